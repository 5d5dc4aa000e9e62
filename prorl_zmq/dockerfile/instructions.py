"""The instructions of a Dockerfile: comments, continued lines, flags and heredocs are resolved, variables are not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidRecord

DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(\S+)\s*")
FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)")
HEREDOC = re.compile(r"\d*<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2")
WITH_HEREDOCS = frozenset({"RUN", "COPY", "ADD"})
WITH_FLAGS = WITH_HEREDOCS | {"FROM", "HEALTHCHECK"}
KNOWN = WITH_HEREDOCS | {
    *("ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD", "SHELL"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


class DockerfileError(InvalidRecord):
    """An instruction is wrong, or cannot be built here (`line`, `instruction`)."""

    def __init__(self, line: int, instruction: str, reason: str) -> None:
        super().__init__(f"line {line}: {instruction}: {reason}", line=line, instruction=instruction)


@dataclass(frozen=True, slots=True)
class Heredoc:
    name: str
    content: str
    is_literal: bool
    """Its name was quoted: variables in it are not replaced."""


@dataclass(frozen=True, slots=True)
class Instruction:
    line: int
    """Where it begins, from 1."""
    keyword: str
    flags: tuple[tuple[str, str], ...]
    text: str
    """What follows the flags, on one line."""
    heredocs: tuple[Heredoc, ...] = ()
    bodies: str = ""
    """The lines of the heredocs as they are written."""

    def fail(self, reason: str) -> DockerfileError:
        """Return an error about this instruction."""
        return DockerfileError(self.line, self.keyword, reason)


def parse_instructions(text: str) -> tuple[list[Instruction], str]:
    r"""Return the instructions of a Dockerfile and its escape character, `\` unless a directive names another.

    Raises:
        DockerfileError: an instruction is unknown, or a heredoc has no end.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    escape = _escape(lines)
    found = []
    at = 0
    while at < len(lines):
        start = at
        logical, at = _logical_line(lines, at, escape)
        words = logical.split(None, 1)
        if not words:
            continue
        keyword, rest = words[0].upper(), words[1].strip() if words[1:] else ""
        if keyword not in KNOWN:
            raise DockerfileError(start + 1, words[0][:40], "it is not an instruction of Dockerfiles")
        flags = []
        while keyword in WITH_FLAGS and (flag := FLAG.match(rest)) is not None:
            flags.append((flag[1], flag[2] or ""))
            rest = rest[flag.end() :]
        heredocs, first = [], at
        for strip, quote, name in _heredocs(rest) if keyword in WITH_HEREDOCS else ():
            content, at = _heredoc(lines, at, name, strips=bool(strip))
            if content is None:
                raise DockerfileError(start + 1, keyword, f"its heredoc {name} has no end")
            heredocs.append(Heredoc(name, content, bool(quote)))
        bodies = "".join(f"{line}\n" for line in lines[first:at])
        found.append(Instruction(start + 1, keyword, tuple(flags), rest, tuple(heredocs), bodies))
    return found, escape


def _escape(lines: list[str]) -> str:
    for line in lines:
        directive = DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape":
            return directive[2]
    return "\\"


def _logical_line(lines: list[str], at: int, escape: str) -> tuple[str, int]:
    """Return a line with those that continue it, without comments, and where the next one begins."""
    parts: list[str] = []
    while at < len(lines):
        line = lines[at]
        at += 1
        bare = line.strip()
        if bare.startswith("#") or (parts and not bare):
            if parts:
                continue
            return "", at
        stripped = line.rstrip()
        if not stripped.endswith(escape):
            parts.append(line)
            break
        parts.append(stripped[:-1])
    return "".join(parts), at


def _heredocs(text: str) -> list[tuple[str, str, str]]:
    """Return the heredocs that a line begins: words outside of quotes."""
    if "<<" not in text:
        return []
    outside = re.sub(r"'(?<!<<')(?<!<<-')[^']*'|\"(?<!<<\")(?<!<<-\")(?:\\.|[^\"\\])*\"", "Q", text)
    return [(found[1], found[2], found[3]) for word in outside.split() if (found := HEREDOC.fullmatch(word))]


def _heredoc(lines: list[str], at: int, name: str, *, strips: bool) -> tuple[str | None, int]:
    content: list[str] = []
    while at < len(lines):
        line = lines[at].lstrip("\t") if strips else lines[at]
        at += 1
        if line == name:
            return "".join(f"{each}\n" for each in content), at
        content.append(line)
    return None, at
