"""The answer that a message gives, as written: in its last boxes, or where it says "the answer is".

Text in, text out, without emphasis, code marks, dollars, tags, full stops and reasons around the answer.
"""

from __future__ import annotations

import re

BOXES_LIMIT = 16
"""Most boxes that form one answer."""
LINE_LIMIT = 600

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOINT = re.compile(
    r"[\s$~]*+(?:\\[\])]|\\[,;! ]|\\q?quad)?[\s$]*+"
    r"(?:,\s*+(?:and|or)?|;|&|and|or|\\(?:text|quad)\s*+\{\s*+,?\s*+(?:and|or)?\s*+\}|\\(?:lor|land|vee))"
    r"[\s$~]*+(?:\\[\[(]|\\[,;! ]|\\q?quad)?[\s$]*+(?:[A-Za-z](?:_\{?\w\}?)?\s*+=[$\s]*+)?\Z"
)
"""Never backtracks into blanks, which would take cubic time: it runs without a time limit."""
_NAME = re.compile(r"(?<![A-Za-z\\])([A-Za-z](?:_\{?\w\}?)?)\s*=\s*[$\s]*\Z")
_HEAD = re.compile(
    r"(?:^|\n)\s*####[ \t]*|<\s*(?:final_?)?answer\s*>|答案(?:\s*[是为為:：])+"
    r"|\banswers?(?:\s+(?:to|of|for)\s+(?:the|this|that)\s+(?:problem|question|exercise|equation))?[*_:]*"
    r"\s*(?:\b(?:is|are|equals|must be|would be|should be|comes (?:out )?to|therefore)\b[*_:]*\s*|:[*_]*\s*|=\s*)+"
    r"|(?:^|\n)[#*\s]*(?:final )?answer[*:\s]*\n\s*",
    re.IGNORECASE,
)
_DISPLAY = re.compile(r"\s*(?:\$\$(.+?)\$\$|\\\[(.+?)\\\])", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?。](?=\s|$|\*|_|\"|”)|</")
_REASON = re.compile(
    r",?\s+(?:because|since|as|which|where|when|whenever|if|so|after|assuming|given|obtained|using|by|but|thanks"
    r"|from|due"
    r"|rounded|provided)\b|,\s+(?!and\b|or\b)(?=[a-z]{2,}\s)|\s+\((?:≈|about|approx|roughly|i\.e|that is|in |to "
    r"|after|see"
    r"|as |with|rounded|expressed|simplified)[^()]*\)|\s+[–—]\s",
)
_ASIDE = re.compile(r"\s*\([A-Za-z][A-Za-z\s-]*\)\s*\Z")
_EMPHASIS = re.compile(
    r"(?<![\w})\]])\*\*\*?(?=\S)|(?<=\S)\*\*\*?(?![\w(\\{$])|(?<![\w\\])__?(?=\S)|(?<=\S)__?(?![\w{(])|`+|</?[a-z]{1,8}\s*/?>|(?<![\\\w})\]*])\*(?=[\w$\\(-])|(?<=[\w$})\]%.])\*(?=[\s.,;:!?]|\Z)"
)
_FILLER = re.compile(
    r"\s*(?:[:\s*_`]|(?:therefore|thus|then|simply|just|exactly|indeed|precisely|now"
    r"|equal to|given by|approximately|about|roughly)\b,?"
    r"|the (?:number|value|fraction|set|interval|point|integer|expression"
    r"|pair|matrix|vector|ordered pair)\b(?: of\b)?)+",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"(?:\b(?:not|neither|nor|never|or|either|between|maybe|possibly|doubt(?: that)?|at least|at most|unless|if"
    r"|(?:more|less|fewer|greater|larger|smaller|other) than)\b|n't)\s+(?:[A-Za-z']{1,6}\s+){0,2}[$*_`(]*\Z",
    re.IGNORECASE,
)
_OTHER = re.compile(r"[$*_`)]*,?\s*(?:or|nor|and/or)\b|\s*\?", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")


def boxes(text: str) -> str:
    r"""Return the content of the last box, or of the last boxes if they form one answer; nothing if it is open."""
    found: list[tuple[int, int, str]] = []
    for opening in [*_BOX.finditer(text)][-BOXES_LIMIT:]:
        if found and opening.start() < found[-1][1]:
            continue  # a box in a box
        end = _closing(text, opening.end())
        if end < 0:
            found.append((opening.start(), len(text), ""))
            break
        found.append((opening.start(), end + 1, text[opening.end() : end]))
    if not found:
        return ""
    parts = [found[-1]]
    for each in reversed(found[:-1]):
        if not _JOINT.match(text[each[1] : parts[0][0]]):
            break
        parts.insert(0, each)
    values = [value for _, _, value in parts]
    if len(values) == 1 or not all(values) or len({*values}) == 1:
        return values[-1]
    names = [_NAME.search(text[max(0, start - 40) : start]) for start, _, _ in parts]
    if all(names):
        values = [f"{name[1]} = {value}" for name, value in zip(names, values, strict=True) if name]
    return ", ".join(values)


def announced(text: str) -> str:
    """Return the answer after a message's last announcement, or a last line that is only an answer."""
    for head in reversed([*_HEAD.finditer(text)]):
        if answer := _stated(text[head.end() : head.end() + 2 * LINE_LIMIT]):
            return answer
    lines = [line for line in text.strip().split("\n") if line.strip()]
    last = without_markup(lines[-1]) if lines else ""
    if len(lines) > 1 and last and len(last) <= LINE_LIMIT and not re.search(r"(?<![A-Za-z\\])[A-Za-z]{2,}", last):
        return last
    bold = _BOLD.findall(lines[-1]) if lines else []
    if len(bold) != 1 or not re.search(r"\d|\\|\$", bold[0]) or hedged(lines[-1], bold[0]):
        return ""
    return without_markup(bold[0])


def hedged(text: str, answer: str) -> bool:
    """Return whether the last answer of a message is refused, or joined with a second one: `57 or 58`."""
    at = text.rfind(answer) if answer else -1
    if at < 0:
        return False
    return bool(_HEDGE.search(text[max(0, at - 60) : at]) or _OTHER.match(text[at + len(answer) :][:60]))


def without_markup(text: str) -> str:
    return _EMPHASIS.sub("", text).strip()


def _stated(rest: str) -> str:
    if display := _DISPLAY.match(rest):
        return (display[1] or display[2]).strip()
    rest = rest.lstrip(" \n\t:*_`")
    line = rest.partition("\n")[0][:LINE_LIMIT]
    end = _SENTENCE_END.search(line)
    line = without_markup(line[: end.start()] if end else line)
    if filler := _FILLER.match(line):
        line = line[filler.end() :]
    if reason := _REASON.search(line):
        line = line[: reason.start()]
    return _ASIDE.sub("", line).strip(" \"'“”.,;:")


def _closing(text: str, start: int) -> int:
    """Return where the brace opened before `start` closes; -1: nowhere."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.start()
    return -1
