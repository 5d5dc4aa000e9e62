"""`phase.judge` in a service: an OpenAI-style server, the service's own engine, and what fails."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from prorl_zmq import Job, Role, Trajectory
from prorl_zmq.errors import GraderFailed
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.stages.judge import JudgeServer
from prorl_zmq.testing import LocalService, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.stages.handler import EvalPhase, PhaseData, RunPhase

URL, MODEL, KEY = "PRORL_JUDGE_URL", "PRORL_JUDGE_MODEL", "PRORL_JUDGE_KEY"

LIMIT_S = 20


class EssayInstance(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    by: str = "server"


def score_of(reply: str) -> float | None:
    found = re.search(r"SCORE: ([01](?:\.\d+)?)\s*\Z", reply)
    if "SCORE: ten" in reply:
        raise ValueError("ten is not a number")
    return float(found[1]) if found else None


class EssayHandler(AgentHandler[EssayInstance]):
    task = "essay"
    instance_type = EssayInstance

    async def run(self, phase: RunPhase[EssayInstance]) -> PhaseData:
        episode = await phase.converse([ChatMessage(Role.USER, f"Write about {phase.instance.topic}.")], ())
        return {"essay": episode.last_text}

    async def eval(self, phase: EvalPhase[EssayInstance]) -> Evaluation:
        by: Any = phase.instance.by
        judgement = await phase.judge(phase.data["essay"], system="Rate it.", read=score_of, by=by)
        return Evaluation(judgement.value, notes=judgement.notes())


def rollout(*turns: str, by: str = "server", **options: Any) -> Trajectory:
    job = Job(task="essay", instance={"topic": "rain", "by": by}, **options)
    with LocalService(handlers={"essay": EssayHandler}, engine=say(*turns)) as service, service.client() as client:
        client.submit(job)
        (trajectory,) = client.collect(1, wait_s=LIMIT_S)
        (backend,) = client.backends.list()
        assert backend.in_flight == 0
    return trajectory


@contextmanager
def judge_server(monkeypatch: pytest.MonkeyPatch, *replies: str | int) -> Iterator[list[dict[str, Any]]]:
    """Serve one reply, or status, after the other; yield what was asked."""
    requests: list[dict[str, Any]] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def answer(request: web.Request) -> web.Response:
        requests.append(await request.json())
        reply = replies[min(len(requests), len(replies)) - 1]
        if isinstance(reply, int):
            return web.Response(status=reply, text="not now")
        return web.json_response({"choices": [{"message": {"content": reply}}]})

    async def serve(stop: asyncio.Event) -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setenv(URL, "http://{}:{}".format(*runner.addresses[0][:2]))
        monkeypatch.setenv(MODEL, "judge-1")
        monkeypatch.delenv(KEY, raising=False)
        ready.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(stop),))
    thread.start()
    try:
        assert ready.wait(LIMIT_S)
        yield requests
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LIMIT_S)
        loop.close()


def test_a_server_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    with judge_server(monkeypatch, 503, "I cannot say.", "Good. SCORE: 0.75") as requests:
        trajectory = rollout("It rains.")
    assert (trajectory.outcome, trajectory.reward) == ("completed", 0.75)
    assert len(requests) == 3
    system, question = requests[-1]["messages"]
    assert (system["content"], question["content"]) == ("Rate it.", "It rains.")
    assert trajectory.result.notes == {
        "judge_model": "judge-1",
        "judge_prompt": "Rate it.\n\nIt rains.",
        "judge_verdict": "Good. SCORE: 0.75",
    }


@pytest.mark.parametrize("replies", [("No idea.",), ("SCORE: ten",), (401,)])
def test_a_judge_that_fails_gives_no_reward(monkeypatch: pytest.MonkeyPatch, replies: tuple[str | int, ...]) -> None:
    with judge_server(monkeypatch, *replies):
        trajectory = rollout("It rains.")
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
    assert trajectory.error is not None
    assert trajectory.error.code == "grader_failed"


def test_no_judge_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (URL, MODEL):
        monkeypatch.delenv(name, raising=False)
    trajectory = rollout("It rains.")
    assert trajectory.outcome == "infrastructure_error"
    assert trajectory.error is not None
    assert f"set {URL} and {MODEL} (an OpenAI-style server" in trajectory.error.message


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(GraderFailed, match=f"{URL} contains a user or password; remove it, and set {KEY}") as refused:
        asyncio.run(JudgeServer({URL: "http://me:hunter2@localhost:8000/v1", MODEL: "judge-1"}).reply("", ""))
    assert "hunter2" not in str(refused.value)


def test_an_engine_of_the_service_judges() -> None:
    trajectory = rollout("It rains.", "SCORE: 0.5", by="engine")
    assert (trajectory.outcome, trajectory.reward) == ("completed", 0.5)
    assert trajectory.result.notes["judge_verdict"] == "SCORE: 0.5"
    assert trajectory.result.metrics["turns"] == 1
    assert trajectory.result.backend == "local"


def test_an_engine_that_cannot_judge_gives_no_reward() -> None:
    trajectory = rollout("It rains.", by="engine", max_attempts=1)  # the script has no second turn
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)


def test_a_judge_of_another_name_is_a_fault_of_the_task() -> None:
    trajectory = rollout("It rains.", by="oracle")
    assert (trajectory.outcome, trajectory.reward) == ("failed", None)
    assert trajectory.error is not None
    assert 'by="server" or by="engine", not by=\'oracle\'' in trajectory.error.message
