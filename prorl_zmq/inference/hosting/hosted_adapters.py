"""The adapters that an engine host serves: its own copies of their folders, and who generates with which.

A version is copied before the engine loads it: a trainer that saves into the same file again would change a link. The
copy has a path of its own and stays until the version is retired and its generations have ended: engines read it
again when they have evicted it. A host that was killed finds the copies that were in service, and loads them again, in
the order of their loading and on the base weights of then.
"""

from __future__ import annotations

import asyncio
import filecmp
import hashlib
import logging
import os
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from ...errors import EngineFailed, InvalidWeights
from ...system.files import open_regular
from ...system.threads import run_aside
from ...wire.messages.base import new_id
from ..adapters import CONFIG, WEIGHTS
from ..checkpoint import read_in_time

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ...wire.messages.engines import WeightUpdate
    from ..engine import AdapterEngine, Engine

COPY_S = 300.0
"""Longest copying of an adapter, in seconds: its folder may be on a network."""
FREE_BYTES = 2**28
"""What a copy must leave free on its disk."""
PER_SLOT = 4
"""Most loaded versions for each slot of the engine, which keeps some of them in memory."""
IN_SERVICE = "in-service"
"""A file next to the copy of a version that is loaded and not retired: the weight version of its base."""
LOADING = "loading"
"""In its place while the engine loads the version: if the host ends meanwhile, the version may be why."""
ENDS = 2
"""How many hosts may end while they load a version; then it is refused."""

log = logging.getLogger("prorl.engine")


@dataclass(slots=True, eq=False)
class _Version:
    folder: Path
    running: int = 0
    retired: bool = False


class HostedAdapters:
    """Loads, uses and retires the adapters of one engine; made and used on its loop.

    Args:
        engine: an `AdapterEngine` if its description has `adapter_slots`; any other takes no adapters.
        folder: for the copies, which the engine sees at the same path; created when it is needed. `restore` deletes
            all others beside it, which are of other services' hosts of this name. None: no adapters.
    """

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self._engine = cast("AdapterEngine", engine)
        self._folder = folder if engine.description.adapter_slots else None
        self._versions: dict[tuple[str, int], _Version] = {}
        self._current: dict[str, int] = {}
        self._left: dict[Path, str] = {}
        """Copies that an earlier host had in service on other weights, and the versions of these."""
        self._suspects: dict[tuple[str, int], list[Path]] = {}
        """Copies during whose loading earlier hosts ended."""
        self._loading = 0
        self._in_order: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by the loads of a model, and kept by them alone."""
        self._one_change = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    @property
    def current(self) -> dict[str, int]:
        """The version of each model that requests without one get: the one that was loaded last."""
        return dict(self._current)

    @property
    def loaded(self) -> dict[str, tuple[int, ...]]:
        """The versions of each model that are not retired; the current one is the last."""
        live = [key for key, one in self._versions.items() if not one.retired]
        return {
            model: (*(version for name, version in live if name == model and version != current), current)
            for model, current in self._current.items()
        }

    async def restore(self) -> None:
        """Load the versions that an earlier host had in service, and delete what else earlier hosts left.

        Versions of other weights than the engine's wait for these (see `weights_changed`).

        Raises:
            EngineFailed: the engine cannot load one now; the next host tries again.
        """
        if self._folder is None or not self._folder.parent.is_dir():
            return
        for other in self._folder.parent.iterdir():
            if other != self._folder:
                _delete(other)
        found: list[tuple[int, Path, str]] = []
        for folder in self._folder.glob("*"):
            mark = folder / IN_SERVICE
            try:
                found.append((mark.stat().st_mtime_ns, folder, mark.read_text()))
            except OSError:
                if (folder / LOADING).exists() and (key := _key(folder)) is not None:
                    self._suspects.setdefault(key, []).append(folder)
                else:
                    _delete(folder)
        self._left = {folder: base for _, folder, base in sorted(found)}
        await self._load_left()

    async def weights_changed(self) -> None:
        """Load the versions that an earlier host had in service on the engine's new weights; forget those of others."""
        try:
            await self._load_left()
        except EngineFailed as error:
            log.warning("adapters of an earlier life are not served: %s", error.message)
        for folder in [one for one, of_base in self._left.items() if of_base != str(self._engine.weight_version)]:
            del self._left[folder]
            _delete(folder)

    async def _load_left(self) -> None:
        base = str(self._engine.weight_version)
        self._loading += 1
        try:
            async with self._one_change:  # requests to load newer versions may come already
                for folder in [one for one, of_base in self._left.items() if of_base == base]:
                    await self._load_again(folder)
                    del self._left[folder]
        finally:
            self._loading -= 1

    async def _load_again(self, folder: Path) -> None:
        key = _key(folder)
        if key is None or key in self._versions:
            _delete(folder)
            return
        (folder / IN_SERVICE).rename(folder / LOADING)
        try:
            await self._engine.load_adapter(*key, folder)
        except InvalidWeights as error:
            log.warning("an adapter of an earlier life is not served: %s", error)
            _delete(folder)
            return
        except BaseException as error:
            if not _is_fatal(error):
                (folder / LOADING).rename(folder / IN_SERVICE)
            raise
        (folder / LOADING).rename(folder / IN_SERVICE)
        self._versions[key] = _Version(folder)
        self._current[key[0]] = key[1]

    async def update(self, request: WeightUpdate) -> str:
        """Do one step of an update of an adapter, which is `load` or `remove`; return and raise as `load` does."""
        match request.step:
            case "load":
                version, path = request.weight_version, Path(request.path)
                return await self.load(request.model, version, path, request.keep, request.digest)
            case "remove":
                self._retire_all_but(request.model, request.keep)
                if not request.keep:
                    self._forget_suspects(request.model)
                return ""
            case step:
                raise EngineFailed(
                    f"the step {step} is for an engine's own weights; of the adapter {request.model} load a folder",
                    refused=True,
                )

    async def load(self, model: str, version: int, path: Path, keep: Collection[int] = (), expected: str = "") -> str:
        """Serve a version of a model's adapter from now on, and retire its earlier ones; return its files' digest.

        Loading the same files as the same version again changes nothing.

        Args:
            model: the adapter's name.
            version: of its weights.
            path: the folder that PEFT saved.
            keep: versions that are not retired, because jobs are to end with them.
            expected: the digest that the files must have; empty: any.

        Raises:
            InvalidWeights: it cannot be used, its digest is another one, or other weights are loaded as this version.
                Earlier versions stay.
            EngineFailed: the engine failed, too many versions are loaded, or the copy cannot be written.
        """
        if self._folder is None:
            raise EngineFailed(f"{model} is not served here, and this engine takes no adapters", refused=True)
        copy = self._folder / f"{model}@{version}-{new_id()[:12]}"
        lock = self._in_order.setdefault(model, asyncio.Lock())
        self._loading += 1
        try:
            async with lock:  # loads of other models need not wait for a slow folder
                digest = await read_in_time(COPY_S, _copy, path, copy)
                if expected not in ("", digest):
                    raise InvalidWeights(
                        f"the files in {path} differ from those published as version {version} of {model}: keep that "
                        "version's folder as it is, publish these as a new version, or remove the model first (`prorl "
                        "backends remove-model`)",
                        path=str(path),
                    )
                async with self._one_change:
                    await self._take(model, version, path, copy)
                    self._current[model] = version
        except BaseException as error:
            if not _is_fatal(error):
                _delete(copy)
            raise
        finally:
            self._loading -= 1
        self._retire_all_but(model, (version, *keep))
        self._forget_suspects(model)
        return digest

    def _forget_suspects(self, model: str) -> None:
        for key in [key for key in self._suspects if key[0] == model]:
            for folder in self._suspects.pop(key):
                _delete(folder)

    def _retire_all_but(self, model: str, versions: Collection[int]) -> None:
        for other in [each for each in self._versions if each[0] == model and each[1] not in versions]:
            self.retire(*other)

    def retire(self, model: str, version: int) -> None:
        """Refuse new requests for a version, and remove it once its generations have ended.

        An unknown version is ignored. If it was the current one, the last of the others becomes current.
        """
        found = self._versions.get((model, version))
        if found is None or found.retired:
            return
        found.retired = True
        (found.folder / IN_SERVICE).unlink(missing_ok=True)
        if self._current.get(model) == version:
            del self._current[model]
            for (name, other), one in self._versions.items():  # that was loaded last before it, if one is kept
                if name == model and not one.retired:
                    self._current[model] = other
        self._remove_idle((model, version), found)

    @contextmanager
    def using(self, model: str, version: int | None = None) -> Iterator[tuple[str, int]]:
        """Keep a version loaded while a request generates with it; None: the model's current one.

        Raises:
            EngineFailed: it is not loaded here.
        """
        number = self._current.get(model) if version is None else version
        found = self._versions.get((model, number)) if number is not None else None
        if number is None or found is None or found.retired:
            named = f"the adapter {model}" if version is None else f"version {version} of the adapter {model}"
            have = ", ".join(f"{name}@{number}" for name, number in sorted(self._current.items()))
            raise EngineFailed(f"{named} is not loaded here; loaded: {have or 'none'}", not_loaded=True)
        found.running += 1
        try:
            yield model, number
        finally:
            found.running -= 1
            self._remove_idle((model, number), found)

    def check_none(self) -> None:
        """Raise `EngineFailed` while adapters are or get loaded: they belong to the engine's present weights."""
        if self._current or self._loading:
            named = f"loaded ({', '.join(sorted(self._current))})" if self._current else "being loaded"
            raise EngineFailed(
                f"adapters of the present weights are {named}: remove them before the engine gets others", refused=True
            )

    async def close(self) -> None:
        """Wait for removals; the engine is closed already. Copies that are left are for the next host."""
        self._closing.set()
        if self._removals:
            await asyncio.wait(self._removals)

    async def _take(self, model: str, version: int, path: Path, copy: Path) -> None:
        known = self._versions.get((model, version))
        if known is not None and not known.retired:
            if not await run_aside(_same, copy, known.folder):
                raise InvalidWeights(
                    f"version {version} of {model} is loaded with other weights than those in {path}; publish these as "
                    "a new version, or remove the model first (`prorl backends remove-model`)",
                    path=str(path),
                )
            _delete(copy)
            (known.folder / IN_SERVICE).touch()
            return
        if known is not None:
            raise EngineFailed(f"version {version} of {model} is being retired; publish a new version, or wait")
        limit = PER_SLOT * self._engine.description.adapter_slots
        if len(self._versions) >= limit:
            ending = sum(one.retired for one in self._versions.values())
            wait = f", or wait for the running generations of {ending}" if ending else ""
            raise EngineFailed(f"{limit} versions of adapters are loaded, the most for its `slots`; remove one{wait}")
        suspects = self._suspects.get((model, version), ())
        if sum([await run_aside(_same, copy, folder) for folder in suspects]) >= ENDS:
            raise InvalidWeights(
                f"{len(suspects)} engine hosts ended while they loaded version {version} of {model} from such a "
                "folder; publish a new version",
                path=str(path),
            )
        try:
            (copy / LOADING).write_text(str(self._engine.weight_version))
        except OSError as error:
            raise EngineFailed(f"no copy of an adapter can be kept in {copy.parent}: {error}") from error
        try:
            await self._engine.load_adapter(model, version, copy)
        except InvalidWeights as error:
            raise InvalidWeights(error.message.replace(str(copy), str(path)), path=str(path)) from error
        (copy / LOADING).rename(copy / IN_SERVICE)
        self._versions[model, version] = _Version(copy)

    def _remove_idle(self, key: tuple[str, int], version: _Version) -> None:
        if version.retired and not version.running and self._versions.get(key) is version:
            del self._versions[key]
            task = asyncio.get_running_loop().create_task(self._remove(key, version.folder), name="remove an adapter")
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove(self, key: tuple[str, int], folder: Path) -> None:
        async with self._one_change:
            with suppress(EngineFailed):  # it has ended, or forgets the adapter by itself
                if key not in self._versions:  # otherwise it was loaded again, in place of this one
                    await self._engine.remove_adapter(*key)
        if rest_s := self._engine.description.adapter_rest_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._closing.wait()
                    return
        await run_aside(_delete, folder)


def _copy(path: Path, copy: Path) -> str:
    """Copy an adapter's two files; return their digest.

    Raises:
        InvalidWeights: one is missing, cannot be read, or changes meanwhile.
        EngineFailed: the copy cannot be written, or would fill the disk.
    """
    try:
        copy.mkdir(parents=True)
    except OSError as error:
        raise EngineFailed(f"no copy of an adapter can be kept in {copy.parent}: {error}") from error
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            source = open(path / name, "rb", opener=open_regular)  # noqa: SIM115 - closed below
        except (OSError, ValueError) as error:
            raise InvalidWeights(f"{path} is no adapter that this host can read: {error}", path=str(path)) from error
        try:
            with source, (copy / name).open("wb") as target:
                size_bytes, free = os.fstat(source.fileno()).st_size, shutil.disk_usage(copy).free
                if free < size_bytes + FREE_BYTES:
                    raise EngineFailed(f"{path / name} has {size_bytes:,} bytes, and only {free:,} are free in {copy}")
                digest.update(size_bytes.to_bytes(8, "little"))
                while part := source.read(min(2**20, size_bytes - target.tell() + 1)):
                    digest.update(part)
                    target.write(part)
                    if target.tell() > size_bytes:
                        break
                if target.tell() != size_bytes:
                    raise InvalidWeights(f"{path / name} changes while it is copied", path=str(path))
        except OSError as error:
            raise EngineFailed(f"the adapter in {path} cannot be copied to {copy}: {error}") from error
    return digest.hexdigest()


def _key(folder: Path) -> tuple[str, int] | None:
    """Return the model and version of a copy; None: it is none."""
    model, _, version = folder.name.rpartition("-")[0].rpartition("@")
    return (model, int(version)) if model and version.isdecimal() else None


def _is_fatal(error: BaseException) -> bool:
    return isinstance(error, EngineFailed) and bool(error.fields.get("fatal"))


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _same(one: Path, other: Path) -> bool:
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in (CONFIG, WEIGHTS))
