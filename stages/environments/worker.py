"""A worker: plays rollouts of one environment, in the interpreter of that environment. Standard library only.

    channel, a stream socket ⇄ the pool, in a stage process: frames of a length (4 bytes, little-endian) and JSON
    standard output          → the pool, for the words of errors; prints never touch the frames

A call is `{"n", "do", "rollout", …}`, its answer `{"n", "value"}` or `{"n", "error"}`; the answer 0 is unasked, and has
the worker's pid. Calls of different rollouts may be answered in any order. The worker ends with the channel.
`worker_process.py` says where workers come from, `adapter.py` what an adapter is and which calls run at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import random
import struct
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .returned_values import NOTE_LIMIT, Invalid, checked_outcome, checked_step

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

LENGTH = struct.Struct("<I")
FRAME_LIMIT_BYTES = 64 * 2**20
CANCEL_S = 5.0
"""Seconds in which a cancelled call must end."""
READ_BYTES = 256 * 1024
OURS = {os.path.dirname(file) for file in (__file__, os.__file__)}  # noqa: PTH120 - as below
"""Folders of modules that errors do not point to: this package's, and the standard library's."""
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "open": ("args", "seed"),
    "step": ("player", "text"),
    "call": ("player", "name", "arguments"),
    "close": (),
    "run": ("url", "key", "models", "args", "seed"),
}
"""The arguments of each method, by their names in a call."""
BEGINNINGS = ("open", "run")
_spare_generators: list[Any] = []
"""numpy's, of rollouts that have ended."""
JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


class Rollout:
    """One object of the adapter's class, and the states of the global random generators that it sees."""

    def __init__(self, world: Any, seed: int | None) -> None:
        self.world = world
        self.opened = False
        self.task: asyncio.Task[Any] | None = None
        self.thread: Future[Any] | None = None
        """The call that a thread runs; cancelling it does not end the thread."""
        self._methods: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._seed = seed
        self._random: Any = None
        self._numpy: Any = None

    def method(self, do: str) -> tuple[Callable[..., Any], bool]:
        """Return a method, and whether it is a coroutine's."""
        if (known := self._methods.get(do)) is None:
            method = getattr(self.world, do)
            known = self._methods[do] = (method, inspect.iscoroutinefunction(method))
        return known

    def begin(self) -> None:
        """Begin with generators that only the seed determines."""
        random.seed(self._seed)
        self._begin_numpy()

    def keep(self) -> None:
        self._random = random.getstate()
        if (numpy := _numpy_random()) is not None:
            self._numpy = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else numpy.get_state()

    def restore(self) -> None:
        if self._random is None:  # its earlier methods were coroutines
            self.begin()
            return
        random.setstate(self._random)
        if self._numpy is None:  # numpy was imported since
            self._begin_numpy()
        elif isinstance(self._numpy, tuple):
            _numpy_random().set_state(self._numpy)
        else:
            _numpy_random().set_bit_generator(self._numpy)

    def _begin_numpy(self) -> None:
        if (numpy := _numpy_random()) is None:
            return
        if hasattr(numpy, "set_bit_generator"):  # since numpy 1.24; states are slow to copy, and generators to make
            numpy.set_bit_generator(_spare_generators.pop() if _spare_generators else numpy.MT19937(0))
        numpy.seed(None if self._seed is None else self._seed % 2**32)


class Worker(asyncio.Protocol):
    """Answers the calls of the pool.

    Args:
        adapter: the adapter's class.
        ended: set when the pool has closed the socket.
    """

    def __init__(self, adapter: Any, ended: asyncio.Event | None = None) -> None:
        self._adapter = adapter
        self._ended = ended
        self._rollouts: dict[str, Rollout] = {}
        self._seen: Rollout | None = None
        """The rollout whose states the global generators have now."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._data = bytearray()
        self._pid = os.getpid()
        self._limit_s = limit_of(adapter)
        self._own_thread = bool(getattr(adapter, "own_thread", False))
        self._threads = ThreadPoolExecutor(slots_of(adapter), thread_name_prefix="rollout")

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.answer({"n": 0, "value": self._pid})

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._ended is not None:
            self._ended.set()

    def data_received(self, data: bytes | memoryview) -> None:
        self._data += data
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            call = json.loads(self._data[LENGTH.size : end].decode())
            del self._data[:end]
            if call["do"] == "ping":
                self.answer({"n": call["n"], "value": None})
            elif call["do"] == "cancel":
                self._begin(self._cancel(call["n"], call["rollout"]))
            else:
                self._play(call["do"], call["n"], call)

    def answer(self, answer: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a child that an environment forked has come back here
        self._transport.write(framed(answer))

    def _play(self, do: str, number: int, call: dict[str, Any]) -> None:
        name = call["rollout"]
        try:
            rollout = self._rollouts.get(name)
            if rollout is None:
                if do not in BEGINNINGS:
                    raise Invalid(f"{do} of the rollout {name}, which this worker does not have")
                rollout = self._rollouts[name] = Rollout(self._adapter(), call["seed"])
            if do == "close":
                del self._rollouts[name]
            method, waits = rollout.method(do)
            arguments = {key: call[key] for key in ARGUMENTS[do]}
            if waits:
                result = method(**arguments)
            elif self._own_thread or do == "run":
                rollout.thread = self._threads.submit(method, **arguments)
                result = asyncio.wrap_future(rollout.thread)
            else:
                self._show_generators(rollout, call)
                value = method(**arguments)
                self.answer({"n": number, "value": self._checked(do, rollout, value)})
                if do == "close":
                    self._seen = None
                    leave_generator()
                return
        except BaseException as error:  # noqa: BLE001 - also SystemExit: a rollout does not end its worker
            self._fail(number, do, error)
            return
        self._begin(self._await(do, number, name, rollout, result))

    def _show_generators(self, rollout: Rollout, call: dict[str, Any]) -> None:
        if self._seen is rollout:
            drop_second_normal()
            return
        if self._seen is not None:
            self._seen.keep()
        if call["do"] in BEGINNINGS:
            rollout.begin()
        else:
            rollout.restore()
        self._seen = rollout

    async def _await(self, do: str, number: int, name: str, rollout: Rollout, result: Any) -> None:
        limit_s = None if do == "run" else self._limit_s
        rollout.task = task = asyncio.ensure_future(_contained(do, result))
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        try:
            if not done:
                task.cancel()
                raise Invalid(f"{do} took longer than its limit of {limit_s:g} s")
            self.answer({"n": number, "value": self._checked(do, rollout, task.result())})
            if do == "run":
                self._rollouts.pop(name, None)
        except BaseException as error:  # noqa: BLE001 - of the environment
            self._fail(number, do, error)

    async def _cancel(self, number: int, name: str) -> None:
        """Cancel a rollout's call and close its world; answer whether all of it has ended."""
        rollout = self._rollouts.pop(name, None)
        ended = True
        if rollout is not None:
            if (task := rollout.task) is not None and not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_S)
                ended = task.done()
            if (thread := rollout.thread) is not None and not thread.done():
                await asyncio.wait({asyncio.wrap_future(thread)}, timeout=CANCEL_S)
                ended = ended and thread.done()
            if ended and rollout.opened:
                try:
                    closed = rollout.world.close()
                    if inspect.isawaitable(closed):
                        await asyncio.wait_for(_contained("close", closed), CANCEL_S)
                except BaseException:  # noqa: BLE001 - as above
                    traceback.print_exc()
        self.answer({"n": number, "value": ended})

    def _checked(self, do: str, rollout: Rollout, value: Any) -> dict[str, Any]:
        if do == "run":
            return checked_outcome(value)
        if do == "close" and value is None:
            return {}
        checked = checked_step(do, value)
        rollout.opened = True
        return checked

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if not isinstance(self._transport, asyncio.BaseTransport):
            asyncio.run(coroutine)
            return
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail(self, number: int, do: str, error: BaseException) -> None:
        self.answer({"n": number, "error": words_of(do, error)})


def framed(answer: dict[str, Any]) -> bytes:
    """Return an answer's frame; halves of surrogate pairs, which no encoding has, become question marks."""
    packed = JSON.encode(answer).encode("utf-8", "replace")
    if len(packed) > FRAME_LIMIT_BYTES:
        words = f"an answer of {len(packed):,} bytes; at most {FRAME_LIMIT_BYTES:,} are allowed"
        packed = JSON.encode({"n": answer["n"], "error": words}).encode()
    return LENGTH.pack(len(packed)) + packed


async def _contained(do: str, result: Any) -> Any:
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop
        raise Invalid(f"{do} raised {error!r}") from error


def words_of(do: str, error: BaseException) -> str:
    if isinstance(error, Invalid):
        return str(error)[:NOTE_LIMIT]
    with contextlib.suppress(Exception):  # its text raises, or standard error is closed
        traceback.print_exception(type(error), error, error.__traceback__)
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - as above
        text = f"its text raised {type(second).__name__}"
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if os.path.dirname(frame.filename) not in OURS:  # noqa: PTH120 - in an interpreter without our modules
            place = f" ({frame.filename}:{frame.lineno})"
    return f"{do} raised {type(error).__name__}: {text}"[:NOTE_LIMIT] + place


def seed_anew() -> None:
    """Seed numpy's global generator in a fork; Python's own is seeded by its module."""
    if (numpy := _numpy_random()) is not None:
        numpy.seed()


def leave_generator() -> None:
    """Leave numpy's global generator to a further rollout."""
    numpy = _numpy_random()
    if hasattr(numpy, "get_bit_generator"):
        _spare_generators.append(numpy.get_bit_generator())


def drop_second_normal() -> None:
    """Drop the number that numpy's older functions keep for the next call, as the exchange of generators does."""
    numpy = _numpy_random()
    if hasattr(numpy, "set_bit_generator"):
        numpy.set_bit_generator(numpy.get_bit_generator())


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def slots_of(adapter: Any) -> int:
    return max(1, int(getattr(adapter, "slots", 64)))


def limit_of(adapter: Any) -> float:
    limit_s = float(getattr(adapter, "limit_s", 60.0))
    if not 0 < limit_s < math.inf:
        raise Invalid(f"limit_s is {limit_s}; a number of seconds is allowed")
    return limit_s


class Blocking:
    """Stands for a transport where calls are played one after the other: an event loop would double a step's time."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(True)
        self._channel = channel

    def write(self, data: bytes) -> None:
        self._channel.sendall(data)

    def serve(self, worker: Worker) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        while count := self._channel.recv_into(buffer):
            worker.data_received(buffer[:count])


def serve(channel: socket.socket, adapter: Any, *, one_at_a_time: bool) -> None:
    """Answer calls until the pool closes the channel."""
    os.register_at_fork(after_in_child=channel.close)
    if one_at_a_time:
        worker, blocking = Worker(adapter), Blocking(channel)
        worker.connection_made(blocking)
        blocking.serve(worker)
    else:
        asyncio.run(_serve(channel, adapter))


async def _serve(channel: socket.socket, adapter: Any) -> None:
    ended = asyncio.Event()
    channel.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: Worker(adapter, ended), sock=channel)
    await ended.wait()
