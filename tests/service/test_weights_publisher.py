"""A trainer's tensors on their way to the engines."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

import pytest
from beside import beside
from support.later import Later
from support.waiting import until

from prorl_zmq import EpisodeLimits, Job, RolloutClient, Sampling
from prorl_zmq.errors import Closed, ConfigError, EngineFailed, InvalidWeights, NoBackend, ProrlError, WeightsHeld
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.inference.checkpoint import delta_of, index_metadata, read_tensors
from prorl_zmq.inference.weights import published_weights
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.integrations import slime
from prorl_zmq.service.child import ChildService

if TYPE_CHECKING:
    from collections.abc import Iterator

    import safetensors.torch as tensor_files
    import torch
    import transformers

    from prorl_zmq import weights_publisher

    from .conftest import TestService
else:
    torch, transformers = Later("torch"), Later("transformers")
    tensor_files, weights_publisher = Later("safetensors.torch"), Later("prorl_zmq.weights_publisher")

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="it is of the extra [train]"),
    pytest.mark.xdist_group("transformers"),
]
SHAPES = {"embed.weight": (8, 4), "layer.weight": (4, 4), "layer.bias": (4,)}


def new_model() -> torch.nn.Module:
    """Return a model whose head is its embedding."""
    head, embed = torch.nn.Linear(4, 8, bias=False), torch.nn.Embedding(8, 4)
    head.weight = embed.weight
    return torch.nn.ModuleDict({"embed": embed, "layer": torch.nn.Linear(4, 4), "head": head})


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """What the engines were started with: of another dtype, and without the copy of the tied tensor."""
    model = tmp_path / "model"
    model.mkdir()
    tensor_files.save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}, model / "a.safetensors"
    )
    return model


@pytest.fixture
def service(empty_service: TestService) -> TestService:
    """Brokers without stage processes."""
    empty_service.start_brokers()
    return empty_service


@pytest.fixture
def host(service: TestService, served: Path) -> list[str]:
    """The command line of an engine host."""
    engine = str(Path(__file__).with_name("folder_engine.py"))
    return [engine, service.backend_broker, f"ipc://{service.folder}/engine", str(served)]


@pytest.fixture
def client(service: TestService, host: list[str]) -> Iterator[RolloutClient]:
    """A client of a service with one engine host."""
    with beside(host), service.client(timeout_s=60) as client:
        until(client.backends.list, "the engine host")
        yield client


@pytest.mark.timeout(120)
def test_engines_get_a_modules_weights_as_they_serve_them(
    service: TestService, client: RolloutClient, served: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    model = new_model()
    with weights_publisher.WeightsPublisher(client, served, folder, part_bytes=40) as publisher:
        for step in (1, 2, 5):
            published = publisher.publish(model, step)
        assert published is not None
        assert [one.backend.weight_version for one in client.backends.list()] == [5]
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "weights-00000002", "weights-00000005"]
        files = sorted(published.path.glob("*.safetensors"))
        found = {name: tensor for file in files for name, tensor in tensor_files.load_file(file).items()}
        assert len(files) == 2
        assert found.keys() == SHAPES.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16)), name
        assert (published.tensors, published.size_bytes) == (3, 2 * (32 + 16 + 4))
        assert min(published.gather_s, published.write_s, published.update_s) > 0
        (cost,) = published.engines.values()
        assert cost.read_bytes > published.size_bytes == published.written_bytes
        assert 0 < cost.pause_s <= cost.load_s < published.update_s
        copy = LocalCopy(tmp_path / "copied", served)
        wanted = Content(5, index_metadata(published.path)["weights"])
        copy.fetch(published.path, wanted)
        assert copy.fetch(tmp_path / "away", wanted).read_bytes == 0, "its digest tells it from all other versions"
        with pytest.raises(InvalidWeights, match="has other weights than the trainer published"):
            copy.fetch(published.path, Content(5, "f" * 64))
        with pytest.raises(ConfigError, match="another trainer publishes"):
            weights_publisher.WeightsPublisher(client, served, folder)
        renamed = [(f"policy.{name}", tensor) for name, tensor in model.state_dict().items()]
        publisher.close()
    client.close()  # it holds the weights
    opened: list[RolloutClient] = []

    def connect() -> RolloutClient:
        opened.append(RolloutClient(service.front_door, timeout_s=60))
        return opened[-1]

    with weights_publisher.WeightsPublisher(
        connect, served, folder, rename=lambda name: name.removeprefix("policy.")
    ) as publisher:
        publisher.publish(renamed, 6)
        with RolloutClient(service.front_door) as other:
            other.update_weights(folder / "weights-00000006", 99, take_over=True)
            with pytest.raises(WeightsHeld):
                publisher.publish(renamed, 7)
            other.update_weights(folder / "weights-00000006", 6)
    with pytest.raises(Closed):
        opened[0].status()
    with RolloutClient(service.front_door) as other:
        assert [one.backend.weight_version for one in other.backends.list()] == [6]


@pytest.mark.timeout(300)
def test_a_hundred_versions_by_delta_are_the_trainers_bit_for_bit(
    client: RolloutClient, served: Path, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "weights", tmp_path / "copy"
    torch.manual_seed(0)
    weights = {f"layers.{n}.w": torch.randn(64, 64) for n in range(4)}
    tensor_files.save_file(
        {name: torch.zeros_like(one, dtype=torch.bfloat16) for name, one in weights.items()}, served / "a.safetensors"
    )
    deltas = []
    with weights_publisher.WeightsPublisher(client, served, folder, form="delta") as publisher:
        for version in range(1, 101):
            for one in weights.values():
                one += 0.1 * torch.randn_like(one) * (torch.rand_like(one) < 0.02)
            published = publisher.publish(weights.items(), version)
            assert published is not None
            if published.written_bytes < published.size_bytes:
                deltas.append(published.written_bytes)
            source = copy if delta_of(published.path) else published.path
            files = source.glob("*.safetensors")
            found = {name: tensor for file in files for name, tensor in tensor_files.load_file(file).items()}
            assert found.keys() == weights.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, weights[name].to(torch.bfloat16)), (version, name)
    assert [one.backend.weight_version for one in client.backends.list()] == [100]
    assert 80 < len(deltas) < 99
    assert len([*folder.glob("weight_v*")]) < 20, "old versions are deleted"


def test_a_rejected_delta_is_published_again_in_full(
    client: RolloutClient, served: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, copy = tmp_path / "weights", tmp_path / "copy"
    weights = {"w": torch.zeros(64, 64)}
    tensor_files.save_file({"w": weights["w"].to(torch.bfloat16)}, served / "a.safetensors")
    with weights_publisher.WeightsPublisher(client, served, folder, form="delta") as publisher:
        for version in (1, 2):
            weights["w"][version] += 1
            publisher.publish(weights.items(), version)
        (damaged,) = (folder / "weight_v000002").glob("*.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        shutil.rmtree(copy)
        weights["w"][3] += 1
        published = publisher.publish(weights.items(), 3)
        assert published is not None
        assert published.written_bytes >= published.size_bytes
        assert "weight_v000002" in caplog.text
        assert "weights 3 are published again, in full" in caplog.text
        assert [one.backend.weight_version for one in client.backends.list()] == [3]
        weights["w"][4] += 1
        published = publisher.publish(weights.items(), 4)
        assert published is not None
        assert published.written_bytes < published.size_bytes
    assert [one.backend.weight_version for one in client.backends.list()] == [4]
    (file,) = copy.glob("*.safetensors")
    assert torch.equal(tensor_files.load_file(file)["w"], weights["w"].to(torch.bfloat16))


@pytest.mark.timeout(120)
def test_a_restarted_engine_loads_its_hosts_copy_or_waits_for_the_published_folder(
    service: TestService, host: list[str], served: Path, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "weights", tmp_path / "copy"
    weights = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with service.client(timeout_s=60) as client:

        def status() -> list[tuple[str, int]]:
            return [(one.state, one.backend.weight_version) for one in client.backends.list()]

        with (
            beside(host),
            weights_publisher.WeightsPublisher(client, served, folder, form="delta") as publisher,
        ):
            publisher.publish(weights.items(), 1)
            weights["layer.bias"] *= 2
            publisher.publish(weights.items(), 2)
        folder.rename(tmp_path / "away")
        with beside(host):
            until(lambda: status() == [("ready", 2)], "the host's own copy")
        shutil.rmtree(copy)
        with beside(host):
            until(lambda: status() == [("behind", 0)], "the engine")
            until(lambda: "the next try is in" in client.backends.list()[0].problem, "its load to fail")
            (tmp_path / "away").rename(folder)
            until(lambda: status() == [("ready", 2)], "the next try")
        (file,) = copy.glob("*.safetensors")
        assert torch.equal(tensor_files.load_file(file)["layer.bias"], torch.full((4,), 2.0, dtype=torch.bfloat16))


@pytest.mark.timeout(60)
def test_a_copy_that_cannot_be_written_ends_publish_at_once(
    client: RolloutClient, served: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "copy").touch()
    weights = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with weights_publisher.WeightsPublisher(client, served, tmp_path / "weights", form="delta") as publisher:
        publisher.publish(weights.items(), 1)
        weights["layer.bias"] *= 2
        with pytest.raises(EngineFailed, match=r"Not a directory.*give another `weights_dir`"):
            publisher.publish(weights.items(), 2, timeout_s=600)
    assert [one.backend.weight_version for one in client.backends.list()] == [1]


def test_a_publisher_that_cannot_begin_keeps_nothing_open(
    service: TestService, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    opened: list[RolloutClient] = []

    def connect() -> RolloutClient:
        opened.append(service.client())
        return opened[-1]

    def fail(*_: object) -> None:
        raise OSError("no more files")

    with monkeypatch.context() as patched:
        patched.setattr(published_weights, "PublishedWeights", fail)
        with pytest.raises(OSError, match="no more files"):
            weights_publisher.WeightsPublisher(connect, served, folder, form="delta")
    with pytest.raises(Closed):
        opened[0].status()
    weights_publisher.WeightsPublisher(connect, served, folder, form="delta").close()


@pytest.mark.timeout(120)
def test_what_another_publisher_wrote_under_the_same_number_is_refused(
    client: RolloutClient, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    good = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    write = published_weights.PublishedWeights.write

    def overwritten(versions: published_weights.PublishedWeights, version: int) -> published_weights.Written:
        written = write(versions, version)
        with published_weights.PublishedWeights(folder, read_tensors(served)) as other:
            for name, tensor in good.items():
                other.add(name, (3 * tensor).bfloat16().reshape(-1).view(torch.uint8).numpy())
            write(other, version)
        return written

    with weights_publisher.WeightsPublisher(client, served, folder, form="delta") as publisher:
        publisher.publish(good.items(), 1)
        monkeypatch.setattr(published_weights.PublishedWeights, "write", overwritten)
        with pytest.raises(InvalidWeights, match="another publisher wrote them, or the number was used again"):
            publisher.publish({**good, "layer.bias": 2 * good["layer.bias"]}.items(), 2)
        assert [one.backend.weight_version for one in client.backends.list()] == [1]
        monkeypatch.undo()
        publisher.publish(good.items(), 3)
    assert [one.backend.weight_version for one in client.backends.list()] == [3]


@pytest.mark.timeout(120)
def test_after_weights_that_do_not_fit_a_full_version_follows(
    client: RolloutClient, served: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "weights"
    good = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    bad = {**good, "layer.bias": torch.full((4,), torch.inf)}
    with weights_publisher.WeightsPublisher(client, served, folder, form="delta") as publisher:
        publisher.publish(good.items(), 1)
        with pytest.raises(InvalidWeights, match="not finite numbers as BF16"):
            publisher.publish(bad.items(), 2)
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "weight_v000001"]
        publisher.publish(good.items(), 2)
        publisher.publish({**good, "layer.bias": 2 * good["layer.bias"]}.items(), 3)
    assert [one.backend.weight_version for one in client.backends.list()] == [3]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "weight_v000002", "weight_v000003"]
    for options in ({"form": "half"}, {"form": "delta", "lora": True}):
        with pytest.raises(ConfigError, match="full"):
            weights_publisher.WeightsPublisher(client, served, folder, **options)  # type: ignore[arg-type]


@pytest.mark.timeout(120)
def test_tied_copies_are_told_apart_from_tensors_that_do_not_fit(
    client: RolloutClient, served: Path, tmp_path: Path
) -> None:
    good = {name: torch.ones(shape) for name, shape in SHAPES.items()}

    def gathered(*more: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor is gone with the next one, as where shards are gathered one by one."""
        for name in (*more, *good, *more):
            yield name, good.get(name, good["embed.weight"]).clone()

    with (
        weights_publisher.WeightsPublisher(client, served, tmp_path / "weights") as publisher,
        pytest.raises(InvalidWeights, match=r"does not have: lm_head\.weight"),
    ):
        publisher.publish(gathered("lm_head.weight"), 1)
    (served / "config.json").write_text('{"tie_word_embeddings": true}')
    with weights_publisher.WeightsPublisher(client, served, tmp_path / "weights") as publisher:
        publisher.publish(gathered("lm_head.weight"), 1)
        with pytest.raises(InvalidWeights, match=r"does not have: copy"):
            publisher.publish(gathered("copy"), 2)


@pytest.mark.timeout(120)
def test_a_checkpoint_that_slime_wrote_is_served(
    service: TestService, client: RolloutClient, served: Path, tmp_path: Path
) -> None:
    args = SimpleNamespace(prorl_endpoint=service.front_door)
    slime.update_weights(args, str(shutil.copytree(served, tmp_path / "weight_v000012")), [])
    assert [one.backend.weight_version for one in client.backends.list()] == [12]
    with pytest.raises(ConfigError, match="does not end with a number"):
        slime.update_weights(args, str(tmp_path / "latest"), [])


@pytest.mark.timeout(120)
def test_weights_that_do_not_fit_reach_no_engine(client: RolloutClient, served: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    good = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    wrong = {
        "does not give: layer.bias": [(name, tensor) for name, tensor in good.items() if name != "layer.bias"],
        "does not have: more": [*good.items(), ("more", torch.ones(2))],
        r"shape \[6\], in the served model \[4\]": [*[*good.items()][:2], ("layer.bias", torch.ones(6))],
        "not finite numbers as BF16": [*[*good.items()][:2], ("layer.bias", torch.full((4,), torch.nan))],
        "embed.weight comes twice": [*good.items(), ("embed.weight", good["embed.weight"])],
    }
    with weights_publisher.WeightsPublisher(client, served, folder) as publisher:
        for words, pairs in wrong.items():
            with pytest.raises(InvalidWeights, match=words):
                publisher.publish(pairs, 1)
        assert [path.name for path in folder.iterdir()] == [".lock"]
        assert [one.backend.weight_version for one in client.backends.list()] == [0]
        for version in (-1, "6", 2**31, 1.0):
            with pytest.raises(ConfigError, match=f"from 0 to 2147483647, not {version!r}"):
                publisher.publish(good.items(), version)
        publisher.publish(good.items(), 1)
        client.backends.clear()
        with pytest.raises(NoBackend):
            publisher.publish(good.items(), 2, timeout_s=0)
    with pytest.raises(Closed, match="make another one"):
        publisher.publish(good.items(), 3)
    for keep, other in ((0, client), (2, None)):
        with pytest.raises(ConfigError):
            weights_publisher.WeightsPublisher(other, served, folder, keep=keep)
    with pytest.raises(ProrlError, match=r"no \*\.safetensors"):
        weights_publisher.WeightsPublisher(client, tmp_path, folder)


@pytest.mark.proof
@pytest.mark.timeout(180)
def test_all_ranks_gather_and_the_first_writes(
    service: TestService, client: RolloutClient, served: Path, tmp_path: Path
) -> None:
    script = str(Path(__file__).with_name("sharded_trainer.py"))
    launch = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, script, service.front_door, str(served), str(tmp_path / "weights")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "invalid_weights", "invalid_weights", "took part", "wrote"]
    assert [one.backend.weight_version for one in client.backends.list()] == [3]


@pytest.mark.proof
@pytest.mark.parametrize("form", ["full", "delta"])
@pytest.mark.timeout(180)
def test_a_trainers_step_is_in_the_next_jobs_tokens_bit_for_bit(form: Literal["full", "delta"], tmp_path: Path) -> None:
    """Through `prorl serve` with the transformers engine: the log-probs are those of the trainer's own weights."""
    served = tmp_path / "model"
    make(served)
    trained = transformers.AutoModelForCausalLM.from_pretrained(served)
    topology = f'sandbox = {{kind = "process"}}\nbackends = [{{kind = "transformers", model = "{served}"}}]\n'
    job = Job(
        task="math",
        instance={"problem": "How many?", "ground_truth": "42"},
        sampling=Sampling(max_tokens=24),
        episode=EpisodeLimits(max_turns=1),
    )
    with (
        tempfile.TemporaryDirectory(prefix="prorl-t-") as folder,
        ChildService(Path(folder), topology) as service,
        RolloutClient(service.front_door, timeout_s=90) as client,
    ):
        service.wait_ready(client)
        publisher = weights_publisher.WeightsPublisher(client, served, tmp_path / "weights", form=form)
        share = 0.02 if form == "delta" else 1.0
        changes = [0.02 * torch.randn_like(one) * (torch.rand_like(one) < share) for one in trained.parameters()]
        for step in range(4):
            if step:
                with torch.no_grad():
                    for parameter, change in zip(trained.parameters(), changes, strict=True):
                        parameter += -change if step == 3 else change
                published = publisher.publish(trained, step)
                assert published is not None
                deltas = form == "delta" and step > 1
                (file,) = (Path(service.run_dir, "weights/policy") if deltas else published.path).glob("*.safetensors")
                pushed = tensor_files.load_file(file)
                assert all(torch.equal(pushed[name], value) for name, value in trained.state_dict().items())
            client.submit([job])
            (one,) = client.stream(timeout_s=60)
            assert one.versions == (step,)
            tokens = torch.from_numpy(one.token_ids.astype("int64"))
            with torch.inference_mode():
                scores = torch.log_softmax(trained(tokens[None]).logits[0, :-1].float(), dim=-1)
            ours = scores.gather(1, tokens[1:, None])[:, 0].numpy()
            mask = one.loss_mask[1:]
            assert abs(ours[mask] - one.logprobs[1:][mask]).max() < 1e-4
        publisher.close()
