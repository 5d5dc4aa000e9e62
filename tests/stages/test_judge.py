"""`phase.judge` in a service: a named model, an OpenAI-style server, the policy itself, and what fails."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web
from support.waiting import until

from prorl_zmq import Job, NamedModel, PhaseLimits, Role, Sampling, Trajectory
from prorl_zmq.errors import ConfigError, EngineFailed
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.chat_endpoint import ChatEndpoint
from prorl_zmq.stages.handler import AgentHandler, Evaluation
from prorl_zmq.testing import LocalService, say
from prorl_zmq.testing.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prorl_zmq.inference.engine import Engine
    from prorl_zmq.stages.handler import EvalPhase, PhaseData, RunPhase

URL, MODEL, KEY = "PRORL_MODEL_JUDGE_URL", "PRORL_MODEL_JUDGE_MODEL", "PRORL_MODEL_JUDGE_KEY"

LIMIT_S = 20


class EssayInstance(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    model: str = "judge"
    questions: int = 1


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
        essay, model = phase.data["essay"], phase.instance.model
        asked = [
            phase.judge([ChatMessage(Role.USER, essay)], system="Rate it.", read=score_of, model=model)
            for _ in range(phase.instance.questions)
        ]
        judgements = await asyncio.gather(*asked)
        return Evaluation(sum(one.value for one in judgements) / len(judgements))


def rollout(
    *turns: str, others: Mapping[str, Engine] | None = None, instance: Mapping[str, Any] | None = None, **options: Any
) -> Trajectory:
    job = Job(task="essay", instance={"topic": "rain", **(instance or {})}, **options)
    handlers = {"essay": EssayHandler}
    with LocalService(handlers=handlers, engine=say(*turns), models=others) as service, service.client() as client:
        client.submit(job)
        (trajectory,) = client.collect(1, wait_s=LIMIT_S)
        until(lambda: not any(one.in_flight for one in client.backends.list()), "the backends are released")
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
    trajectory = rollout("It rains.", backend_wait_s=2 * LIMIT_S)
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None), "at once: there is no such model"
    assert trajectory.error is not None
    assert "no judge: no backend of the model judge took job" in trajectory.error.message
    assert f"or set {URL} and {MODEL} for the EVAL stage processes" in trajectory.error.message


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match=f"{URL} contains a user or password; remove it, and set {KEY}") as refused:
        ChatEndpoint("judge", {URL: "http://me:hunter2@localhost:8000/v1", MODEL: "judge-1"})._opened()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "models"), [("rm", {"judge": "rm"}), ("judge", {}), ("rm", {"judge": NamedModel("rm", Sampling())})]
)
def test_a_named_model_judges(name: str, models: dict[str, Any]) -> None:
    trajectory = rollout("It rains.", others={name: say("Hm. SCORE: 0.5")}, models=models)
    assert (trajectory.outcome, trajectory.reward) == ("completed", 0.5), trajectory.error
    assert trajectory.result.notes["judge_verdict"] == "Hm. SCORE: 0.5"
    assert trajectory.result.notes["judge_prompt"] == "Rate it.\n\nIt rains."
    assert trajectory.result.metrics["turns"] == 1
    assert trajectory.result.backend == "local", "the policy's"


def test_the_policy_judges_itself_where_a_task_says_so() -> None:
    trajectory = rollout("It rains.", "SCORE: 0.5", instance={"model": "policy"})
    assert (trajectory.outcome, trajectory.reward) == ("completed", 0.5), trajectory.error


def test_several_questions_are_asked_at_once_and_noted_apart() -> None:
    judge = say(lambda _: "SCORE: 0.25")
    trajectory = rollout("It rains.", others={"judge": judge}, instance={"questions": 6})
    assert trajectory.reward == 0.25, trajectory.error
    verdicts = {name for name in trajectory.result.notes if name.startswith("judge_verdict")}
    assert verdicts == {"judge_verdict", "judge_verdict 2", "judge_verdict 3", "judge_verdict 4"}


def test_an_evals_questions_are_limited() -> None:
    trajectory = rollout("It rains.", others={"judge": say(lambda _: "SCORE: 1")}, instance={"questions": 257})
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
    assert trajectory.error is not None
    assert "at most 256 questions" in trajectory.error.message


def test_an_engine_that_cannot_judge_gives_no_reward() -> None:
    def broken(_: str) -> str:
        raise EngineFailed("out of memory")

    trajectory = rollout("It rains.", others={"judge": say(broken)}, max_attempts=1)
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
    assert "the judge judge failed: backend local-judge" in str(trajectory.error)


def test_unreadable_verdicts_mask_the_rollout_and_the_reply_is_noted() -> None:
    trajectory = rollout("It rains.", others={"judge": say(lambda _: "I like it.")})
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
    assert trajectory.error is not None
    assert "gave no verdict, asked 2 times; its last reply ends: 'I like it.'" in trajectory.error.message
    assert trajectory.result.notes["judge_verdict"] == "I like it."


class SilentEngine(ScriptedEngine):
    async def generate(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


def test_a_judge_that_never_answers_is_no_timeout_of_the_agent() -> None:
    limits = PhaseLimits(eval_s=0.5)
    trajectory = rollout("It rains.", others={"judge": SilentEngine(("",))}, limits=limits, max_attempts=1)
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
    assert trajectory.error is not None
    assert "waited for its judge" in trajectory.error.message


def test_a_question_without_room_in_the_judges_context_gives_no_reward() -> None:
    trajectory = rollout("x" * 200, others={"judge": say(lambda _: "SCORE: 1", context_tokens=64)})
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
    assert trajectory.error is not None
    assert "and the judge's context 64" in trajectory.error.message


def test_a_stem_answer_in_words_is_judged_by_a_named_model() -> None:
    instance = {"problem": "Where is the DNA?", "ground_truth": "the nucleus"}
    job = Job(task="stem", instance=instance, models={"judge": "rm"})
    with (
        LocalService(
            engine=say("\\boxed{inside of the cell's core}"),
            models={"rm": say(lambda prompt: f"VERDICT: {'CORRECT' if 'core' in prompt else 'INCORRECT'}")},
        ) as service,
        service.client() as client,
    ):
        client.submit(job)
        (trajectory,) = client.collect(1, wait_s=LIMIT_S)
    assert (trajectory.outcome, trajectory.reward) == ("completed", 1.0), trajectory.error
    assert trajectory.result.metrics["judged"] == 1.0
    assert "REFERENCE ANSWER\nthe nucleus" in trajectory.result.notes["judge_prompt"]
