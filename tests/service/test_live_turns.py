"""The turns of rollouts at work, through a whole service."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.commands import prorl
from support.waiting import until

from prorl_zmq import Job
from prorl_zmq.brokers.rollout import turn_requests
from prorl_zmq.commands import job_turns
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import RequestTimeout, UnknownJob
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.tokenizer import decode
from prorl_zmq.stages import episode
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.tools.tool import Arguments, Tool
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from prorl_zmq import RolloutClient
    from prorl_zmq.data.trajectory import TokenArrays
    from prorl_zmq.wire.messages.watching import TurnsPeeked

WAIT_S = 30.0


class Where(Arguments, frozen=True):
    where: str


class Look(Tool[Where]):
    """Sees something once the test lets it."""

    name = "look"
    description = "Looks."
    takes = Where

    async def call(self, arguments: Where, timeout_s: float) -> str:
        await asyncio.to_thread(WalkHandler.may_see.wait, WAIT_S)
        return f"I see {arguments.where}."


class Walk(msgspec.Struct, frozen=True):
    blocks: bool = False


class WalkHandler(AgentHandler[Walk]):
    task = "walk"
    instance_type = Walk
    may_see = threading.Event()
    may_grade = threading.Event()

    async def run(self, phase: RunPhase[Walk]) -> PhaseData:
        if phase.instance.blocks:
            self.may_see.wait(WAIT_S)
        await phase.converse([ChatMessage(Role.USER, "Walk.")], [Look()])
        return {}

    async def eval(self, phase: EvalPhase[Walk]) -> Evaluation:
        await asyncio.to_thread(self.may_grade.wait, WAIT_S)
        return Evaluation(1.0)


class DuelHandler(AgentHandler[Walk]):
    task = "duel"
    instance_type = Walk

    async def run(self, phase: RunPhase[Walk]) -> PhaseData:
        players = [phase.conversation([], name=name) for name in ("white", "black")]
        turns = await asyncio.gather(*(player.say("Begin.") for player in players))
        turns[0].reward = 0.5
        return {}

    async def eval(self, phase: EvalPhase[Walk]) -> Evaluation:
        del phase
        return Evaluation(1.0, rewards={"white": 1.0, "black": -1.0})


@pytest.fixture(autouse=True)
def _begin() -> None:
    WalkHandler.may_see.clear()
    WalkHandler.may_grade.clear()


def walking(*turns: str) -> LocalService:
    topology = {"service": {"node": "local"}}
    return LocalService(handlers={"walk": WalkHandler}, engine=say(*turns), topology=topology)


def seen(client: RolloutClient, job_id: str, phase: Phase, words: str) -> tuple[TurnsPeeked, TokenArrays]:
    """Look until the turns that are shown end with some words."""
    found: list[tuple[TurnsPeeked, TokenArrays]] = []

    def look() -> bool:
        reply, arrays = client.views.turns(job_id)
        if arrays is None or reply.phase != phase or words not in decode(arrays.token_ids.tolist()):
            return False
        found.append((reply, arrays))
        return True

    until(look, f"{words!r} in {phase}")
    return found[0]


def test_turns_are_shown_as_they_come_and_after_the_end_there_is_a_result() -> None:
    turns = (tool_call("look", where="a tree"), "A tree.")
    with walking(*turns) as service, service.client() as client:
        client.submit(job := Job(task="walk", instance={}))
        reply, arrays = seen(client, job.job_id, Phase.RUN, "a tree")
        assert reply.so_far is not None
        assert (reply.place, reply.node, reply.so_far.backend) == ("held", "local", "local")
        assert "I see" not in decode(arrays.token_ids.tolist())
        assert arrays.turns[:, 2].tolist() == [Role.SYSTEM, Role.USER, Role.ASSISTANT]
        assert [step.name for step in reply.so_far.steps if step.name == "engine"] == ["engine"]
        known = {"known_attempt": reply.attempt, "known_tokens": reply.so_far.tokens}
        again, none = client.views.turns(job.job_id, **known)
        assert (none, again.so_far is not None and again.so_far.tokens) == (None, known["known_tokens"])
        WalkHandler.may_see.set()
        whole, arrays = seen(client, job.job_id, Phase.EVAL, "I see a tree.")
        assert whole.so_far is not None
        WalkHandler.may_grade.set()
        (trajectory,) = client.stream()
        assert (trajectory.reward, trajectory.token_ids.tolist()) == (1.0, arrays.token_ids.tolist())
        with pytest.raises(UnknownJob, match="has ended") as refused:
            client.views.turns(job.job_id)
        assert refused.value.fields["ended"]


def test_a_command_prints_turns_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_turns, "LOOK_S", 0.05)
    turns = (tool_call("look", where="a tree"), "A tree.")
    with walking(*turns) as service, service.client() as client:
        client.submit(job := Job(task="walk", instance={}))
        place = (job.job_id, "--connect", service.front_door)
        seen(client, job.job_id, Phase.RUN, "a tree")
        shown = prorl("job", *place, "--turns")
        assert shown.returncode == 0, shown.stderr
        assert "has not ended" in shown.stdout
        assert '→ look({"where": "a tree"})' in shown.stdout
        assert "I see" not in shown.stdout
        refused = prorl("job", *place, "--turns", "--json")
        assert (refused.returncode, "--json prints the trace alone" in refused.stderr) == (2, True)
        followed: list[str] = []
        follower = threading.Thread(target=lambda: followed.append(prorl("job", *place, "--follow").stdout))
        follower.start()
        WalkHandler.may_see.set()
        seen(client, job.job_id, Phase.EVAL, "I see a tree.")
        WalkHandler.may_grade.set()
        follower.join(WAIT_S)
        (text,) = followed
        assert [text.count(words) for words in ("→ look(", "I see a tree.", "\nA tree.")] == [1, 1, 1]
        assert text.index("→ look(") < text.index("I see a tree.") < text.index("\nA tree.")
        assert "completed after" in text
        again = prorl("job", *place, "--turns")
        assert "I see a tree." in again.stdout
        assert len(list(client.stream())) == 1


def test_an_ended_jobs_turns_name_who_spoke_and_what_it_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "STEP_S", 0.0)
    with LocalService(handlers={"duel": DuelHandler}, engine=say("Mine.", "Mine.")) as service:
        with service.client() as client:
            client.submit(job := Job(task="duel", instance={}))
            (trajectory,) = client.collect(1)
        shown = prorl("job", job.job_id, "--connect", service.front_door, "--turns").stdout
    lines = [line.rpartition(" · ")[0] for line in shown.splitlines() if line.endswith(" tokens")]
    assert lines == ["0  user · white", "1  assistant · white · reward 0.5", "2  user · black", "3  assistant · black"]
    assert sorted(step.turn for step in trajectory.result.steps if step.name == "engine") == [1, 2]


def test_a_stage_process_that_a_task_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_requests, "TURNS_WAIT_S", 0.2)
    with walking("Done.") as service, service.client() as client:
        client.submit(job := Job(task="walk", instance={"blocks": True}))

        def refused() -> str:
            try:
                client.views.turns(job.job_id)
            except RequestTimeout as error:
                return error.message
            return ""

        until(refused, "no answer of the process")
        assert "has not shown its turns within 0.2 s" in refused()
        WalkHandler.may_see.set()
        WalkHandler.may_grade.set()
        assert [one.reward for one in client.stream()] == [1.0]
