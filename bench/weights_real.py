"""Deltas of a model that AdamW trains, and what a `transformers` engine's load of a host's copy costs.

Adam's steps are largest at first, until its averages settle. A step of AdamW at one rate changes fewer elements of
larger weights, so the model is first trained on text, until it predicts more than the frequencies of bytes
(`PRETRAINING_STEPS`; loss 2.5). The share depends little on the length: after 40, 150 and 400 steps, the median weight
was 0.0141, 0.0145 and 0.0160, the first delta 4.3, 4.6 and 4.3 %, and the mean of the deltas 6 to 12 was 1.73, 1.83 and
1.68 % of the full bytes (three draws each, at most 0.12 % apart).

The engine reads the copy while it generates, and pauses to exchange its model; vLLM loads in the pause
(`weights_vllm.py`).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from harness import Row
from transformers import LlamaConfig, LlamaForCausalLM

from prorl_zmq.inference.checkpoint import TensorKind, read_tensors
from prorl_zmq.inference.hosting.engine_updates import EngineUpdates
from prorl_zmq.inference.transformers_engine import TransformersEngine
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire.messages.backends import ChatSettings

if TYPE_CHECKING:
    from prorl_zmq.inference.weights.published_weights import Written

RATE, PRETRAINING_RATE = 1e-6, 1e-3
PRETRAINING_STEPS = 400
SEQUENCES, TOKENS = 8, 32
FIRST_SHARE, LATER_SHARE, LATER = 0.05, 0.02, 5
PAUSE_RATIO = 1.2
TEXTS = Path(__file__).parents[1] / "docs"


def llama(hidden: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def publish(published: PublishedWeights, model: LlamaForCausalLM, version: int) -> Written:
    state = {name: one.detach().bfloat16().contiguous() for name, one in model.state_dict().items()}
    for name, tensor in state.items():
        published.add(name, tensor.reshape(-1).view(torch.uint8).numpy())
    return published.write(version)


def kinds(model: LlamaForCausalLM) -> dict[str, TensorKind]:
    return {name: TensorKind("BF16", tuple(one.shape)) for name, one in model.state_dict().items()}


def batches(seed: int) -> torch.Tensor:
    """Draw pieces of this project's documents, by bytes: int64 [SEQUENCES, TOKENS]."""
    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(TEXTS.glob("*.md"))), np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(text) - TOKENS, SEQUENCES)
    return torch.from_numpy(np.stack([text[start : start + TOKENS] for start in starts]).astype(np.int64))


def trained(steps: int, pretraining: int, layers: int) -> list[Written]:
    """Train on text, then by policy gradient at 1e-6; publish each version of the latter."""
    model = llama(384, layers, 256)
    optimizer = torch.optim.AdamW(model.parameters(), PRETRAINING_RATE)
    for step in range(pretraining):
        tokens = batches(step)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    written = []
    with (
        tempfile.TemporaryDirectory(prefix="prorl-bench-") as name,
        PublishedWeights(Path(name), kinds(model), threads=1) as published,
    ):
        publish(published, model, 0)
        for step in range(1, steps + 1):
            tokens = batches(pretraining + step)
            chances = torch.log_softmax(model(tokens[:, :-1]).logits, -1)
            drawn = torch.distributions.Categorical(logits=chances.detach()).sample()
            rewards = (drawn == tokens[:, 1:]).float().mean(-1)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            logprobs = chances.gather(-1, drawn[..., None])[..., 0]
            (-(advantages[:, None] * logprobs).mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            written.append(publish(published, model, step))
            published.prune(step, ())
    return written


def snapshots(steps: int, pretraining: int, layers: int) -> list[Row]:
    shares = [one.delta_bytes / one.size_bytes for one in trained(steps, pretraining, layers)]
    first, later = shares[0], float(np.mean(shares[LATER:]))
    what = "delta of a model that AdamW trains at 1e-6"
    return [
        Row(f"{what}, step 1", 100 * first, "% of full", target="at most 5", holds=first <= FIRST_SHARE),
        Row(
            f"its steps {LATER + 1} to {steps}, mean",
            100 * later,
            "% of full",
            "",
            None,
            "at most 2",
            later <= LATER_SHARE,
        ),
        Row("the largest of these", 100 * max(shares[LATER:]), "% of full"),
    ]


class Load(NamedTuple):
    """One version, loaded by an engine from its host's copy, and from memory."""

    pause_s: float
    cpu_s: float
    memory_s: float
    memory_cpu_s: float


async def loads(folder: Path, turns: int, layers: int) -> list[Load]:
    """Load versions, while the trainer's folder is away."""
    model = llama(1024, layers, 4096)
    model.bfloat16().save_pretrained(folder / "served")
    engine = TransformersEngine(folder / "served", ChatSettings(), 0, device="cpu", dtype="bfloat16", rows=1)
    updates = EngineUpdates(engine, folder / "copy", copies_all=True)
    root, done = folder / "root", []
    with PublishedWeights(root, read_tensors(folder / "served"), threads=1) as published:
        for version in range(1, turns + 1):
            for one in model.parameters():
                one.data += 1e-3 * torch.randn_like(one) * (torch.rand_like(one) < 0.01)
            written = publish(published, model, version)
            wanted = Content(version, written.weights)
            await updates.fetch(written.path, wanted, 600.0)
            root.rename(folder / "away")
            cpu = time.process_time()
            times = await updates.load(written.path, wanted, "keep")
            cpu_s = time.process_time() - cpu
            (folder / "away").rename(root)
            began, cpu = time.perf_counter(), time.process_time()
            own = {name: one.clone() for name, one in model.state_dict().items()}
            LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=own, dtype=torch.bfloat16).eval()
            done.append(Load(times.pause_s, cpu_s, time.perf_counter() - began, time.process_time() - cpu))
    await engine.close()
    return done


def pauses(turns: int, layers: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as name:
        done = asyncio.run(loads(Path(name), turns, layers))
    best = Load(*(min(one) for one in zip(*done, strict=True)))
    memory = "a load of the same tensors from memory"
    ratio = best.pause_s / best.memory_s
    return [
        Row(
            "pause of a transformers engine, without the trainer's folder",
            1000 * best.pause_s,
            "ms",
            memory,
            ratio,
            f"at most {PAUSE_RATIO:g}×",
            ratio <= PAUSE_RATIO,
        ),
        Row("its load of the host's copy before", best.cpu_s, "CPU s", memory, best.cpu_s / best.memory_cpu_s),
    ]
