"""Checkpoints that may and may not take the place of a model's, without an engine."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from prorl_zmq.errors import InvalidWeights
from prorl_zmq.inference.checkpoint import INDEX, TensorKind, check_checkpoint, index_metadata, read_tensors

if TYPE_CHECKING:
    from pathlib import Path

SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (4, 3), "b.bias": (4,), "c": ()}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.random(shape).astype(np.float32) for name, shape in SHAPES.items()}


def whole(folder: Path, given: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    save_file(given, folder / "model.safetensors")
    return folder


def parts(folder: Path, given: dict[str, np.ndarray]) -> Path:
    """Save each tensor in a file of its own, with an index."""
    folder.mkdir()
    places = {name: f"model-{number}.safetensors" for number, name in enumerate(given)}
    for name, file in places.items():
        save_file({name: given[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return whole(tmp_path / "model", tensors())


@pytest.mark.parametrize("save", [whole, parts])
def test_other_values_of_the_same_tensors(save: object, model: Path, tmp_path: Path) -> None:
    new = save(tmp_path / "new", tensors(1))  # type: ignore[operator]
    check_checkpoint(new, model)
    check_checkpoint(model, new)
    assert read_tensors(new)["a.weight"] == TensorKind("F32", (4, 3))


def test_files_beside_the_index_do_not_count(model: Path, tmp_path: Path) -> None:
    new = parts(tmp_path / "new", tensors(1))
    save_file(tensors(2), new / "consolidated.safetensors")
    check_checkpoint(new, model)


def refused(new: Path, model: Path) -> str:
    with pytest.raises(InvalidWeights) as caught:
        check_checkpoint(new, model)
    assert caught.value.path == str(new)
    return caught.value.message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"c": None}, "lacks tensors that the model has: c"),
        ({"d": np.zeros(2, np.float32)}, "has tensors that the model lacks: d"),
        ({"a.weight": np.zeros((3, 4), np.float32)}, r"a.weight is F32 [3, 4], in the model F32 [4, 3]"),
        ({"b.bias": np.zeros(4, np.float16)}, "b.bias is F16 [4], in the model F32 [4]"),
        ({f"many.{number}": np.zeros(1) for number in range(9)}, "many.0, many.1, many.2 and 6 more"),
    ],
)
@pytest.mark.parametrize("save", [whole, parts])
def test_other_tensors(
    save: object, change: dict[str, np.ndarray | None], word: str, model: Path, tmp_path: Path
) -> None:
    changed = {name: value for name, value in (tensors(1) | change).items() if value is not None}
    assert word in refused(save(tmp_path / "new", changed), model)  # type: ignore[operator]


def test_no_folder(model: Path, tmp_path: Path) -> None:
    assert "not a folder" in refused(tmp_path / "nowhere", model)
    assert "not a folder" in refused(model / "model.safetensors", model)


def test_an_index_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX)
    assert index_metadata(tmp_path) == {}


def test_no_safetensors(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "pytorch_model.bin").touch()
    assert "no *.safetensors" in refused(empty, model)


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
@pytest.mark.parametrize("save", [whole, parts])
def test_file_cut_short(save: object, kept: int, model: Path, tmp_path: Path) -> None:
    new = save(tmp_path / "new", tensors(1))  # type: ignore[operator]
    file = min(new.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:kept])
    assert "not a whole safetensors file" in refused(new, model)


def test_file_of_something_else(model: Path, tmp_path: Path) -> None:
    new = whole(tmp_path / "new", tensors(1))
    (new / "model.safetensors").write_bytes(b"\xff" * 4096)
    assert "not a whole safetensors file" in refused(new, model)


def test_part_that_is_missing(model: Path, tmp_path: Path) -> None:
    new = parts(tmp_path / "new", tensors(1))
    (new / "model-1.safetensors").unlink()
    assert "model-1.safetensors" in refused(new, model)


def test_part_without_its_tensor(model: Path, tmp_path: Path) -> None:
    new = parts(tmp_path / "new", tensors(1))
    (new / "model-1.safetensors").write_bytes((new / "model-0.safetensors").read_bytes())
    assert "b.bias" in refused(new, model)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x"}}', "\xff"]
)
def test_malformed_index(index: str, model: Path, tmp_path: Path) -> None:
    new = parts(tmp_path / "new", tensors(1))
    (new / INDEX).write_bytes(index.encode("latin-1"))
    assert "not an index" in refused(new, model)


@pytest.mark.parametrize("what", ["fifo", "header", "longer", "nested"])
def test_a_file_that_is_none_is_refused_at_once(tmp_path: Path, what: str) -> None:
    """A FIFO stopped the whole process: the library opens files with the interpreter's lock held."""
    model, weights = tmp_path / "model", tmp_path / "new"
    for folder in (model, weights):
        folder.mkdir()
        save_file({"layer": np.zeros(3, np.float32)}, folder / "model.safetensors")
    file = weights / "model.safetensors"
    if what == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif what == "header":
        file.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    elif what == "longer":
        file.write_bytes(file.read_bytes() + b"more")
    else:
        header = b"[" * 100_000
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidWeights, match="not a whole safetensors file"):
        check_checkpoint(weights, model)
