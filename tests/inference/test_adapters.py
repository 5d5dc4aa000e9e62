"""Adapters that may and may not be served on a base model, without an engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.adapters import BASE, matrices, small_adapter, small_base

from prorl_zmq.errors import InvalidWeights
from prorl_zmq.inference.adapters import CONFIG, PREFIX, WEIGHTS, Adapter, check_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST = f"{PREFIX}layers.0.q_proj."


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return small_base(tmp_path / "base")


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"init_lora_weights": "Gaussian", "lora_dropout": 0.1, "task_type": "CAUSAL_LM"},
        {"target_modules": "all-linear", "modules_to_save": None, "rank_pattern": {}},
        {"target_modules": ["layers.0.q_proj", "layers.1.q_proj", "v_proj"], "lora_alpha": 0.5},
    ],
)
def test_a_plain_adapter(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    path = small_adapter(tmp_path / "a", **config)
    scaled = config.get("lora_alpha", 4), config.get("use_rslora", False)
    expected = Adapter(2, *scaled, tuple(sorted(BASE)))
    assert check_adapter(path, base, 2) == check_adapter(path, None, 8) == expected


def test_some_layers_only(base: Path, tmp_path: Path) -> None:
    """Layers are missing on purpose only where the configuration says so."""
    some = {name: value for name, value in matrices().items() if ".layers.0." in name or "layers.0" in name}
    assert len(some) == 4
    for config in ({"layers_to_transform": 0}, {"exclude_modules": "layers.1.*"}, {"target_modules": r".*\.0\..*"}):
        path = small_adapter(tmp_path / "some", some, **config)
        assert check_adapter(path, base, 2).modules == ("layers.0.q_proj", "layers.0.v_proj")
    path = small_adapter(tmp_path / "some", some)
    with pytest.raises(InvalidWeights, match=r"lacks layers .* layers\.1\.q_proj, layers\.1\.v_proj"):
        check_adapter(path, base, 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"r": 0}, r"adapter_config.json: .*`\$.r`"),
        ({"r": "many"}, "adapter_config.json"),
        ({"r": 4}, r"matrices of layers.* are \[2, 4\] and \[\d, 2\], not of rank 4"),
        ({"r": 9}, "its rank is 9; this engine takes adapters up to 8"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"bias": "lora_only"}, 'its bias is "lora_only"'),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "target module o_proj is not in the base model"),
        ({"modules_to_save": ["lm_head"]}, "it has modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "it has target_parameters"),
        ({"use_dora": True}, "it has use_dora"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "it has layer_replication"),
        ({"rank_pattern": {"q_proj": 4}}, "it has rank_pattern"),
        ({"trainable_token_indices": [3]}, "it has trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga', which changes"),
        ({"init_lora_weights": ["x"]}, "init_lora_weights"),
    ],
)
def test_a_wrong_configuration(config: dict[str, Any], words: str, base: Path, tmp_path: Path) -> None:
    path = small_adapter(tmp_path / "wrong", **config)
    with pytest.raises(InvalidWeights, match=words) as caught:
        check_adapter(path, base, 8)
    assert caught.value.path == str(path)
    assert str(path) in caught.value.message


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in matrices().items() if key != name}


def with_value(value: float, kind: str) -> dict[str, Any]:
    tensors = {name: array.astype(kind) for name, array in matrices().items()}
    tensors[f"{FIRST}lora_B.weight"][-1, -1] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no tensors"),
        (without(f"{FIRST}lora_B.weight"), r"lacks lora_B of layers\.0\.q_proj"),
        (without(f"{FIRST}lora_A.weight"), r"lacks lora_A of layers\.0\.q_proj"),
        ({**matrices(), f"{FIRST}lora_B.bias": np.ones(6, np.float32)}, "neither lora_A nor lora_B"),
        ({**matrices(), "layers.0.q_proj.lora_A.weight": np.ones((2, 4), np.float32)}, "neither lora_A nor lora_B"),
        ({**matrices(), f"{PREFIX}lm_head.lora_A.weight": np.ones((2, 4), np.float32)}, "it adapts lm_head"),
        ({**matrices(), f"{PREFIX}embed_tokens.lora_embedding_A": np.ones((2, 9), np.float32)}, "neither lora_A"),
        (
            {**matrices(), f"{PREFIX}mlp.experts.0.up.lora_A.weight": np.ones((2, 4), np.float32)},
            r"experts\.0\.up: the",
        ),
        (
            {**matrices(), f"{FIRST}lora_A.weight": np.ones((2, 5), np.float32)},
            r"\[6, 5\]; in the base model .*\[6, 4\]",
        ),
        ({**matrices(), f"{FIRST}lora_A.weight": np.ones((2, 4), np.int32)}, "is I32; there are F32, BF16, F16"),
        (
            {
                **matrices(),
                f"{PREFIX}layers.7.q_proj.lora_A.weight": np.ones((2, 4), np.float32),
                f"{PREFIX}layers.7.q_proj.lora_B.weight": np.ones((6, 2), np.float32),
            },
            r"adapts layers\.7\.q_proj, which the base model does not have",
        ),
        (with_value(np.nan, "float32"), "q_proj.lora_B.weight holds NaN or infinity"),
        (with_value(-np.inf, "float16"), "q_proj.lora_B.weight holds NaN or infinity"),
    ],
)
def test_wrong_tensors(tensors: dict[str, Any], words: str, base: Path, tmp_path: Path) -> None:
    path = small_adapter(tmp_path / "wrong", tensors)
    with pytest.raises(InvalidWeights, match=words):
        check_adapter(path, base, 8)


def test_the_largest_finite_numbers_pass(base: Path, tmp_path: Path) -> None:
    for kind in ("float32", "float16"):
        tensors = with_value(float(np.finfo(kind).max), kind)
        assert check_adapter(small_adapter(tmp_path / "large", tensors), base, 2).rank == 2


def cut(path: Path) -> None:
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size - 1)


def stretched(path: Path) -> None:
    """Let a tensor claim fewer numbers than it has bytes."""
    file = path / WEIGHTS
    content = file.read_bytes()
    shape = b'"shape":[2,4]'
    assert shape in content
    file.write_bytes(content.replace(shape, b'"shape":[4,2]'))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "not a whole safetensors file"),
        (lambda path: (path / WEIGHTS).unlink(), "adapter_model.safetensors"),
        (lambda path: (path / CONFIG).unlink(), "adapter_config.json"),
        (lambda path: (path / CONFIG).write_text("{"), "adapter_config.json"),
        (lambda path: (path / CONFIG).write_text("[]"), "adapter_config.json"),
        (lambda path: (path / CONFIG).write_text('{"peft_type": "LORA"}'), "missing required field"),
        (stretched, "rank 2"),
        (lambda path: ((path / WEIGHTS).unlink(), os.mkfifo(path / WEIGHTS)), "not a regular file"),
    ],
)
def test_a_spoiled_folder(spoil: Callable[[Path], object], words: str, base: Path, tmp_path: Path) -> None:
    path = small_adapter(tmp_path / "spoiled")
    spoil(path)
    with pytest.raises(InvalidWeights, match=words):
        check_adapter(path, base, 2)


def test_no_folder(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidWeights, match="it is not a folder that this host can see"):
        check_adapter(tmp_path / "nowhere", base, 2)
