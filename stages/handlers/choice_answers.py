"""Which choices a message picks: the letter that it announces, where a letter can be meant.

A box holds a letter, a choice's own text, or both. Elsewhere a letter counts if the message announces it ("the answer
is B", "B is correct", "#### B") or if it is the first or the last line; "the answer is a number" names none. The last
announcement counts; one that names two letters picks both. `math-verify`, which extracts letters too, misjudges more of
the pairs in `tests/stages/choice_pairs.py` (`bench/rewards.py`).
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from ...tasks.written_answers import boxed, compact, normal, words

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Letters = frozenset[str]
MESSAGE_LIMIT = 4000
"""Most characters of a message that are read, from its end."""
NONE: Letters = frozenset()

_MARKUP = (
    (r"<\s*(?:final_?)?answer\s*>", " answer: "),
    (r"(?m)^\s*####\s*", " answer: "),
    (r"\\(?:text|math)[a-z]*\s*(?=\{)|\\(?:mbox|hbox|operatorname|boldsymbol|bm|emph|underline)\s*(?=\{)", ""),
    (r"\{\\(?:rm|bf|it)\s", "{"),
    (r"</?[a-z]{1,8}\s*>|[$`]|\\[()\[\]]|\\[ ,;:!]", " "),
    (r"\*+|__+|~~", ""),
    (r"[{}]", " "),
    (r"[ \t]+", " "),
)
"""Rewrites in this order: announcements, LaTeX commands, tags and marks of mathematics, emphasis, braces, blanks."""
_OPEN, _CLOSE = r"[(\[\"'“‘«]{0,3} ?", r" ?[)\]\"'”’»]{0,3}"
_FOLLOW = (
    r"(?= ?(?:$|\n|[,;!?。，](?!\d)|\.(?![A-Za-z]\.|\d)|:(?!\d)|[-–—]{1,3} |[(\[→]|=>"
    r"|(?:because|since|as|for|which|due|where|with|by|based|given|according|from|and|or|not|in|on|at|but|so|is|are)\b))"
)
_LETTER = (
    rf"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer|[Ll]etter|[Ss]tatement) )?{_OPEN}(?<![A-Za-z0-9_\\'’-])"
    rf"([A-Ja-j])(?![\w'’+#^_]){_CLOSE}"
)
_JOINED = r" ?(?:[,;] ?(?:and |or )?|/|&|\+|and/or\b|and\b|or\b|vs\.?) ?"
_PICK = re.compile(rf"{_LETTER}{_FOLLOW}")
_MORE = re.compile(rf"{_JOINED}{_LETTER}{_FOLLOW}")
_BUT = re.compile(rf"not {_LETTER},? but {_LETTER}{_FOLLOW}")
_WRAPPED = re.compile(r"[(\[] ?([A-Ja-j]) ?[)\]]")
_SEVERAL = re.compile(r"(?:not|neither|either|none|both|one of|any of|all of|between|unclear|unknown|impossible)\b")
_HEAD = re.compile(
    r"(?:(?:\b(?:answers?|solution|conclusion|(?:correct|right|best|final|my|appropriate|suitable)"
    r"(?: multiple[- ]choice)? (?:options?|choices?|letters?|selections?|statements?|alternatives?)"
    r"|(?:options?|choices?|answer) that (?:is|best fits|fits|matches)(?: \w+){0,4}))"
    r"(?: (?:to|for|of) (?:the|this|that) (?:above |given )?(?:question|problem|quiz))?"
    r"(?: choice| option| letter)?"
    r" ?(?:(?:is|are|was|:|=|-|–|—|would be|must be|should be|has to be|seems to be|will be|therefore is|choice:) ?)+"
    r"|\b(?:I|[Ww]e|[Ll]et us|[Ll]et's)(?: ?(?:will|would|must|'ll|'d|should|can|therefore|thus|finally|shall))*"
    r" (?:choose|chose|pick|select|go with|answer|conclude|mark)(?: with)?:? "
    r"|答案(?: ?[是为為:：选選] ?)+|选择? ?(?=[A-J]))"
    r"(?:(?:therefore|thus|then|hence|clearly|definitely|indeed|most likely|probably|simply|the|just) ?,? ?)*\s*",
    re.IGNORECASE,
)
_IS_RIGHT = re.compile(
    r"(?<![\w'’-])(?:(?:option|choice|answer|statement) )?[(\[]?([A-J])[)\]]?(?:[:.] ?[^.\n:]{1,60}?,?)?"
    r" (?:is|must be|would be|has to be)(?: therefore| thus| then| clearly| indeed)?"
    r" (?:the )?(?:only |single |one )?(?:most |one that is )?"
    r"(?:correct|right|best|true one|answer)\b(?! if| only if| that)",
)
_NO_REASON = re.compile(r" ?(?:is|are|and|or|not|in|on|at|but|so)\b")
_SUPPOSED = re.compile(
    r"(?:\b(?:if|whether|suppose|assume|assuming|unless|not|think|thought)\b"
    r"|\b[A-J]\)?,? ?(?:and\b|or\b|[/&,]))[^.\n]{0,16}$",
    re.IGNORECASE,
)


def picked(answer: str, choices: Sequence[str]) -> Letters:
    """Return the letters that an answer picks: those of its box, or those that its message announces."""
    if "\\boxed" in answer or "\\fbox" in answer:
        return _whole(_plain(boxed(answer)[:MESSAGE_LIMIT]), choices)
    text = _plain(answer[-MESSAGE_LIMIT:])
    return _whole(text, choices) or _announced(text, choices)


def of_truth(truth: str, choices: Sequence[str]) -> Letters:
    return _whole(_plain(truth), choices)


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    for pattern, to in _MARKUP:
        text = re.sub(pattern, to, text)
    return text.strip()


def _whole(text: str, choices: Sequence[str]) -> Letters:
    """Return the picks of a text that is only an answer: a letter, several letters, a choice's text, or both."""
    text = text.strip(" .:\n")
    if not text or len(text) > MESSAGE_LIMIT:
        return NONE
    bare = text.strip("()[]. ").upper()
    if len(bare) == 1 and "A" <= bare <= "J":
        return frozenset(bare)  # also if it is another choice's text, as in A, B, AB, O
    if (named := _named(text, choices)) is not None:
        return frozenset(named)
    if "\n" in text:
        return NONE
    if re.fullmatch(r"[A-J]{2,4}", text):
        return frozenset(text)
    head = re.match(
        r"(?:the )?(?:correct |final |right |best )?(?:answer|option|choice)s? ?(?:is |are |: ?)?", text, re.IGNORECASE
    )
    rest = text[head.end() :] if head else text
    if (read := _read(rest, 0, choices)) is not None:
        letters, end = read
        tail = rest[end:].lstrip(" .:)-–—,").strip("() ")
        own = _named(tail, choices)
        if own:
            return letters if letters == {own} else NONE
        if not tail or (re.match(r" ?[.:)(–—,-]", rest[end - 1 :]) and len(letters) == 1 and not _PICK.search(tail)):
            return letters
    if (match := re.fullmatch(r"(.+?) ?\(([A-J])\)", text)) is not None and _named(match[1], choices) == match[2]:
        return frozenset(match[2])
    return NONE


def _announced(text: str, choices: Sequence[str]) -> Letters:
    """Return the picks of a message's last announcement, or else of its first or last line."""
    found: list[tuple[int, Letters]] = []
    for head in _HEAD.finditer(text):
        at = head.end()
        if (other := _BUT.match(text, at)) is not None:
            found.append((at, frozenset(other[2].upper())))
        elif (read := _read(text, at, choices)) is not None:
            letters, end = read
            own = _named(_sentence(text, end).lstrip(" .:)-–—,"), choices)
            found.append((at, letters if own is None or letters == {own} else NONE))
        elif _SEVERAL.match(text, at):
            found.append((at, NONE))
        elif (own := _named(_sentence(text, at), choices)) is not None:
            found.append((at, frozenset(own)))
    found += [
        (match.start(1), frozenset(match[1]))
        for match in _IS_RIGHT.finditer(text)
        if not _SUPPOSED.search(text[max(0, match.start() - 40) : match.start()])
    ]
    lines = [line for line in text.split("\n") if line.strip()]
    listed = {match[0] for line in lines if (match := re.match(r"\s*[(\[]?[A-J][)\].:] ?(?=\S)", line))}
    if len(lines) > 1 and (last := _line(lines[-1], choices, listed)):
        found.append((len(text), last))
    if found:
        return max(found, key=lambda one: one[0])[1]
    return _line(lines[0], choices, listed) if lines else NONE


def _line(line: str, choices: Sequence[str], listed: Collection[str]) -> Letters:
    """Return the picks of a line that is an answer, or begins with one: `B`, `(B) Copper`, `B, since it is soft`.

    Where several lines begin with letters, the message lists the choices, and only a bare letter is an answer.
    """
    line = re.sub(r"^ ?(?:so|thus|hence|therefore|finally|[#>-]+)[,:]? ", "", line, flags=re.IGNORECASE).strip()
    if len(listed) > 1 and len(line) > len("(B).") + 1:
        return NONE
    if whole := _whole(line, choices):
        return whole
    read = _read(line, 0, choices)
    if read is None or not re.match(r"[(\[]?[A-J]", line) or _NO_REASON.match(line, read[1]):
        return NONE
    own = _named(_sentence(line, read[1]), choices)
    return read[0] if own is None or read[0] == {own} else NONE


def _read(text: str, at: int, choices: Sequence[str]) -> tuple[Letters, int] | None:
    """Read letters at a position; return them and their end."""
    first = _PICK.match(text, at)
    if first is None:
        # Anything may follow a letter in brackets; only its choice's own text may follow a bare one.
        first = re.compile(_LETTER).match(text, at)
        if first is None or not (
            _WRAPPED.search(first[0]) or _named(_sentence(text, first.end()), choices) == first[1].upper()
        ):
            return None
    letters, end = {first[1].upper()}, first.end()
    while (more := _MORE.match(text, end)) is not None:
        letters.add(more[1].upper())
        end = more.end()
    return frozenset(letters), end


def _sentence(text: str, at: int) -> str:
    """Return the rest of a sentence, without its explanation."""
    rest = text[at : at + 400].lstrip(" .:)-–—,").partition("\n")[0]
    rest = re.split(r"[.!?;](?= |$)| (?:because|since)\b", rest, maxsplit=1)[0]
    return rest.strip()


def _named(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the choice with this text."""
    said = normal(text)
    for at, each in enumerate(choices):
        own = normal(each)
        if said and (compact(own) == compact(said) or (words(own) and words(own) == words(said))):
            return chr(ord("A") + at)
    return None
