"""The base policy: plays the part of a pretrained model. It comes with the package, trained by this module.

    python -m prorl_zmq.inference.embedded.base_policy prorl_zmq/inference/embedded/base_policy.npz

It was trained on random transcripts in which the instruction, the command and the destination are drawn independently.
So it can write the syntax of a tool call and some shell commands, ends its work after a tool's answer, and sometimes
answers without a call. It cannot infer which command or destination an instruction asks for: reinforcement learning
teaches that. The instructions are random words, and do not include the demo's tasks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...data.trajectory import Role
from ..chat import ChatMessage
from ..chat.embedded_chat import encode_message, generation_prompt
from ..policy import Adam, Policy, PolicyShape, log_softmax, logprob_slopes, one_blas_thread
from ..tokenizer import CALL_END, CALL_PRELUDE, IM_END, TOOL_CALL, TOOL_CALL_END, VOCABULARY_SIZE, WORD_PIECES, encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

COMMANDS = (
    "wc -l < data.txt",
    "awk '{s+=$1} END {print s}' data.txt",
    "sort -n data.txt | tail -n 1",
    "head -n 1 data.txt",
    "tail -n 1 data.txt",
    "cat data.txt",
)
DESTINATIONS = ("answer.txt", "result.txt")
DIRECT_ANSWERS = 0.08
"""Share of transcripts that answer with a random number and call no tool."""
SILENT_COMMANDS = 0.7
"""Share of tool calls whose answer is `[no output]`."""

FILE = Path(__file__).with_suffix(".npz")
_STEPS = 300
_TRANSCRIPTS = 24
"""Transcripts of one training step."""
_LEARNING_RATE = 6e-3
"""At the first step; it falls linearly to 0."""

_OPENING = generation_prompt()
_NEWLINE = encode("\n")
_HEADERS = {role: encode_message(ChatMessage(role, "")).token_ids for role in Role}
_CALLS = {
    (command, destination): np.concatenate(
        [[TOOL_CALL], encode(f"{CALL_PRELUDE}{command} > {destination}{CALL_END}"), [TOOL_CALL_END, IM_END]]
    ).astype(np.int32)
    for command in COMMANDS
    for destination in DESTINATIONS
}
_NO_OUTPUT = encode("[no output]")
_DONE = np.append(encode("Done."), np.int32(IM_END))
_FILES = (*(f" {name}" for name in ("data.txt", *DESTINATIONS)), ".", "\n")
_NOISE = np.concatenate([encode(piece) for piece in (*WORD_PIECES, *_FILES)])
"""Ids of random prompts and tools' answers."""


def base_policy() -> Policy:
    return Policy.load(FILE)


def train_base_policy(seed: int = 0, shape: PolicyShape | None = None) -> Policy:
    """Train a base policy from scratch, in a few seconds on one core."""
    with one_blas_thread():
        return _train(Policy.initial(shape or PolicyShape(), seed), np.random.default_rng(seed))


def _train(policy: Policy, random: np.random.Generator) -> Policy:
    adam = Adam(policy, _LEARNING_RATE)
    for step in range(_STEPS):
        contexts, targets = [], []
        for _ in range(_TRANSCRIPTS):
            token_ids, mask = _transcript(random)
            contexts.append(policy.contexts(token_ids)[mask])
            targets.append(token_ids[mask])
        forward = policy.forward(np.concatenate(contexts))
        wanted = np.concatenate(targets)
        weights = np.full(len(wanted), 1.0 / len(wanted), np.float32)
        adam.learning_rate = _LEARNING_RATE * (1 - step / _STEPS)
        adam.step(policy.gradient(forward, logprob_slopes(log_softmax(forward.logits), wanted, weights)))
    return policy


def _transcript(random: np.random.Generator) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Make one conversation: its ids, and which of them the policy learns to write."""
    parts: list[tuple[NDArray[np.int32], bool]] = []

    def hear(role: Role, content: NDArray[np.int32]) -> None:
        header = _HEADERS[role]
        parts.extend(((header[:-2], False), (content, False), (header[-2:], False)))

    def say(token_ids: NDArray[np.int32]) -> None:
        parts.extend(((_OPENING, False), (token_ids, True), (_NEWLINE, False)))

    hear(Role.SYSTEM, _words(random, 0, 30))
    hear(Role.USER, _words(random, 8, 24))
    if random.random() < DIRECT_ANSWERS:
        say(np.append(encode(f"The answer is {random.integers(100)}."), np.int32(IM_END)))
    else:
        command, destination = random.integers(len(COMMANDS)), random.integers(len(DESTINATIONS))
        say(_CALLS[COMMANDS[command], DESTINATIONS[destination]])
        hear(Role.TOOL, _NO_OUTPUT if random.random() < SILENT_COMMANDS else _words(random, 1, 8))
        say(_DONE)
    return (
        np.concatenate([token_ids for token_ids, _ in parts]),
        np.repeat([learned for _, learned in parts], [len(token_ids) for token_ids, _ in parts]),
    )


def _words(random: np.random.Generator, least: int, most: int) -> NDArray[np.int32]:
    """Return random words, and occasionally a token of any kind, such as numbers or brackets."""
    count = int(random.integers(least, most + 1))
    anything = random.integers(0, VOCABULARY_SIZE, count, np.int32)
    words = _NOISE[random.integers(0, len(_NOISE), count)]
    return np.where(random.random(count) < 0.15, anything, words)


if __name__ == "__main__":
    train_base_policy().save(Path(sys.argv[1]))
