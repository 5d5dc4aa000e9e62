"""Versions of weights: what a delta costs a trainer and an engine host, in bytes and in CPU seconds of one thread.

A model of bfloat16 tensors changes from version to version as AdamW with a learning rate of 1e-6 changes one: 1.2 % of
the elements move by one unit of their last place. The trainer's side writes each version (`PublishedWeights`), a host
brings its copy to it (`LocalCopy`), and slime's way of doing both, of whole tensors, does the same work in the same
turn. Rates are bytes of full weights per CPU second of the one thread, the best of the turns, since other load on the
machine makes them lower only. 100 versions of a small model follow, each compared with the trainer's tensors; then the
relay to eight hosts. With PyTorch, also the deltas of a small Llama that AdamW trains, and the load of a host's copy by
an engine. With vLLM, its pause for that load (`weights_vllm.py`): the median of the ratios to a load of the same
tensors from memory, in turns.
"""

from __future__ import annotations

import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
import zstandard
from engines import WITHOUT, Engines, vllm_python
from harness import Incomplete, Row, main
from weights_relay import relay

from prorl_zmq.inference.checkpoint import TensorKind
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.inference.weights.version_folder import read_version, version_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Model = dict[str, NDArray[np.uint16]]

SHARE = 0.0117
ENCODE_GB_S, APPLY_GB_S, BYTES_SHARE = 0.6, 1.5, 0.02
SLIME = "slime's way"
SLIME_CHUNK = 2 << 20
VERSIONS = 100
VLLM_VERSIONS, VLLM_LOADS, VLLM_LIMIT_S = 2, 8, 3600.0
PAUSE_RATIO = 1.2
MEMORY = "vLLM's load of the same tensors from memory"


def model(tensors: int, elements: int) -> Model:
    """Make weights of a standard deviation of 0.02."""
    random = np.random.default_rng(0)
    return {
        f"layers.{number}.weight": (random.normal(0, 0.02, elements).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        for number in range(tensors)
    }


def train(weights: Model, seed: int) -> None:
    """Move a share of the elements by one unit in the last place."""
    random = np.random.default_rng(seed)
    for data in weights.values():
        at = np.flatnonzero(random.random(len(data), np.float32) < SHARE)
        data[at] += random.choice(np.array([1, 0xFFFF], np.uint16), len(at))


def kinds(weights: Model) -> dict[str, TensorKind]:
    return {name: TensorKind("BF16", (len(data),)) for name, data in weights.items()}


def publish(published: PublishedWeights, weights: Model, version: int) -> float:
    """Write a version; return the CPU seconds of encoding it."""
    for name, data in weights.items():
        published.add(name, data.view(np.uint8))
    return published.write(version).encode_s


def slime_encode(weights: Model, kept: Model) -> tuple[float, dict[str, tuple[bytes, str]]]:
    """Encode as slime does (`update_weight_from_disk_delta.py`); return the CPU seconds and the frames."""
    frames = {}
    began = time.thread_time()
    for name, data in weights.items():
        new = data.view(np.uint8).copy()
        difference = new ^ kept[name].view(np.uint8)
        if np.count_nonzero(difference):
            frames[name] = (zstandard.ZstdCompressor(level=1).compress(difference), xxhash.xxh3_128(new).hexdigest())
        kept[name] = new.view(np.uint16)
    return time.thread_time() - began, frames


def slime_apply(frames: dict[str, tuple[bytes, str]], folder: Path) -> float:
    """Apply to mapped files as slime's engine does (`local_checkpoint.py`); return the CPU seconds."""
    began = time.thread_time()
    for name, (frame, wanted) in frames.items():
        region = np.memmap(folder / name, np.uint8, "r+")
        hasher = xxhash.xxh3_128()
        reader = zstandard.ZstdDecompressor().stream_reader(frame)
        at = 0
        while block := reader.read(SLIME_CHUNK):
            piece = np.frombuffer(block, np.uint8)
            region[at : at + len(piece)] ^= piece
            hasher.update(region[at : at + len(piece)])
            at += len(piece)
        assert hasher.hexdigest() == wanted
    return time.thread_time() - began


def speeds(turns: int, tensors: int, elements: int) -> list[Row]:
    weights = model(tensors, elements)
    full = 2 * tensors * elements
    encode: list[tuple[float, float]] = []
    apply: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="prorl-bench-") as name,
        PublishedWeights(Path(name) / "root", kinds(weights), threads=1) as published,
    ):
        root, others = Path(name) / "root", Path(name) / "others"
        copy = LocalCopy(Path(name) / "copy", None, threads=1)
        kept = {tensor: data.copy() for tensor, data in weights.items()}
        others.mkdir()
        for tensor, data in weights.items():
            data.tofile(others / tensor)
        publish(published, weights, 1)
        began = time.process_time()
        copy.fetch(version_path(root, 1), Content(1))
        first = time.process_time() - began
        for version in range(2, turns + 2):
            train(weights, version)
            ours = publish(published, weights, version)
            theirs, frames = slime_encode(weights, kept)
            encode.append((ours, theirs))
            began = time.process_time()
            done = copy.fetch(version_path(root, version), Content(version))
            apply.append((time.process_time() - began, slime_apply(frames, others)))
    rows = []
    for what, pairs, target in (("encode", encode, ENCODE_GB_S), ("apply", apply, APPLY_GB_S)):
        ours, theirs = (full / min(side) / 1e9 for side in zip(*pairs, strict=True))
        promise = f"at least {target:g}"
        rows.append(Row(f"{what} a delta", ours, "GB/s and thread", SLIME, ours / theirs, promise, ours >= target))
    share = done.read_bytes / full
    rows.append(Row("bytes of a delta", 100 * share, "% of full", target="at most 2", holds=share <= BYTES_SHARE))
    rows.append(Row("first copy of a full version", full / first / 1e9, "GB/s and thread"))
    return rows


def chain(versions: int) -> list[Row]:
    weights = model(8, 20_000)
    unequal, read_bytes = 0, 0
    with (
        tempfile.TemporaryDirectory(prefix="prorl-bench-") as name,
        PublishedWeights(Path(name) / "root", kinds(weights), threads=1) as published,
    ):
        copy = LocalCopy(Path(name) / "copy", None, threads=1)
        for version in range(1, versions + 1):
            publish(published, weights, version)
            read_bytes += copy.fetch(version_path(Path(name) / "root", version), Content(version)).read_bytes
            with copy.reading(Content(version)) as folder:
                for tensor, place in read_version(folder).tensors.items():
                    content = (folder / place.file).read_bytes()[place.at : place.at + place.length]
                    unequal += content != weights[tensor].tobytes()
            published.prune(version, ())
            train(weights, version)
    full = 2 * 8 * 20_000 * versions
    return [
        Row(f"tensors of {versions} versions that differ", unequal, "tensors", target="0", holds=unequal == 0),
        Row(f"read for {versions} versions", 100 * read_bytes / full, "% of full"),
    ]


def vllm_rows(others: list[Row]) -> list[Row]:
    """Measure the pauses of a real vLLM.

    Raises:
        Incomplete: there is no vLLM; it has the other rows.
    """
    python = vllm_python()
    if python is None:
        raise Incomplete(WITHOUT, others)
    script = Path(__file__).with_name("weights_vllm.py")
    with Engines(python) as engines:
        arguments = (engines.model, engines.folder / "weights", VLLM_VERSIONS, VLLM_LOADS)
        said = engines.output(str(script), *map(str, arguments), timeout_s=VLLM_LIMIT_S)
    found = json.loads(said.splitlines()[-1])
    rows = []
    for form, loads in found.items():
        pause, ratio = median(loads, "pause_s"), median(loads, "pause_s", "memory_s")
        name, target = f"pause of a real vLLM for the host's copy of a {form}", f"at most {PAUSE_RATIO:g}×"
        rows.append(Row(name, 1000 * pause, "ms", MEMORY, ratio, target, ratio <= PAUSE_RATIO))
        cpu, ratio = median(loads, "cpu_s"), median(loads, "cpu_s", "memory_cpu_s")
        rows.append(Row(f"CPU of its worker meanwhile, {form}", cpu, "CPU s", MEMORY, ratio))
    every = [load for loads in found.values() for load in loads]
    return [*rows, Row("its pause without a load", 1000 * median(every, "empty_pause_s"), "ms")]


def median(loads: list[dict[str, float]], name: str, below: str = "") -> float:
    """Return the median of a figure, or of its ratio to another one."""
    return float(np.median([load[name] / (load[below] if below else 1.0) for load in loads]))


def measure(quick: bool) -> list[Row]:
    rows = speeds(3, 4, 2**22) + chain(20) if quick else speeds(10, 8, 2**24) + chain(VERSIONS)
    rows += relay(quick=quick)
    if find_spec("torch") is None:
        raise Incomplete("PyTorch is not installed: make .venv/.train", rows)
    from weights_real import PRETRAINING_STEPS, pauses, snapshots

    if quick:
        return rows + snapshots(7, 5, 2) + pauses(2, 1)
    rows += snapshots(12, PRETRAINING_STEPS, 8) + pauses(5, 4)
    return rows + vllm_rows(rows)


if __name__ == "__main__":
    main("weights", "deltas of weights: bytes, and CPU of trainer and engine host", measure)
