"""Copies a Python file with the modules that it imports from its folder, so that it can be imported elsewhere."""

from __future__ import annotations

import ast
import shutil
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def copy_module(root: Path, name: str, target: Path) -> None:
    """Copy a file below `root` into `target`, under the same relative name.

    Modules and packages next to it that it imports are copied too, recursively; for a file in a package, the whole
    package. Other files, such as data that it reads, are not.

    Raises:
        ConfigError: it is missing, or not below `root`.
        OSError: it cannot be read or written.
    """
    file = root / name
    if ".." in file.relative_to(root).parts:
        raise ConfigError(
            f"{name} is not below {root}, so it cannot be copied: name it by its whole path, which all nodes must have",
            key="service.task_modules",
        )
    if not file.is_file():
        raise ConfigError(f"{file} is not there; name a Python file with a handler in it", key="service.task_modules")
    package = file
    while (package.parent / "__init__.py").is_file() and package.parent != root:
        package = package.parent
    copied: set[Path] = set()
    waiting = [package]
    while waiting:
        if (each := waiting.pop()) not in copied:
            copied.add(each)
            place = target / each.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if each.is_dir():
                shutil.copytree(each, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                shutil.copyfile(each, place)
            waiting += _imported_from(each, package.parent)


def _imported_from(place: Path, folder: Path) -> Iterator[Path]:
    """Yield what a module or a package imports from a folder."""
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # reported on import
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if (folder / top / "__init__.py").is_file():
                    yield folder / top
                elif (folder / f"{top}.py").is_file():
                    yield folder / f"{top}.py"
