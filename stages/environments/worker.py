"""A worker: plays rollouts of one environment, in the interpreter of that environment. Standard library only.

    Unix socket, inherited   ⇄ the pool, in a stage process: frames of a length (4 bytes, little-endian) and JSON
    standard output          → the pool, for the words of errors; prints never touch the frames

A call is `{"n", "do", "rollout", …}`, its answer `{"n", "value"}` or `{"n", "error"}`. Calls of different rollouts may
be answered in any order. What an adapter returns is checked here, so that errors name the method and the value. The
worker ends with the socket. `adapter.py` says what an adapter is and which calls run at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import signal
import socket
import struct
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

LENGTH = struct.Struct("<I")
FRAME_LIMIT_BYTES = 64 * 2**20
OBSERVATION_LIMIT = 1_000_000
"""Most characters of what one player sees at a time."""
TOOLS_LIMIT = 1_000_000
"""Most characters of all tools together, as JSON."""
INFO_LIMIT, NOTE_LIMIT, NAME_LIMIT = 64, 4000, 128
"""Most entries of `info` that are kept, and most characters of a text and of a name in it."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")
"""What models can write as a tool's name."""
LARGEST_REWARD = 3.4028234663852886e38
"""As in `data.conversations`, which this interpreter cannot import."""
CANCEL_S = 5.0
"""Seconds in which a cancelled call must end."""
READ_BYTES = 256 * 1024
ROLES = ("system", "user", "assistant")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "open": ("args", "seed"),
    "step": ("player", "text"),
    "call": ("player", "name", "arguments"),
    "close": (),
    "run": ("url", "key", "models", "args", "seed"),
}
"""The arguments of each method, by their names in a call."""
BEGINNINGS = ("open", "run")
_PR_SET_PDEATHSIG = 1
_ME = os.getpid()


class Invalid(Exception):
    """An adapter returned something that its contract excludes."""


class Rollout:
    """One object of the adapter's class, and the states of the global random generators that it sees."""

    def __init__(self, world: Any, seed: int | None) -> None:
        self.world = world
        self.opened = False
        self.task: asyncio.Task[Any] | None = None
        self.thread: Future[Any] | None = None
        """The call that a thread runs; cancelling it does not end the thread."""
        self._seed = seed
        self._random: Any = None
        self._numpy: Any = None

    def begin(self) -> None:
        """Begin with generators that only the seed determines."""
        random.seed(self._seed)
        if (numpy := _numpy_random()) is not None:
            numpy.seed(None if self._seed is None else self._seed % 2**32)

    def keep(self) -> None:
        self._random = random.getstate()
        numpy = _numpy_random()
        self._numpy = numpy.get_state() if numpy is not None else None

    def restore(self) -> None:
        if self._random is None:  # its earlier methods were coroutines
            self.begin()
            return
        random.setstate(self._random)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)


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
        self._limit_s = limit_of(adapter)
        self._own_thread = bool(getattr(adapter, "own_thread", False))
        self._threads = ThreadPoolExecutor(slots_of(adapter), thread_name_prefix="rollout")

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._ended is not None:
            self._ended.set()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            call = json.loads(self._data[LENGTH.size : end])
            del self._data[:end]
            if call["do"] == "ping":
                self.answer({"n": call["n"], "value": None})
            elif call["do"] == "cancel":
                self._begin(self._cancel(call["n"], call["rollout"]))
            else:
                self._play(call["do"], call["n"], call)

    def answer(self, answer: dict[str, Any]) -> None:
        if os.getpid() != _ME:
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
            method = getattr(rollout.world, do)
            arguments = {key: call[key] for key in ARGUMENTS[do]}
            if inspect.iscoroutinefunction(method):
                result = method(**arguments)
            elif self._own_thread or do == "run":
                rollout.thread = self._threads.submit(method, **arguments)
                result = asyncio.wrap_future(rollout.thread)
            else:
                self._show_generators(rollout, call)
                value = method(**arguments)
                self.answer({"n": number, "value": self._checked(do, rollout, value)})
                return
        except BaseException as error:  # noqa: BLE001 - also SystemExit: a rollout does not end its worker
            self._fail(number, do, error)
            return
        self._begin(self._await(do, number, name, rollout, result))

    def _show_generators(self, rollout: Rollout, call: dict[str, Any]) -> None:
        if self._seen is rollout:
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
    packed = json.dumps(answer, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    if len(packed) > FRAME_LIMIT_BYTES:
        words = f"an answer of {len(packed):,} bytes; at most {FRAME_LIMIT_BYTES:,} are allowed"
        packed = json.dumps({"n": answer["n"], "error": words}).encode()
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
        if frame.filename != __file__:
            place = f" ({frame.filename}:{frame.lineno})"
    return f"{do} raised {type(error).__name__}: {text}"[:NOTE_LIMIT] + place


def checked_step(do: str, value: Any) -> dict[str, Any]:
    """Return what a method of a world returned as plain data; raise `Invalid` if the contract excludes it."""
    known = (
        ("observations", "tools") if do == "open" else ("observations", "rewards", "done", "truncated", "info", "mask")
    )
    given = _mapping(do, value, "what it returned")
    if unknown := [key for key in given if key not in known]:
        raise Invalid(f"{do} returned the unknown entry {unknown[0]!r:.100}; known are {', '.join(known)}")
    observations = _mapping(do, given.get("observations") or {}, "observations")
    if do == "open" and not observations:
        raise Invalid("open returned no observations, so no player can act")
    checked: dict[str, Any] = {
        "observations": {_name(do, player): _observation(do, player, seen) for player, seen in observations.items()}
    }
    if do == "open":
        checked["tools"] = _tools(given.get("tools") or ())
        return checked
    if rewards := _mapping(do, given.get("rewards") or {}, "rewards"):
        checked["rewards"] = {
            _name(do, player): _number(do, f"the reward of {player}", one) for player, one in rewards.items()
        }
    for key in ("done", "truncated"):
        checked[key] = bool(given.get(key, False))
    checked["info"] = _info(given.get("info") or {})
    if given.get("mask"):
        checked["mask"] = str(given["mask"])[:NOTE_LIMIT]
    return checked


def checked_outcome(value: Any) -> dict[str, Any]:
    known = ("reward", "rewards", "turn_rewards", "metrics", "error", "mask")
    given = _mapping("run", value, "what it returned")
    if unknown := [key for key in given if key not in known]:
        raise Invalid(f"run returned the unknown entry {unknown[0]!r:.100}; known are {', '.join(known)}")
    checked: dict[str, Any] = {key: str(given[key])[:NOTE_LIMIT] for key in ("error", "mask") if given.get(key)}
    if not checked:
        checked["reward"] = _number("run", "the reward", given.get("reward"))
    rewards = _mapping("run", given.get("rewards") or {}, "rewards")
    checked["rewards"] = {
        _name("run", name): _number("run", f"the reward of {name}", one) for name, one in rewards.items()
    }
    turns = given.get("turn_rewards")
    turns = {} if turns is None else turns
    pairs = turns.items() if hasattr(turns, "items") else enumerate(turns)
    checked["turn_rewards"] = [[int(turn), _number("run", f"the reward of turn {turn}", one)] for turn, one in pairs]
    checked["metrics"] = {
        key: one for key, one in _info(given.get("metrics") or {}).items() if not isinstance(one, str)
    }
    return checked


def _mapping(do: str, value: Any, what: str) -> Any:
    if not hasattr(value, "items"):
        raise Invalid(f"{do} returned {value!r:.100}; {what} must be a dict")
    return value


def _name(do: str, name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
        raise Invalid(f"{do} returned the player {name!r:.100}; a text of 1 to {NAME_LIMIT} characters is allowed")
    return name


def _number(do: str, what: str, value: Any) -> float:
    number = _float(value)
    if not -LARGEST_REWARD <= number <= LARGEST_REWARD:
        raise Invalid(f"{do} returned {value!r:.100} as {what}; a finite number is allowed")
    return number


def _float(value: Any) -> float:
    """Return a number of any type as a float; NaN: it is none, or too large."""
    try:
        return math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except Exception:  # noqa: BLE001 - arrays raise many kinds
        return math.nan


def _observation(do: str, player: str, seen: Any) -> str | list[dict[str, str]]:
    checked: str | list[dict[str, str]]
    if isinstance(seen, str):
        size, checked = len(seen), seen
    elif isinstance(seen, (list, tuple)) and seen:
        checked = [_message(do, player, message) for message in seen]
        size = sum(len(message["content"]) for message in checked)
    else:
        raise Invalid(f"{do} returned {seen!r:.100} as what {player} sees; a text or a list of messages is allowed")
    if size > OBSERVATION_LIMIT:
        raise Invalid(
            f"{do} returned an observation of {size:,} characters for player {player}; "
            f"at most {OBSERVATION_LIMIT:,} are allowed"
        )
    return checked


def _message(do: str, player: str, message: Any) -> dict[str, str]:
    try:
        role, content = message["role"], message["content"]
    except (TypeError, KeyError):
        role = content = None
    if role not in ROLES or not isinstance(content, str):
        raise Invalid(
            f"{do} returned the message {message!r:.100} for {player}; it needs a role of {', '.join(ROLES)}, "
            "and a text as content"
        )
    return {"role": role, "content": content}


def _tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    checked, seen = [], set()
    for tool in tools:
        try:
            name, parameters = tool["name"], tool.get("parameters") or {}
            about, players = tool.get("description") or "", tool.get("players")
            fits = isinstance(name, str) and TOOL_NAME.fullmatch(name) is not None
            fits = fits and isinstance(parameters, dict) and isinstance(about, str)
            fits = fits and (players is None or isinstance(players, list))
        except (TypeError, KeyError, AttributeError):
            fits = False
        if not fits:
            raise Invalid(
                f"open returned the tool {tool!r:.100}; it needs a name of letters, digits and _ . : / -, "
                "a description, and parameters as a JSON schema"
            )
        checked.append({"name": name, "description": about, "parameters": parameters})
        if players is not None:
            checked[-1]["players"] = [_name("open", player) for player in players]
        for player in checked[-1].get("players", ("all players",)):
            if (name, player) in seen:
                raise Invalid(f"open returned two tools named {name} for {player}")
            seen.add((name, player))
    try:
        size = len(json.dumps(checked, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"open returned tools that JSON cannot carry: {error}") from error
    if size > TOOLS_LIMIT:
        raise Invalid(f"open returned tools of {size:,} characters; at most {TOOLS_LIMIT:,} are allowed")
    return checked


def _info(info: Any) -> dict[str, float | str]:
    kept: dict[str, float | str] = {}
    for key, value in list(info.items())[:INFO_LIMIT] if hasattr(info, "items") else ():
        number = _float(value)
        if isinstance(value, str):
            kept[str(key)[:NAME_LIMIT]] = value[:NOTE_LIMIT]
        elif math.isfinite(number):
            kept[str(key)[:NAME_LIMIT]] = number
    return kept


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "random", None)


def slots_of(adapter: Any) -> int:
    return max(1, int(getattr(adapter, "slots", 64)))


def load(place: str) -> Any:
    """Return the adapter's class from `module:Class`, or `/path/file.py:Class`."""
    module, _, name = place.rpartition(":")
    if module.endswith(".py"):
        spec: Any = importlib.util.spec_from_file_location(f"prorl_adapter_{Path(module).stem}", module)
        loaded: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
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


def limit_of(adapter: Any) -> float:
    limit_s = float(getattr(adapter, "limit_s", 60.0))
    if not 0 < limit_s < math.inf:
        raise Invalid(f"limit_s is {limit_s}; a number of seconds is allowed")
    return limit_s


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


class Blocking:
    """Stands for a transport where calls are played one after the other: an event loop would double a step's time."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(True)
        self._channel = channel

    def write(self, data: bytes) -> None:
        self._channel.sendall(data)

    def serve(self, worker: Worker) -> None:
        while data := self._channel.recv(READ_BYTES):
            worker.data_received(data)


async def serve(channel: socket.socket, adapter: Any, first: dict[str, Any]) -> None:
    ended = asyncio.Event()
    channel.setblocking(False)
    _, worker = await asyncio.get_running_loop().create_connection(lambda: Worker(adapter, ended), sock=channel)
    worker.answer(first)
    await ended.wait()


def main() -> None:
    """Serve the pool. The arguments are the socket's descriptor, the pool's process, and the adapter's place."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[2]):
        return
    channel, place = socket.socket(fileno=int(sys.argv[1])), sys.argv[3]
    blocking = Blocking(channel)
    try:
        adapter = load(place)
        is_program = callable(getattr(adapter, "run", None))
        waits = any(inspect.iscoroutinefunction(getattr(adapter, each, None)) for each in ARGUMENTS)
        plain = not (is_program or waits or getattr(adapter, "own_thread", False))
        about = {"slots": slots_of(adapter), "limit_s": limit_of(adapter), "is_program": is_program}
        first = {"n": 0, "value": {**about, "one_at_a_time": plain}}
    except BaseException as error:  # noqa: BLE001 - as above
        blocking.write(framed({"n": 0, "error": words_of("the import", error)}))
        return
    os.register_at_fork(after_in_child=channel.close)
    if plain:
        worker = Worker(adapter)
        worker.connection_made(blocking)
        worker.answer(first)
        blocking.serve(worker)
    else:
        asyncio.run(serve(channel, adapter, first))


if __name__ == "__main__":
    main()
