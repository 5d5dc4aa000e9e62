"""`LocalCopy`: a host's copy of a model's weights, a plain checkpoint that is updated in place.

All engines of one model on a host share the folder: who changes it holds its lock (`flock`), who reads it shares the
lock. `.weight_sync/state.json` has the version, where slime has it, and the version that is being written:

    at rest           `version`; every tensor is that of the version
    `writing` above   each tensor is that of `version` or of `writing`; one in which the process died is neither
    no `version`      any tensor may be of any version

A delta is applied tensor by tensor: one that has the new checksum already is skipped, any other is changed and must
have it then. So a death between two tensors costs nothing. A tensor that is neither is found by its checksum, and the
copy begins again with the newest full version, and reads only the tensors that differ. So does a copy that was
written before the machine was booted: its bytes may not have reached the disk. A delta's files are read and checked
before the first byte is changed. No engine runs on the copy: engines load it during an update.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from ...errors import EngineFailed, InvalidWeights, RequestTimeout
from ...system.node_name import boot_id
from ..checkpoint import DELTA, INDEX, check_checkpoint, check_wanted, some_names
from .copy_failure import copy_failure
from .copy_folder import SYNC, opened_lock
from .stored_tensor import StoredTensor
from .tensor_delta import frame_limit
from .version_chain import Content, Version, find_route
from .version_folder import header_bytes, published, read_version, version_path, write_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from threading import Event

    from .version_folder import Place, VersionFolder

THREADS = min(16, os.cpu_count() or 1)
LOCK_POLL_S = 0.05
"""Seconds between two tries to lock the copy."""

_Result = TypeVar("_Result")

log = logging.getLogger("prorl.engine")


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a copy's `state.json` says."""

    version: str | None = None
    """Six digits or more."""
    weights: str = ""
    """Identifies the version's content; empty: not known."""
    writing: str | None = None
    """The version whose delta is being applied."""
    writing_weights: str = ""
    boot: str = ""
    """The boot of the machine in which this was written."""

    @property
    def had(self) -> Content | None:
        """The version that the copy has, or from which it is being updated."""
        return None if self.version is None else Content(int(self.version), self.weights)


class Fetched(NamedTuple):
    """What a `fetch` did."""

    version: int
    weights: str
    read_bytes: int
    """From the trainer's folder."""
    tensors: int
    """That were changed."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Source:
    """The wanted version's folder, and those of the versions before it next to it."""

    path: Path
    version: int
    like: Path | None

    def folder(self, version: int) -> Path:
        """Return a version's folder. Version 0 of a trainer that publishes deltas alone is the engines' model."""
        if version == self.version:
            return self.path
        path = version_path(self.path.parent, version)
        return path if version or path.exists() or self.like is None else self.like

    def published(self, version: int) -> Version:
        """Return what is published of a version.

        A delta of slime is for whatever has its base's number now. Later versions than the wanted one may be of before
        that, so their bases are not known.
        """
        found = published(self.folder(version), version)
        if found.base is None or found.base_weights:
            return found
        if version > self.version:
            return found._replace(base=None)
        return found._replace(base_weights=self._weights(found.base))

    def delta(self, version: int) -> VersionFolder:
        path = self.folder(version)
        delta = read_version(path / DELTA if (path / DELTA).is_dir() else path)
        if delta.base_version is None or delta.base_weights:
            return delta
        return replace(delta, base_weights=self._weights(delta.base_version))

    def _weights(self, version: int) -> str:
        return read_version(self.folder(version)).weights


class _Torn(Exception):
    """A tensor of the copy is of no version that we know."""


@dataclass(slots=True)
class _Run:
    """What one `fetch` counts, and when it must end."""

    threads: int
    until: float
    ended: Event | None
    read_bytes: int = 0
    tensors: int = 0

    def check(self) -> None:
        check_wanted(self.ended)
        if time.monotonic() > self.until:
            raise RequestTimeout("the weights were not fetched in time")

    def change(self, work: Callable[[str], int | None], names: Iterable[str]) -> None:
        """Do the work for each tensor; it returns the bytes read, or None if there was nothing to do."""
        read = [size for size in self.each(work, names).values() if size is not None]
        self.tensors += len(read)
        self.read_bytes += sum(read)

    def each(self, work: Callable[[str], _Result], names: Iterable[str]) -> dict[str, _Result]:
        """Do the work for each name, in threads; raise the first failure, after which none is begun.

        The threads are daemons: an executor's would delay the process's exit while a folder on a network hangs.
        """
        left, done, failures = deque(names), dict[str, _Result](), list[BaseException]()

        def loop() -> None:
            while left and not failures:
                with suppress(IndexError):  # another thread has taken the last one
                    name = left.popleft()
                    try:
                        self.check()
                        done[name] = work(name)
                    except BaseException as error:  # noqa: BLE001 - raised below
                        failures.append(error)

        threads = [Thread(target=loop, name="weights", daemon=True) for _ in range(min(self.threads, len(left)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return done


class LocalCopy:
    """One model's copy on this host.

    Args:
        folder: of the copy alone, on a disk of this host or in memory (/dev/shm); it is made if it is missing. The file
            system needs room for one version.
        like: the folder of the model that the engines started with: each version must have its tensors. None: it is
            not on this host.
        threads: that change tensors.
    """

    def __init__(self, folder: Path, like: Path | None, threads: int = THREADS) -> None:
        self.folder = folder
        self._like = like
        self._threads = threads

    @property
    def had(self) -> Content | None:
        """What the copy has; None: no whole version."""
        state = self._state()
        return state.had if state.writing is None else None

    def fetch(self, path: Path, wanted: Content, until: float = inf, ended: Event | None = None) -> Fetched:
        """Bring the copy to a version. Engines may generate meanwhile; who reads the copy is waited for.

        Args:
            path: the version's folder; those of the versions before it are next to it.
            wanted: the version, and what identifies its content if that is known.
            until: the end of the time allowed, by `time.monotonic`.
            ended: set once the version is not wanted any more.

        Raises:
            InvalidWeights: the version or one on the way to it is missing, damaged, of other tensors, or of other
                content than `wanted`; the message names it. The copy may be of no version then, but the next `fetch`
                continues it.
            EngineFailed: a file cannot be read or written; `final` if that will last: for instance, the disk is full.
            RequestTimeout: it took too long, or was ended; the next `fetch` continues.
        """
        began = time.perf_counter()
        source = _Source(path, wanted.version, self._like)
        try:
            with self._locked(fcntl.LOCK_EX, until, ended):
                run = _Run(self._threads, until, ended)
                run.check()
                if wanted.weights and self.had == wanted:
                    return Fetched(*wanted, 0, 0, time.perf_counter() - began)  # the folder may be gone
                had = self._state().had
                try:
                    self._fetch(source, wanted, run, had)
                except (_Torn, InvalidWeights) as problem:
                    if isinstance(problem, InvalidWeights) and (had is None or not (path / DELTA).is_dir()):
                        raise
                    log.warning("%s: %s; beginning again with a full version", self.folder, problem)
                    self._fetch(source, wanted, run, None)
                weights = self._state().weights
        except _Torn as torn:
            raise InvalidWeights(f"{path.parent}: {torn}", path=str(path)) from None
        except OSError as error:
            raise copy_failure(self.folder, error) from error
        return Fetched(wanted.version, weights, run.read_bytes, run.tensors, time.perf_counter() - began)

    @contextmanager
    def reading(self, wanted: Content, until: float = inf) -> Iterator[Path]:
        """Keep the copy unchanged while an engine loads it: the folder.

        Raises:
            InvalidWeights: it does not have this version, or has other content under its number.
            RequestTimeout: another process changed it until then.
        """
        with self._locked(fcntl.LOCK_SH, until):
            had = self.had
            if had is None or not had.may_be(wanted):
                what = "no whole version" if had is None else f"version {had.version}"
                if had is not None and had.version == wanted.version:
                    what = "other weights of this number"
                raise InvalidWeights(f"{self.folder} has {what}, not {wanted.version}", path=str(self.folder))
            yield self.folder

    def hold(self, path: Path, wanted: Content, until: float = inf, ended: Event | None = None) -> ExitStack:
        """Bring the copy to a version, and keep it unchanged until the returned context is closed.

        Raises:
            ProrlError: as `fetch`.
        """
        while True:
            fetched = self.fetch(path, wanted, until, ended)
            with ExitStack() as stack:
                try:
                    stack.enter_context(self.reading(Content(wanted.version, fetched.weights), until))
                except InvalidWeights:
                    continue  # another process has changed it meanwhile
                if time.monotonic() > until:
                    raise RequestTimeout("the weights were not fetched in time")
                return stack.pop_all()

    # Ways -------------------------------------------------------------------------------------------------------------

    def _fetch(self, source: _Source, wanted: Content, run: _Run, had: Content | None) -> None:
        target = read_version(source.path)
        if target.version not in (None, wanted.version):
            raise target.invalid(f"is version {target.version}; it was given as version {wanted.version}")
        if wanted.weights and target.weights and wanted.weights != target.weights:
            raise target.invalid("has other weights than the trainer published as this version")
        wanted = Content(wanted.version, wanted.weights or target.weights)
        problem = ""

        def look(version: int) -> Version | None:
            nonlocal problem
            try:
                return source.published(version)
            except InvalidWeights as error:
                problem = problem or error.message
            return None

        route = find_route(look, had, wanted)
        state = self._state()
        if state.writing is not None and had is not None:
            starts = route is not None and route.anchor is None and route.deltas[:1] == (int(state.writing),)
            if not starts or source.delta(int(state.writing)).weights != state.writing_weights:
                route = find_route(look, None, wanted)  # the delta that was being applied is not on the way
        if route is None:
            has = "has no version" if had is None else f"has version {had.version}"
            raise target.invalid(
                f"cannot be reached, since {problem or 'no full version is before it'}; the copy {has}"
            )
        if route.anchor is not None:
            self._take_full(read_version(source.folder(route.anchor)), route.anchor, run)
        for version in route.deltas:
            if route.back:
                self._undo(source.delta(version), run)
            else:
                self._apply(source.delta(version), run)

    def _take_full(self, full: VersionFolder, version: int, run: _Run) -> None:
        if self._like is not None:
            check_checkpoint(full.path, self._like)
        theirs = full.tensors
        self._note(State())
        is_new = not self._has_tensors(theirs)
        if is_new:
            self._allocate(theirs)
        with _opened(full, os.O_RDONLY) as sources, _opened(self._own(), os.O_RDWR) as ours:

            def take(name: str) -> int | None:
                wanted, form = theirs[name].checksum, full.checksum_format
                if wanted and not is_new and ours[name].checksum(form) == wanted:
                    return None
                try:
                    found = ours[name].copy_from(sources[name], form)
                except ValueError as error:
                    raise full.invalid(f"cannot be read, tensor {name}: {error}") from error
                if wanted and found != wanted:
                    raise full.invalid(f"has other bytes of {name} than its checksum says")
                return theirs[name].length

            run.change(take, _largest_first(theirs))
        if read_version(full.path).weights != full.weights:
            raise full.invalid("changed while it was read")
        self._note(State(f"{version:06d}", full.weights))

    def _apply(self, delta: VersionFolder, run: _Run) -> None:
        state = self._state()
        assert state.had is not None, "a route begins with a version"
        if delta.base_version != state.had.version:
            raise delta.invalid(f"is made for version {delta.base_version}, and the copy has {state.had.version}")
        if delta.base_weights and state.weights and delta.base_weights != state.weights:
            raise delta.invalid(f"is made for other weights of version {delta.base_version} than the copy has")
        again = state.writing is not None
        frames = self._frames(delta, run)
        with _opened(self._own(), os.O_RDWR) as ours:
            self._note(msgspec.structs.replace(state, writing=f"{delta.version:06d}", writing_weights=delta.weights))

            def change(name: str) -> int | None:
                wanted, form, tensor = delta.tensors[name].checksum, delta.checksum_format, ours[name]
                if again and tensor.checksum(form) == wanted:
                    return None
                patch = tensor.apply_xor if delta.encoding == "xor" else tensor.apply_overwrite
                try:
                    found = patch(frames[name], form)
                except ValueError as error:
                    raise _Torn(f"{delta.name}, tensor {name}: {error}") from error
                if found != wanted:
                    raise _Torn(f"with {delta.name}, the tensor {name} does not get the checksum that it should have")
                return len(frames[name])

            run.change(change, _largest_first(delta.tensors))
        self._note(State(f"{delta.version:06d}", delta.weights))

    def _undo(self, delta: VersionFolder, run: _Run) -> None:
        if delta.encoding != "xor":
            raise _Torn(f"{delta.name} cannot be undone, since it is encoded by {delta.encoding}")
        frames = self._frames(delta, run)
        with _opened(self._own(), os.O_RDWR) as ours:
            self._note(State())

            def restore(name: str) -> int:
                if ours[name].checksum(delta.checksum_format) != delta.tensors[name].checksum:
                    raise _Torn(f"the tensor {name} is not that of version {delta.version}")
                try:
                    ours[name].apply_xor(frames[name])
                except ValueError as error:
                    raise _Torn(f"{delta.name}, tensor {name}: {error}") from error
                return len(frames[name])

            run.change(restore, _largest_first(delta.tensors))
        self._note(State(f"{delta.base_version:06d}", delta.base_weights))

    def _frames(self, delta: VersionFolder, run: _Run) -> dict[str, memoryview]:
        """Return the frames of a delta, all of whose files are checked."""
        places, ours = delta.tensors, self._own().tensors
        if unknown := places.keys() - ours.keys():
            raise delta.invalid(f"has tensors that the model lacks: {some_names(unknown)}; is it of this model?")
        for name, place in places.items():  # before a file is read
            if place.length > frame_limit(ours[name].length):
                raise delta.invalid(f"has {place.length} bytes for {name}, a tensor of {ours[name].length} bytes")
        content = run.each(delta.read_file, sorted({*delta.weight_map.values()}))
        frames = {}
        for name, place in places.items():
            frames[name] = content[place.file][place.at : place.at + place.length]
            if len(frames[name]) != place.length:
                raise delta.invalid(f"has {place.file} without the end of {name}")
        return frames

    # Files ------------------------------------------------------------------------------------------------------------

    def _own(self) -> VersionFolder:
        """Return the copy, whose files have all tensors."""
        try:
            own = read_version(self.folder)
            if not own.tensors:
                raise own.invalid("has no tensors")
        except InvalidWeights as error:
            raise _Torn(f"the copy is damaged: {error.message}") from error
        return own

    def _has_tensors(self, theirs: Mapping[str, Place]) -> bool:
        """Return whether the copy's files have room for just these tensors."""
        try:
            ours = self._own().tensors
        except _Torn:
            return False
        return {name: place.kind for name, place in ours.items()} == {
            name: place.kind for name, place in theirs.items()
        }

    def _allocate(self, theirs: Mapping[str, Place]) -> None:
        """Make the copy's files, with the layout of a full version."""
        for path in self.folder.iterdir():
            if path.name != SYNC:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for file in sorted({place.file for place in theirs.values()}):
            entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name, place in theirs.items():
                if place.file == file:
                    offsets = (end, end := end + place.length)
                    entries[name] = {"dtype": place.kind.dtype, "shape": place.kind.shape, "data_offsets": offsets}
            header = header_bytes(entries)
            with (self.folder / file).open("wb") as made:
                made.write(header.data)
                made.flush()
                if end:
                    os.posix_fallocate(made.fileno(), len(header), end)
        index = {"metadata": {}, "weight_map": {name: place.file for name, place in theirs.items()}}
        write_aside(self.folder / INDEX, json.dumps(index).encode())

    @contextmanager
    def _locked(self, how: int, until: float, ended: Event | None = None) -> Iterator[None]:
        sync = self.folder / SYNC
        if not sync.is_dir() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise EngineFailed(f"{self.folder} has files that are no copy of weights; give another `weights_dir`")
        sync.mkdir(parents=True, exist_ok=True)
        with opened_lock(sync / "lock") as lock:
            while not _try_lock(lock, how):
                check_wanted(ended)
                if time.monotonic() > until:
                    raise RequestTimeout(f"another process held the copy in {self.folder} for all of the time")
                time.sleep(LOCK_POLL_S)
            yield

    def _state(self) -> State:
        """Return the state; one that cannot be read, or was written before the last boot, says nothing."""
        with suppress(OSError, msgspec.MsgspecError, ValueError):
            state = msgspec.json.decode((self.folder / SYNC / "state.json").read_bytes(), type=State)
            if state.boot in ("", boot_id()) and all(
                one is None or one.isdecimal() for one in (state.version, state.writing)
            ):
                return state
        return State()

    def _note(self, state: State) -> None:
        content = msgspec.json.encode(msgspec.structs.replace(state, boot=boot_id()))
        write_aside(self.folder / SYNC / "state.json", content)


@contextmanager
def _opened(version: VersionFolder, flags: int) -> Iterator[dict[str, StoredTensor]]:
    """Open the tensors of a full version, or of a copy."""
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for file in {*version.weight_map.values()}:
            files[file] = os.open(version.path / file, flags)
            stack.callback(os.close, files[file])
        yield {name: StoredTensor(files[at.file], at.at, at.length) for name, at in version.tensors.items()}


def _try_lock(lock: int, how: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        return True
    return False


def _largest_first(places: Mapping[str, Place]) -> list[str]:
    return sorted(places, key=lambda name: -places[name].length)
