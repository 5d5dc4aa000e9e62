"""The reports of an evaluation: `report.html`, which is self-contained, and `report.md` with charts as files.

Texts of data files, models and tools are escaped: control characters, HTML, and the syntax of Markdown tables. The page
runs no script and loads nothing.
"""

from __future__ import annotations

import math
import re
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from ..system.logs import one_line
from .charts import COLOURS, charts_of, standing_alone
from .passes import Estimate, percentage
from .run_folder import CHARTS, REPORT_HTML, REPORT_MD, SUMMARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plan import Plan
    from .run_folder import RunFolder, Sample
    from .summary import Summary

SHOWN_PROBLEMS = 500
NOTHING = "–"
TITLES = {
    "passes": "pass@k with 95 % intervals",
    "rewards": "Mean reward per problem",
    "times": "Time per phase",
    "tokens": "Tokens generated",
    "failures": "Failures by reason",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]#|~$!])")


def write_reports(folder: RunFolder, summary: Summary) -> None:
    """Write `summary.json`, `report.md`, `report.html` and the charts of a run folder."""
    folder.write(SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n")
    for name, text in reports_of(folder.plan, summary, folder.samples, str(folder.path)).items():
        folder.write(name, text)


def reports_of(plan: Plan, summary: Summary, samples: Sequence[Sample], folder: str) -> dict[str, str]:
    hardest_first = sorted(summary.problems, key=lambda row: (-1.0 if row.reward is None else row.reward, row.line))
    charts = charts_of(summary, samples)
    files = {name: f"{CHARTS}/{name}.svg" for name in charts}
    context: dict[str, Any] = {
        "plan": plan,
        "summary": summary,
        "file_name": one_line(plan.file),
        "models": ", ".join(map(one_line, summary.models)) or "no model yet",
        "remarks": remarks(summary),
        "counting": counting_text(summary.threshold),
        "groups": [("task", summary.tasks), ("row format", summary.row_formats)],
        "most": max((row.k for row in summary.passes), default=1),
        "problem_count": max(1, len(summary.problems)),
        "shown": hardest_first[:SHOWN_PROBLEMS],
        "left_out": max(0, len(hardest_first) - SHOWN_PROBLEMS),
        "folder": one_line(folder),
        # matplotlib's own XML, in which it escapes what it draws
        "charts": [(TITLES[name], files[name], Markup(svg)) for name, svg in charts.items()],  # noqa: S704
        "colours": Markup(COLOURS),  # noqa: S704 - our own
        "settings": _settings(plan),
    }
    environment = _environment()
    return {
        **{files[name]: standing_alone(svg) for name, svg in charts.items()},
        REPORT_MD: environment.get_template(REPORT_MD).render(context),
        REPORT_HTML: environment.get_template(REPORT_HTML).render(context),
    }


def remarks(summary: Summary) -> list[str]:
    lines = []
    missing = summary.rollouts - summary.ended
    if missing:
        lines.append(f"{missing} of {summary.rollouts} rollouts have not ended: the figures are of those that have.")
    if summary.infrastructure_errors:
        lines.append(
            f"{summary.infrastructure_errors} rollouts ended with errors of the infrastructure or the task, which say "
            "nothing about the model: they are left out of pass@k. The same command runs them again."
        )
    lines += [
        f"pass@{row.k} leaves out {row.left_out} problems with fewer samples that count."
        for row in summary.passes
        if row.left_out and not missing
    ]
    if len(summary.weight_versions) > 1:
        versions = ", ".join(map(str, summary.weight_versions))
        lines.append(f"The weights changed meanwhile: versions {versions} generated.")
    return lines


def counting_text(threshold: float) -> str:
    return (
        f"a rollout solves its problem if it completes with a reward of {threshold:g} or more. Failed ones and those "
        "out of time count as not solved, with reward 0; errors of the infrastructure or the task are left out. pass@k "
        "is 1 − C(n−c, k) / "
        "C(n, k), averaged over the problems with at least k samples that count. Intervals are at 95 % and take the "
        "problem as the unit: Wilson's, with the effective sample size that the variance between problems leaves; for "
        "the mean reward, Student's t over the problems' means."
    )


def percent(value: Estimate | float | None) -> str:
    if value is None:
        return NOTHING
    return percentage(value.value if isinstance(value, Estimate) else value)


def mean(value: Estimate | float | None) -> str:
    if value is None:
        return NOTHING
    return format(value.value if isinstance(value, Estimate) else value, ".3f")


def interval(estimate: Estimate | None) -> str:
    return NOTHING if estimate is None else f"{percentage(estimate.low)} to {percentage(estimate.high)}"


def mean_interval(estimate: Estimate | None) -> str:
    if estimate is None or not math.isfinite(estimate.low):
        return NOTHING
    return f"{estimate.low:.3f} to {estimate.high:.3f}"


def seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1000:.1f} ms"
    if value < 100:
        return f"{value:.3g} s"
    return f"{value:,.0f} s"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def money(value: float | None) -> str:
    """Return a cost with at least three digits."""
    if value is None:
        return NOTHING
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def cell(value: object) -> str:
    """Return a text as a cell of a Markdown table: one line without markup."""
    return _MARKDOWN.sub(r"\\\1", escape(one_line(str(value)), quote=False)) or " "


def shown(value: object) -> str:
    return one_line(str(value))


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("prorl_zmq.evaluation", ""),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    filters = (percent, interval, mean, mean_interval, seconds, number, money, cell, shown)
    environment.filters.update({function.__name__: function for function in filters})
    return environment


def _settings(plan: Plan) -> list[tuple[str, str]]:
    values = msgspec.structs.asdict(plan.settings)
    return [
        (name, one_line(" ".join(map(str, value)) if isinstance(value, tuple) else str(value)))
        for name, value in values.items()
        if value not in (None, "", (), {})
    ]
