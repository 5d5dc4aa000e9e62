"""Generate the blocking client, `prorl_zmq/client/blocking/`, from the asyncio one by replacing words.

    python .ci/generate_client.py            writes the files
    python .ci/generate_client.py --check    exits with 1 if they are not what would be written

What cannot be replaced word by word lies in `transport.py`, which both folders have, and which is written by hand.
Ruff sorts the imports and joins the lines that became shorter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "prorl_zmq" / "client"
FILES = ("backends.py", "batch.py", "client.py", "connection.py", "endpoint.py", "views.py", "weights.py")
FIRST_LINE = "# Generated from ../asynchronous/{name} by `make client`; do not edit.\n"

WORDS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter)__\b", r"__\1__"),
    (r"\bAsync(?=[A-Z])", ""),  # AsyncRolloutClient, AsyncIterator
)
SENTENCES = {
    "batch.py": (
        (
            "so the iterable may be endless. It is drawn from on the event\n        loop, so it must not block. May be",
            "so the iterable may be endless. May be",
        ),
    ),
    "client.py": (
        ("client of the service, on asyncio.", "client of the service, on blocking sockets."),
        ("on an asyncio loop. Concurrent calls are allowed.", "for one thread; two threads take two clients."),
        (" Concurrent calls\n        take turns.", ""),
    ),
    "connection.py": (("an asyncio client's connections", "a blocking client's connections"),),
}
"""What holds for one of the two clients only: in each file, the text that is found once, and what replaces it."""


def translate(name: str, text: str) -> str:
    """Return the blocking file of an asyncio file's text, before Ruff has formatted it."""
    for old, new in SENTENCES.get(name, ()):
        if text.count(old) != 1:
            sys.exit(f"generate_client: {name} has {text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    return FIRST_LINE.format(name=name) + text


def formatted(path: Path, text: str) -> str:
    """Return the text as Ruff would leave it in that file."""
    options = ["--config", str(ROOT / "pyproject.toml"), "--stdin-filename", str(path), "-"]
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, *options]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    """Write the files, or say which are stale."""
    stale = []
    for name in FILES:
        path = CLIENT / "blocking" / name
        made = formatted(path, translate(name, (CLIENT / "asynchronous" / name).read_text(encoding="utf-8")))
        if path.exists() and path.read_text(encoding="utf-8") == made:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(made, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"prorl_zmq/client/blocking: {', '.join(stale)} are not what `make client` generates; run it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
