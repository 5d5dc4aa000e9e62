"""`WeightsRelay`: an engine host's part of the relay: it fetches versions from other processes, and serves them.

A version that the host sees under its path, with the right index, is not fetched. Any other one goes to
`.weight_sync/incoming/weight_vN` in the copy's folder, its index last, and `LocalCopy` reads it there. Before that:

    the version's index                    its SHA-256 came with the version from the backend broker
    indexes of versions before it          the SHA-256 of each is in the index of the version after it
    chunks of the files on the way         their checksums are in the index
    the index of another host's copy       its tensors' checksums make up the digest of the version's content

The copy of another host is read if the way from what this host has begins with an older full version, which would come
from the trainer. One process of a machine fetches at a time; the others then find the version complete.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING

import msgspec
import zmq

from ...errors import EngineFailed, InvalidWeights
from ...system.node_name import boot_id
from ...wire.messages.relay import COPY_FILE, INDEX_FILE, CopyState, WeightSource
from ..checkpoint import INDEX, check_wanted
from ..weights.copy_failure import LASTING, copy_failure
from ..weights.copy_folder import SYNC, opened_lock
from ..weights.local_copy import LOCK_POLL_S
from ..weights.version_chain import Version, find_route
from ..weights.version_folder import (
    CHUNK_BYTES,
    NAME,
    index_digest,
    published,
    version_path,
    write_aside,
)
from .chunk_source import ChunkSource, check_deadline
from .offered_copy import content_of, copy_problem
from .offered_folder import OfferedFolder, offered_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from threading import Event

    from ...security.keyring import Keyring
    from ...wire.messages.relay import WeightRelay
    from ..weights.local_copy import LocalCopy
    from ..weights.version_chain import Content
    from .chunk_plan import Key
    from .chunk_server import ChunkServer


log = logging.getLogger("prorl.relay")


class WeightsRelay:
    """Of one engine host; its methods may be called from any thread.

    Args:
        copy: the copy of the host.
        server: which serves what is fetched; None: nothing is served.
        name: of the host's backend.
        keyring: the keys of this process; None: it has none.
    """

    def __init__(self, copy: LocalCopy, server: ChunkServer | None, name: str, keyring: Keyring | None) -> None:
        self._copy = copy
        self._server = server
        self._keyring = keyring
        self._incoming = copy.folder / SYNC / "incoming"
        self._closed = False
        self._state_lock = Lock()
        self._fetching = Lock()
        source = WeightSource(name, server.endpoint, server.curve_key) if server is not None else None
        place = sha256(f"{boot_id()} {_disk(copy.folder)}".encode()).hexdigest()
        self.state = CopyState(place, str(copy.folder), source)
        """For the heartbeats."""
        self.note_copy()

    def note_copy(self) -> None:
        """Read what the copy has, for the heartbeats."""
        had = self._copy.had
        size_bytes = 0
        with suppress(OSError):
            size_bytes = sum(one.stat().st_size for one in self._copy.folder.rglob("*") if one.is_file())
        version = had.version if had is not None else None
        weights = had.weights if had is not None and not had.weights.startswith("files-") else ""
        with self._state_lock:
            self.state = msgspec.structs.replace(self.state, version=version, weights=weights, size_bytes=size_bytes)
        if self._server is not None:
            self._server.forget_copies()

    def bring(
        self, path: Path, wanted: Content, relay: WeightRelay, until: float, ended: Event | None = None
    ) -> tuple[Path, int]:
        """Bring the host's copy to a version; return a folder with the version, and the bytes that were read for it.

        Args:
            path: where the trainer wrote it.
            wanted: the version.
            relay: its index, and whom to ask.
            until: the end of the time allowed, by `time.monotonic`.
            ended: set once the version is not wanted any more.

        Raises:
            InvalidWeights: no source has it, or all gave wrong bytes; or as `LocalCopy.fetch`.
            EngineFailed: it cannot be written (`final` as with `LocalCopy.fetch`), or the host is stopping.
            RequestTimeout: it took too long, or was ended; another call continues.
        """
        if not wanted.weights:
            raise InvalidWeights(f"the weights {wanted.version} came without a digest of their content", path=str(path))
        check = partial(self._check, until, ended)
        check()
        had = self._copy.had
        try:
            near = self._near(path, wanted, relay, check, had)
            try:
                read = self._copy.fetch(near, wanted, until, ended).read_bytes
            except InvalidWeights as error:
                if near == path:
                    raise
                log.warning("%s; fetching a full version", error.message)
                near = self._near(path, wanted, relay, check, None, trusts=False)
                read = self._copy.fetch(near, wanted, until, ended).read_bytes
        except OSError as error:
            raise copy_failure(self._incoming, error) from error
        self.note_copy()
        return near, read

    def _check(self, until: float, ended: Event | None) -> None:
        check_deadline(until)
        check_wanted(ended)
        if self._closed:
            raise EngineFailed("the engine host is stopping", unreachable=True)

    def _near(
        self,
        path: Path,
        wanted: Content,
        relay: WeightRelay,
        check: Callable[[], None],
        had: Content | None,
        *,
        trusts: bool = True,
    ) -> Path:
        """Return a folder of this host with a version, which is fetched from other processes if need be.

        Without `trusts`, what was fetched before is checked, and its wrong chunks are fetched again.
        """
        if index_digest(path) == relay.index:
            with suppress(InvalidWeights):
                self._offer([offered_version(path)])
            return path
        if had == wanted:
            there = version_path(self._incoming, wanted.version)
            if index_digest(there) == relay.index:  # another process of this machine has fetched it
                with suppress(InvalidWeights):
                    self._offer([offered_version(there)])
            return self._incoming / "none"  # at `path` this host may have a folder of another trainer
        with self._alone(check):
            return self._fetch(wanted, relay, check, had, trusts=trusts)

    # The transfer -----------------------------------------------------------------------------------------------------

    def _fetch(
        self, wanted: Content, relay: WeightRelay, check: Callable[[], None], had: Content | None, *, trusts: bool
    ) -> Path:
        began = time.monotonic()
        check()
        target = version_path(self._incoming, wanted.version)
        there = find_route(self._look, had, wanted) if trusts else None
        if there is not None and not there.back:  # another process of this machine has fetched it
            versions = {wanted.version, *there.deltas, *(() if there.anchor is None else (there.anchor,))}
            with suppress(InvalidWeights):
                self._offer([offered_version(version_path(self._incoming, version)) for version in versions])
                return target
        with zmq.Context() as context, ChunkSource(context, self._keyring, relay.sources, check) as source:
            while True:
                try:
                    self._way(wanted, relay, source, had)
                    break
                except InvalidWeights:
                    if source.giver is None:  # else one that is silent now may have it later
                        raise
            self._note_fetch(source.fed_by, time.monotonic() - began)
        given = ", ".join(f"{size / 1e6:.3g} MB from {name}" for name, size in source.fed_by.items())
        log.info("weights %d were fetched: %s", wanted.version, given)
        return target

    def _look(self, version: int) -> Version | None:
        """Return what was fetched whole of a version."""
        with suppress(InvalidWeights):
            return published(version_path(self._incoming, version), version)
        return None

    def _way(self, wanted: Content, relay: WeightRelay, source: ChunkSource, had: Content | None) -> None:
        """Fetch the version and those that lead to it, or the copy of another host."""
        chain = _Chain(self._incoming, relay.index, wanted, source)
        route = find_route(chain.look, had, wanted)
        starts_late = route is None or route.anchor not in (None, wanted.version)
        failure: OSError | None = None
        if starts_late:
            try:
                self._from_a_copy(wanted, source)
            except InvalidWeights:
                pass
            except OSError as error:
                if error.errno in LASTING:
                    raise
                failure = error
            else:
                return
        if route is None and failure is not None:
            raise failure
        if route is None:
            problem = chain.problem or f"no way leads to weights {wanted.version}"
            raise InvalidWeights(problem, path=str(self._incoming))
        anchor = () if route.anchor is None else (chain.folder(route.anchor, full=True),)
        self._receive([*anchor, *(chain.folder(version, full=False) for version in route.deltas)], source)

    def _receive(self, folders: list[OfferedFolder], source: ChunkSource, *, again: bool = True) -> None:
        """Fetch the chunks of folders, which are served meanwhile; the indexes come last. `again`: as `fetch`."""
        self._offer(folders)
        self._make_room(folders)
        by_digest = {folder.digest: folder for folder in folders}
        files: dict[tuple[str, int], int] = {}
        try:
            keys: list[Key] = []
            for folder in folders:
                (folder.path / INDEX).unlink(missing_ok=True)
                folder.path.mkdir(parents=True, exist_ok=True)
                for number, (name, sums) in enumerate(folder.files):
                    files[folder.digest, number] = opened = os.open(folder.path / name, os.O_RDWR | os.O_CREAT, 0o644)
                    came_before = os.fstat(opened).st_size == sums.size_bytes
                    os.ftruncate(opened, sums.size_bytes)
                    if sums.size_bytes:
                        os.posix_fallocate(opened, 0, sums.size_bytes)
                    for chunk in range(len(sums.chunks)):
                        if came_before and folder.is_right(number, chunk, folder.read_from(opened, number, chunk)):
                            folder.add(number, chunk)
                        else:
                            keys.append((folder.digest, number, chunk))

            def take(key: Key, data: bytes) -> bool:
                digest, number, chunk = key
                folder = by_digest[digest]
                if not folder.is_right(number, chunk, data):
                    return False
                os.pwrite(files[digest, number], data, chunk * CHUNK_BYTES)
                folder.add(number, chunk)
                if self._server is not None:
                    self._server.notify()
                return True

            source.fetch(keys, take, again=again)
            for folder in folders:
                write_aside(folder.path / INDEX, folder.index)
        finally:
            for opened in files.values():
                os.close(opened)
            for folder in folders:
                folder.is_open = False
            if self._server is not None:
                self._server.notify()

    def _make_room(self, folders: list[OfferedFolder]) -> None:
        """Remove all versions but these, and files of other forms of these, such as half a copy."""
        kept = {folder.path: {INDEX, *(name for name, _ in folder.files)} for folder in folders}
        for path in self._incoming.iterdir():
            if NAME.fullmatch(path.name) and path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        for path, names in kept.items():
            for file in path.glob("*"):
                if file.name not in names:
                    file.unlink()

    def _from_a_copy(self, wanted: Content, source: ChunkSource) -> None:
        """Fetch the copy of another host; raise the last `OSError` if a copy could not be written.

        A host whose copy could not be fetched whole is left out; what came of it is kept for the next one. An error
        that lasts, such as that of a full disk, is raised at once.
        """
        failure: OSError | None = None
        failed: list[WeightSource] = []
        while True:
            found = b""

            def take(_: Key, data: bytes) -> bool:
                nonlocal found
                found = data
                return content_of(data) == wanted.weights

            try:
                source.fetch([(wanted.weights, COPY_FILE, 0)], take, waits=False, again=False, without=failed)
            except InvalidWeights as lacking:
                raise failure or lacking from None
            giver = source.giver
            assert giver is not None, "it gave the index"
            failed.append(giver)
            folder = OfferedFolder(version_path(self._incoming, wanted.version), found, whole=False)
            try:
                self._receive([folder], source, again=False)
                problem = copy_problem(folder.path)
            except InvalidWeights:
                continue
            except OSError as error:
                if error.errno in LASTING:
                    raise
                failure = error
                log.warning("the copy of %s cannot be written here: %s", giver.name, error)
            else:
                if not problem:
                    return
                source.leave_liar(f"gave a copy that {problem}")
            shutil.rmtree(folder.path, ignore_errors=True)

    def _offer(self, folders: list[OfferedFolder]) -> None:
        if self._server is not None:
            self._server.withdraw({folder.digest for folder in folders})
            self._server.offer(*folders)

    def _note_fetch(self, fed_by: dict[str, int], seconds: float) -> None:
        with self._state_lock:
            self.state = msgspec.structs.replace(
                self.state, fetched_bytes=sum(fed_by.values()), seconds=seconds, fed_by=dict(fed_by)
            )

    @contextmanager
    def _alone(self, check: Callable[[], None]) -> Iterator[None]:
        """Fetch for this machine. While another process does, asks for versions that are not here are not left open."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            while not self._fetching.acquire(timeout=LOCK_POLL_S):
                check()
            stack.callback(self._fetching.release)
            lock = stack.enter_context(opened_lock(self._incoming / "lock"))
            try:
                while not _is_locked(lock):
                    self._expect(fetches=False)
                    check()
                    time.sleep(LOCK_POLL_S)
            finally:
                self._expect(fetches=True)
            yield

    def _expect(self, *, fetches: bool) -> None:
        if self._server is not None and self._server.is_patient != fetches:
            self._server.is_patient = fetches
            self._server.notify()

    def close(self) -> None:
        """Stop serving, and give up what is being fetched."""
        self._closed = True
        if self._server is not None:
            self._server.close()


class _Chain:
    """The indexes of a version and those before it, as they are asked for; each is checked by the one after it."""

    def __init__(self, root: Path, index: str, wanted: Content, source: ChunkSource) -> None:
        self._root = root
        self._source = source
        self._digests = {wanted.version: index}
        self._folders: dict[str, OfferedFolder] = {}
        self.problem = ""

    def look(self, version: int) -> Version | None:
        """As `find_route` wants it."""
        if version not in self._digests:
            return None
        try:
            found = self._get(version, self._digests[version])
            full_bytes, delta = None, found
            if found.version.base_version is None:
                full_bytes = sum(sums.size_bytes for _, sums in found.files)
                if not found.version.delta_index:
                    return Version(version, found.version.weights, full_bytes)
                delta = self._get(version, found.version.delta_index)
        except InvalidWeights as error:
            self.problem = self.problem or error.message
            return None
        known = delta.version
        if known.base_version is None or found.version.weights != known.weights:
            return None
        if known.base_index:
            self._digests[known.base_version] = known.base_index
        delta_bytes = sum(sums.size_bytes for _, sums in delta.files)
        return Version(version, known.weights, full_bytes, known.base_version, known.base_weights, delta_bytes)

    def folder(self, version: int, *, full: bool) -> OfferedFolder:
        """Return the folder of a version that was looked at: the full one, or the delta."""
        found = self._folders[self._digests[version]]
        return found if full or found.version.base_version is not None else self._folders[found.version.delta_index]

    def _get(self, version: int, digest: str) -> OfferedFolder:
        if digest not in self._folders:

            def take(_: Key, data: bytes) -> bool:
                if sha256(data).hexdigest() != digest:
                    return False
                self._folders[digest] = OfferedFolder(version_path(self._root, version), data, whole=False)
                return True

            is_first = not self._folders  # those before it are on the way of this host alone
            self._source.fetch([(digest, INDEX_FILE, 0)], take, waits=is_first, again=False)
        folder = self._folders[digest]
        if folder.version.version != version:
            raise folder.version.invalid(f"says that it is version {folder.version.version}")
        return folder


def _is_locked(lock: int) -> bool:
    """Lock an open file unless another process has; return whether that was possible."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _disk(folder: Path) -> str:
    """Identify a folder, which is made: containers of one machine may have other disks under the same path."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        stat = folder.stat()
        return f"{stat.st_dev}:{stat.st_ino}"
    return str(folder)
