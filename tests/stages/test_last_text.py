"""What is judged of a policy's last turn: never its reasoning, whoever led the rollout."""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chat_families import FAMILIES, make_tokenizer, save_tokenizer
from harness_talk import CHAT, Talk, asking

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat
from prorl_zmq.inference.engine import Generation
from prorl_zmq.stages.conversation import Conversation
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.handlers.code_source import last_block
from prorl_zmq.stages.handlers.math_answers import answer_of, right_answer
from prorl_zmq.tools.think_and_finish import FinishTool
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness_talk import Client
    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import Sampling

pytestmark = pytest.mark.xdist_group("transformers")

FINISH = '<tool_call>\n{"name": "finish", "arguments": {"message": "7"}}\n</tool_call>'


@cache
def chat(name: str) -> TransformersChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        return TransformersChatFormat.load(
            ChatSettings("transformers", str(save_tokenizer(FAMILIES[name], Path(folder))))
        )


@cache
def tokenizer(name: str) -> Any:
    return make_tokenizer(FAMILIES[name])


def encode(name: str, text: str, *, ended: bool = True) -> NDArray[np.int32]:
    ids = tokenizer(name)(text, add_special_tokens=False)["input_ids"]
    end = [tokenizer(name).convert_tokens_to_ids(FAMILIES[name].end)] if ended else []
    return np.array([*ids, *end], np.int32)


def by_conversation(name: str, text: str, *, ended: bool) -> Episode:
    async def generate(_ids: NDArray[np.int32], _sampling: Sampling, _stops: Sequence[int]) -> Generation:
        ids = encode(name, text, ended=ended)
        return Generation(
            ids, np.zeros(len(ids), np.float32), (VersionSpan(0, 0, len(ids)),), "stop" if ended else "length"
        )

    episode = Episode()
    policy = JobPolicy(generate, chat(name), 0, Job(task="t", instance={}), episode)

    async def given() -> JobPolicy:
        return policy

    opening = [ChatMessage(Role.USER, "What is 3 + 4?")]
    asyncio.run(Conversation(episode, given, opening, [FinishTool()]).say())
    return episode


def by_harness(name: str, text: str, *, ended: bool) -> Episode:
    async def talk(client: Client) -> None:
        await client.post(CHAT, asking(CHAT, "What is 3 + 4?"))

    return Talk(chat(name), lambda said: encode(name, said, ended=ended), [text]).run(talk)


LEADERS = pytest.mark.parametrize("lead", [by_conversation, by_harness])


@LEADERS
@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("qwen3", "<think>\nPerhaps \\boxed{7}, or"),
        ("r1", "<think>Perhaps \\boxed{7}, or"),
        ("r1-opened", "Perhaps \\boxed{7}, or"),
        ("chatml", "<think>\nPerhaps \\boxed{7}, or"),
    ],
)
def test_of_a_thought_that_was_never_closed_nothing_counts(lead: Any, name: str, thought: str) -> None:
    for ended in (False, True):
        episode = lead(name, thought, ended=ended)
        assert episode.last_text == ""
        assert not right_answer("7", answer_of(episode.final_message, episode.last_text))


@LEADERS
def test_the_answer_counts_and_not_the_box_that_was_thought_of(lead: Any) -> None:
    episode = lead("qwen3", "<think>\nIs it \\boxed{8}? No.\n</think>\n\nThe answer is 7.", ended=True)
    assert episode.last_text.strip() == "The answer is 7."
    assert right_answer("7", answer_of(episode.final_message, episode.last_text))


def test_the_finish_message_counts_and_not_the_box_that_was_thought_of() -> None:
    episode = by_conversation("qwen3", "<think>\nIs it \\boxed{8}? No.\n</think>\n\n" + FINISH, ended=True)
    assert episode.final_message == "7"
    assert right_answer("7", answer_of(episode.final_message, episode.last_text))


@LEADERS
def test_a_program_that_was_drafted_in_a_thought_is_no_solution(lead: Any) -> None:
    episode = lead("qwen3", "<think>\n```python\nprint(1)\n```\n</think>\n\nI cannot.", ended=True)
    assert not last_block(episode.last_text)
