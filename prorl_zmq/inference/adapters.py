"""Checks the folder of a PEFT LoRA adapter against the weights that it is for, before an engine reads the folder.

An engine that reads a wrong adapter may die, or serve a part of it. So an adapter must be a plain LoRA of linear layers
whose weights are in the base's safetensors files under their own names, complete, of the right shapes, and finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from ..errors import EngineFailed, InvalidWeights
from ..system.files import open_regular
from .checkpoint import read_header, read_tensors, some_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from .checkpoint import Entry, TensorKind

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG_LIMIT_BYTES = 2**20
PREFIX = "base_model.model."
"""PEFT's, of the names of all tensors."""
PARTS = ("lora_A", "lora_B")
PLAIN_STARTS = {True, False, None, "gaussian", "eva", "orthogonal", "mica"}
"""Values of `init_lora_weights` that leave the base's weights as they are."""
NOT_LINEAR = {"lm_head", "embed_tokens"}
"""Adapters of the output layer and the embeddings: engines support them in part, or ignore them."""
EXPONENTS = {"F32": (np.uint32, 0x7F80_0000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}
"""By type, an integer of its size and the exponent's bits, which are all set in NaN and infinity."""
CHUNK_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter."""

    rank: int
    alpha: float
    """The product of the two matrices is scaled by `alpha / rank`."""
    rank_stabilized: bool
    """It is scaled by `alpha / sqrt(rank)`."""
    modules: tuple[str, ...]
    """The adapted linear layers, by their full names in the base model."""


class _Config(msgspec.Struct):
    """What `adapter_config.json` says that an engine must know; other fields concern training."""

    peft_type: str
    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: float
    target_modules: str | list[str]
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: Any = True
    layers_to_transform: int | list[int] | None = None
    exclude_modules: str | list[str] | None = None
    modules_to_save: Any = None
    target_parameters: Any = None
    use_dora: Any = False
    lora_bias: Any = False
    layer_replication: Any = None
    rank_pattern: Any = None
    alpha_pattern: Any = None
    use_qalora: Any = False
    use_bdlora: Any = None
    alora_invocation_tokens: Any = None
    trainable_token_indices: Any = None


REFUSED = {
    "modules_to_save": "whole layers beside the adapter would have to be served too",
    "target_parameters": "the layout of adapted experts is not in the file, so they cannot be served reliably",
    "use_dora": "DoRA is not supported",
    "lora_bias": "biases are not served",
    "layer_replication": "it changes the base model",
    "rank_pattern": "one rank must hold for all layers",
    "alpha_pattern": "one alpha must hold for all layers",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "trainable_token_indices": "trained embeddings are not supported",
}
"""Fields of the configuration that must be empty, and why."""


def not_loaded(adapter: tuple[str, int]) -> EngineFailed:
    """Return the refusal of a request with an adapter, a model and a version, that the engine has not loaded."""
    model, version = adapter
    return EngineFailed(f"version {version} of the adapter {model} is not loaded", not_loaded=True)


def takes_none() -> EngineFailed:
    """Return the refusal of an engine without slots to load an adapter."""
    return EngineFailed("this engine takes no adapters: start it with the option lora", refused=True)


def check_adapter(path: Path, like: Path | None, rank: int) -> Adapter:
    """Check that the folder `path` has an adapter of the weights in the folder `like`.

    Args:
        path: holds `adapter_config.json` and `adapter_model.safetensors`.
        like: of the base model; None: it is not on this machine, so names and shapes are checked only among themselves.
        rank: the largest that the engine takes.

    Raises:
        InvalidWeights: a file is missing or not whole; it is no plain LoRA, or of a larger rank; its layers are not
            those that it names, or not the base's; or a number is NaN or infinite.
    """
    try:
        if not path.is_dir():
            raise ValueError("it is not a folder that this host can see")
        config = _read_config(path)
        if config.r > rank:
            raise ValueError(f"its rank is {config.r}; this engine takes adapters up to {rank}")
        offset, entries, _ = read_header(path / WEIGHTS)
        base = None if like is None else read_tensors(like)
        modules = _check_shapes(entries, config, base)
        if base is not None:
            _check_complete(modules, config, base)
        _check_finite(path, offset, entries)
    except (ValueError, OSError) as error:
        raise InvalidWeights(f"{path} is not an adapter that can be served: {error}", path=str(path)) from error
    return Adapter(config.r, config.lora_alpha, config.use_rslora, tuple(sorted(modules)))


def _read_config(path: Path) -> _Config:
    try:
        with open(path / CONFIG, "rb", opener=open_regular) as file:
            config = msgspec.json.decode(file.read(CONFIG_LIMIT_BYTES), type=_Config)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{CONFIG}: {error}") from error
    if config.peft_type != "LORA":
        raise ValueError(f"its peft_type is {config.peft_type}; only LORA is supported")
    if not 0 < config.lora_alpha < math.inf:
        raise ValueError(f"its lora_alpha is {config.lora_alpha}; it must be above 0")
    if config.bias != "none":
        raise ValueError(f'its bias is "{config.bias}"; it must be "none", because biases are not served')
    start = config.init_lora_weights
    if not isinstance(start, str | bool | None) or (start.lower() if isinstance(start, str) else start) not in (
        PLAIN_STARTS
    ):
        raise ValueError(
            f"its init_lora_weights is {start!r}, which changes the base's weights; convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    for name, reason in REFUSED.items():
        if getattr(config, name):
            raise ValueError(f"it has {name}: {reason}")
    return config


def _check_shapes(
    entries: Mapping[str, Entry], config: _Config, base: Mapping[str, TensorKind] | None
) -> Collection[str]:
    """Return the modules that have both matrices.

    Raises:
        ValueError: a tensor is something else, or has another shape than the rank and the base give it.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in entries.items():
        module, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not name.startswith(PREFIX) or not name.endswith(".weight") or part not in PARTS or not module:
            raise ValueError(f"its tensor {name} is neither lora_A nor lora_B of a linear layer")
        steps = module.split(".")
        if steps[-1] in NOT_LINEAR:
            raise ValueError(f"it adapts {module}; adapters of embeddings and of the output layer are not supported")
        if "experts" in steps:
            raise ValueError(f"it adapts {module}: {REFUSED['target_parameters']}")
        if entry.dtype not in EXPONENTS:
            raise ValueError(f"its tensor {name} is {entry.dtype}; there are {', '.join(EXPONENTS)}")
        found.setdefault(module, {})[part] = entry.shape
    if not found:
        raise ValueError("it has no tensors")
    for module, parts in found.items():
        if len(parts) != len(PARTS):
            raise ValueError(f"it lacks {PARTS[PARTS[0] in parts]} of {module}")
        a, b = (parts[part] for part in PARTS)
        if len(a) != 2 or len(b) != 2 or a[0] != config.r or b[1] != config.r:
            raise ValueError(f"the matrices of {module} are {list(a)} and {list(b)}, not of rank {config.r}")
        if base is None:
            continue
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise ValueError(f"it adapts {module}, which the base model does not have")
        if weight.shape != (b[0], a[1]):
            raise ValueError(
                f"it adapts {module} as {[b[0], a[1]]}; in the base model that is {list(weight.shape)}: is it of this "
                "base?"
            )
    return found.keys()


def _check_complete(modules: Collection[str], config: _Config, base: Mapping[str, TensorKind]) -> None:
    """Raise `ValueError` unless the adapter has all modules that its configuration names, which may be a pattern."""
    if isinstance(config.target_modules, str):
        return
    names = [
        name.removesuffix(".weight")
        for name, kind in base.items()
        if len(kind.shape) == 2 and "experts" not in name.split(".")
    ]
    missing: set[str] = set()
    for target in config.target_modules:
        named = {name for name in names if name == target or name.endswith(f".{target}")}
        if not named:
            raise ValueError(f"its target module {target} is not in the base model")
        missing |= named - set(modules)
    if missing and config.layers_to_transform is None and not config.exclude_modules:
        raise ValueError(f"it lacks layers that its target_modules name: {some_names(missing)}")


def _check_finite(path: Path, offset: int, entries: Mapping[str, Entry]) -> None:
    with open(path / WEIGHTS, "rb", opener=open_regular) as file:
        for name, entry in entries.items():
            kind, exponent = EXPONENTS[entry.dtype]
            begin, end = entry.data_offsets
            if end - begin != math.prod(entry.shape) * np.dtype(kind).itemsize:
                raise ValueError(f"{WEIGHTS} is not whole: {name} has {end - begin} bytes")
            file.seek(offset + begin)
            for at in range(begin, end, CHUNK_BYTES):
                bits = np.frombuffer(file.read(min(CHUNK_BYTES, end - at)), kind)
                if bool(np.any(bits & exponent == exponent)):
                    raise ValueError(f"its tensor {name} holds NaN or infinity")
