"""Calls that name their conversations: each is a part of the rollout under its name, and they never mix."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from harness_talk import APIS, CHAT, GEMINI, RESPONSES, Talk, asking, sent_back
from scripted_policy import CHAT as EMBEDDED

from prorl_zmq import Job
from prorl_zmq.data.trajectory import Role
from prorl_zmq.testing import LocalService, say
from prorl_zmq.testing.scripted_engine import tokens_of
from prorl_zmq.wire.messages.base import CONVERSATIONS_LIMIT
from prorl_zmq.wire.messages.jobs import EpisodeLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from harness_talk import Client

    from prorl_zmq.stages.episode import Episode

HEADER = "X-Prorl-Conversation"


def talk_of(*turns: str) -> Talk:
    limits = EpisodeLimits(max_turns=2 * CONVERSATIONS_LIMIT)
    return Talk(EMBEDDED, lambda text: np.array(tokens_of(text), np.int32), turns, limits=limits)


def played(talk: Talk, program: Callable[[Client], Coroutine[Any, Any, None]], *, named: bool = True) -> Episode:
    async def main() -> None:
        async with talk.served(named=named) as client:
            await program(client)
        await talk.model.finish()

    asyncio.run(main())
    return talk.episode


def said(episode: Episode) -> dict[str, list[str]]:
    """Return what the policy said in each conversation, by segment."""
    texts = {}
    for one in episode.conversations:
        arrays = one.trajectory.arrays()
        parts = np.split(np.arange(len(arrays.token_ids)), one.trajectory.segments)
        turns = [EMBEDDED.decode(arrays.token_ids[part][arrays.loss_mask[part]]) for part in parts]
        texts[one.name] = [turn.replace("<|im_end|>", ".") for turn in turns]
    return texts


@pytest.mark.parametrize("path", APIS)
def test_two_players_of_a_program_are_two_conversations(path: str) -> None:
    """They begin with equal requests, which behind one name would be two lines of one conversation."""
    talk = talk_of("e4", "e5", "Nf3")
    field = {RESPONSES: "input", GEMINI: "contents"}.get(path, "messages")

    async def program(client: Client) -> None:
        body = asking(path, "Your move.")
        first = await client.post(f"/c/white{path}", body)
        await client.post(f"/c/black{path}", body)
        await client.post(f"/c/white{path}", sent_back(path, body, first, *asking(path, "e5. And now?")[field]))

    episode = played(talk, program)
    assert [(one.name, one.segments, one.trained) for one in episode.named().conversations] == [
        ("white", 1, True),
        ("black", 1, True),
    ]
    assert said(episode) == {"white": ["e4.Nf3."], "black": ["e5."]}
    assert "e4" not in talk.prompts[1]
    white = episode.conversations[0].trajectory.arrays()
    assert [Role(role) for role in white.turns[:, 2]] == [Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert episode.whole().tokens == sum(one.trajectory.tokens for one in episode.conversations)
    assert (episode.metrics["main_turns"], episode.metrics["turns"]) == (3, 3)
    assert [line[16:34].strip() for line in episode.notes["calls"].splitlines()] == [
        "white: main",
        "black: main",
        "white: main",
    ]


def test_players_who_say_the_same_keep_their_own_turns() -> None:
    """Their histories are text alone, so only the names distinguish them."""
    more = [{"role": "assistant", "content": "pass"}, {"role": "user", "content": "And now?"}]

    async def program(client: Client) -> None:
        body = asking(CHAT, "Your move.")
        for name in ("white", "black"):
            await client.post(f"/c/{name}{CHAT}", body)
        for name in ("black", "white"):
            await client.post(f"/c/{name}{CHAT}", body | {"messages": [*body["messages"], *more]})

    episode = played(talk_of("pass", "pass", "b", "w"), program)
    assert said(episode) == {"white": ["pass.w."], "black": ["pass.b."]}


def test_the_header_names_a_conversation_and_calls_without_a_name_are_main() -> None:
    async def program(client: Client) -> None:
        await client.post(CHAT, asking(CHAT, "Hello."))
        client.session.headers[HEADER] = "critic"
        await client.post(CHAT, asking(CHAT, "Judge it."))
        await client.post(f"/c/other{CHAT}", asking(CHAT, "Judge it again."))

    episode = played(talk_of("one", "two", "three"), program)
    assert said(episode) == {"main": ["one."], "critic": ["two.", "three."]}, "the header comes before the path"


def test_kinds_of_calls_are_told_within_a_conversation() -> None:
    """A title is a side call of its own conversation, whatever the others have."""
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}

    async def program(client: Client) -> None:
        for name in ("a", "b"):
            await client.post(f"/c/{name}{CHAT}", asking(CHAT, "Do it.", tools=[tool]))
            await client.post(f"/c/{name}{CHAT}", asking(CHAT, "Give a title."))

    episode = played(talk_of("done", "title", "done", "title"), program)
    assert (episode.metrics["main_turns"], episode.metrics["side_turns"]) == (2, 2)


def test_a_harness_whose_agent_could_call_too_has_one_conversation() -> None:
    async def program(client: Client) -> None:
        await client.post(f"/c/white{CHAT}", asking(CHAT, "Hello."))

    episode = played(talk_of("one"), program, named=False)
    assert said(episode) == {"main": ["one."]}
    assert episode.named().conversations == ()


def test_what_cannot_name_a_conversation_is_refused_and_ends_nothing() -> None:
    async def program(client: Client) -> None:
        status, answer = await client.asked(f"/c/a b{CHAT}", asking(CHAT, "Hello."))
        assert status == 400
        assert "a conversation cannot be named 'a b'" in answer["error"]["message"]
        for number in range(CONVERSATIONS_LIMIT):
            await client.post(f"/c/n{number}{CHAT}", asking(CHAT, "Hello."))
        status, answer = await client.asked(f"/c/more{CHAT}", asking(CHAT, "Hello."))
        assert (status, answer["error"]["message"]) == (400, "a rollout has at most 64 conversations")
        await client.post(f"/c/n0{CHAT}", asking(CHAT, "More."))

    episode = played(talk_of("one"), program)
    assert len(episode.conversations) == CONVERSATIONS_LIMIT


def test_a_program_outside_names_its_conversations() -> None:
    job = Job(task="outside", instance={"prompt": "Play."}, group_id="g")
    with LocalService(engine=say("a", "b")) as service, service.client() as client, client.endpoint(job) as rollout:
        for name in ("white", "black"):
            body = json.dumps({"model": "policy", **asking(CHAT, f"You are {name}.")}).encode()
            headers = {"Authorization": f"Bearer {rollout.api_key}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{rollout.base_url}/c/{name}/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=30) as response:
                assert response.status == 200
        trajectory = rollout.finish(reward=0.5)
    parts = trajectory.split()
    assert [(part.group_id, part.reward) for part in parts] == [("g/white", 0.5), ("g/black", 0.5)]
    assert [part.token_ids[part.loss_mask].tolist() for part in parts] == [tokens_of("a"), tokens_of("b")]
