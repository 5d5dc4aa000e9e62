"""The warm start: the policy imitates a script until it writes what the script writes.

The script plays the part of what a pretrained model knows. It has the tasks' sentences before it, but draws its
command, its file and its number without a look at them. So the policy learns the form of a tool call and of an answer,
and to end its work after a tool's answer; it cannot learn which one an instruction asks for, as nothing in the script
depends on it: that is left to reinforcement learning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...data.trajectory import Role
from ...demo.tasks import DESTINATION
from ...demo.tasks import QUESTIONS as SHELL_QUESTIONS
from ...inference.base_policy import COMMANDS
from ...inference.chat import ChatMessage
from ...stages.handlers.math import SYSTEM_MESSAGE as MATH_SYSTEM
from ...stages.handlers.shell import SYSTEM_MESSAGE as SHELL_SYSTEM
from .tasks import SHAPES, math_problem
from .tokenizer import CALL, END_OF_CALL, END_OF_TURN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ...inference.chat.transformers_chat import TransformersChatFormat
    from .model import Model

OTHER_DESTINATION = "result.txt"
OTHER_DESTINATIONS = 0.15
"""Share of commands that write to the wrong file."""
BASH = {"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}
OUTPUTS = ("[no output]", "[exit code 1]", "12", "No such file or directory")
"""What the tool may answer."""
STEPS = 200
TRANSCRIPTS = 16
"""Transcripts of one step."""
LEARNING_RATE = 5e-3
"""Highest; it rises over `RISE` steps and falls to 0 in a straight line."""
RISE = 20
HEARD_WEIGHT = 0.3
"""Of the loss on prompts and tools' answers: who can foretell a text tells it from others, as all pretrained do."""


@dataclass(frozen=True, slots=True)
class Transcript:
    token_ids: NDArray[np.int32]
    """int32 [T]"""
    mask: NDArray[np.bool_]
    """bool [T]: true where the script speaks."""


def transcript(chat: TransformersChatFormat, random: np.random.Generator) -> Transcript:
    if random.random() < 0.5:
        return _conversation(chat, *_work(random))
    return _conversation(chat, *_answer(random))


def texts(random: np.random.Generator, count: int) -> Iterator[str]:
    """Return texts as conversations have them, for a tokenizer to learn from."""
    for index in range(count):
        opening, turns, outputs = (_work if index % 2 else _answer)(random)
        yield "\n".join([*(f"{message.role.name.lower()}\n{message.content}" for message in opening), " Tools: bash."])
        yield "\n".join(f"assistant\n{turn}" for turn in turns)
        yield "\n".join(f"tool\n{output}" for output in outputs)


def _work(random: np.random.Generator) -> tuple[list[ChatMessage], list[str], list[str]]:
    """Return the opening of a shell task, the script's turns, and the tool's answers between them."""
    command = COMMANDS[random.integers(len(COMMANDS))]
    destination = OTHER_DESTINATION if random.random() < OTHER_DESTINATIONS else DESTINATION
    question = list(SHELL_QUESTIONS)[random.integers(len(SHELL_QUESTIONS))]
    call = json.dumps({"name": "bash", "arguments": {"command": f"{command} > {destination}"}})
    opening = [ChatMessage(Role.SYSTEM, SHELL_SYSTEM), ChatMessage(Role.USER, f"Write to {DESTINATION}: {question}")]
    output = OUTPUTS[0] if random.random() < 0.7 else OUTPUTS[random.integers(len(OUTPUTS))]
    return opening, [f"{CALL}{call}{END_OF_CALL}", "Done."], [output]


def _answer(random: np.random.Generator) -> tuple[list[ChatMessage], list[str], list[str]]:
    """Return the opening of a math task and the script's only turn."""
    shapes, answers = list(SHAPES), list(SHAPES.values())
    problem = math_problem(shapes[random.integers(len(shapes))], random)
    opening = [ChatMessage(Role.SYSTEM, MATH_SYSTEM), ChatMessage(Role.USER, problem)]
    return opening, [f"The answer is \\boxed{{{answers[random.integers(len(answers))]}}}"], []


def _conversation(
    chat: TransformersChatFormat, opening: list[ChatMessage], turns: list[str], outputs: list[str]
) -> Transcript:
    conversation = chat.conversation(opening, [BASH] if outputs else [])
    parts: list[tuple[NDArray[np.int32], bool]] = []
    for index, text in enumerate(turns):
        parts += [(piece.token_ids, False) for piece in conversation.prompt().pieces]
        said = chat.tokenizer.encode(f"{text}{END_OF_TURN}")[0]
        parts.append((said, True))
        conversation.add_turn(said)
        if index < len(outputs):
            conversation.add_tool_results([outputs[index]])
    return Transcript(
        np.concatenate([token_ids for token_ids, _ in parts]),
        np.repeat([spoken for _, spoken in parts], [len(token_ids) for token_ids, _ in parts]),
    )


def imitate(
    model: Model, chat: TransformersChatFormat, seed: int, on_step: Callable[[int, float], None], steps: int = STEPS
) -> None:
    random = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        batch = [transcript(chat, random) for _ in range(TRANSCRIPTS)]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / RISE, 1.0) * (1 - step / steps)
        loss, heard = _losses(model, batch)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss + HEARD_WEIGHT * heard)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step + 1, float(loss.detach()))


def _losses(model: Model, batch: list[Transcript]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of what the script says, and of what it hears."""
    token_ids, mask, there = (
        pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).to(model.device)
        for rows in (
            [one.token_ids.astype(np.int64) for one in batch],
            [one.mask for one in batch],
            [np.ones_like(one.mask) for one in batch],
        )
    )
    hidden, targets = model.hidden(token_ids[:, :-1]), token_ids[:, 1:]
    heard = there[:, 1:] & ~mask[:, 1:]
    spoken_loss, heard_loss = (
        functional.cross_entropy(model.logits(hidden[chosen]), targets[chosen]) for chosen in (mask[:, 1:], heard)
    )
    return spoken_loss, heard_loss
