"""`Mutant`: a small fault of our own, as a patch file that says in its header what breaks and which tests must notice.

The text before the first `---` is the header: what breaks, in a sentence or two, then fields of one line each.

    tier: unit | process | system | proof
    tests: arguments of pytest that select the tests which must fail: files and `-k`, since tests are renamed

The rest is a unified diff, as `git apply` takes it. It is applied here by its text alone: the lines that a hunk expects
must be found in the file exactly once, wherever they are. So a patch survives changes elsewhere in its file.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIERS = ("unit", "process", "system", "proof")
_FIELD = re.compile(r"^(tier|tests): *(.+)$", re.MULTILINE)
_FILE = re.compile(r"^--- a/(?P<old>\S+)\n\+\+\+ b/(?P<new>\S+)\n", re.MULTILINE)
_HUNK = re.compile(r"^@@ [^\n]*@@[^\n]*\n", re.MULTILINE)


class InvalidPatch(Exception):
    """A patch file has no valid header or no diff."""


class DoesNotApply(Exception):
    """The file no longer has the lines that a patch changes, or has them several times."""


@dataclass(frozen=True)
class Change:
    """One hunk: the lines that a file has, and those in their place."""

    file: str
    """Relative to the repository's root."""
    before: str
    after: str

    def applied(self, text: str) -> str:
        """Return the file's text with the change.

        Raises:
            DoesNotApply: the expected lines are not in the text exactly once.
        """
        found = [match.span() for match in re.finditer(f"^{re.escape(self.before)}", text, re.MULTILINE)]
        if len(found) != 1:
            raise DoesNotApply(f"{self.file} has the expected lines {len(found)} times")
        start, end = found[0]
        return text[:start] + self.after + text[end:]


@dataclass(frozen=True)
class Mutant:
    name: str
    breaks: str
    tier: str
    tests: tuple[str, ...]
    """Arguments of pytest."""
    changes: tuple[Change, ...]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Read a patch file.

        Raises:
            InvalidPatch: a field or the diff is missing or malformed.
        """
        text = path.read_text(encoding="utf-8")
        start = text.find("\n--- ") + 1
        if not start:
            raise InvalidPatch(f"{path.name} has no diff after its header")
        header, diff = text[:start], text[start:]
        fields = dict(_FIELD.findall(header))
        breaks = " ".join(_FIELD.sub("", header).split())
        if not breaks or fields.keys() != {"tier", "tests"} or fields["tier"] not in TIERS:
            raise InvalidPatch(f"{path.name}: the header needs what breaks, `tier: {'|'.join(TIERS)}` and `tests:`")
        return cls(path.stem, breaks, fields["tier"], tuple(shlex.split(fields["tests"])), _changes(path.name, diff))

    @property
    def files(self) -> list[str]:
        """The files that it changes, each once."""
        return list(dict.fromkeys(change.file for change in self.changes))

    def texts(self, root: Path) -> dict[str, str]:
        """Return the changed files' new texts.

        Raises:
            DoesNotApply: a file has changed where the patch does.
        """
        texts: dict[str, str] = {}
        for change in self.changes:
            if not (root / change.file).is_file():
                raise DoesNotApply(f"there is no {change.file}")
            before = texts.get(change.file) or (root / change.file).read_text(encoding="utf-8")
            texts[change.file] = change.applied(before)
        return texts


def patch_files() -> list[Path]:
    return sorted(FOLDER.glob("*.patch"))


def _changes(name: str, diff: str) -> tuple[Change, ...]:
    changes: list[Change] = []
    parts = _FILE.split(diff)
    if parts[0] or len(parts) < 4:
        raise InvalidPatch(f"{name}: a file's diff begins with `--- a/FILE` and `+++ b/FILE`")
    for old, new, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        nothing, *hunks = _HUNK.split(body)
        if nothing or not hunks or old != new:
            raise InvalidPatch(f"{name}: {old} needs one or more hunks, each of which begins with `@@ … @@`")
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            if any(line[0] not in " +-" for line in lines):
                raise InvalidPatch(f"{name}: each line of a hunk begins with a space, + or -")
            before = "".join(line[1:] for line in lines if line[0] in " -")
            after = "".join(line[1:] for line in lines if line[0] in " +")
            if before == after or not before:
                raise InvalidPatch(f"{name}: a hunk expects lines and changes some")
            changes.append(Change(new, before, after))
    return tuple(changes)
