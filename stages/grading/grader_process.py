"""The processes of a `GraderPool`: a template with all imports done, and the graders forked from it.

    SEQPACKET socket, inherited    ← the pool: the grader's module, a channel, a file for its output
    the channel                    ⇄ the pool: `Call`s and `Answer`s; first the grader's pid

The template imports modules of this package before it forks. A grader imports a user's module itself, since the module
may start threads. The template kills processes that graders leave, and all its descendants when the pool closes the
socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any, BinaryIO, NoReturn

import msgspec

from ...system.processes import die_with_parent
from ...system.readable import readable
from ...tools.processes.fork_watch import ForkWatch, forked
from ...tools.processes.process_tree import children, descendants, kill

OWN_PACKAGE = (__package__ or "").partition(".")[0]  # not of __name__: the template is started as __main__
PRELOADED = "PRELOADED"
"""The attribute that lists the imports of a module's functions; they take a second, and start no threads."""
REQUEST_LIMIT_BYTES = 64 * 1024
LENGTH = struct.Struct("<I")
"""The prefix of each packed message."""
MESSAGE_LIMIT_BYTES = 64 * 2**20
OUTPUT_LIMIT_BYTES = 1 << 20
"""Most bytes that a grader may print in one call; further writes fail."""


class Call(msgspec.Struct, frozen=True):
    module: str
    name: str
    """The name within the module; dots separate class and method."""
    arguments: tuple[Any, ...]


class Answer(msgspec.Struct, frozen=True):
    value: Any = None
    problem: str = ""
    """The exception, or why the result cannot be returned; empty: `value` is the result."""
    raised: bool = False
    """Whether the function itself raised the problem."""


class Template:
    """Forks graders until the pool closes the control socket."""

    def __init__(self, control: socket.socket, memory_bytes: int) -> None:
        self._control = control
        self._memory_bytes = memory_bytes
        self._graders: set[int] = set()

    def run(self) -> None:
        watch = ForkWatch()
        watched: list[ForkWatch | socket.socket] = [watch, self._control]
        while True:
            ready = readable(watched)
            if watch in ready:
                watch.clear()
                self._reap()
            if self._control in ready and not self._serve_request():
                break
        kill(*descendants(os.getpid()))

    def _serve_request(self) -> bool:
        module, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_LIMIT_BYTES, 2)
        if not module:
            return False
        channel, output = descriptors
        if module.decode().partition(".")[0] == OWN_PACKAGE:
            with contextlib.suppress(Exception):  # the grader meets the error too, and reports it
                for name in (module.decode(), *getattr(importlib.import_module(module.decode()), PRELOADED, ())):
                    importlib.import_module(name)
        gc.freeze()
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            _grade(channel, output, self._memory_bytes, template)
        os.close(channel)
        os.close(output)
        self._graders.add(pid)
        return True

    def _reap(self) -> None:
        for pid in children(os.getpid()):
            if pid not in self._graders:
                kill(pid)  # left by a grader that has ended
            with contextlib.suppress(ChildProcessError):
                ended, _ = os.waitpid(pid, os.WNOHANG)
                self._graders.discard(ended)


def _grade(channel: int, output: int, memory_bytes: int, template: int) -> NoReturn:
    """In a forked child: answer calls until the pool closes the channel."""
    code = 1
    try:
        die_with_parent(template)
        forked()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for limit, amount in (
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, OUTPUT_LIMIT_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (amount, amount))
        for standard in (1, 2):
            os.dup2(output, standard)
        faulthandler.enable()
        with socket.socket(fileno=channel) as pool, pool.makefile("rb") as calls:
            pool.sendall(LENGTH.pack(os.getpid()))
            while (packed := _received(calls)) is not None:
                os.ftruncate(output, 0)
                os.lseek(output, 0, os.SEEK_SET)
                answer = _answer(packed)
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                pool.sendall(LENGTH.pack(len(answer)) + answer)
        code = 0
    finally:
        os._exit(code)


def _answer(packed: bytes) -> bytes:
    call = msgspec.msgpack.decode(packed, type=Call)
    try:
        function = functools.reduce(getattr, call.name.split("."), importlib.import_module(call.module))
        value: Any = function(*call.arguments)  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - also SystemExit: a grader ends only by dying
        with contextlib.suppress(Exception):  # too much output, or out of memory
            traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        return msgspec.msgpack.encode(Answer(problem=f"{type(error).__name__}: {error}"[:4000], raised=True))
    try:
        answer = msgspec.msgpack.encode(Answer(value), enc_hook=_plain)
    except Exception as error:  # noqa: BLE001 - of an object's own methods
        return msgspec.msgpack.encode(Answer(problem=f"a {type(value).__name__} is not plain data: {error}"[:4000]))
    if len(answer) > MESSAGE_LIMIT_BYTES:
        return msgspec.msgpack.encode(Answer(problem=f"{len(answer)} bytes; at most {MESSAGE_LIMIT_BYTES} are taken"))
    return answer


def _plain(value: Any) -> Any:
    """Convert NumPy and PyTorch scalars to Python's own."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"{type(value).__name__} cannot be passed on")


def _received(calls: BinaryIO) -> bytes | None:
    """Return the next packed call; None: the pool closed the channel."""
    if len(head := calls.read(LENGTH.size)) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    packed = calls.read(size)
    return packed if len(packed) == size else None


def main() -> None:
    """Serve the control socket. The arguments are its descriptor, a grader's memory limit, and Python's path."""
    sys.path[:] = msgspec.json.decode(sys.argv[3], type=list[str])
    with socket.socket(fileno=int(sys.argv[1])) as control:
        Template(control, int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
