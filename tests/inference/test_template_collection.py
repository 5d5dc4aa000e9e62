"""Each template of current models: its calls are read, what is seen is what it writes, and no content makes a frame."""

from __future__ import annotations

import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from chat_collection import FOLDER, MODELS, make_tokenizer, save_model

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat_traits import WrittenCall
from prorl_zmq.inference.tool_calls.call import ToolCall
from prorl_zmq.inference.transformers_chat import TransformersChatFormat
from prorl_zmq.wire.messages.backends import ChatSettings

pytestmark = pytest.mark.skipif(not MODELS, reason=f"no chat templates in {FOLDER}")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Run {name}.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
                "required": ["command"],
            },
        },
    }
    for name in ("bash", "python")
]


class Step(NamedTuple):
    """A turn that calls tools, and what follows it."""

    generated: np.ndarray
    whole: str
    """The template's own rendering of the conversation after it, opened for the next turn."""
    calls: list[WrittenCall]
    answers: list[dict[str, Any]]
    kept: bool
    """The template's rendering begins with what the engine saw before."""


@lru_cache(8)
def load(name: str) -> TransformersChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        return TransformersChatFormat.load(ChatSettings("transformers", str(save_model(MODELS[name], Path(folder)))))


@lru_cache(8)
def tokenizer_of(name: str) -> Any:
    return make_tokenizer(MODELS[name])


def render(name: str, messages: list[dict[str, Any]], *, opened: bool) -> str:
    return str(
        tokenizer_of(name).apply_chat_template(
            messages,
            tools=TOOLS if load(name).traits.shows_tools else None,
            tokenize=False,
            add_generation_prompt=opened,
        )
    )


def common(one: str, other: str) -> int:
    """Give how many characters two texts begin with in common, up to the end of a mark or a line."""
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return end if end == len(other) else max(one.rfind(mark, 0, end) + 1 for mark in ">]\n")


def calling_steps(name: str, said: str = "a\nb") -> list[Step]:
    """Give two turns that call tools, as the template writes them, the second one two tools where it can."""
    traits = load(name).traits
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Work."}, {"role": "user", "content": "Do it."}]
    if not traits.takes_system:
        messages = [{"role": "user", "content": "Work.\n\nDo it."}]
    steps = []
    number = 0
    for count in (1, 2):
        before = render(name, messages, opened=True)
        for some in range(count, 0, -1):
            names = ["bash", "python"][:some]
            calls = [
                WrittenCall(tool, {"command": f"ls -l {n}", "seconds": n}, traits.call_id(number + n, tool))
                for n, tool in enumerate(names, 1)
            ]
            thinks = traits.reasoning.key and not before.rstrip().endswith(traits.reasoning.marks[1])
            turn = traits.turn("", "I list it." if thinks else None, calls)
            answers = traits.results([f"{said} {n}" for n in range(some)], calls)
            try:
                whole = render(name, [*messages, turn, *answers], opened=True)
            except Exception:
                if some == 1:
                    raise
            else:
                if f"ls -l {some}" in whole:
                    break
        number += len(calls)
        start = common(whole, before)
        last = whole.rindex(f"ls -l {some}")
        ends = re.compile("|".join(map(re.escape, (*MODELS[name].stops, MODELS[name].eos, "<|tools_suffix|>"))))
        found = ends.search(whole, last)
        assert found is not None
        generated = np.array(tokenizer_of(name)(whole[start : found.end()], add_special_tokens=False)["input_ids"])
        messages += [turn, *answers]
        steps.append(Step(generated.astype(np.int32), whole, calls, answers, whole.startswith(before)))
    return steps


@pytest.mark.parametrize("name", MODELS)
def test_conversation(name: str) -> None:
    chat = load(name)
    conversation = chat.conversation([ChatMessage(Role.SYSTEM, "Work."), ChatMessage(Role.USER, "Do it.")], TOOLS)
    prompt = conversation.prompt()
    seen = np.concatenate([piece.token_ids for piece in prompt.pieces])
    for step in calling_steps(name):
        read = conversation.add_turn(step.generated)
        assert [(call.name, call.arguments) for call in read.calls if isinstance(call, ToolCall)] == [
            (call.name, call.arguments) for call in step.calls
        ]
        conversation.add_tool_results([str(answer["content"]) for answer in step.answers])
        prompt = conversation.prompt()
        new = np.concatenate([piece.token_ids for piece in prompt.pieces])
        assert prompt.rewritten != step.kept
        seen = new if prompt.rewritten else np.concatenate([seen, step.generated, new])
        assert chat.decode(seen) == step.whole
