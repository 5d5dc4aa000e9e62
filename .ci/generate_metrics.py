"""Write the tables of all metrics into `docs/metrics.md`, from `prorl_zmq/metrics/catalog.py`.

    python .ci/generate_metrics.py            writes the page
    python .ci/generate_metrics.py --check    exits with 1 if it is not what would be written

The catalog's headings, which are comments, become those of the tables.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from prorl_zmq.metrics import catalog

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- What follows is written by .ci/generate_metrics.py -->\n", "<!-- Until here. -->\n"


def tables() -> str:
    """Return the tables, one for each part of the catalog."""
    parts = re.split(r"^# (.*?) -+\n", (ROOT / "prorl_zmq/metrics/catalog.py").read_text("utf-8"), flags=re.MULTILINE)
    lines = []
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        lines += [f"### {title}", "", "| metric | kind | labels | what |", "|---|---|---|---|"]
        for name in re.findall(r"^([A-Z_]+) = (?:Counter|Gauge|Histogram)\(", text, re.MULTILINE):
            metric = getattr(catalog, name)
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help_text} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{tables()}\n{END}{after}"
    if "--check" not in sys.argv:
        PAGE.write_text(new, "utf-8")
    elif new != page:
        sys.exit(f"{PAGE.name} is stale: run `python .ci/generate_metrics.py`")


if __name__ == "__main__":
    main()
