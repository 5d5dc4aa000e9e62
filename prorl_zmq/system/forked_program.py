"""What a forked process does in place of `python -P PROGRAM`: reset itself, run the program, and exit.

The order is a JSON object: program (`-m` and a module, or a script, and the arguments), environment, folder,
descriptors (the numbers that passed descriptors get), nice, open_files (soft and hard limit, or null).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import random
import resource
import runpy
import signal
import sys
import threading
import time
from importlib import invalidate_caches
from typing import TYPE_CHECKING, Any, NoReturn

from .processes import die_with_parent, lower_priority, wait_adopted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NOT_FLUSHED = 120
"""The exit code of an interpreter that cannot flush its output."""


def become(line: int, descriptors: Sequence[int], starter: int, client: int) -> NoReturn:
    """Read an order from a line and execute it, after the client has adopted this process, which `starter` forked."""
    code = 1
    try:
        gc.enable()
        wait_adopted(starter)
        die_with_parent(client)
        report(line, os.getpid())
        with open(line, "rb", closefd=False) as orders:
            packed = orders.readline()
        if packed.endswith(b"\n"):
            program = _prepare(json.loads(packed), line, descriptors)
            if program is not None:
                code = exit_code_of(program)
    finally:
        _end(code)


def report(line: int, said: int | OSError) -> None:
    """Report a pid or an error to the client."""
    message = said if isinstance(said, int) else {"error": [said.errno, said.strerror, said.filename]}
    with contextlib.suppress(OSError):
        os.write(line, json.dumps(message).encode("ascii") + b"\n")


def _prepare(order: dict[str, Any], line: int, descriptors: Sequence[int]) -> Callable[[], None] | None:
    """Set up this process by the order; return what runs the program, or None if it cannot run."""
    try:
        os.setsid()
        numbers: list[int] = order["descriptors"]
        line, *descriptors = _above(max(numbers), line, *descriptors)
        for descriptor, number in zip(descriptors, numbers, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if order["open_files"] is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, order["open_files"])
        lower_priority(order["nice"])
        os.chdir(order["folder"])
    except OSError as error:
        report(line, error)
        return None
    program: list[str] = order["program"]
    _set_environment(order["environment"])
    _open_streams()
    sys.orig_argv = [sys.executable, "-P", *program]
    set_title(sys.orig_argv)
    _reseed()
    os.close(line)
    if program[0] != "-m":
        sys.argv = program
        return lambda: _discard(runpy.run_path(program[0], run_name="__main__"))
    module = program[1]
    sys.argv = program[1:]  # the first item becomes the module's file when it runs
    sys.modules.pop(module, None)  # was preloaded for its imports
    return lambda: _discard(runpy.run_module(module, run_name="__main__", alter_sys=True))


def _discard(_: object) -> None: ...


def _above(number: int, *descriptors: int) -> list[int]:
    """Move descriptors to numbers above one."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, number + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return moved


def _set_environment(environment: dict[str, str]) -> None:
    before, after = (each.get("PYTHONPATH", "") for each in (os.environ, environment))
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if before != after:
        left = [folder for folder in sys.path if folder not in before.split(os.pathsep)]
        sys.path[:] = [*filter(None, after.split(os.pathsep)), *left]
    invalidate_caches()


def _open_streams() -> None:
    """Reopen the standard streams, as the interpreter does."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    unbuffered = number > 0 and bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(
        open(number, "wb" if number else "rb", 0 if unbuffered else -1, closefd=False),
        like.encoding,
        like.errors,
        newline="\n" if number else None,
        line_buffering=number == 2 or os.isatty(number),
        write_through=unbuffered,
    )


def _reseed() -> None:
    random.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def set_title(arguments: Sequence[str]) -> None:
    """Show this command line in the process list, cut to the length of the first one."""
    try:
        place = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "program_invocation_name").value
    except ValueError:  # a C library without that symbol
        return
    if place is not None and ctypes.string_at(place, len(_shown)) == _shown:
        room = len(_shown)
        _shown[:] = _joined(arguments)[: room - 1].ljust(room, b"\0")
        ctypes.memmove(place, bytes(_shown), room)


def _joined(arguments: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in arguments)


_shown = bytearray(_joined(sys.orig_argv))
"""This process's command line, as in memory."""


def exit_code_of(run: Callable[[], None]) -> int:
    """Run a program; return an interpreter's exit code for it, negative if a signal would end it."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - the interpreter's own last handler
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    """Do what an interpreter does at its exit, except finalization."""
    try:
        for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # noqa: SLF001
            try:
                finish()
            except BaseException as error:  # noqa: BLE001
                sys.excepthook(type(error), error, error.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except (OSError, ValueError):
                code = code or NOT_FLUSHED
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code)
