"""A host gets a version after trouble: old numbers, damaged or locked folders, full disks, lying copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.relay_world import CHUNK, World
from support.weight_versions import KINDS, publish

from prorl_zmq.inference.checkpoint import INDEX
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_folder import version_path

if TYPE_CHECKING:
    from pathlib import Path

    from support.relay_world import Host


def incoming(host: Host, version: int) -> Path:
    return version_path(host.copy.folder / ".weight_sync/incoming", version)


def test_a_trainer_that_resumes_one_version_back(world: World) -> None:
    host = world.host()
    for _ in range(3):
        world.bring(host, world.publish())
    world.published.close()
    world.published = PublishedWeights(world.root, KINDS, threads=1)
    world.written[2] = publish(world.published, world.models[2], 2)
    world.relays[2] = world.trainer.relay(world.written[2].path)
    assert [*world.bring(host, 2)] == ["trainer"]


def test_a_damaged_version_is_repaired(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that died before it used a version has a chunk of zeros, as after a power failure."""
    host, version = world.host(), world.publish()
    with monkeypatch.context() as patch:
        patch.setattr(host.copy, "fetch", None)
        with pytest.raises(TypeError):
            world.bring(host, version)
    (file,) = incoming(host, version).glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - file.stat().st_size % CHUNK - CHUNK)
        opened.write(bytes(CHUNK))
    index = (world.written[version].path / INDEX).stat().st_size
    assert world.bring(host, version) == {"trainer": CHUNK + index}
