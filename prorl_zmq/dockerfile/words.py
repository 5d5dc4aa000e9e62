"""Words of a Dockerfile with variables: `$NAME`, `${NAME}`, `${NAME:-word}`, `-`, `:+` and `+`, and their quoting.

A word is evaluated here where its variables are known, else by the shell that builds: its syntax for them is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OPERATOR = re.compile(r":?[-+]")
PLAIN = re.compile(r"""["'$]""")
"""What a plain word has none of, besides the escape character."""
SPECIAL = re.compile(r'(["\\$`])')
VALUE_LIMIT = 2**17
"""Longest value: Linux has no longer variables and arguments."""


class WordError(ValueError):
    """A word has a variable in a form that is not supported."""


class UnknownVariable(ValueError):
    """The value of a variable is known only to the base image."""


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    operator: str = ""
    word: Word = ()


Word = tuple["str | Variable", ...]


def parse_word(text: str, escape: str, *, quotes: str = "'\"") -> Word:
    """Parse a word; escapes and these quotes are resolved."""
    if not PLAIN.search(text) and escape not in text:
        return (text,) if text else ()
    word, _ = _parse(text, 0, escape, "", quotes)
    return word


def split_words(text: str, escape: str) -> list[str]:
    """Split text at spaces outside of quotes; quotes and escapes stay."""
    if not PLAIN.search(text) and escape not in text:
        return text.split()
    words, word, quote, at = [], "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        if char in "'\"":
            quote = "" if quote == char else quote or char
        if char.isspace() and not quote:
            words += [word] if word else []
            word = ""
        else:
            word += char
        at += 1
    if quote:
        raise WordError(f"a quote {quote} has no end")
    return words + ([word] if word else [])


def evaluate(word: Word, known: Mapping[str, str | None]) -> str:
    """Return the value of a word. A name that is missing is unset; one whose value is None is not known here.

    Raises:
        UnknownVariable: it has a variable that is not known here; `*` in `known` makes every missing one that.
        WordError: it is longer than any variable or argument of a program.
    """
    value = ""
    for part in word:
        value += part if isinstance(part, str) else _value(part, known)
        if len(value) > VALUE_LIMIT:  # values that name others a few times each grow exponentially
            raise WordError(f"its value has more than {VALUE_LIMIT} characters")
    return value


def shell_word(word: Word) -> str:
    """Return a word for a shell, between double quotes."""
    return f'"{"".join(map(_shell_part, word))}"'


def _value(variable: Variable, known: Mapping[str, str | None]) -> str:
    value = known.get(variable.name, "")
    if value is None or (variable.name not in known and "*" in known):
        raise UnknownVariable(f"the value of ${variable.name} is known only to the base image")
    is_set = bool(value) if variable.operator.startswith(":") else variable.name in known
    if variable.operator.endswith("-"):
        return value if is_set else evaluate(variable.word, known)
    if variable.operator.endswith("+"):
        return evaluate(variable.word, known) if is_set else ""
    return value


def _shell_part(part: str | Variable) -> str:
    if isinstance(part, str):
        return SPECIAL.sub(r"\\\1", part)
    inner = (
        _shell_part(each).replace("}", "\\}") if isinstance(each, str) else _shell_part(each) for each in part.word
    )
    return f"${{{part.name}{part.operator}{''.join(inner)}}}"


def _parse(text: str, at: int, escape: str, end: str, quotes: str) -> tuple[Word, int]:
    parts: list[str | Variable] = []
    literal, quote = "", ""
    while at < len(text) and (quote or text[at] != end or not end):
        char = text[at]
        if quote == "'":
            quote, literal, at = ("", literal, at + 1) if char == "'" else (quote, literal + char, at + 1)
        elif char == escape and at + 1 < len(text):
            kept = char if quote and text[at + 1] not in '"$' + escape else ""
            literal, at = literal + kept + text[at + 1], at + 2
        elif char in quotes and (char == '"' or not quote):
            quote, at = ("" if quote else char), at + 1
        elif char == "$" and (found := _variable(text, at + 1, escape, quotes)) is not None:
            variable, at = found
            parts += [literal, variable] if literal else [variable]
            literal = ""
        else:
            literal, at = literal + char, at + 1
    if quote:
        raise WordError(f"a quote {quote} has no end")
    if end and at >= len(text):
        raise WordError("a ${ has no }")
    return (*parts, *([literal] if literal else [])), at


def _variable(text: str, at: int, escape: str, quotes: str) -> tuple[Variable, int] | None:
    """Return the variable after a `$` and where it ends; None: the `$` is a character."""
    braced = text.startswith("{", at)
    name = NAME.match(text, at + braced)
    if name is None:
        if braced:
            raise WordError(f"{text[at - 1 : at + 20]}: it is not a variable that Dockerfiles have")
        return None
    if not braced:
        return Variable(name[0]), name.end()
    at = name.end()
    if text.startswith("}", at):
        return Variable(name[0]), at + 1
    operator = OPERATOR.match(text, at)
    if operator is None:
        raise WordError(f"${{{name[0]}{text[at : at + 10]}: only :-, -, :+ and + may follow a name")
    word, at = _parse(text, operator.end(), escape, "}", quotes)
    return Variable(name[0], operator[0], word), at + 1
