"""Extract a solution's source from a policy's message, and add the imports that graders of the field assume.

LiveCodeBench, APPS and TACO put pages of imports before each solution. Here only names that the source uses are
imported, since `typing` alone takes as long as the interpreter's start.
"""

from __future__ import annotations

import re

SOURCE_LIMIT_BYTES = 120_000
"""Largest solution: it enters the sandbox as one argument, which the kernel limits to 128 KiB."""
FENCE = re.compile(r"(`{3,})[^`]*\Z")
MODULE = re.compile(r"(?<!\w)([^\W\d]\w*)\s*\.")
"""Matches from a name's beginning only: otherwise a long word would take quadratic time."""
WORD = re.compile(r"(?<![\w.])[^\W\d]\w*")
"""A name that is not an attribute."""
ALIASES = {"np": "numpy", "pd": "pandas"}
"""Modules imported under another name, if the sandbox has them."""
NAMES = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "datetime": "timedelta",
    "fractions": "Fraction",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "io": "BytesIO StringIO",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile "
    "filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "json": "dumps loads",
    "math": "acos asin atan atan2 ceil comb cos degrees dist exp fabs factorial floor gcd hypot inf isclose isqrt lcm "
    "log log10 log2 perm pi prod radians sin sqrt tan trunc",
    "operator": "add and_ attrgetter iand itemgetter mul or_ xor",
    "random": "choice randint randrange sample shuffle uniform",
    "re": "findall finditer fullmatch match search split sub",
    "statistics": "mean median",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "sys": "maxsize setrecursionlimit stderr stdin stdout",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal "
    "Mapping NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
}
"""Names that solutions expect to be imported, by module. None is a builtin."""
MODULES = frozenset({*NAMES, "os", "time"})
_HOMES = {name: module for module, names in NAMES.items() for name in names.split()}


def last_block(text: str) -> str | None:
    """Return the content of the last closed code block of a Markdown text, without the fences' indentation; None: none.

    An unclosed block does not count: the policy was cut off.
    """
    found: list[str] | None = None
    block: list[str] = []
    closed_behind: list[str] | None = None
    fence, indent = "", 0
    for line in text.splitlines():
        stripped = line.strip()
        if fence:
            code, closing, rest = line.rstrip().rpartition(fence)
            if stripped.startswith(fence) and stripped.lstrip("`")[:1] in ("", " "):
                found, fence = block, ""
                continue
            if closed_behind is not None and stripped.startswith(fence) and (match := FENCE.match(stripped)):
                found = closed_behind  # another block begins
                fence, indent, block, closed_behind = match[1], len(line) - len(line.lstrip()), [], None
                continue
            if closing and not rest and not code.endswith("`") and closed_behind is None:
                closed_behind = [*block, code[indent:] if not code[:indent].strip() else code]
            block.append(line[indent:] if not line[:indent].strip() else line)
        elif match := FENCE.match(stripped):
            fence, indent, block, closed_behind = match[1], len(line) - len(line.lstrip()), [], None
    if fence and closed_behind is not None:  # the last line of code, and its fence: no other fence closes the block
        found = closed_behind
    return None if found is None else "\n".join(found) + "\n"


def needed_imports(source: str) -> str:
    """Return the usual imports that a source uses, as the driver reads them: `math np=numpy math:gcd,inf`.

    Includes imports of the source itself, at no cost. A module counts as used if a dot follows its name.
    """
    named = {*MODULE.findall(source)}
    modules = sorted([*(named & MODULES), *(f"{short}={ALIASES[short]}" for short in named & ALIASES.keys())])
    wanted: dict[str, list[str]] = {}
    for name in sorted({*WORD.findall(source)} & _HOMES.keys()):
        wanted.setdefault(_HOMES[name], []).append(name)
    return " ".join([*modules, *(f"{module}:{','.join(names)}" for module, names in sorted(wanted.items()))])
