"""What a phase's end looks like on the wire, whatever the task's own code gave: the broker can always read it."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from prorl_zmq.data.scores import Scores
from prorl_zmq.data.trajectory import Role
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import Busy, EngineFailed, ErrorInfo, GraderFailed, HandlerFailed, SandboxLimitExceeded
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.engine import Generation
from prorl_zmq.stages import job_backend
from prorl_zmq.stages.episode import ConversationRecord, Episode
from prorl_zmq.stages.grading.grader_pool import GraderPool
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, Failure, InitPhase, PhaseData, RunPhase
from prorl_zmq.stages.job_backend import JobBackend, PhaseClock
from prorl_zmq.stages.phase_ends import checked, conversation_notes, readable, reward_of, rewards_of
from prorl_zmq.stages.phase_runner import PhaseRunner
from prorl_zmq.stages.stage_services import StageServices
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import Backend
from prorl_zmq.wire.messages.base import METRICS_LIMIT, SEGMENTS_LIMIT
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import ArrayForm, Job, Outcome, Phase, PhaseLimits, RecordForm
from prorl_zmq.wire.messages.stages import PhaseDone, PhaseFailed, StartPhase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

EVENT: dict[str, Any] = {"stage_id": "s", "job_id": "j", "attempt": 1}
SHORT = ErrorInfo("handler_failed", "no")


def failed(error: Any = SHORT, **more: Any) -> PhaseFailed:
    return PhaseFailed(**EVENT, phase=Phase.RUN, outcome=Outcome.FAILED, error=error, **more)


def test_an_event_in_good_order_is_left_alone() -> None:
    event = failed(ErrorInfo("mine", "no", {"line": 3, "why": None}), metrics={"a": 1.0}, tokens=3, turns=1)
    assert readable(event) == event


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e39, 10**400, None, "1.0", b"1", [1.0]])
def test_a_reward_that_is_no_finite_number_is_refused(reward: Any) -> None:
    with pytest.raises(GraderFailed, match="it must be a finite number"):
        reward_of(Evaluation(reward))


def test_a_reward_may_be_any_kind_of_number() -> None:
    rewards = (1, True, np.float32(0.5), -2.5, 1e6)
    assert [reward_of(Evaluation(reward)) for reward in rewards] == [1.0, 1.0, 0.5, -2.5, 1e6]


def test_conversations_have_rewards_by_name() -> None:
    evaluation = Evaluation(0.0, rewards={"white": np.float32(1.0), "black": -1})
    assert rewards_of(evaluation, ["white", "black", "referee"]) == {"white": 1.0, "black": -1.0}
    assert rewards_of(Evaluation(0.5, rewards={"main": 0.5}), []) == {"main": 0.5}


@pytest.mark.parametrize(
    ("rewards", "names", "problem"),
    [
        ({"white": math.nan}, ["white"], "EVAL gave the conversation white the reward nan; it must be a finite number"),
        ({"white": "much"}, ["white"], "EVAL gave the conversation white the reward 'much'; it must be a finite"),
        ({"whit": 1.0}, ["white", "black"], "a reward for the conversation 'whit'; the rollout has: white, black"),
        ({"white": 1.0}, [], "a reward for the conversation 'white'; the rollout has: main"),
        ({"main": 1.0}, [], "the reward 0.0, and the rollout's only conversation 1.0; give one reward"),
        ([1.0], ["white"], r"the rewards \[1.0\] \(list\); they must be a dict of numbers by conversation"),
    ],
)
def test_wrong_rewards_of_conversations_are_refused_by_name(rewards: Any, names: list[str], problem: str) -> None:
    with pytest.raises((GraderFailed, HandlerFailed), match=problem):
        rewards_of(Evaluation(0.0, rewards=rewards), names)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (range(100_000), "eval gave 100000 metrics; at most 512 can be passed on"),
        (["x" * 1000], "eval gave something that cannot be passed on: Expected `str` of length <= 128"),
    ],
)
def test_metrics_beyond_the_limit_are_the_handlers_error(names: Iterable[object], problem: str) -> None:
    metrics = {str(name): 1.0 for name in names}
    with pytest.raises(HandlerFailed, match=problem):
        checked(PhaseDone(**EVENT, phase=Phase.EVAL, reward=1.0, metrics=metrics))


def test_as_many_metrics_as_are_allowed_pass() -> None:
    event = PhaseDone(**EVENT, phase=Phase.EVAL, reward=1.0, metrics={str(n): 1.0 for n in range(METRICS_LIMIT)})
    assert checked(event) == event


@pytest.mark.parametrize(
    "error",
    [
        ErrorInfo("mine", "\ud800"),
        ErrorInfo(None, "no"),  # type: ignore[arg-type]
        ErrorInfo("mine", "no", {"a": [1]}),  # type: ignore[dict-item]
        None,
    ],
)
def test_an_error_of_any_kind_is_told_in_short(error: Any) -> None:
    _told_in_short(error)


def test_a_long_error_is_told_in_short() -> None:
    fields: dict[str, Any] = {f"{n:03d}" + "k" * 1000: "v" * 100_000 for n in range(100)}
    _told_in_short(ErrorInfo("c" * 1000, "m" * 4_000_000, fields))


def _told_in_short(error: Any) -> None:
    event = readable(failed(error, metrics={"a": 1.0}, tokens=3, turns=1))
    frame = codec.encode(event)
    assert len(frame) < 300_000
    assert codec.decode(frame, PhaseFailed) == event
    assert (event.tokens, event.metrics) == (3, {"a": 1.0})


@pytest.mark.parametrize(
    "record", [{"timings": {f"tool.{n}": 1.0 for n in range(1000)}}, {"segments": (1,) * (SEGMENTS_LIMIT + 1)}]
)
def test_a_record_that_is_too_large_is_left_out(record: dict[str, Any]) -> None:
    forms = (RecordForm("experts", 1, (ArrayForm("experts", "uint8", (2, 1, 1)),)),)
    given = {"records": forms, "records_dropped": {"sampling_mask": "the engine gave none"}}
    event = readable(failed(tokens=3, turns=1, **given, **record))
    assert event == failed()
    assert codec.decode(codec.encode(event), PhaseFailed) == event


class NoInstance(msgspec.Struct):
    pass


class Scripted(AgentHandler[NoInstance]):
    """Does the same in INIT and in EVAL."""

    task = "scripted"
    instance_type = NoInstance

    def __init__(self, act: Callable[[], Awaitable[Any]]) -> None:
        self._act = act

    async def init(self, phase: InitPhase[NoInstance]) -> PhaseData:
        return await self._act()

    async def run(self, phase: RunPhase[NoInstance]) -> PhaseData:
        return await self._act()

    async def eval(self, phase: EvalPhase[NoInstance]) -> Evaluation:
        return await self._act()


def outcome(
    phase: Phase, act: Callable[[], Awaitable[Any]], limit_s: float = 60.0, handler: type[Scripted] = Scripted
) -> PhaseDone | PhaseFailed:
    """Run a phase that needs neither sandboxes nor engines."""
    limits = PhaseLimits(limit_s, limit_s, limit_s)
    job = Job(task="scripted", instance={}, job_id="j", limits=limits)
    command = StartPhase(job_id="j", attempt=1, phase=phase, conversations=("white", "black"))
    unused: Any = None

    async def main() -> PhaseDone | PhaseFailed:
        async with GraderPool(1) as graders, asyncio.timeout(20):
            backends: Any = Reports()
            services = StageServices("s", unused, backends, unused, unused, graders, unused, unused, {})
            runner = PhaseRunner(services, command, job, handler(act))
            event, _ = await runner.run()
            return event

    return asyncio.run(main())


def test_what_the_broker_would_drop_is_the_handlers_error() -> None:
    fields: dict[str, Any] = {"tokens": 8, "turns": 2}
    for rewards in (((1, 1.0), (0, 1.0)), ((0, 1.0), (0, 2.0)), ((2, 1.0),)):
        with pytest.raises(HandlerFailed, match=r"run gave something that cannot be passed on: rewards of the turns"):
            checked(PhaseDone(**EVENT, **fields, phase=Phase.RUN, turn_rewards=rewards))
        assert readable(failed(**fields, turn_rewards=rewards)).turn_rewards == ()


def test_eval_gives_conversations_their_rewards() -> None:
    async def judge() -> Evaluation:
        return Evaluation(0.5, rewards={"black": -1.0})

    event = outcome(Phase.EVAL, judge)
    assert isinstance(event, PhaseDone)
    assert (event.reward, event.rewards) == (0.5, {"black": -1.0})


def test_a_failures_reward_that_is_not_finite_is_the_handlers_error() -> None:
    class Punishing(Scripted):
        def eval_exception(self, job: Job, error: Exception) -> Failure:
            return Failure(Outcome.FAILED, SHORT, reward=-math.inf)

    async def fail() -> Evaluation:
        raise ValueError("no")

    event = outcome(Phase.EVAL, fail, handler=Punishing)
    assert isinstance(event, PhaseFailed)
    assert (event.error.code, event.reward) == ("handler_failed", None)
    assert event.error.message == "eval_exception gave the reward -inf; it must be a finite number"


class Reports:
    """The part of a backend client that a failed phase asks."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def report_failure(self, _job_id: str, backend: Backend, _message: str) -> None:
        self.failed.append(backend.backend_id)

    def release(self, _job_id: str, _attempt: int, _model: str, _context_tokens: int) -> None:
        pass

    def age_s(self, _job_id: str, _model: str) -> float:
        return 7.0


@pytest.mark.parametrize(
    ("fields", "failed"),
    [({}, ["b"]), ({"refused": True}, []), ({"parser": True, "unreachable": True}, []), ({"model": "user"}, [])],
)
def test_only_a_backends_own_failure_is_reported_of_it(fields: dict[str, Any], failed: list[str]) -> None:
    async def fail() -> None:
        raise EngineFailed("no", **fields)

    reports, unused = Reports(), object()
    command = StartPhase(job_id="j", attempt=1, phase=Phase.RUN)
    job = Job(task="scripted", instance={}, job_id="j")

    async def main() -> PhaseDone | PhaseFailed:
        services = StageServices("s", unused, reports, *6 * [unused])  # type: ignore[arg-type]
        runner = PhaseRunner(services, command, job, Scripted(fail))
        runner.rollout.backend.current = Backend(backend_id="b", endpoint="ipc://b")
        return (await runner.run())[0]

    event = asyncio.run(main())
    assert isinstance(event, PhaseFailed)
    assert event.error.code == "engine_failed"
    assert reports.failed == failed


def test_time_that_is_added_to_a_phase_that_has_ended_changes_nothing() -> None:
    """It still closes its sandbox then, and a pause of the process is added to all phases that it has."""
    closing, closed = asyncio.Event(), asyncio.Event()

    class Slow:
        handle = None
        held = True

        async def close(self) -> None:
            closing.set()
            await closed.wait()

    async def act() -> None:
        raise SandboxLimitExceeded("it used too much memory")

    unused: Any = None
    command = StartPhase(job_id="j", attempt=1, phase=Phase.INIT)
    job = Job(task="scripted", instance={}, job_id="j")

    async def main() -> PhaseDone | PhaseFailed:
        runner: Any = PhaseRunner(StageServices("s", *8 * [unused]), command, job, Scripted(act))
        runner.sandbox = Slow()
        running = asyncio.create_task(runner.run())
        await closing.wait()
        runner.add_time(5.0)
        closed.set()
        return (await running)[0]

    assert isinstance(asyncio.run(main()), PhaseFailed)


@pytest.mark.parametrize(
    ("phase", "returned", "said"),
    [
        (Phase.INIT, None, "init returned None; it must return a dict with what run needs, which may be empty"),
        (Phase.RUN, None, "run returned None; it must return a dict with what eval needs, which may be empty"),
        (Phase.RUN, "a", "run returned 'a' (str); it must return a dict"),
        (Phase.RUN, {"a": [1, {"b": Outcome}]}, "the dict['a'][1]['b'] is <enum 'Outcome'> (EnumType); plain data are"),
        (Phase.EVAL, 1.0, "eval returned 1.0 (float); it must return an Evaluation, such as Evaluation(reward=1.0)"),
        (Phase.EVAL, None, "eval returned None; it must return an Evaluation"),
    ],
)
def test_what_a_phase_returned_is_named_where_it_must_be_something_else(phase: Phase, returned: Any, said: str) -> None:
    async def give() -> Any:
        return returned

    event = outcome(phase, give)
    assert isinstance(event, PhaseFailed)
    assert (event.outcome, event.error.code, event.retry) == (Outcome.FAILED, "handler_failed", False)
    assert said in event.error.message


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.EVAL])
def test_a_phase_ends_at_its_limit(phase: Phase) -> None:
    event = outcome(phase, asyncio.Event().wait, limit_s=0.01)
    assert isinstance(event, PhaseFailed)
    assert (event.outcome, event.error.code, event.error.fields["limit_s"]) == (Outcome.TIMEOUT, "phase_timeout", 0.01)


@pytest.mark.parametrize(("phase", "reward"), [(Phase.INIT, None), (Phase.EVAL, 0.0)])
def test_a_failure_has_a_reward_only_once_the_agent_has_acted(phase: Phase, reward: float | None) -> None:
    async def exceed() -> None:
        raise SandboxLimitExceeded("it used too much memory")

    event = outcome(phase, exceed)
    assert isinstance(event, PhaseFailed)
    assert (event.outcome, event.reward) == (Outcome.FAILED, reward)


def test_texts_of_many_conversations_are_notes_within_the_limit() -> None:
    records = [ConversationRecord(f"critic{n}", False, TrajectoryBuilder()) for n in range(20)]
    for record in records:
        record.transcript.append(ChatMessage(Role.USER, f"text of {record.name}"))
    notes = conversation_notes(records, 4)
    assert list(notes) == ["conversation critic0", "conversation critic1", "conversation critic2", "conversations"]
    assert "text of critic19" in notes["conversations"]
    assert conversation_notes(records, 0) == {}
    assert len(conversation_notes(records[:4], 4)) == 4
    assert list(conversation_notes([ConversationRecord("n" * 128, False, TrajectoryBuilder())], 4)) == []


def test_conversations_that_fail_at_once_move_the_job_once() -> None:
    moves: list[str] = []

    class Backends(Reports):
        async def assign(
            self, _job: Job, _attempt: int, *_: Any, leaving: str, model: str, on_waited: Callable[[float], None]
        ) -> Backend:
            del model
            moves.append(leaving)
            await asyncio.sleep(0)
            on_waited(7.5)
            return Backend(backend_id="good", endpoint="ipc://good")

        def note_served(self, _job_id: str, _attempt: int, _model: str) -> None:
            pass

    class Engines:
        async def generate(self, backend: Backend, *_: Any, **__: Any) -> Generation:
            await asyncio.sleep(0)
            if backend.backend_id == "bad":
                raise EngineFailed("broken")
            return Generation(np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionSpan(0, 0, 2),), "stop")

    async def main() -> tuple[list[Any], list[str]]:
        backends: Any = Backends()
        engines: Any = Engines()
        job, clock = Job(task="scripted", instance={}, job_id="j"), PhaseClock(60.0)
        held = JobBackend(job, 1, backends, engines, clock)
        held.current = Backend(backend_id="bad", endpoint="ipc://bad")
        prompt = np.zeros(3, np.int32)
        async with clock.limit():
            done = await asyncio.gather(*(held.generate(prompt, job.sampling, ()) for _ in range(8)))
        held.release()
        return done, backends.failed

    done, failed = asyncio.run(main())
    assert len(done) == 8
    assert (failed, moves) == (["bad"], ["bad"])
    assert {one.room_wait_s for one in done} == {7.5}, "all of them waited for room in the good one"


@pytest.mark.parametrize("full", [False, True])
def test_a_moved_rollout_gives_up_later_by_its_wait_for_room(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for an engine without room is no failure: neither the phase's limit nor `backend_wait_s` counts it."""
    now = 0.0
    monkeypatch.setattr(job_backend, "time", SimpleNamespace(monotonic=lambda: now))
    tried: list[str] = []
    left: list[float] = []

    class Backends(Reports):
        async def assign(self, _job: Job, _attempt: int, waits: Any, **_: Any) -> Backend:
            nonlocal now
            if full:
                waits()
                left.append(clock.limit_s if clock._timer is None or clock._timer.when() is not None else 0.0)
            now += 50.0
            return Backend(backend_id=f"b{len(tried)}", endpoint="ipc://x")

    class Engines:
        async def generate(self, backend: Backend, *_: Any, **__: Any) -> Generation:
            tried.append(backend.backend_id)
            raise EngineFailed("gone", unreachable=len(tried) < 6)

    clock = PhaseClock(60.0)

    async def main() -> None:
        backends: Any = Backends()
        engines: Any = Engines()
        job = Job(task="scripted", instance={}, job_id="j", backend_wait_s=60.0)
        held = JobBackend(job, 1, backends, engines, clock, _moves_left=0)
        held.current = Backend(backend_id="bad", endpoint="ipc://bad")
        async with clock.limit():
            with pytest.raises(EngineFailed):
                await held.generate(np.zeros(3, np.int32), job.sampling, ())

    asyncio.run(main())
    assert len(tried) == (6 if full else 3), "it moves on as long as it waits for room alone"
    assert left == [0.0] * 5 * full, "the clock stands still"


def test_the_clock_of_a_phase_stands_still_while_a_turn_is_parked() -> None:
    """The host knows how old the rollout's group is, and parks the newest."""
    asked: list[float] = []

    class Backends(Reports):
        def note_served(self, _job_id: str, _attempt: int, _model: str) -> None:
            pass

    class Engines:
        async def generate(self, *_: Any, age_s: float, on_parked: Any, **__: Any) -> Generation:
            assert clock._timer is not None
            asked.append(age_s)
            for _ in range(2):
                on_parked()
                assert clock._timer.when() is None
            return Generation(np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionSpan(0, 0, 2),), "stop")

    clock = PhaseClock(60.0)

    async def main() -> None:
        backends: Any = Backends()
        engines: Any = Engines()
        job = Job(task="scripted", instance={}, job_id="j")
        held = JobBackend(job, 1, backends, engines, clock)
        held.current = Backend(backend_id="good", endpoint="ipc://good")
        async with clock.limit() as timer:
            began = timer.when()
            await held.generate(np.zeros(3, np.int32), job.sampling, ())
            until = timer.when()
            assert began is not None
            assert until is not None
            assert began <= until < began + 1.0, "it runs again, with what was left"

    asyncio.run(main())
    assert asked == [7.0]


def test_segments_that_were_scored_before_new_weights_are_scored_again() -> None:
    versions, asked = iter([1, 1, 2, 2, 2]), []

    class Backends(Reports):
        def note_served(self, _job_id: str, _attempt: int, _model: str) -> None:
            pass

    class Engines:
        async def score(self, _backend: Backend, _job_id: str, text: Any, top: int, _limit_s: float) -> Scores:
            asked.append(text.tolist())
            none = np.zeros((len(text), top), np.float32)
            return Scores(text.astype(np.float32), none.astype(np.int32), none, next(versions))

    async def main() -> Scores:
        backends: Any = Backends()
        engines: Any = Engines()
        held = JobBackend(Job(task="scripted", instance={}, job_id="j"), 1, backends, engines, PhaseClock(60.0))
        held.current = Backend(backend_id="good", endpoint="ipc://good", scores=True)
        return await held.score(np.arange(6, dtype=np.int32), (2, 4), 0, held.current.chat)

    scores = asyncio.run(main())
    assert asked == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert (scores.weight_version, scores.logprobs.tolist()) == (2, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])


@pytest.mark.parametrize(
    ("fields", "pause_s"), [({}, 0.1), ({"retry_after_s": 0.0}, 0.1), ({"retry_after_s": 3.0}, 3.0)]
)
def test_a_full_engine_is_not_asked_again_at_once(fields: dict[str, float], pause_s: float) -> None:
    assert job_backend._pause_s(Busy("4096 texts wait", **fields)) == pause_s


def test_an_engine_whose_queue_of_texts_is_full_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_backend, "SHORTEST_PAUSE_S", 0.0)
    asked = []

    class Backends(Reports):
        def note_served(self, _job_id: str, _attempt: int, _model: str) -> None:
            pass

    class Engines:
        async def score(self, backend: Backend, _job_id: str, text: Any, top: int, _limit_s: float) -> Scores:
            asked.append(backend.backend_id)
            if len(asked) < 10:  # more often than a job may move
                raise Busy("4096 texts wait", retry_after_s=0.0)
            none = np.zeros((len(text), top), np.float32)
            return Scores(text.astype(np.float32), none.astype(np.int32), none, 0)

    async def main() -> list[str]:
        backends: Any = Backends()
        engines: Any = Engines()
        held = JobBackend(Job(task="scripted", instance={}, job_id="j"), 1, backends, engines, PhaseClock(60.0))
        held.current = Backend(backend_id="full", endpoint="ipc://full", scores=True)
        await held.score(np.arange(3, dtype=np.int32), (), 0, held.current.chat)
        return backends.failed

    assert asyncio.run(main()) == []
    assert asked == ["full"] * 10


def test_a_conversation_left_under_way_ends_with_run() -> None:
    ended = asyncio.Event()

    async def main() -> PhaseDone | PhaseFailed:
        async def speak() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                if runner.rollout.episode.is_over:  # so that it cannot say more
                    ended.set()

        async def act() -> None:
            record = ConversationRecord("left", True, TrajectoryBuilder(), task=asyncio.create_task(speak()))
            runner.rollout.episode = Episode(conversations=[record])
            await asyncio.sleep(0)
            raise EngineFailed("no")

        unused: Any = None
        services = StageServices("s", unused, Reports(), *6 * [unused])  # type: ignore[arg-type]
        command = StartPhase(job_id="j", attempt=1, phase=Phase.RUN)
        runner = PhaseRunner(services, command, Job(task="scripted", instance={}, job_id="j"), Scripted(act))
        return (await runner.run())[0]

    assert isinstance(asyncio.run(main()), PhaseFailed)
    assert ended.is_set()
