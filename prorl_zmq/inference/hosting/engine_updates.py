"""The weight update in progress on one engine: its begin, its end, and its time limit.

An update stops the engine, and is then ended, cancelled, replaced by a load that the engine does itself, or abandoned
after its limit (the trainer died). There is one update at a time; calls that change weights run in order.
`Engine.begin_update` specifies what an engine does.

A `fetch` before a load gets the weights to this machine while the engine generates. A load without it does it itself.
There are two ways. Full versions are read where the trainer wrote them, ahead into the machine's page cache. Deltas,
and with `copies_all` all versions, are put into a copy that all engines of the model on this host share (see
`LocalCopy`). Versions of a trainer that shares no disk come to the copy by the relay (see `WeightsRelay`). A draft
model's weights are read from the version's own folder.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, cast

from ...errors import EngineFailed, InvalidWeights, RequestTimeout, UpdateInProgress, UpdateNotBegun
from ...system.threads import run_aside
from ...wire.messages.engines import UpdateTimes
from ..checkpoint import (
    DRAFT,
    INDEX,
    check_wanted,
    delta_of,
    draft_of,
    index_metadata,
    lost_index,
    read_ahead,
    read_in_time,
)
from ..weights.version_chain import Content
from .frames import decoded_info
from .host_relay import local_copy

if TYPE_CHECKING:
    from ...wire.messages.engines import UpdateMode, WeightUpdate
    from ...wire.messages.relay import CopyState, WeightRelay
    from ..engine import DraftEngine, Engine, TransferEngine
    from ..relay.weights_relay import WeightsRelay
    from ..weights.local_copy import LocalCopy

FETCH_S = 600.0
"""Longest copying of weights by a load, in seconds: of those that were not fetched before."""
ANSWER_SHARE = 0.8
"""Of the time for a fetch, after which a host answers."""
ASKED_NAMED = 4
"""Most sources of a relay that an error names."""
AGAIN_S = 10.0
"""Seconds between two tries to resume an engine whose trainer died."""

log = logging.getLogger("prorl.engine")


@dataclass(slots=True, eq=False)
class _Begun:
    weight_version: int
    stopping: asyncio.Task[None]
    """Done when no generation runs any more."""
    limit: asyncio.TimerHandle
    call_id: str = ""
    call: asyncio.Task[None] | None = None
    """The last call of a transfer, and the id of its request, which may come twice."""
    received: bool = False
    """Whether a whole transfer came, and no part of another one since."""


class EngineUpdates:
    """Changes the weights of one engine; made and used on its loop.

    Args:
        engine: whose weights change.
        copy: the folder of the copy, which the engine sees at the same path; None: it takes no deltas.
        copies_all: full versions are copied too. A file, such as the embedded engine's, never is.
        relay: fetches versions that this host does not see; None: there are none.
    """

    def __init__(
        self, engine: Engine, copy: Path | None = None, *, copies_all: bool = False, relay: WeightsRelay | None = None
    ) -> None:
        self._engine = engine
        self._copy_folder = copy if copies_all or engine.description.reads_here else None
        self._copies_all = copies_all
        self._relay = relay
        self._draft_ignored = False
        """Whether the log says so."""
        self._begun: _Begun | None = None
        self._wanted: Content | None = None
        """The weights that are fetched, or were fetched last."""
        self._unwanted = Event()
        """Set once they are not wanted any more."""
        self._one_change = asyncio.Lock()
        self._giving_up: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> bool:
        """Whether an update is begun, or a call changes the weights."""
        return self._begun is not None or self._one_change.locked()

    @property
    def copy_state(self) -> CopyState | None:
        """The copy of the model's weights, for the heartbeats."""
        return self._relay.state if self._relay is not None else None

    def check_none(self) -> None:
        """Raise `EngineFailed` while an update is begun, or a call changes the weights."""
        if self.under_way:
            raise EngineFailed("the engine gets new weights now: load adapters afterwards", refused=True)

    async def update(self, request: WeightUpdate) -> UpdateTimes | None:
        """Do one step of an update; return what a fetch or a load cost. Raises as its method does."""
        version = request.weight_version
        match request.step:
            case "fetch":
                content = Content(version, request.digest)
                return await self.fetch(Path(request.path), content, request.timeout_s, request.relay)
            case "load":
                content = Content(version, request.digest)
                return await self.load(Path(request.path), content, request.mode, request.relay)
            case "begin":
                await self.begin(version, request.mode, request.limit_s)
            case "transfer":
                await self.transfer(request)
            case "end":
                await self.end(version, transferred=request.transferred)
            case "cancel":
                await self.cancel(version)
            case "set":
                await self.set_version(version)
        return None

    async def begin(self, weight_version: int, mode: UpdateMode, limit_s: float) -> None:
        """Stop generating, as `mode` says; return when no generation runs. A repeated begin restarts the limit.

        Raises:
            UpdateInProgress: an update to another version was begun.
            EngineFailed: the engine could not stop, and continues; or the update was abandoned meanwhile.
        """
        self._check_none_but(weight_version)
        loop = asyncio.get_running_loop()
        if self._begun is None:
            if self._wanted is not None and self._wanted.version != weight_version:
                self._want(None)
            stopping = loop.create_task(self._stop(mode), name=f"begin update {weight_version}")
            stopping.add_done_callback(lambda task: task.cancelled() or task.exception())  # who waits for it, has it
            self._begun = _Begun(weight_version, stopping, loop.call_later(limit_s, self._limit_passed, limit_s))
        else:
            self._begun.limit.cancel()
            self._begun.limit = loop.call_later(limit_s, self._limit_passed, limit_s)
        begun = self._begun
        await asyncio.wait([begun.stopping])
        if begun.stopping.cancelled():
            raise EngineFailed(f"the update to weights {weight_version} was taken back before generating had stopped")
        if begun.stopping.exception() is not None:
            self._forget(begun)
            begun.stopping.result()

    async def transfer(self, request: WeightUpdate) -> None:
        """Do one call of vLLM's weight transfer; one that is asked for again, with the same id, is done once.

        Raises:
            UpdateInProgress: an update to another version was begun.
            UpdateNotBegun: no update was begun.
            EngineFailed: the engine has no weight transfer, or the call failed.
        """
        self._check_none_but(request.weight_version)
        begun = self._begun
        if begun is None:
            message = f"no update to weights {request.weight_version} was begun here, or it was given up"
            raise UpdateNotBegun(message, weight_version=request.weight_version)
        if begun.call is None or begun.call_id != request.request_id:
            begun.call_id = request.request_id
            begun.call = asyncio.create_task(self._transfer(begun, request), name=f"transfer: {request.call}")
            begun.call.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(begun.call)

    async def _transfer(self, begun: _Begun, request: WeightUpdate) -> None:
        engine = cast("TransferEngine", self._engine)
        if not engine.description.transfer or request.call is None:
            raise EngineFailed("the engine was started without a weight transfer", refused=True)
        await asyncio.wait([begun.stopping])
        async with self._one_change:
            if self._begun is not begun:
                raise UpdateNotBegun("the update was given up", weight_version=request.weight_version)
            info = decoded_info(request)
            if request.call == "update":
                begun.received = False
            await engine.transfer(request.call, info, request.timeout_s)
            if request.call == "finish":
                begun.received = True

    async def end(self, weight_version: int, *, transferred: bool = False) -> None:
        """Resume with these weights. A repeated end does nothing.

        Args:
            weight_version: as in `begin`.
            transferred: without a whole transfer since `begin`, the engine resumes with the weights that it had.

        Raises:
            UpdateInProgress: an update to another version was begun.
            UpdateNotBegun: no update was begun, and the engine serves another version.
            EngineFailed: the engine could not resume, and the end may be repeated; or no whole transfer came.
        """
        self._check_none_but(weight_version)
        begun = self._begun
        if begun is not None:
            await asyncio.wait([begun.stopping])
        async with self._one_change:
            if begun is not None and self._begun is begun:
                if transferred and not begun.received:
                    await self._engine.end_update(None)
                    self._forget(begun)
                    raise EngineFailed(
                        f"weights {weight_version} did not come; it continues with {self._engine.weight_version}"
                    )
                await self._engine.end_update(weight_version)
                self._forget(begun)
            elif self._engine.weight_version != weight_version:
                raise UpdateNotBegun(
                    f"no update to weights {weight_version} was begun here, or it was given up; the engine serves "
                    f"{self._engine.weight_version}",
                    weight_version=weight_version,
                )

    async def cancel(self, weight_version: int) -> None:
        """Resume with the weights that the engine has, if an update to this version was begun; end its fetch.

        Raises:
            UpdateInProgress: an update to another version was begun.
            EngineFailed: the engine could not resume; the call may be repeated.
        """
        self._check_none_but(weight_version)
        if self._wanted is not None and self._wanted.version == weight_version:
            self._want(None)
        if self._begun is not None:
            await self._take_back(self._begun)

    async def fetch(self, path: Path, wanted: Content, limit_s: float, relay: WeightRelay | None = None) -> UpdateTimes:
        """Fetch weights to this machine, while the engine generates. Without a copy, a load reads the rest.

        Args:
            path: of the weights.
            wanted: their version, and what identifies their content if that is known.
            limit_s: when the broker stops waiting; the answer comes before.
            relay: where the weights are fetched if this host does not see them; None: nowhere.

        Raises:
            InvalidWeights: they have other content, or cannot be copied.
            EngineFailed: the copy cannot be written.
            RequestTimeout: the folder or its copy took too long, the version was cancelled, or others were asked for; a
                later load continues.
        """
        ended = self._want(wanted)
        limit_s *= ANSWER_SHARE
        began = time.monotonic()
        until = began + limit_s
        draft = await self._draft_of(path, until)
        path, read_bytes = await self._bring(path, wanted, relay, until, ended)
        left_s = until - time.monotonic()
        copy = await read_in_time(left_s, self._copy_for, path, wanted, relay, late=RequestTimeout)
        if copy is not None:
            left_s = until - time.monotonic()
            fetched = await read_in_time(left_s, copy.fetch, path, wanted, until, ended, late=RequestTimeout)
            read_bytes += fetched.read_bytes
            await run_aside(self._note_copy, copy)
        elif self._engine.description.reads_here:
            with suppress(InvalidWeights):
                read_bytes = await read_in_time(until - time.monotonic(), read_ahead, path, until, ended)
        if draft is not None:
            with suppress(InvalidWeights):
                read_bytes += await read_in_time(until - time.monotonic(), read_ahead, draft, until, ended)
        return UpdateTimes(time.monotonic() - began, read_bytes=read_bytes)

    async def load(
        self, path: Path, wanted: Content, mode: UpdateMode, relay: WeightRelay | None = None
    ) -> UpdateTimes:
        """Have the engine load weights itself: a whole update, or the rest of one that was begun for this version.

        Raises:
            UpdateInProgress: an update to another version was begun.
            InvalidWeights: they cannot be used; the engine continues with its current ones.
            EngineFailed: the engine does not support new weights, or failed during the update.
            RequestTimeout: the weights could not be copied within `FETCH_S`, were cancelled meanwhile, or others were
                asked for; the engine continues as before.
        """
        weight_version = wanted.version
        self._check_none_but(weight_version)
        ended = self._want(wanted)
        begun = self._begun
        if begun is not None:
            begun.limit.cancel()  # a load has its own limits
            await asyncio.wait([begun.stopping])
        async with self._one_change:
            fetching = time.monotonic()
            until = fetching + FETCH_S
            reached = False
            try:
                draft = await self._draft_of(path, until)
                path, _ = await self._bring(path, wanted, relay, until, ended)
                left_s = until - time.monotonic()
                copy = await read_in_time(left_s, self._copy_for, path, wanted, relay, late=RequestTimeout)
                with ExitStack() as held:
                    if copy is not None:
                        left_s = until - time.monotonic()
                        hold = await read_in_time(left_s, copy.hold, path, wanted, until, ended, late=RequestTimeout)
                        held.enter_context(hold)
                        path = copy.folder
                        await run_aside(self._note_copy, copy)
                        log.info("the engine loads weights %d from this host's copy in %s", weight_version, path)
                    check_wanted(ended)
                    loading, reached = time.monotonic(), True
                    if draft is not None:
                        engine = cast("DraftEngine", self._engine)
                        pause_s = await engine.update_weights(path, weight_version, mode, draft)
                    else:
                        pause_s = await self._engine.update_weights(path, weight_version, mode)
                load_s = time.monotonic() - loading
                return UpdateTimes(loading - fetching, load_s, load_s if pause_s is None else pause_s)
            finally:
                if begun is not None:
                    try:
                        if not reached:
                            await self._engine.end_update(None)
                        self._forget(begun)
                    except EngineFailed as error:
                        self._resume_later(begun, AGAIN_S, error)

    async def set_version(self, weight_version: int) -> None:
        """Set the version of the engine's weights, from the next token on.

        Raises:
            UpdateInProgress: an update was begun.
            EngineFailed: the engine is gone.
        """
        self._check_none_but(None)
        self._want(None)
        async with self._one_change:
            await self._engine.set_weight_version(weight_version)

    async def close(self) -> None:
        """Forget a begun update; the engine is closed already. May be called again."""
        begun = self._begun
        if begun is not None:
            self._forget(begun)
            begun.stopping.cancel()
            await asyncio.wait([begun.stopping])
        for task in tuple(self._giving_up):
            task.cancel()
        if self._relay is not None:
            await run_aside(self._relay.close)

    def _want(self, wanted: Content | None) -> Event:
        """End the fetches of all other weights; return what ends those of these.

        A version whose trainer died may never come, and would hold up all others.
        """
        if self._wanted != wanted:
            self._unwanted.set()
            self._wanted, self._unwanted = wanted, Event()
        return self._unwanted

    async def _bring(
        self, path: Path, wanted: Content, relay: WeightRelay | None, until: float, ended: Event
    ) -> tuple[Path, int]:
        """Bring the copy to a version of a trainer that shares no disk; return its folder here, and the bytes read."""
        if relay is None:
            return path, 0
        if self._relay is None or self._copy_folder is None:
            raise InvalidWeights(
                f"{path.name} comes from a trainer that shares no disk with this host, which has no copy of weights: "
                "give its backend a `weights_dir`, or install the extra [server] there",
                path=str(path),
            )
        left_s = until - time.monotonic()
        try:
            return await read_in_time(left_s, self._relay.bring, path, wanted, relay, until, ended, late=RequestTimeout)
        except RequestTimeout as error:
            asked = ", ".join(f"{one.name} at {one.endpoint}" for one in relay.sources[-ASKED_NAMED:])
            message = (
                f"weights {wanted.version} did not come in time ({error.message}); this host asked {asked}. If it does "
                "not reach the trainer there, give the `relay` of `WeightsPublisher` an address that it reaches"
            )
            raise RequestTimeout(message, path=str(path)) from error

    async def _draft_of(self, path: Path, until: float) -> Path | None:
        """Return the weights of the engine's draft model in a version's folder; None: it is to load none."""
        if not self._engine.description.drafts:
            return None
        return await read_in_time(until - time.monotonic(), draft_of, path, late=RequestTimeout)

    def _note_draft(self, path: Path) -> None:
        """Log once that the engine has no use for a version's draft weights."""
        if not self._draft_ignored and not self._engine.description.drafts and draft_of(path) is not None:
            self._draft_ignored = True
            log.warning("the engine ignores %s/ in %s: it has no draft model that takes weights", DRAFT, path)

    def _copy_for(self, path: Path, wanted: Content, relay: WeightRelay | None) -> LocalCopy | None:
        """Return the copy through which the engine gets a version; None: it reads it where it is."""
        if wanted.weights and self._copy_folder is not None and self._copy_folder.is_dir():
            copy = self._open_copy(self._copy_folder)
            if copy.had == wanted:
                return copy  # the trainer's folder may be gone
        if wanted.weights and index_metadata(path).get("weights", wanted.weights) != wanted.weights:
            raise InvalidWeights(
                f"{path.name} has other weights than the trainer published as version {wanted.version}: another "
                "publisher wrote them, or the number was used again",
                path=str(path),
            )
        self._note_draft(path)
        if lost_index(path):
            raise InvalidWeights(
                f"{path.name} is a delta without its index {INDEX}: it is not complete", path=str(path)
            )
        delta = delta_of(path)
        if path.is_file() or (delta is None and not self._copies_all and relay is None):
            return None
        if self._copy_folder is None:
            if delta != path:
                return None
            raise InvalidWeights(
                f"{path.name} is a delta, and this engine reads weights where the trainer wrote them; give its backend "
                "a `weights_dir`, which the engine and its host see at the same path",
                path=str(path),
            )
        return self._open_copy(self._copy_folder)

    def _note_copy(self, copy: LocalCopy) -> None:
        """Have the heartbeats report what the copy has, if they report something else."""
        if self._relay is not None:
            had, state = copy.had, self._relay.state
            if had is None or (had.version, had.weights) != (state.version, state.weights):
                self._relay.note_copy()

    def _open_copy(self, folder: Path) -> LocalCopy:
        try:
            return local_copy(folder, self._engine.description)
        except ImportError as error:
            raise EngineFailed(str(error)) from error

    async def _stop(self, mode: UpdateMode) -> None:
        async with self._one_change:
            await self._engine.begin_update(mode)

    async def _take_back(self, begun: _Begun) -> None:
        begun.stopping.cancel()  # it may still be draining
        await asyncio.wait([begun.stopping])
        async with self._one_change:
            if self._begun is begun:
                await self._engine.end_update(None)
                self._forget(begun)

    def _limit_passed(self, limit_s: float) -> None:
        task = asyncio.get_running_loop().create_task(self._give_up(limit_s), name="give up an update")
        self._giving_up.add(task)
        task.add_done_callback(self._giving_up.discard)

    async def _give_up(self, limit_s: float) -> None:
        begun = self._begun
        if begun is None:
            return
        log.warning(
            "the update to weights %d did not end within %g s (is the trainer alive?); going on with weights %d",
            begun.weight_version,
            limit_s,
            self._engine.weight_version,
        )
        try:
            await self._take_back(begun)
        except EngineFailed as error:
            self._resume_later(begun, limit_s, error)

    def _resume_later(self, begun: _Begun, limit_s: float, error: EngineFailed) -> None:
        log.warning("the engine could not resume, and is asked again: %s", error.message)
        if self._begun is begun:
            begun.limit = asyncio.get_running_loop().call_later(AGAIN_S, self._limit_passed, limit_s)

    def _forget(self, begun: _Begun) -> None:
        begun.limit.cancel()
        if self._begun is begun:
            self._begun = None

    def _check_none_but(self, weight_version: int | None) -> None:
        begun = self._begun
        if begun is not None and begun.weight_version != weight_version:
            raise UpdateInProgress(
                f"an update to weights {begun.weight_version} was begun and has not ended; end or cancel it first",
                weight_version=begun.weight_version,
            )
