"""Tasks in Python files, without an installed package: `--task-module`, `[service] task_modules`.

A file is imported by its stem, or by its path below its package; grader processes import it by the same name. Its
folder is appended to `sys.path`, so that neighbouring modules can be imported and shadow no installed module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .handler import AgentHandler, load_handlers, log, make_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

IMPORT_LIMIT_S = 120.0
KEY = "task_module"
_NO_PARENT = "attempted relative import"
_BASE = "AgentHandler of prorl_zmq.stages.handler"


def own_handlers(files: Iterable[Path]) -> dict[str, type[AgentHandler[Any]]]:
    """Import files and return the handlers that they define, by task.

    Abstract classes, and classes whose names begin with an underscore, are skipped.

    Raises:
        ConfigError: a file cannot be imported, has no handler or a broken one, or two handlers are of one task.
    """
    handlers: dict[str, type[AgentHandler[Any]]] = {}
    for file in dict.fromkeys(Path(file).absolute() for file in files):
        for kind in _handlers_in(_imported(file), file):
            task = getattr(kind, "task", None)
            if not isinstance(task, str):
                raise ConfigError(f'{file.name}: {kind.__name__} names no task; write task = "…" in it', key=KEY)
            if (other := handlers.get(task)) is not None:
                both = f"{other.__module__}:{other.__name__} and {kind.__module__}:{kind.__name__}"
                raise ConfigError(f"{file.name}: the task {task} has two handlers, {both}; rename one's task", key=KEY)
            make_handler(task, kind)
            handlers[task] = kind
    return handlers


def all_handlers(
    files: Iterable[Path], names: Iterable[str] = (), warn: Callable[[str], None] = log.warning
) -> dict[str, AgentHandler[Any]]:
    """Make the handlers of files and of installed packages, by task; only `names`, if any are given.

    A file's task replaces an installed task of the same name.

    Raises:
        ConfigError: see `own_handlers` and `load_handlers`.
    """
    wanted = set(names)
    own = {task: make_handler(task, kind) for task, kind in own_handlers(files).items()}
    others = wanted - own.keys()
    installed = load_handlers(others, warn) if others or not wanted else {}
    handlers = installed | {task: handler for task, handler in own.items() if not wanted or task in wanted}
    for handler in handlers.values():
        handler.file_tasks = own
    return handlers


def _handlers_in(module: ModuleType, file: Path) -> list[type[AgentHandler[Any]]]:
    own = [
        each
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, AgentHandler) and each.__module__ == module.__name__
        if not name.startswith("_")
    ]
    whole = [each for each in dict.fromkeys(own) if not inspect.isabstract(each)]
    if not whole:
        missing = [f"{each.__name__} has no {' and no '.join(sorted(each.__abstractmethods__))}" for each in own]
        what = "; ".join(missing) or f"no class in it is a subclass of {_BASE}"
        raise ConfigError(f"{file} has no handler: {what}", key=KEY)
    return whole


def _imported(file: Path) -> ModuleType:
    if file.suffix != ".py" or not file.is_file():
        what = "is not there" if not file.exists() else "is not a .py file"
        raise ConfigError(f"{file} {what}; name a Python file with a handler in it", key=KEY)
    name, folder = _place(file)
    top = name.partition(".")[0]
    if not name.replace(".", "_").isidentifier():
        raise ConfigError(f"{file}: {name!r} is not a name of a module; rename the file, such as my_task.py", key=KEY)
    try:
        known = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        known = None
    ours = folder / (f"{top}.py" if top == name else f"{top}/__init__.py")
    if known is not None and (known.origin is None or Path(known.origin).resolve() != ours.resolve()):
        place = known.origin or "Python's own"
        raise ConfigError(f"{file} has the name of another module, {top} ({place}); rename it", key=KEY)
    if str(folder) not in sys.path:  # graders get this path too
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    return _import_within_limit(name, file)


def _place(file: Path) -> tuple[str, Path]:
    """Return the name by which a file is imported, and the folder that must be on Python's path."""
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def _import_within_limit(name: str, file: Path) -> ModuleType:
    result: list[ModuleType | BaseException] = []

    def run() -> None:
        try:
            result.append(importlib.import_module(name))
        except BaseException as error:  # noqa: BLE001 - also SystemExit of a script without a guard
            result.append(error)

    thread = threading.Thread(target=run, name=f"import {name}", daemon=True)
    thread.start()
    thread.join(IMPORT_LIMIT_S)
    if not result:
        raise ConfigError(f"{file} could not be imported within {IMPORT_LIMIT_S:g} s; what does it wait for?", key=KEY)
    if isinstance(module := result[0], BaseException):
        raise ConfigError(f"{file}{_why(module, file)}", key=KEY) from module
    return module


def _why(error: BaseException, file: Path) -> str:
    """Return where and why an import failed."""
    if isinstance(error, SyntaxError):
        elsewhere = "" if Path(error.filename or "") == file else f" of {error.filename}"
        line = f"line {error.lineno}{elsewhere}: " if error.lineno is not None else ""
        return f" cannot be imported: {line}{error.msg}"
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    hint = ""
    if isinstance(error, ImportError) and _NO_PARENT in str(error):
        hint = "; import the file next to it by its name, or put an __init__.py into the folder"
    return f" cannot be imported: {where}{type(error).__name__}: {error}{hint}"
