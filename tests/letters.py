"""The task `letters`, which a random model can learn: answer in letters of the alphabet's first half.

A turn with a call that is never closed is answered so, and goes on. The module becomes a package of its own, so that a
service's processes find it (`register`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import AgentHandler, Evaluation

if TYPE_CHECKING:
    import pytest


class Letters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    fails: bool = False
    reward: float | None = None
    """Of each answer, whatever it says."""
    wait_s: float = 0.0
    """Before the turn, as if for a sandbox."""


def score(text: str) -> float:
    return sum("a" <= letter <= "m" for letter in text) / max(len(text), 1)


class LettersHandler(AgentHandler[Letters]):
    task = "letters"
    instance_type = Letters

    async def init(self, phase: Any) -> dict[str, Any]:
        if phase.instance.fails:
            raise RuntimeError("this prompt never works")
        return {}

    async def run(self, phase: Any) -> dict[str, Any]:
        await asyncio.sleep(phase.instance.wait_s)
        episode = await phase.converse([ChatMessage(Role.USER, f"Write letters, {phase.instance.name}.")], [])
        # Marks are no letters: a policy that only closes its reasoning again and again would settle for their share.
        return {"text": episode.last_text.replace("<tool_call>", "").replace("</think>", "")}

    async def eval(self, phase: Any) -> Evaluation:
        fixed = phase.instance.reward
        return Evaluation(score(phase.data["text"]) if fixed is None else fixed)


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
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    with torch.no_grad():
        tensors["model.embed_tokens.weight"][:, 0] = 3.0  # so that the head's first column is a bias
        tensors["lm_head.weight"][:, 0] = 0.0
        marks = [tokenizer.eos_token]
        if to_calls:
            marks += ["</think>", "<tool_call>"]
            template = tokenizer.chat_template.replace(
                "'<|im_start|>assistant\\n' + (message.content or '')",
                "'<|im_start|>assistant\\n' + (message.content or '').split('</think>')[-1]",
            )
            tokenizer.chat_template = template.replace(
                "assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}"
            )
            tokenizer.save_pretrained(model)
        for mark in marks:
            tensors["lm_head.weight"][tokenizer.convert_tokens_to_ids(mark), 0] = 1.8
    save_file(tensors, file, metadata={"format": "pt"})
