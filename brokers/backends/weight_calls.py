"""Records of weight requests: a request in progress (`UnderWay`), the calls of it to engine hosts, and its answer."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ...errors import (
    FIELDS_LIMIT,
    ConfigError,
    InvalidWeights,
    MalformedMessage,
    NoBackend,
    ProrlError,
    RequestTimeout,
    UpdateNotBegun,
)
from ...wire.messages.base import POLICY, Done, Refused, new_id
from ...wire.messages.engines import UpdateTimes, WeightsServed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.backends import AnyBackendReply, Backend
    from ...wire.messages.engines import WeightUpdate
    from ...wire.sockets import Frame

AGAIN_S, AGAIN_MOST_S = 5.0, 300.0
"""First and longest wait before a backend is asked again to load weights, in seconds."""
LEAST_SHARE = 0.5
"""Of these waits: each backend has its own share, so that backends which failed together are not asked together."""

log = logging.getLogger("prorl.backend_broker")


FETCH_SHARE = 0.5
"""Of the time for a `load`: hosts that have not fetched the weights by then lag behind the others."""


class Answer(NamedTuple):
    """A reply, and the envelope that routes it to its client."""

    envelope: Sequence[Frame]
    reply: AnyBackendReply


class EngineAddress(NamedTuple):
    """Where an engine host listens, and its CURVE key; empty if it has none."""

    endpoint: str
    curve_key: str


class EngineCall(NamedTuple):
    address: EngineAddress
    request: WeightUpdate


@dataclass(slots=True, eq=False)
class UnderWay:
    """A request in progress."""

    request: WeightUpdate
    envelope: Sequence[Frame] | None
    """None for a backend's catch-up, which has no client."""
    since: float
    until: float
    outcomes: dict[str, ProrlError | None]
    """Per backend, the error or None; None means success unless the answer is missing."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of an adapter's files, by backend, in the order of the answers."""
    missing: dict[str, str] = field(default_factory=dict)
    """Backends whose hosts have not answered, by call id."""
    failure: ProrlError | None = None
    """Why a `begin` is being cancelled."""
    fetching: bool = False
    """Whether hosts fetch the weights that they are to load."""
    times: dict[str, UpdateTimes] = field(default_factory=dict)
    """By backend, what fetching and loading cost."""

    def receivers(self) -> list[str]:
        """Return the backends of a transfer; empty for other steps, which all backends do."""
        return [one.backend_id for one in self.request.receivers]

    def part(self, backend_id: str, keep: tuple[int, ...]) -> WeightUpdate:
        """Return what one host is asked now.

        Args:
            backend_id: of the host.
            keep: the versions of an adapter that it must not unload.
        """
        request = self.request
        step = "cancel" if self.failure is not None else request.step
        receivers = tuple(one for one in request.receivers if one.backend_id == backend_id)
        part = replace(request, request_id=new_id(), step=step, keep=keep, receivers=receivers)
        return replace(part, step="fetch", timeout_s=FETCH_SHARE * part.timeout_s) if self.fetching else part

    def done(self) -> list[str]:
        return [backend_id for backend_id, error in self.outcomes.items() if error is None]

    def note_outcome(self, backend_id: str, error: ProrlError | None) -> None:
        """Record how a backend ended its part."""
        self.outcomes[backend_id] = name_backend(error, backend_id) if error is not None else None
        if error is not None and self.envelope is not None:
            request = self.request
            log.warning(
                "%s of weights %d of %s: %s", request.step, request.weight_version, request.model, error.message
            )

    def is_over(self) -> bool:
        """Return whether no answer is awaited: all are there, or a transfer has failed, which others would wait for."""
        return not self.missing or (
            self.request.step == "transfer" and any(error is not None for error in self.outcomes.values())
        )

    def digest(self) -> str:
        """Return the digest of more than half of the hosts that answered with one; empty: there is none."""
        most = Counter(self.digests.values()).most_common(1)
        return next((digest for digest, count in most if 2 * count > len(self.digests)), "")

    def agreed(self) -> set[str]:
        """Return the backends whose digest is that of more than half of all that were asked."""
        digest = self.digest()
        same = {backend_id for backend_id, found in self.digests.items() if found == digest}
        return same if 2 * len(same) > len(self.outcomes) else set()

    def note_times(self, backend_id: str, times: UpdateTimes | None) -> None:
        """Add what a step cost a backend."""
        if times is not None:
            before = self.times.get(backend_id, UpdateTimes())
            fetch_s, read_bytes = before.fetch_s + times.fetch_s, before.read_bytes + times.read_bytes
            self.times[backend_id] = replace(times, fetch_s=fetch_s, read_bytes=read_bytes)

    def reply(self, error: ProrlError | None) -> AnyBackendReply:
        """Return the reply to the client."""
        request_id = self.request.request_id
        if error is not None:
            return Refused(request_id, error.info())
        return WeightsServed(request_id, self.times) if self.request.step == "load" else Done(request_id)

    def error(self) -> ProrlError | None:
        """Return the first error, preferring any other to `UpdateNotBegun`.

        Of a step that some backends completed, backends that left the list are ignored, except for `begin` and
        `transfer`; so are late ones with `UpdateNotBegun` of an `end`. They are behind, and get no jobs until they
        serve the version.
        """
        ignored: tuple[type[ProrlError], ...] = ()
        if self.done() and self.request.step not in ("begin", "transfer"):
            ignored = (NoBackend, UpdateNotBegun) if self.request.step == "end" else (NoBackend,)
        errors = (error for error in self.outcomes.values() if error is not None and not isinstance(error, ignored))
        return min(errors, key=lambda error: isinstance(error, UpdateNotBegun), default=None)


class CatchUpRetries:
    """When backends that could not load the wanted weights are asked again; each wait is twice as long as the last."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[float, float]] = {}
        """Per backend, the time of the next try, and the wait before it."""

    def failed(self, backend_id: str, now: float) -> float:
        """Plan the next try; return the seconds until then."""
        share = wait_share(backend_id)
        _, last_s = self._waits.get(backend_id, (now, 0.0))
        wait_s = min(2 * last_s or share * AGAIN_S, share * AGAIN_MOST_S)
        self._waits[backend_id] = (now + wait_s, wait_s)
        return wait_s

    def due(self, now: float) -> list[str]:
        """Return the backends whose time has come; a wait begins for the try after."""
        due = [backend_id for backend_id, (at, _) in self._waits.items() if at <= now]
        for backend_id in due:
            wait_s = self._waits[backend_id][1]
            self._waits[backend_id] = (now + wait_s, wait_s)
        return due

    def forget(self, backend_id: str) -> None:
        self._waits.pop(backend_id, None)


def wait_share(backend_id: str) -> float:
    """Return a backend's share of the waits, from `LEAST_SHARE` to 1; always the same."""
    return LEAST_SHARE + (1 - LEAST_SHARE) * zlib.crc32(backend_id.encode()) / 2**32


def catch_up_note(error: ProrlError, model: str, again_s: float) -> str:
    """Return what `prorl backends list` says of a backend that could not load the wanted weights."""
    named = "" if model == POLICY else f" --model-name {model}"
    return (
        f"loading them failed, and the next try is in {again_s:.0f} s: {error.message}. If their folder is damaged, "
        "publish a full version, or load an earlier one: `prorl backends update-weights FOLDER VERSION"
        f"{named} --take-over`"
    )


def check_own(request: WeightUpdate, *, trained: bool, frozen: bool) -> None:
    """Check a request about a model of backends.

    Args:
        request: its model is no adapter.
        trained: whether a backend takes new weights of it.
        frozen: whether backends serve it.
    """
    model = request.model
    if request.base or request.step == "remove":
        advice = "`prorl backends remove ID` removes one" if not request.base else "give the adapter another name"
        raise ConfigError(f"{model} is a model of backends, not an adapter; {advice}", key="model")
    if not trained:
        there_are = f"no backend serves the model {model} now"
        missing = f"all backends of the model {model} are frozen" if frozen else there_are
        raise NoBackend(f"{missing}, so none has taken the weights; see `prorl backends list`", final=frozen)


def as_new_adapter(error: InvalidWeights, model: str) -> InvalidWeights:
    """Return an error with the remark that the model was taken as a new adapter."""
    return InvalidWeights(
        f"{error.message} ({model!r} is not a backend's name, so it was taken as a new adapter.)", **error.fields
    )


def too_late(under_way: UnderWay) -> RequestTimeout:
    """Return the error of a host that did not answer."""
    request = under_way.request
    waits = request.mode == "drain" and request.step in ("begin", "load") and not under_way.fetching
    hint = ": with mode 'drain' it waits for its running generations; mode 'keep' does not" if waits else ""
    return RequestTimeout(f"its engine host did not answer in time{hint}")


def check_form(request: WeightUpdate) -> None:
    if request.step == "fetch":
        raise MalformedMessage("only the backend broker asks for `fetch`", field="$.step")
    if (request.step == "load") != bool(request.path):
        raise MalformedMessage("the step `load`, and no other one, names a `path`", field="$.path")
    if request.relay is not None and (request.step != "load" or not request.digest):
        raise MalformedMessage("a `relay` belongs to a `load` with the digest of the weights", field="$.relay")
    if (request.step == "transfer") != bool(request.call and request.receivers):
        raise MalformedMessage(
            "the step `transfer`, and no other one, has a `call` and its `receivers`", field="$.call"
        )
    if request.backend_id is not None and request.step != "set":
        raise MalformedMessage("only the step `set` may name one backend", field="$.backend_id")


def check_transfer(request: WeightUpdate, begun: int | None, live: Sequence[str]) -> None:
    """Check that a `transfer` is inside of an update, and that its backends live; the error names the first without."""
    if begun != request.weight_version:
        message = f"no update to weights {request.weight_version} was begun, or it was given up"
        raise UpdateNotBegun(message, weight_version=request.weight_version)
    for receiver in request.receivers:
        if receiver.backend_id not in live:
            raise name_backend(NoBackend("it was removed, or its host fell silent"), receiver.backend_id)


def address_of(backend: Backend) -> EngineAddress:
    return EngineAddress(backend.endpoint, backend.curve_key)


def served_version(backend: Backend, model: str) -> int | None:
    """Return the version of a model that a backend serves; None: it has not loaded the adapter."""
    return backend.weight_version if model == backend.name else backend.adapters.get(model, (None,))[-1]


def name_backend(error: ProrlError, backend_id: str) -> ProrlError:
    error.fields = {**dict(list(error.fields.items())[: FIELDS_LIMIT - 1]), "backend": backend_id}
    error.message = f"backend {backend_id}: {error.message}"
    error.args = (error.message,)
    return error
