"""The processes of an `EnvironmentPool`, in the interpreter of an environment. Standard library only.

    guard                a child of the stage process
    └─ template          imports the adapter, and forks for each order
       ├─ guard
       │  └─ worker      plays rollouts (see `worker.py`)
       └─ …

    line, a stream socket per guard    → the pool: how its child ended, after all below is killed
                                       ← the pool: closed, upon which the guard kills its child
    control, SEQPACKET                 → the pool: what the adapter is, or why it cannot be imported
                                       ← the pool: orders; closed, upon which the template ends

An order is a worker's folder, with descriptors: its channel, its output, and the line of its guard. A guard adopts the
orphans below it, so that nothing that a world starts outlives its worker. If a guard is killed, the pool has the guard
above it, or those below it, kill the rest.

An import that starts a thread or a process, or opens a file, would be half present in a fork: such a template forks
nothing, and becomes the only worker itself, of an order that has just the channel.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ...system.processes import become_subreaper, die_with_parent
from ...system.readable import readable
from ...tools.processes.fork_watch import ForkWatch
from ...tools.processes.process_tree import children
from .returned_values import Invalid
from .worker import ARGUMENTS, JSON, limit_of, seed_anew, serve, slots_of, words_of

if TYPE_CHECKING:
    from collections.abc import Iterable

ORDER_BYTES = 4096


def guard(line: socket.socket, of_child: Iterable[int] = ()) -> None:
    """Fork, and return in the child; see above for what the parent does, which does not return.

    Args:
        line: to the pool; the child closes it.
        of_child: descriptors that the parent closes.
    """
    become_subreaper()
    me = os.getpid()
    child = os.fork()
    if child:
        for descriptor in of_child:
            os.close(descriptor)
        _watch_over(child, line)
    line.close()
    os.setsid()
    die_with_parent(me)


def _watch_over(child: int, line: socket.socket) -> NoReturn:
    words = "was lost"
    try:
        watch, status = ForkWatch(), None
        while (status := _reaped(child)) is None and line not in readable((watch, line)):
            watch.clear()
        me = os.getpid()
        while below := children(me):
            for pid in below:  # only this process reaps them, so a number is still theirs
                with suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in below:
                ended = os.waitpid(pid, 0)[1]
                status = ended if pid == child else status
        code = os.waitstatus_to_exitcode(status or 0)
        words = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    finally:
        with suppress(OSError):
            line.sendall(words.encode())
        os._exit(0)


def _reaped(child: int) -> int | None:
    """Reap all children that have ended; return the status of one of them, if it has."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


class Order(NamedTuple):
    folder: str
    descriptors: list[int]


def next_order(control: socket.socket) -> Order | None:
    """Return the pool's next order; None: it has closed the control socket."""
    folder, descriptors, _, _ = socket.recv_fds(control, ORDER_BYTES, 3)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return Order(folder.decode(), list(descriptors)) if folder else None


def forked_worker(control: socket.socket) -> int | None:
    """Fork a worker for each order; return its channel in the worker, and None at the end in the template."""
    gc.collect()
    gc.freeze()  # a worker that collects would otherwise copy the memory of all objects
    while (order := next_order(control)) is not None:
        _reaped(0)
        channel, output, line = order.descriptors
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            is_fork = os.fork() == 0
        except OSError as error:
            is_fork = False
            os.write(line, f"cannot be forked: {error.strerror}".encode())
        if is_fork:
            control.close()
            guard(socket.socket(fileno=line), (channel, output))
            os.chdir(order.folder)
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
            seed_anew()
            return channel
        for descriptor in order.descriptors:
            os.close(descriptor)
    return None


def about(adapter: Any, *, forks: bool) -> dict[str, Any]:
    """Return what the pool must know of an adapter."""
    is_program = callable(getattr(adapter, "run", None))
    waits = any(inspect.iscoroutinefunction(getattr(adapter, each, None)) for each in ARGUMENTS)
    return {
        "slots": slots_of(adapter),
        "limit_s": limit_of(adapter),
        "is_program": is_program,
        "one_at_a_time": not (is_program or waits or getattr(adapter, "own_thread", False)),
        "forks": forks,
    }


def belongings() -> tuple[int, int, int]:
    """Return how many threads, open files and children this process has: a fork lacks the one and shares the others."""
    threads, files = (list(Path("/proc/self", each).iterdir()) for each in ("task", "fd"))
    return len(threads), sum(each.exists() for each in files), len(children(os.getpid()))


def load(place: str) -> Any:
    """Return the adapter's class from `module:Class`, or `/path/file.py:Class`."""
    module, _, name = place.rpartition(":")
    if module.endswith(".py"):
        spec: Any = importlib.util.spec_from_file_location(f"prorl_adapter_{Path(module).stem}", module)
        loaded: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        # Not by its loader, whose bytecode may be that of a file of the same second and size.
        exec(compile(Path(module).read_bytes(), module, "exec"), vars(loaded))  # noqa: S102
    else:
        loaded = importlib.import_module(module)
    for part in name.split("."):
        loaded = getattr(loaded, part)
    if not callable(getattr(loaded, "run", None)):
        if not hasattr(loaded, "open") and (not inspect.isclass(loaded) or hasattr(loaded, "reset")):
            return _wrapped(loaded)
        lacking = [each for each in ("open", "step", "close") if not callable(getattr(loaded, each, None))]
        if lacking:
            raise Invalid(
                f"{place} has no method {lacking[0]}: an adapter has open, step and close, or run, or reset and step"
            )
    return loaded


def _wrapped(make: Any) -> Any:
    """Return the adapter of a class with gymnasium's `reset` and `step`, or of a function that makes such objects."""
    gymnasium = load(f"{Path(__file__).with_name('adapters')}/gymnasium.py:Gymnasium")

    class Wrapped(gymnasium):  # type: ignore[misc, valid-type]
        slots = getattr(make, "slots", 64)
        limit_s = getattr(make, "limit_s", 60.0)
        own_thread = getattr(make, "own_thread", False)

        def __init__(self) -> None:
            super().__init__(make)

    return Wrapped


def main(line: str, control: str, soft: str, hard: str, place: str) -> None:
    """Serve the pool; the arguments are two descriptors, limits of open files, and the adapter's place."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    guard(socket.socket(fileno=int(line)), (int(control),))
    orders = socket.socket(fileno=int(control))
    before = belongings()
    try:
        adapter = load(place)
        answer = about(adapter, forks=belongings() == before)
    except BaseException as error:  # noqa: BLE001 - also SystemExit: the pool must hear of it
        answer = {"error": words_of("the import", error)}
    orders.send(JSON.encode(answer).encode("utf-8", "replace"))
    if answer.get("forks"):
        channel = forked_worker(orders)
    else:
        order = next_order(orders)
        channel = order.descriptors[0] if order is not None else None
    if channel is not None:
        serve(socket.socket(fileno=channel), adapter, one_at_a_time=answer["one_at_a_time"])
