"""The adapters of an engine host: copies, versions, and requests that name them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import hashlib
import shutil
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.inference.adapters import CONFIG, WEIGHTS
from prorl_zmq.inference.hosting import hosted_adapters
from prorl_zmq.inference.hosting.hosted_adapters import HostedAdapters
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import AddBackend, BackendAlive
from prorl_zmq.wire.messages.engines import Abort, AnyEngineReply, EngineReady, Generate, Generated, WeightUpdate
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    InWorld = Callable[[Callable[[Any], Any]], None]

PROMPT = np.arange(5, dtype=np.int32)


def saved(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(content)
    return folder


def generate(name: str, tokens: int, model: str = "", version: int | None = None) -> bytes:
    sampling = Sampling(max_tokens=tokens, seed=1)
    return codec.encode(Generate(name, job_id="job", sampling=sampling, model=model, weight_version=version))


async def told(client: Any, *frames: bytes) -> Any:
    client.send(b"", *frames)
    return await client.receive(AnyEngineReply)


def digest_of(content: bytes) -> str:
    files = (b"{}", content)
    return hashlib.sha256(b"".join(len(one).to_bytes(8, "little") + one for one in files)).hexdigest()


async def load(
    client: Any, folder: Path, version: int, content: bytes = b"one", model: str = "a", digest: str = ""
) -> Any:
    path = str(saved(folder / "given", content))
    update = WeightUpdate(f"u{version}", step="load", weight_version=version, path=path, model=model, digest=digest)
    reply = await told(client, codec.encode(update))
    if isinstance(reply, EngineReady):
        assert reply.digest == digest_of(content)
        assert reply.times is not None
        assert reply.times.load_s > reply.times.pause_s == 0, "it generates meanwhile"
        return replace(reply, digest="", times=None)
    return reply


def copies(world: Any, adapters: str = "adapters") -> list[bytes]:
    found = []
    for file in (world.folder / adapters / "service").glob(f"*/{WEIGHTS}"):
        with suppress(FileNotFoundError):  # the host deletes it at this moment
            found.append(file.read_bytes())
    return sorted(found)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


def test_tokens_have_their_own_models_version_and_the_trainer_may_delete_its_folder(
    in_world: InWorld, tmp_path: Path
) -> None:
    async def test(world: Any) -> None:
        client, beats = world.raw(), world.broker.requests
        assert await load(client, tmp_path, 7) == EngineReady("u7", 7)
        shutil.rmtree(tmp_path / "given")
        (path,) = world.engine.loaded.values()
        assert (path / WEIGHTS).read_bytes() == b"one"
        for model, version in (("", 0), ("policy", 0), ("a", 7)):
            reply = await told(client, generate("r", 4, model), PROMPT.tobytes())
            assert isinstance(reply, Generated)
            assert [span.weight_version for span in reply.spans] == [version]
        await world.broker.until(lambda: any(isinstance(b, BackendAlive) and b.adapters == {"a": (7,)} for b in beats))
        added = next(request for request in beats if isinstance(request, AddBackend))
        assert added.backend.adapter_slots == 2

    in_world(test)


def test_other_files_than_a_version_was_published_with_are_refused(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        client = world.raw()
        refused = await load(client, tmp_path, 7, b"two", digest=digest_of(b"one"))
        assert refused.error.code == "invalid_weights"
        words = f"the files in {tmp_path / 'given'} differ from those published as version 7 of a: keep that"
        assert words in refused.error.message
        assert (world.engine.loaded, copies(world)) == ({}, [])
        refused = await told(client, generate("r", 4, "a"), PROMPT.tobytes())
        assert "the adapter a is not loaded here" in refused.error.message
        assert await load(client, tmp_path, 7, b"one", digest=digest_of(b"one")) == EngineReady("u7", 7)
        saved(tmp_path / "given", b"one")
        (tmp_path / "given" / CONFIG).write_text("{ }")
        path = str(tmp_path / "given")
        update = WeightUpdate("u8", "load", 8, path, model="b", digest=digest_of(b"one"))
        assert (await told(client, codec.encode(update))).error.code == "invalid_weights"

    in_world(test)


def test_a_missing_adapter_is_refused_and_never_answered_by_the_base(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        client = world.raw()
        reply = await told(client, generate("r", 4, "a"), PROMPT.tobytes())
        assert reply.error.message == "the adapter a is not loaded here; loaded: none"
        await load(client, tmp_path, 7)
        reply = await told(client, generate("r", 4, "a", 6), PROMPT.tobytes())
        assert reply.error.message == "version 6 of the adapter a is not loaded here; loaded: a@7"
        assert reply.error.fields == {"not_loaded": True}

    in_world(test)


def test_a_version_stays_until_its_last_generation_ends(
    in_world: InWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: Any) -> None:
        client = world.raw()
        await load(client, tmp_path, 1, b"one")
        client.send(b"", generate("endless", 30_000, "a"), PROMPT.tobytes())
        await load(client, tmp_path, 2, b"two")
        assert copies(world) == [b"one", b"two"]
        assert world.engine.removed == []
        reply = await told(client, generate("new", 4, "a"), PROMPT.tobytes())
        assert [span.weight_version for span in reply.spans] == [2]
        reply = await told(client, generate("old", 4, "a", 1), PROMPT.tobytes())
        assert "version 1 of the adapter a is not loaded" in reply.error.message
        monkeypatch.setattr(hosted_adapters, "PER_SLOT", 1)
        reply = await load(client, tmp_path, 3, b"three")
        assert reply.error.message.endswith("remove one, or wait for the running generations of 1")
        client.send(b"", codec.encode(Abort("endless")))
        await until(lambda: copies(world) == [b"two"])
        assert world.engine.removed == [("a", 1)]

    in_world(test)


def test_without_the_current_version_the_one_before_is_current(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        client, beats = world.raw(), world.broker.requests
        await load(client, tmp_path, 7)
        path = str(saved(tmp_path / "given", b"two"))
        update = WeightUpdate("u8", "load", 8, path, model="a", keep=(7,))
        assert isinstance(await told(client, codec.encode(update)), EngineReady)
        before = len(beats)
        removal = WeightUpdate("r8", "remove", 8, model="a", keep=(7,))
        assert isinstance(await told(client, codec.encode(removal)), EngineReady)
        for version in (None, 7):
            reply = await told(client, generate("r", 4, "a", version), PROMPT.tobytes())
            assert [span.weight_version for span in reply.spans] == [7]
        await world.broker.until(
            lambda: any(isinstance(b, BackendAlive) and b.adapters == {"a": (7,)} for b in beats[before:])
        )
        await told(client, codec.encode(WeightUpdate("r7", "remove", 0, model="a")))
        reply = await told(client, generate("r", 4, "a"), PROMPT.tobytes())
        assert reply.error.message == "the adapter a is not loaded here; loaded: none"

    in_world(test)


def test_a_copy_stays_while_the_engine_may_still_read_it(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        client = world.raw()
        world.engine._description = dataclasses.replace(world.engine.description, adapter_rest_s=60.0)
        for version, content in ((1, b"one"), (2, b"two"), (3, b"three")):
            assert await load(client, tmp_path, version, content) == EngineReady(f"u{version}", version)
        await until(lambda: world.engine.removed == [("a", 1), ("a", 2)])
        assert copies(world) == [b"one", b"three", b"two"]
        world.engine._description = dataclasses.replace(world.engine.description, adapter_rest_s=0.01)
        await load(client, tmp_path, 4, b"four")
        await until(lambda: copies(world) == [b"four", b"one", b"two"])
        await world.host._adapters.close()
        assert copies(world) == [b"four", b"one", b"two"], "the next host deletes them"

    in_world(test)


def test_a_failed_load_changes_nothing(in_world: InWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: Any) -> None:
        client, given = world.raw(), tmp_path / "given"
        await load(client, tmp_path, 1)
        reply = await load(client, tmp_path, 2, b"wrong")
        assert (reply.error.code, reply.error.message) == ("invalid_weights", f"{given} is wrong")
        reply = await load(client, tmp_path, 1, b"other")
        assert reply.error.code == "invalid_weights"
        assert "version 1 of a is loaded with other weights" in reply.error.message
        assert "remove the model first" in reply.error.message
        assert await load(client, tmp_path, 1) == EngineReady("u1", 1), "the same again"
        missing = WeightUpdate("u", step="load", weight_version=2, path=str(tmp_path / "nowhere"), model="a")
        reply = await told(client, codec.encode(missing))
        assert "no adapter that this host can read" in reply.error.message
        reply = await told(client, codec.encode(WeightUpdate("u", step="begin", weight_version=2, model="a")))
        assert "the step begin is for an engine's own weights" in reply.error.message
        monkeypatch.setattr(hosted_adapters, "PER_SLOT", 1)
        await load(client, tmp_path, 1, model="b")
        reply = await load(client, tmp_path, 1, model="c")
        assert "2 versions of adapters are loaded, the most for its `slots`; remove one" in reply.error.message
        assert world.host._adapters.current == {"a": 1, "b": 1}
        assert copies(world) == [b"one", b"one"]

    in_world(test)


def test_the_base_keeps_its_weights_while_adapters_of_it_are_loaded(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        client, adapters = world.raw(), world.host._adapters
        await load(client, tmp_path, 1)
        for step in ("load", "begin", "set"):
            reply = await told(client, codec.encode(WeightUpdate("u", step=step, weight_version=9, path="/x")))
            assert "adapters of the present weights are loaded (a)" in reply.error.message
        adapters.retire("a", 1)
        reply = await told(client, codec.encode(WeightUpdate("u", step="set", weight_version=9)))
        assert reply == EngineReady("u", 9)
        await until(lambda: copies(world) == [])

    in_world(test)


def test_adapters_are_not_loaded_while_the_base_gets_other_weights(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        client, adapters, gate = world.raw(), world.host._adapters, asyncio.Event()
        await told(client, codec.encode(WeightUpdate("u", step="begin", weight_version=9)))
        reply = await load(client, tmp_path, 1)
        assert "the engine gets new weights now: load adapters afterwards" in reply.error.message
        await told(client, codec.encode(WeightUpdate("u", step="cancel", weight_version=9)))

        async def slow(*_: Any) -> None:
            await gate.wait()

        world.engine.load_adapter = slow
        loading = asyncio.create_task(adapters.load("a", 1, saved(tmp_path / "given", b"one")))
        await asyncio.sleep(0)
        with pytest.raises(EngineFailed, match="adapters of the present weights are being loaded"):
            adapters.check_none()
        gate.set()
        await loading
        assert adapters.current == {"a": 1}

    in_world(test)


@pytest.mark.parametrize("version", [5, 6])
def test_a_new_host_waits_for_the_weights_that_its_adapters_adapt(
    in_world: InWorld, tmp_path: Path, version: int
) -> None:
    async def test(world: Any) -> None:
        folder = world.folder / "others" / "service"
        await world.engine.set_weight_version(5)
        await HostedAdapters(world.engine, folder).load("a", 3, saved(tmp_path / "given", b"a 3"))
        world.engine.loaded.clear()
        await world.engine.set_weight_version(0)
        after = HostedAdapters(world.engine, folder)
        await after.restore()
        after.check_none()
        assert world.engine.loaded == {}
        assert copies(world, "others") == [b"a 3"]
        await world.engine.set_weight_version(version)
        await after.weights_changed()
        assert after.current == ({"a": 3} if version == 5 else {})
        assert copies(world, "others") == ([b"a 3"] if version == 5 else [])

    in_world(test)


def test_a_new_host_loads_what_was_in_service(in_world: InWorld, tmp_path: Path) -> None:
    """As after `kill -9`: nothing was closed, and half a copy is left."""

    async def test(world: Any) -> None:
        folder = world.folder / "others" / "service"
        before = HostedAdapters(world.engine, folder)
        for model, version in (("a", 9), ("a", 3), ("b-1", 2)):
            await before.load(model, version, saved(tmp_path / "given", f"{model} {version}".encode()), keep=(9,))
        saved(folder / "c@1-half", b"half")
        saved(folder.parent / "earlier-service", b"earlier")
        world.engine.loaded.clear()
        after = HostedAdapters(world.engine, folder)
        await after.restore()
        assert after.current == {"a": 3, "b-1": 2}
        assert set(world.engine.loaded) == {("a", 9), ("a", 3), ("b-1", 2)}
        assert copies(world, "others") == [b"a 3", b"a 9", b"b-1 2"]
        assert [each.name for each in folder.parent.iterdir()] == ["service"]
        with after.using("a", 9) as adapter:
            assert adapter == ("a", 9)
        (world.engine.loaded["a", 3] / WEIGHTS).write_bytes(b"wrong")
        last = HostedAdapters(world.engine, folder)
        await last.restore()
        assert last.current == {"a": 9, "b-1": 2}
        for model, version in (("a", 9), ("b-1", 2)):
            last.retire(model, version)
        last.retire("b-1", 2)
        await last.close()
        assert copies(world, "others") == []

    in_world(test)


def test_a_new_host_that_cannot_load_now_loses_nothing(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        folder = world.folder / "others" / "service"
        before = HostedAdapters(world.engine, folder)
        for model in ("a", "b"):
            await before.load(model, 1, saved(tmp_path / "given", model.encode()))

        async def unreachable(*_: Any) -> None:
            raise EngineFailed("its server is away", unreachable=True)

        world.engine.load_adapter = unreachable
        with pytest.raises(EngineFailed, match="away"):
            await HostedAdapters(world.engine, folder).restore()
        del world.engine.load_adapter
        after = HostedAdapters(world.engine, folder)
        await after.restore()
        assert after.current == {"a": 1, "b": 1}

    in_world(test)


def test_a_load_during_the_start_comes_after_what_was_in_service(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        folder, gate = world.folder / "others" / "service", asyncio.Event()
        await HostedAdapters(world.engine, folder).load("a", 1, saved(tmp_path / "given", b"one"))

        async def slow(*_: Any) -> None:
            await gate.wait()

        world.engine.load_adapter = slow
        after = HostedAdapters(world.engine, folder)
        restoring = asyncio.create_task(after.restore())
        await asyncio.sleep(0)
        loading = asyncio.create_task(after.load("a", 2, saved(tmp_path / "given", b"two")))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(restoring, loading)
        assert after.current == {"a": 2}
        await after.close()

    in_world(test)


def test_a_version_that_ends_engines_is_refused(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        folder, given = world.folder / "others" / "service", tmp_path / "given"

        async def dies(*_: Any) -> None:
            raise EngineFailed("out of memory", fatal=True)

        world.engine.load_adapter = dies
        for _ in range(2):
            host = HostedAdapters(world.engine, folder)
            await host.restore()
            with pytest.raises(EngineFailed, match="out of memory"):
                await host.load("a", 1, saved(given, b"one"))
        del world.engine.load_adapter
        last = HostedAdapters(world.engine, folder)
        await last.restore()
        with pytest.raises(InvalidWeights, match="2 engine hosts ended while they loaded version 1 of a"):
            await last.load("a", 1, given)
        assert copies(world, "others") == [b"one", b"one"]
        await last.load("a", 1, saved(given, b"repaired"))
        assert copies(world, "others") == [b"repaired"]

    in_world(test)


def test_a_host_without_a_folder_takes_no_adapters(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        adapters = HostedAdapters(world.engine, None)
        await adapters.restore()
        with pytest.raises(EngineFailed, match="this engine takes no adapters"):
            await adapters.load("a", 1, saved(tmp_path / "given", b"one"))
        with pytest.raises(EngineFailed, match="is not loaded here"), adapters.using("a"):
            pass

    in_world(test)


def test_a_slow_folder_holds_up_its_own_model_alone(
    in_world: InWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: Any) -> None:
        adapters, go, copy = world.host._adapters, threading.Event(), hosted_adapters._copy

        def slow(path: Path, target: Path) -> None:
            if path.name == "slow":
                assert go.wait(10)
            copy(path, target)

        monkeypatch.setattr(hosted_adapters, "_copy", slow)
        first = asyncio.create_task(adapters.load("a", 1, saved(tmp_path / "slow", b"one")))
        await asyncio.sleep(0)
        second = asyncio.create_task(adapters.load("a", 2, saved(tmp_path / "given", b"two")))
        await adapters.load("b", 1, saved(tmp_path / "other", b"b"))
        assert adapters.current == {"b": 1}
        go.set()
        await asyncio.gather(first, second)
        assert adapters.current == {"a": 2, "b": 1}

    in_world(test)


def test_a_refused_load_leaves_nothing_of_its_model(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        update = WeightUpdate("u", "load", 7, str(tmp_path / "missing"), model="a")
        assert (await told(world.raw(), codec.encode(update))).error.code == "invalid_weights"
        gc.collect()  # the error's traceback
        await until(lambda: not world.host._adapters._in_order)

    in_world(test)


def test_a_copy_does_not_fill_the_disk(in_world: InWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: Any) -> None:
        monkeypatch.setattr(hosted_adapters, "FREE_BYTES", 2**62)
        reply = await load(world.raw(), tmp_path, 1)
        assert reply.error.code == "engine_failed"
        assert "are free in" in reply.error.message
        assert copies(world) == []

    in_world(test)


def test_a_copy_ends_at_the_size_that_the_file_had(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        folder = saved(tmp_path / "given", b"one")
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.safetensors").symlink_to("/proc/self/maps")  # a regular file of 0 bytes, and more
        adapters = HostedAdapters(world.engine, world.folder / "x" / "service")
        with pytest.raises(InvalidWeights, match=r"adapter_model\.safetensors changes while it is copied"):
            await adapters.load("a", 1, folder)
        assert copies(world, "x") == []
        with pytest.raises(InvalidWeights, match="no adapter that this host can read: embedded null byte"):
            await adapters.load("a", 1, folder.with_name("a\0b"))

    in_world(test)


def test_a_full_disk_is_not_the_adapters_fault(in_world: InWorld, tmp_path: Path) -> None:
    async def test(world: Any) -> None:
        (world.folder / "file").write_text("")
        adapters = HostedAdapters(world.engine, world.folder / "file" / "x")
        with pytest.raises(EngineFailed, match="no copy of an adapter can be kept"):
            await adapters.load("a", 1, saved(tmp_path / "given", b"one"))
        with pytest.raises(InvalidWeights, match="no adapter that this host can read"):
            await world.host._adapters.load("a", 1, tmp_path / "nowhere")

    in_world(test)
