"""Which files import which: of the package, and of the tests.

Imports inside functions and under TYPE_CHECKING count like all others: a reader has to follow them too.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "prorl_zmq": "prorl_zmq",
    "brokers": "prorl_zmq.brokers",
    "stages": "prorl_zmq.stages",
    "tools": "prorl_zmq.tools",
}
"""Folders of the repository, and the packages as which they are installed."""


@cache
def modules() -> dict[str, Path]:
    """Return the package's modules by name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of the package that a module imports."""
    path = modules()[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return _imported(path, package) & modules().keys() - {module}


@cache
def test_modules() -> dict[str, Path]:
    """Return what test files import as top-level modules, from tests/ and bench/, by name."""
    found = {
        ".".join(path.relative_to(ROOT / "bench").with_suffix("").parts): path for path in (ROOT / "bench").glob("*.py")
    }
    for path in (ROOT / "tests").rglob("*.py"):
        found[".".join(path.relative_to(ROOT / "tests").with_suffix("").parts)] = path
    return found


@cache
def imports_of_file(path: Path) -> frozenset[Path]:
    """Return the files that a file imports, of the package, of tests/ and of bench/."""
    by_name = {**test_modules(), **modules()}
    names = {path: name for name, path in modules().items()}
    if path in names:
        return frozenset(modules()[name] for name in imports(names[path]))
    # A test folder's own helpers are imported by their bare names too, if it puts its folder on the path.
    beside = {other.stem: other for other in path.parent.glob("*.py")}
    found = _imported(path, [])
    return frozenset(target for name in found if (target := by_name.get(name) or beside.get(name)) and target != path)


@cache
def closure(path: Path) -> frozenset[Path]:
    """Return a file, and all files that it imports, directly or through others."""
    found, left = set(), [path]
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            left += imports_of_file(one)
    return frozenset(found)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements, at any depth; `ast.walk` would take four times as long over their expressions."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, name, ())


def _imported(path: Path, package: list[str]) -> frozenset[str]:
    """Return the names of the modules that a file imports, and of what it imports from them."""
    found = set()
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() or name in test_modules() else base for name in names}
    return frozenset(found)
