"""A trainer whose folder no engine host sees: versions come by the relay, also to a host that comes too late."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from beside import beside
from support.later import Later
from support.waiting import until

from prorl_zmq.errors import ConfigError

if TYPE_CHECKING:
    import safetensors.torch as tensor_files
    import torch

    from prorl_zmq import RolloutClient, weights_publisher
    from prorl_zmq.wire.messages.relay import CopyState

    from .conftest import TestService
else:
    torch, tensor_files = Later("torch"), Later("safetensors.torch")
    weights_publisher = Later("prorl_zmq.weights_publisher")

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="it is of the extra [train]"),
    pytest.mark.xdist_group("transformers"),
]
HERE = Path(__file__).parent


class Elsewhere:
    """A client of a trainer on another machine: hosts do not see the paths that it names."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self.backends = client.backends

    def update_weights(self, path: Path, *arguments: Any, **options: Any) -> Any:
        return self._client.update_weights(Path("/elsewhere") / path.name, *arguments, **options)


def copies(client: RolloutClient) -> dict[str, CopyState]:
    return {one.backend.backend_id: one.copy for one in client.backends.list() if one.copy is not None}


@pytest.mark.timeout(120)
def test_versions_reach_hosts_that_do_not_see_the_folder(empty_service: TestService, tmp_path: Path) -> None:
    served = tmp_path / "model"
    served.mkdir()
    tensor_files.save_file({"w": torch.zeros(4000, dtype=torch.bfloat16)}, served / "a.safetensors")
    empty_service.start_brokers()
    folder = empty_service.folder
    with ExitStack() as stack:
        client = stack.enter_context(empty_service.client(timeout_s=60))

        def host(name: str) -> None:
            place = [empty_service.backend_broker, f"ipc://{folder}/{name}.s", str(served)]
            stack.enter_context(beside([str(HERE / "folder_engine.py"), *place, name, str(folder / name)]))

        for name in ("a", "b", "c"):
            host(name)
        until(lambda: len(copies(client)) == 3, "three hosts")
        about: dict[str, Any] = {"form": "delta", "relay": f"ipc://{folder}/t.w"}
        elsewhere: Any = Elsewhere(client)
        with weights_publisher.WeightsPublisher(elsewhere, served, tmp_path / "w", **about) as publisher:
            generator = torch.Generator().manual_seed(0)
            for version in (1, 2, 3):
                weights = torch.randn(4000, generator=generator).to(torch.bfloat16)
                published = publisher.publish([("w", weights)], version)
                assert published is not None
                assert {*published.engines} == {"a", "b", "c"}
                assert all(times.read_bytes > 0 for times in published.engines.values())
                until(lambda: {one.version for one in copies(client).values()} == {version}, "heartbeats")  # noqa: B023
                assert {name: [*one.fed_by] for name, one in copies(client).items()} == {
                    "a": ["trainer"],
                    "b": ["trainer"],
                    "c": ["a"],
                }
        host("late")
        until(lambda: "late" in copies(client) and copies(client)["late"].version == 3, "the late host")
        assert {*copies(client)["late"].fed_by} <= {"a", "b", "c"}
        (late,) = (one for one in client.backends.list() if one.backend.backend_id == "late")
        assert (late.backend.weight_version, late.state) == (3, "ready")
        for name in ("a", "late"):
            (file,) = (folder / name).glob("*.safetensors")
            assert torch.equal(tensor_files.load_file(file)["w"], weights)


def test_only_deltas_have_a_relay(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="relay is for form='delta'"):
        weights_publisher.WeightsPublisher(None, tmp_path, tmp_path / "w", relay="tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match=r"adapters .* have no relay"):
        weights_publisher.WeightsPublisher(None, tmp_path, tmp_path / "w", relay="tcp://127.0.0.1:*", lora=True)
