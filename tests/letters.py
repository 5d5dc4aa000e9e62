"""The examples' task `letters`, with instances that fail, wait, or have a fixed reward.

A turn with a call that is never closed is answered so, and goes on. The module becomes a package of its own, so that a
service's processes find it (`register`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_zmq import Role
from prorl_zmq.examples.trainers.shared import letters as example
from prorl_zmq.examples.trainers.shared.make_model import END_OF_TURN, favour
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import Evaluation
from prorl_zmq.tools.tool import Tool

if TYPE_CHECKING:
    import pytest


class Letters(example.Letters, frozen=True, forbid_unknown_fields=True):
    fails: bool = False
    reward: float | None = None
    """Of each answer, whatever it says."""
    wait_s: float = 0.0
    """Before the turn, as if for a sandbox."""
    has_tool: bool = False
    """Only a policy that has tools can make a call, also a bad one."""


class Nothing(msgspec.Struct, frozen=True):
    pass


class Wait(Tool[Nothing]):
    name = "wait"
    description = "Wait."
    takes = Nothing

    async def call(self, arguments: Nothing, timeout_s: float) -> str:
        del arguments, timeout_s
        return "done"


class LettersHandler(example.LettersHandler):
    instance_type = Letters

    async def init(self, phase: Any) -> Any:
        if phase.instance.fails:
            raise RuntimeError("this prompt never works")
        return await super().init(phase)

    async def run(self, phase: Any) -> Any:
        await asyncio.sleep(phase.instance.wait_s)
        prompt = ChatMessage(Role.USER, f"Write letters, {phase.instance.name}.")
        episode = await phase.converse([prompt], [Wait()] if phase.instance.has_tool else [])
        return {"text": episode.last_text}

    async def eval(self, phase: Any) -> Evaluation:
        fixed = phase.instance.reward
        return await super().eval(phase) if fixed is None else Evaluation(fixed)


def register(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the task visible to child processes."""
    info = folder / "letters_task-1.dist-info"
    info.mkdir()
    (folder / "letters_task.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: letters-task\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[prorl_zmq.handlers]\nletters = letters_task:LettersHandler\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def lean(model: Path, *, to_calls: bool) -> None:
    """Have a tiny model end its turns; with `to_calls` many call a tool, and its template drops earlier reasoning."""
    if not to_calls:
        favour(model, END_OF_TURN)
        return
    from transformers import AutoTokenizer

    favour(model, END_OF_TURN, "</think>", "<tool_call>")
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = tokenizer.chat_template.replace(
        "'<|im_start|>assistant\\n' + (message.content or '')",
        "'<|im_start|>assistant\\n' + (message.content or '').split('</think>')[-1]",
    )
    tokenizer.chat_template = template.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
    tokenizer.save_pretrained(model)
