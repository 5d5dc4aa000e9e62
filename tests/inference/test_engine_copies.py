"""Where an engine host takes weights from: a folder, the page cache, or its copy; and what is too slow or wrong."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace as replace_field
from support.weight_versions import KINDS, assert_same, model, publish, read_copy, step, write_checkpoint

from prorl_zmq.errors import EngineFailed, InvalidWeights, RequestTimeout
from prorl_zmq.inference.checkpoint import DELTA, DRAFT, INDEX, read_ahead
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting import engine_updates
from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.relay import WeightRelay, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.weight_versions import Model

    from prorl_zmq.inference.engine import EngineDescription
    from prorl_zmq.inference.policy import Policy
    from prorl_zmq.wire.messages.engines import UpdateMode, UpdateStep


WAIT_S = 20.0


class FolderEngine(EmbeddedEngine):
    """Notes the folders that it is to load, and what they hold."""

    def __init__(self, policy: Policy, model: Path, *, reads_here: bool) -> None:
        super().__init__(policy)
        self._model = model
        self._reads_here = reads_here
        self.loaded: list[tuple[Path, int, Model]] = []
        self.drafts: list[Path | None] = []
        self.has_draft = False

    @property
    def description(self) -> EngineDescription:
        return replace(super().description, model=str(self._model), reads_here=self._reads_here, drafts=self.has_draft)

    async def update_weights(
        self, path: Path, weight_version: int, mode: UpdateMode, draft: Path | None = None
    ) -> None:
        self.drafts.append(draft)
        self.loaded.append((path, weight_version, read_copy(path)))


def with_folders(
    policy: Policy,
    tmp_path: Path,
    test: Callable[[FolderEngine, EngineUpdates, Path], Any],
    *,
    copies_all: bool = True,
    reads_here: bool = True,
) -> None:
    async def main() -> None:
        engine = FolderEngine(policy, write_checkpoint(tmp_path / "served", model(99)), reads_here=reads_here)
        updates = EngineUpdates(engine, tmp_path / "copy", copies_all=copies_all)
        await test(engine, updates, tmp_path / "published")
        await updates.close()
        await engine.close()

    asyncio.run(main())


def test_an_engine_loads_the_copy_that_was_fetched(policy: Policy, tmp_path: Path) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        weights = {1: model(), 2: step(model(), 1)}
        with PublishedWeights(root, KINDS, threads=1) as published:
            for version in (1, 2):
                path = publish(published, weights[version], version).path
                times = await updates.update(WeightUpdate("f", "fetch", version, str(path)))
                assert times is not None
                assert times.read_bytes > 0
                assert times.fetch_s > 0
                assert len(engine.loaded) == version - 1
                file = path / "model-00000-of-00001.safetensors"
                file.rename(path / "away")  # it is not read again
                times = await updates.update(WeightUpdate("l", "load", version, str(path)))
                assert times is not None
                assert times.read_bytes == 0
                assert times.load_s == times.pause_s > 0, "the engine does not say how long it was stopped"
                (path / "away").rename(file)
        assert [one[:2] for one in engine.loaded] == [(tmp_path / "copy", 1), (tmp_path / "copy", 2)]
        for _, version, loaded in engine.loaded:
            assert_same(loaded, weights[version])

    with_folders(policy, tmp_path, test)


def test_weights_that_were_not_fetched_are_fetched_by_the_load(policy: Policy, tmp_path: Path) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with PublishedWeights(root, KINDS, threads=1) as published:
            path = publish(published, model(), 1).path
        await updates.load(path, Content(1), "keep")
        assert_same(engine.loaded[0][2], model())
        with pytest.raises(InvalidWeights, match="weight_v000002 is not a folder"):
            await updates.load(root / "weight_v000002", Content(2), "keep")
        with pytest.raises(InvalidWeights, match="weight_v000002 is not a folder"):
            await updates.fetch(root / "weight_v000002", Content(2), 30.0)
        assert len(engine.loaded) == 1

    with_folders(policy, tmp_path, test)


def test_the_heartbeats_report_the_copy_without_a_relay_too(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine = FolderEngine(policy, write_checkpoint(tmp_path / "served", model(99)), reads_here=True)
        copy, root = LocalCopy(tmp_path / "copy", None), tmp_path / "published"
        relay = WeightsRelay(copy, None, "host", None)
        updates = EngineUpdates(engine, copy.folder, copies_all=True, relay=relay)
        with PublishedWeights(root, KINDS, threads=1) as published:
            first, second = (
                publish(published, weights, n).path for n, weights in ((1, model()), (2, step(model(), 1)))
            )
        assert updates.copy_state is not None
        assert (updates.copy_state.version, updates.copy_state.size_bytes) == (None, 0)
        await updates.update(WeightUpdate("f", "fetch", 1, str(first)))
        assert updates.copy_state.version == 1
        assert updates.copy_state.size_bytes > 0
        caplog.set_level("INFO", "prorl.engine")
        await updates.update(WeightUpdate("l", "load", 2, str(second)))
        assert f"loads weights 2 from this host's copy in {copy.folder}" in caplog.text
        assert updates.copy_state.version == 2
        twin = EngineUpdates(engine, copy.folder, copies_all=True, relay=WeightsRelay(copy, None, "twin", None))
        await updates.update(WeightUpdate("l", "load", 1, str(first)))
        await twin.update(WeightUpdate("l", "load", 1, str(first)))
        assert twin.copy_state is not None
        assert twin.copy_state.version == 1
        for one in (updates, twin):
            await one.close()
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["cancel", "fetch", "load"])
def test_a_fetch_ends_once_its_version_is_not_wanted(policy: Policy, tmp_path: Path, ending: UpdateStep) -> None:
    """It waits for the copy, which another process of this host holds."""

    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with PublishedWeights(root, KINDS, threads=1) as published:
            first, second = (publish(published, VERSIONS[version], version).path for version in (1, 2))
        copy = LocalCopy(tmp_path / "copy", None)
        copy.fetch(first, Content(1))
        asked = WeightUpdate("f", "fetch", 2, str(second), timeout_s=600.0)
        with copy.reading(Content(1)):
            fetch = asyncio.create_task(updates.update(asked))
            again = asyncio.create_task(updates.update(replace_field(asked, request_id="again")))
            await asyncio.sleep(0)
            assert not fetch.done()
            await updates.update(replace_field(asked, step="cancel", weight_version=5))
            assert not fetch.done(), "another version was cancelled"
            version = 2 if ending == "cancel" else 1
            end = asyncio.create_task(
                updates.update(replace_field(asked, step=ending, weight_version=version, path=str(first)))
            )
            async with asyncio.timeout(WAIT_S):
                for ended in (fetch, again):
                    with pytest.raises(RequestTimeout, match="or these were cancelled"):
                        await ended
        await end
        await updates.update(asked)
        await updates.update(replace_field(asked, step="load"))
        assert_same(engine.loaded[-1][2], VERSIONS[2])

    with_folders(policy, tmp_path, test)


@pytest.mark.parametrize("copies_all", [True, False])
def test_draft_weights_are_read_ahead_and_loaded_where_they_are(
    policy: Policy, tmp_path: Path, copies_all: bool
) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        engine.has_draft = True
        with PublishedWeights(root, KINDS, threads=1) as published:
            plain, drafted = (publish(published, VERSIONS[version], version).path for version in (1, 2))
        write_checkpoint(drafted / DRAFT, model(5))
        size_bytes = (drafted / DRAFT / "model.safetensors").stat().st_size
        await updates.load(plain, Content(1), "keep")
        for read_bytes in (await fetched(updates, drafted, 2), await fetched(updates, drafted, 2)):
            assert read_bytes >= size_bytes
        await updates.load(drafted, Content(2), "keep")
        assert engine.drafts == [None, drafted / DRAFT]
        assert engine.loaded[1][0] == tmp_path / "copy", "a delta comes by the copy"
        assert_same(engine.loaded[1][2], VERSIONS[2])

    with_folders(policy, tmp_path, test, copies_all=copies_all)


async def fetched(updates: EngineUpdates, path: Path, version: int) -> int:
    return (await updates.fetch(path, Content(version), 30.0)).read_bytes


def test_an_engine_without_a_draft_model_says_once_that_it_ignores_its_weights(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        for version in (1, 2):
            path = write_checkpoint(root / str(version), VERSIONS[version])
            write_checkpoint(path / DRAFT, model(5))
            await updates.fetch(path, Content(version), 30.0)
            await updates.load(path, Content(version), "keep")
        assert engine.drafts == [None, None]
        assert [one.getMessage() for one in caplog.records if DRAFT in one.getMessage()] == [
            f"the engine ignores draft/ in {root / '1'}: it has no draft model that takes weights"
        ]

    with_folders(policy, tmp_path, test)


def test_a_relay_that_is_not_reached_is_named(policy: Policy, tmp_path: Path) -> None:
    async def main() -> None:
        engine = FolderEngine(policy, write_checkpoint(tmp_path / "served", model(99)), reads_here=True)
        copy = LocalCopy(tmp_path / "copy", None)
        relay = WeightsRelay(copy, None, "host", None)
        updates = EngineUpdates(engine, copy.folder, copies_all=True, relay=relay)
        source = WeightSource("trainer", f"ipc://{tmp_path}/gone")
        fetch = WeightUpdate("f", "fetch", 2, "/elsewhere", digest="a" * 64, relay=WeightRelay("b" * 64, (source,)))
        with pytest.raises(RequestTimeout, match=r"this host asked trainer at ipc://.*/gone\. If it does not reach"):
            await updates.update(replace_field(fetch, timeout_s=0.3))
        await updates.close()
        await engine.close()

    asyncio.run(main())


SECOND = step(model(), 1, share=0.2)
VERSIONS = {1: model(), 2: SECOND, 3: step(SECOND, 2, share=0.2)}
"""A full version, a delta, and a full version with a delta."""


async def publish_chain(updates: EngineUpdates, root: Path) -> None:
    with PublishedWeights(root, KINDS, threads=1) as published:
        for version, tensors in VERSIONS.items():
            path = publish(published, tensors, version).path
            assert (path / DELTA).is_dir() is (version == 3)
            await updates.fetch(path, Content(version), 30.0)
            await updates.load(path, Content(version), "keep")


def test_without_a_folder_for_them_only_deltas_are_copied(policy: Policy, tmp_path: Path) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        await publish_chain(updates, root)
        copy = tmp_path / "copy"
        assert [one[0] for one in engine.loaded] == [root / "weight_v000001", copy, copy]
        for _, version, loaded in engine.loaded:
            assert_same(loaded, VERSIONS[version])

    with_folders(policy, tmp_path, test, copies_all=False)


@pytest.mark.parametrize("copies_all", [True, False])
def test_a_host_loads_its_own_copy_if_the_published_folder_is_gone(
    policy: Policy, tmp_path: Path, copies_all: bool
) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with PublishedWeights(root, KINDS, threads=1) as published:
            for version in (1, 2):
                written = publish(published, VERSIONS[version], version)
        wanted = WeightUpdate("r", "load", 2, str(written.path), digest=written.weights)
        await updates.update(wanted)
        shutil.rmtree(root)
        await updates.update(replace_field(wanted, step="fetch"))
        await updates.update(wanted)
        assert [one[0] for one in engine.loaded] == [tmp_path / "copy"] * 2
        assert_same(engine.loaded[1][2], VERSIONS[2])
        for other in ("", "f" * 64):
            with pytest.raises(InvalidWeights, match="weight_v000002 is not a folder"):
                await updates.update(replace_field(wanted, digest=other))

    with_folders(policy, tmp_path, test, copies_all=copies_all)


@pytest.mark.parametrize("step", ["fetch", "load"])
def test_a_delta_without_its_index_is_not_read_as_a_checkpoint(
    policy: Policy, tmp_path: Path, step: UpdateStep
) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with PublishedWeights(root, KINDS, threads=1) as published:
            for version in (1, 2):
                path = publish(published, VERSIONS[version], version).path
        (path / INDEX).unlink()
        with pytest.raises(InvalidWeights, match="weight_v000002 is a delta without its index"):
            await updates.update(WeightUpdate("r", step, 2, str(path)))
        assert not engine.loaded

    with_folders(policy, tmp_path, test, copies_all=False)


def test_a_server_elsewhere_that_sees_the_copy_loads_it(policy: Policy, tmp_path: Path) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        await publish_chain(updates, root)
        assert [one[0] for one in engine.loaded] == [tmp_path / "copy"] * 3

    with_folders(policy, tmp_path, test, reads_here=False)


def test_a_server_elsewhere_takes_full_versions_only(policy: Policy, tmp_path: Path) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with PublishedWeights(root, KINDS, threads=1) as published:
            for version, tensors in VERSIONS.items():
                path = publish(published, tensors, version).path
                if version == 2:
                    refusal = "weight_v000002 is a delta, and this engine .* give its backend a `weights_dir`"
                    with pytest.raises(InvalidWeights, match=refusal):
                        await updates.fetch(path, Content(version), 30.0)
                    with pytest.raises(InvalidWeights, match=refusal):
                        await updates.load(path, Content(version), "keep")
                else:
                    await updates.fetch(path, Content(version), 30.0)
                    await updates.load(path, Content(version), "keep")
        assert [one[0].name for one in engine.loaded] == ["weight_v000001", "weight_v000003"]
        assert not (tmp_path / "copy").exists()

    with_folders(policy, tmp_path, test, copies_all=False, reads_here=False)


@pytest.mark.parametrize("copies_all", [True, False])
def test_a_number_with_other_weights_than_were_published_is_refused(
    policy: Policy, tmp_path: Path, copies_all: bool
) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with PublishedWeights(root, KINDS, threads=1) as published:
            first = publish(published, model(), 1)
        with PublishedWeights(root, KINDS, threads=1) as published:
            other = publish(published, SECOND, 1)
        for asked in ("fetch", "load"):
            with pytest.raises(InvalidWeights, match="another publisher wrote them, or the number was used again"):
                await updates.update(WeightUpdate("r", asked, 1, str(first.path), digest=first.weights))
        assert not engine.loaded
        await updates.update(WeightUpdate("r", "load", 1, str(other.path), digest=other.weights))
        assert_same(engine.loaded[0][2], SECOND)

    with_folders(policy, tmp_path, test, copies_all=copies_all)


def test_a_host_that_is_too_slow_says_so_and_loads_the_weights_later(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with PublishedWeights(root, KINDS, threads=1) as published:
            first, second = publish(published, model(), 1), publish(published, SECOND, 2)
        await updates.load(first.path, Content(1, first.weights), "keep")
        wanted = Content(2, second.weights)
        with LocalCopy(tmp_path / "copy", None).reading(Content(1)):  # as a neighbour that was stopped
            with pytest.raises(RequestTimeout):
                await updates.fetch(second.path, wanted, 0.25)
            with monkeypatch.context() as patch:
                patch.setattr(engine_updates, "FETCH_S", 0.2)
                with pytest.raises(RequestTimeout):
                    await updates.load(second.path, wanted, "keep")
            for thread in threading.enumerate():
                if thread.name in ("fetch", "hold"):
                    thread.join(WAIT_S)
                    assert not thread.is_alive(), "it waits for the lock after its time"
        assert [one[1] for one in engine.loaded] == [1]
        await updates.load(second.path, wanted, "keep")
        assert_same(engine.loaded[1][2], SECOND)

    with_folders(policy, tmp_path, test)


def test_a_published_folder_that_hangs_is_too_slow_too(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(engine_updates, "delta_of", lambda _: let_go.wait(WAIT_S))
    monkeypatch.setattr(engine_updates, "FETCH_S", 0.05)

    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        for asked in ("fetch", "load"):
            with pytest.raises(RequestTimeout, match=r"could not be read within 0\.0"):
                await updates.update(WeightUpdate("r", asked, 1, str(root), timeout_s=0.05))
        assert not engine.loaded

    try:
        with_folders(policy, tmp_path, test)
    finally:
        let_go.set()


def test_a_folder_of_something_else_is_no_copy(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "thesis.txt").write_text("mine")

    async def test(engine: FolderEngine, updates: EngineUpdates, root: Path) -> None:
        with pytest.raises(EngineFailed, match="has files that are no copy of weights"):
            await publish_chain(updates, root)
        assert not engine.loaded

    with_folders(policy, tmp_path, test)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["thesis.txt"]


def test_a_file_is_loaded_where_it_is(policy: Policy, make_policy: Callable[..., Policy], tmp_path: Path) -> None:
    new = make_policy(7)
    new.save(tmp_path / "new.npz")

    async def main() -> None:
        engine = EmbeddedEngine(policy)
        updates = EngineUpdates(engine, tmp_path / "copy", copies_all=True)
        await updates.fetch(tmp_path / "new.npz", Content(1), 30.0)
        times = await updates.load(tmp_path / "new.npz", Content(1), "keep")
        assert 0 < times.pause_s < times.load_s, "it reads the file before it stops"
        assert engine.weight_version == 1
        await engine.close()

    asyncio.run(main())


def test_without_a_copy_a_fetch_reads_ahead(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "served", model())
    size = (path / "model.safetensors").stat().st_size
    assert read_ahead(path, inf) == read_ahead(path / "model.safetensors", inf) == size
    assert read_ahead(path, 0.0) == read_ahead(tmp_path / "nowhere", inf) == read_ahead(Path("/dev/zero"), inf) == 0


def test_what_a_server_elsewhere_reads_is_not_read_here(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(engine_updates, "read_ahead", lambda path, *_: read.append(path))

    async def main() -> None:
        for reads_here in (True, False):
            engine = EmbeddedEngine(policy)
            description = replace(engine.description, reads_here=reads_here)
            engine.__class__ = type("Elsewhere", (EmbeddedEngine,), {"description": description})
            await EngineUpdates(engine).fetch(Path(f"/{reads_here}"), Content(1), 30.0)

    asyncio.run(main())
    assert read == [Path("/True")]
