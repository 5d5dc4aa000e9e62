"""The folder that a Dockerfile's COPY and ADD take files from, without what `.dockerignore` names."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from glob import iglob
from pathlib import Path

from ..errors import InvalidRecord

IGNORE = ".dockerignore"
GLOB = re.compile(r"[*?\[]")


class Context:
    """The folder of a Dockerfile.

    Raises:
        InvalidRecord: `.dockerignore` has an invalid pattern (`line`).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._top = str(root)
        self._rules = self._read_rules()

    def find(self, pattern: str) -> list[str]:
        """Return the paths that a source of COPY names, relative to the folder, in order.

        Raises:
            ValueError: it leads out of the folder.
        """
        name = posixpath.normpath(pattern.lstrip("/") or ".")
        if name == ".." or name.startswith("../"):
            raise ValueError(f"{pattern} leads out of the folder of the Dockerfile")
        if GLOB.search(name):
            translated = re.sub(r"\[\^", "[!", name)
            found = sorted(iglob(translated, root_dir=self.root, include_hidden=True))  # noqa: PTH207 - relative
        else:
            found = [name] if os.path.lexists(f"{self._top}/{name}") else []
        if not all(map(self._is_inside, found)):
            raise ValueError(f"{pattern} leads out of the folder of the Dockerfile through a link")
        return [each for each in found if not self._is_ignored(each)] if self._rules else found

    def copy_to(self, target: Path) -> None:
        """Copy the folder, links as links."""

        def ignored(folder: str, names: list[str]) -> list[str]:
            below = os.path.relpath(folder, self.root)
            paths = {name: posixpath.normpath(f"{below}/{name}") for name in names}
            # A rule that begins with ! may bring back what is in an ignored folder.
            return [name for name, path in paths.items() if self._is_ignored(path) and not (self.root / path).is_dir()]

        shutil.copytree(self.root, target, symlinks=True, ignore=ignored if self._rules else None)
        for folder, _, _ in os.walk(target, topdown=False) if self._rules else ():
            below = os.path.relpath(folder, target)
            if self._is_ignored(below) and not os.listdir(folder):  # noqa: PTH208 - as os.walk
                Path(folder).rmdir()

    def _is_inside(self, path: str) -> bool:
        """Return whether a path stays in the folder, wherever links on it lead."""
        at = self._top
        for part in path.split("/"):
            at = f"{at}/{part}"
            if os.path.islink(at):  # noqa: PTH114 - fast
                return os.path.realpath(f"{self._top}/{path}").startswith(f"{os.path.realpath(self._top)}/")
        return True

    def _is_ignored(self, path: str) -> bool:
        parts = path.split("/")
        within = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        ignored = False
        for is_kept, rule in self._rules:
            if any(rule.fullmatch(each) for each in within):
                ignored = not is_kept
        return ignored

    def _read_rules(self) -> list[tuple[bool, re.Pattern[str]]]:
        """Return each rule, and whether it keeps what it matches."""
        file = f"{self._top}/{IGNORE}"
        if not os.path.isfile(file):  # noqa: PTH113 - fast
            return []
        lines = enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1)
        return [_numbered_rule(number, line.strip()) for number, line in lines if line.strip() and line[0] != "#"]


def _numbered_rule(number: int, pattern: str) -> tuple[bool, re.Pattern[str]]:
    try:
        return pattern.startswith("!"), _rule(pattern.removeprefix("!").strip())
    except re.error as error:
        words = f"{IGNORE}, line {number}: {pattern!r} is not a pattern: {error.msg}"
        raise InvalidRecord(words, line=number) from error


def _rule(pattern: str) -> re.Pattern[str]:
    name = posixpath.normpath(pattern.lstrip("/") or ".")
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = re.sub(
        r"\*\*/|\*\*|\*|\?|\[[^\]]*\]|.",
        lambda match: parts.get(match[0]) or (_characters(match[0]) if match[0][1:] else re.escape(match[0])),
        name,
    )
    return re.compile(found, re.DOTALL)


def _characters(group: str) -> str:
    """Return `[…]` for `re`, where a bracket or a doubled sign inside would mean more."""
    inside = group[1:-1].removeprefix("^")
    escaped = re.sub(r"([&|~[])", r"\\\1", inside)
    return f"[^{escaped}]" if group.startswith("[^") else f"[{escaped}]"
