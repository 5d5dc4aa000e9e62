"""A trainer's LoRA on its way to the engines, as a folder of PEFT's."""

from __future__ import annotations

import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.adapters import PeftReference, peft_model
from support.later import Later

from prorl_zmq.errors import ConfigError, EngineFailed, InvalidWeights, NoBackend
from prorl_zmq.examples.trainers.shared.make_model import make
from prorl_zmq.inference.adapters import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    import peft
    import torch
    import transformers

    from prorl_zmq import weights_publisher
else:
    peft, torch, transformers = Later("peft"), Later("torch"), Later("transformers")
    weights_publisher = Later("prorl_zmq.weights_publisher")

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="`make trainers` installs peft"),
    pytest.mark.xdist_group("transformers"),
]
TARGETS = ["q_proj", "v_proj"]
TEXT = [[*range(10, 34)]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    make(folder)
    return folder


def trained(base: Path, **options: Any) -> Any:
    """Return a PEFT model with an adapter that changes what the base says."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS, "init_lora_weights": False, **options}
    with peft_model():
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()


def publisher_of(base: Path, folder: Path, updates: list[Any]) -> Any:
    """Return a publisher whose service notes what it is to load."""

    def update_weights(path: Path, version: int, *, model: str, base: str, **_: Any) -> None:
        updates.append((path, version, f"{model} of {base}"))

    client: Any = SimpleNamespace(update_weights=update_weights)
    return weights_publisher.WeightsPublisher(client, base, folder, model="a", lora=True, base="qwen")


def test_an_adapter_is_published_as_it_is_trained(base: Path, tmp_path: Path) -> None:
    model, updates = trained(base), []
    with torch.inference_mode():
        scores = torch.log_softmax(model(input_ids=torch.tensor(TEXT)[:, :-1]).logits, -1)
    said = scores.gather(2, torch.tensor(TEXT)[:, 1:, None])[..., 0].numpy()
    reference = PeftReference(base)
    assert np.abs(reference.logprobs(None, TEXT, said.shape[1]) - said).max() > 1e-2
    with publisher_of(base, tmp_path / "weights", updates) as publisher:
        published = publisher.publish(model, 3)
        assert np.abs(reference.logprobs(published.path, TEXT, said.shape[1]) - said).max() < 1e-5
        assert published.tensors == 2 * 2 * model.config.num_hidden_layers
        tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        again = publisher.publish(tensors.items(), 4, lora_config=model.peft_config["default"].to_dict())
        for name in (CONFIG, WEIGHTS):
            assert (again.path / name).read_bytes() == (published.path / name).read_bytes()
    assert updates == [(published.path, 3, "a of qwen"), (again.path, 4, "a of qwen")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "DoRA is not supported"),
        ({"bias": "all"}, 'its bias is "all"'),
        ({"target_modules": ["lm_head"]}, "adapters of embeddings and of the output layer are not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_what_engines_cannot_serve_reaches_none(
    base: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    updates: list[Any] = []
    with publisher_of(base, tmp_path / "weights", updates) as publisher, pytest.raises(InvalidWeights, match=words):
        publisher.publish(trained(base, **options), 1)
    assert updates == []
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [".lock"]


def test_wrong_arguments_and_numbers_are_refused(base: Path, tmp_path: Path) -> None:
    model, updates = trained(base), []
    with publisher_of(base, tmp_path / "weights", updates) as publisher:
        with pytest.raises(ConfigError, match="Linear is none"):
            publisher.publish(torch.nn.Linear(2, 2), 1)
        with pytest.raises(ConfigError, match="need lora_config"):
            publisher.publish([], 1)
        next(tensor for name, tensor in model.named_parameters() if "lora_B" in name).data[0, 0] = float("nan")
        with pytest.raises(InvalidWeights, match="holds NaN or infinity"):
            publisher.publish(model, 1)
    assert updates == []
    client: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match="only an adapter"):
        weights_publisher.WeightsPublisher(client, base, tmp_path / "other", base="qwen")


def test_what_waiting_cannot_mend_is_raised_at_once(base: Path, tmp_path: Path) -> None:
    tries: list[int] = []

    def update_weights(_: Path, version: int, **__: Any) -> None:
        tries.append(version)
        raise NoBackend("the adapter a could be of p or q: name its base", final=True)

    client: Any = SimpleNamespace(update_weights=update_weights, backends=SimpleNamespace(list=list))
    with weights_publisher.WeightsPublisher(client, base, tmp_path / "w", model="a", lora=True) as publisher:
        began = time.monotonic()
        with pytest.raises(NoBackend, match="name its base"):
            publisher.publish(trained(base), 2)
        assert time.monotonic() - began < 60
    assert tries == [2]


def test_an_engine_that_fails_while_another_has_the_adapter_stops_nothing(base: Path, tmp_path: Path) -> None:
    def update_weights(*_: Any, **__: Any) -> None:
        raise EngineFailed("it went away")

    backend = SimpleNamespace(name="base", weight_version=2, adapters={"a": (1,)})
    listed = SimpleNamespace(list=lambda: [SimpleNamespace(backend=backend)])
    client: Any = SimpleNamespace(update_weights=update_weights, backends=listed)
    model = trained(base)
    with weights_publisher.WeightsPublisher(client, base, tmp_path / "w", model="a", lora=True) as publisher:
        publisher.publish(model, 1)
        with pytest.raises(EngineFailed, match="it went away"):
            publisher.publish(model, 2, timeout_s=0.5)
