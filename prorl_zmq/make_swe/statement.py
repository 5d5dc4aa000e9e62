"""Writes an instance's problem statement: an issue made from the failing tests.

It shows a test's code up to the failing line, the values and the result. Examples that quote a line which the bug
changed are left out, since they would give away the cause.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from .suite import Failure

EXAMPLES = 3
CODE_LINES = 24
MESSAGE_LINES = 14
MESSAGE_WIDTH = 240
LEAST_LEAK = 8
"""Shorter lines, such as `pass`, occur anywhere."""
ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
NOISE = re.compile(r"^\s*(\.\.\.)?\s*(Full diff truncated|Use -v to get|\(.*hidden\), use).*|.*use '-vv' to show.*")


@dataclass(frozen=True)
class Example:
    code: str
    """The test's lines up to the failing one."""
    statement: str
    """The failing one."""
    called: str
    """The project's function that it calls, such as `humanize.intcomma`; empty: unknown."""
    values: Mapping[str, str]
    """Variables that the code uses without setting them."""
    exception: str
    message: str

    @property
    def bare(self) -> bool:
        """Whether only the exception's class is known."""
        return self.message == self.exception

    @property
    def summary(self) -> str:
        name = f"`{self.called}`" if self.called else "The library"
        missed = re.match(r"(?:Failed: )?DID NOT RAISE (?:any of )?(.*)|AssertionError: (\w+) not raised", self.message)
        if missed:
            expected = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", missed[1] or missed[2])
            return f"{name} does not raise {expected} any more where it should"
        if self.exception in ("AssertionError", "Failed"):
            return f"{name} gives a wrong result"
        return f"{name} fails with {self.exception}"


def examples(failures: Iterable[Failure], read: Callable[[str], str], modules: Collection[str]) -> list[Example]:
    """Return one example for each failing statement, the clearest and shortest first."""
    found: dict[tuple[str, str], Example] = {}
    for failure in failures:
        example = _example(failure, read, modules) if failure.path and failure.line else None
        if example is not None:
            key = (example.statement, example.exception)
            if key not in found or _size(example) < _size(found[key]):
                found[key] = example
    return sorted(found.values(), key=lambda each: (not each.called, each.bare, _size(each), each.code, each.message))


def write(name: str, version: str, shown: Iterable[Example], failing: int, changed: Iterable[str]) -> str | None:
    """Return the problem statement; None: any example would give away the bug."""
    secrets = [line for line in changed if len(line) >= LEAST_LEAK]
    safe = [each for each in shown if not leaks(_full(each), secrets)][:EXAMPLES]
    if not safe:
        return None
    first, *others = safe
    release = name if version == "0" else f"{name} {version}"
    parts = [first.summary, f"With {release} this does not work as it should:", _full(first)]
    for other in others:
        parts += ["It also goes wrong here:", _full(other)]
    left = failing - len(safe)
    if left > 0:
        parts.append(f"{left} more {'case goes' if left == 1 else 'cases go'} wrong in a similar way.")
    parts.append(
        "The code above is right about what to expect; it worked before. Please find the cause in the library and fix "
        "it, without changing what works."
    )
    return "\n\n".join(parts) + "\n"


def leaks(text: str, secrets: Iterable[str]) -> bool:
    """Return whether a text quotes one of these lines, ignoring spaces."""
    plain = _squeezed(text)
    return any(_squeezed(secret) in plain for secret in secrets)


def _full(example: Example) -> str:
    values = "".join(f"\n{name} = {value}" for name, value in example.values.items())
    given = f"```python{values}\n```\n\n" if values else ""
    lead = "with these values:\n\n" if values else ""
    return f"```python\n{example.code}\n```\n\n{lead}{given}What happens:\n\n```\n{example.message}\n```"


def _example(failure: Failure, read: Callable[[str], str], modules: Collection[str]) -> Example | None:
    text = read(failure.path)
    tree = _parsed(text)
    function = _function_at(tree, failure.function_line) if tree is not None else None
    if tree is None or function is None:
        return None
    statement = _statement_at(function, failure.line)
    body = [each for each in function.body if each.lineno <= failure.line]
    if statement is None or not body:
        return None
    if len(body) > 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # a docstring
    lines = text.splitlines()
    end = statement.end_lineno
    code = textwrap.dedent("\n".join(lines[body[0].lineno - 1 : end])).strip("\n")
    if len(code.splitlines()) > CODE_LINES or _parsed(code) is None:  # such as the beginning of a `try`
        code = textwrap.dedent("\n".join(lines[statement.lineno - 1 : end])).strip("\n")
    if len(code.splitlines()) > CODE_LINES:
        return None
    own = " ".join(ast.unparse(statement).split())
    return Example(
        code=code,
        statement=own,
        called=_called([statement, *body[::-1]], _imported(tree, modules)),
        values=_values(code, failure.variables),
        exception=failure.exception,
        message=_message(failure.message),
    )


def _function_at(tree: ast.AST, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == line:
                return node
    return None


def _statement_at(function: ast.AST, line: int) -> ast.stmt | None:
    found = None
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node is not function and node.lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


def _imported(tree: ast.AST, modules: Collection[str]) -> frozenset[str]:
    """Return the names that a test file imports from the project."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.split(".")[0] in modules]
            names |= {(alias.asname or alias.name.split(".")[0]) for alias in found}
        # Tests inside of a package import it relatively; `from .` is another file of the tests.
        elif isinstance(node, ast.ImportFrom) and (
            node.level > 1 or (node.level == 0 and (node.module or "").split(".")[0] in modules)
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


def _called(statements: Iterable[ast.AST], imported: Collection[str]) -> str:
    """Return the first call of the project's; empty: there is none."""
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.split(".")[0] in imported and re.fullmatch(r"[A-Za-z_][\w.]*", name):
                return name
    return ""


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def _values(code: str, variables: Mapping[str, str]) -> dict[str, str]:
    tree = _parsed(code)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)] if tree is not None else []
    set_here = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    used = dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Load))
    return {name: _stable(variables[name]) for name in used if name in variables and name not in set_here}


def _message(message: str) -> str:
    lines = [line[:MESSAGE_WIDTH].rstrip() for line in _stable(message).splitlines() if not NOISE.match(line)]
    while lines and not lines[-1]:
        lines.pop()
    shown = lines[:MESSAGE_LINES]
    return "\n".join([*shown, "…"] if len(lines) > len(shown) else shown)


def _stable(text: str) -> str:
    return ADDRESS.sub("0x…", text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _size(example: Example) -> int:
    return len(example.code) + len(example.message) + sum(map(len, example.values.values()))
