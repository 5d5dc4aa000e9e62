"""The program that runs one test of a solution in a sandbox; it enters as text, in an argument of `python3 -c`.

    arguments     the solution's source, the imports before it, the function to call ("": it is a program), seconds of
                  processor time, bytes of memory, a filter of system calls in hexadecimal digits, and the line of the
                  first run in this sandbox ("": this is the first)
    descriptor 0  a program's input, or a JSON list of the arguments of a function
    descriptor 1  a program's output, or the function's result as JSON
    descriptor 2  the driver's line, its pid and the state of the files, before the solution runs; then the solution's

The driver holds no secret and does not judge. It binds every name that it needs before the solution runs, so a solution
that patches `json`, `os` or the builtins harms only itself. A test that finds leftovers of another one reports `dirty`,
and is repeated in a new sandbox. It needs only Python 3.8, and imports little: a test costs the interpreter's start.
"""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

PLACES = (".", "/tmp", "/dev/shm", "/var/tmp", "/dev/pts")  # noqa: S108 - where files can be left
MOST_FILES = 1000
DIRTY = 3
OWN_PID = 0x7EADBEEF
"""As in `code_seccomp.py`."""
NO_NEW_PRIVILEGES, SECCOMP, FILTER_MODE = 38, 22, 2
STACK_BYTES = 128 * 2**20
DEPTH = 50_000
"""The recursion limit of LiveCodeBench."""


def main() -> None:
    source, imports, function, seconds, memory, program, first = sys.argv[1:]
    if program:
        _have_no_children(bytes.fromhex(program))
    files = str(_files())
    if first:
        pid, before = first.split()
        if files != before or _younger_than(int(pid)):
            os.write(2, b"prorl dirty\n")
            os._exit(DIRTY)
    os.write(2, f"prorl {os.getpid()} {files}\n".encode())
    _limit(resource.RLIMIT_CPU, int(seconds), 1)
    _limit(resource.RLIMIT_AS, int(memory))
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    sys.setrecursionlimit(DEPTH)
    sys.argv[:] = ["solution.py"]
    if function:
        _call(source, imports, function)
    else:
        _load("__main__", source, imports)


def _have_no_children(program: bytes) -> None:
    import ctypes

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    program = program.replace(OWN_PID.to_bytes(4, sys.byteorder), os.getpid().to_bytes(4, sys.byteorder))
    given = Filter(len(program) // 8, program)
    if prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(SECCOMP, FILTER_MODE, ctypes.byref(given), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def _files() -> int:
    """Return a number that changes whenever anything has changed where files can be left.

    The kernel records each change of a file, its mode, times, names and attributes in a time that no
    program can set. If there are too many files to check, the number differs each time.
    """
    changes = []
    for place in PLACES:
        for folder, folders, files in os.walk(place):
            for name in ("", *sorted(folders), *sorted(files)):
                try:
                    changes.append(os.lstat(f"{folder}/{name}").st_ctime_ns)
                except OSError:
                    changes.append(0)
            if len(changes) > MOST_FILES:
                return os.getpid()
    return abs(hash(tuple(changes)))


def _younger_than(first: int) -> bool:
    """Return whether another process was started after the first run in this sandbox."""
    names = os.listdir("/proc")  # noqa: PTH208 - pathlib takes as long to import as the interpreter to start
    numbers = (int(name) for name in names if name.isdigit())
    return any(number > first and number != os.getpid() for number in numbers)


def _limit(what: int, soft: int, more: int = 0) -> None:
    """Set a soft limit, and a hard limit higher by a margin, below the allowed one."""
    allowed = resource.getrlimit(what)[1]
    hard = soft + more if allowed == resource.RLIM_INFINITY else min(soft + more, allowed)
    resource.setrlimit(what, (min(soft, hard), hard))


def _load(name: str, source: str, imports: str) -> ModuleType:
    module = type(sys)(name)
    sys.modules[name] = module
    for part in imports.split():
        alias, also, package = part.partition("=")
        if not also:
            package, _, names = part.partition(":")
        try:
            imported = __import__(package)
        except ImportError:
            continue  # not every image has numpy
        if also:
            module.__dict__[alias] = imported
            continue
        found = {each: getattr(imported, each) for each in names.split(",") if hasattr(imported, each)}
        module.__dict__.update(found if names else {package: imported})
    exec(compile(source, "solution.py", "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - in a sandbox
    return module


def _call(source: str, imports: str, function: str) -> None:
    read, write = _json()
    end, put, encoded = os._exit, os.write, str.encode
    arguments = read(sys.stdin.buffer.read().decode())
    answer, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # its prints are not its result
    module = _load("solution", source, imports)
    owner: Any = getattr(module, "Solution", None)
    target = getattr(owner(), function) if hasattr(owner, function) else getattr(module, function)
    result = encoded(write(target(*arguments)))
    while result:
        result = result[put(answer, result) :]
    end(0)  # skips whatever it left for the interpreter's exit


def _json() -> tuple[Callable[[str], Any], Callable[[Any], str]]:
    """Return the C functions that read and write JSON, which no Python code can change."""
    try:
        from _json import encode_basestring_ascii, make_encoder, make_scanner

        reading: Any = _Reading
        scan = make_scanner(reading)
        encode = make_encoder({}, _plain, encode_basestring_ascii, None, ":", ",", False, False, True)
        join = "".join
        if join(encode([1.5, "a"], 0)) == '[1.5,"a"]' and scan('{"a":[1,null]}', 0)[0] == {"a": [1, None]}:
            return lambda text: scan(text, 0)[0], lambda value: join(encode(value, 0))
    except (ImportError, AttributeError, TypeError, ValueError):
        pass  # not CPython, or changed: they are not a public interface
    import json

    return json.loads, json.JSONEncoder(default=_plain, separators=(",", ":")).encode


class _Reading:
    """How the scanner reads JSON."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}.__getitem__


def _plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays to Python's own."""
    plain = getattr(value, "tolist", None)
    if plain is None:
        raise TypeError(f"the result has a {type(value).__name__} in it, which is not plain data")
    return plain()


main()
