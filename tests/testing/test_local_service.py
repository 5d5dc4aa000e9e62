"""`LocalService`: jobs as in a service, several at once, and nothing left, however a test ends."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
import pytest
from needed import usable
from support import forks
from support.waiting import until

from prorl_zmq import Job, Outcome, Role, Sampling, collate
from prorl_zmq.errors import ConfigError, InvalidJob, JobTooLarge, UnknownTask
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.embedded.embedded_engine import load_embedded_engine
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from prorl_zmq.testing import LocalService, local_service, loop_thread, say, tool_call
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.toolbox import Toolbox, ToolName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Trajectory


class RiddleInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    question: str
    answer: str = ""
    tools: tuple[ToolName, ...] = ()
    hangs: str = ""


class RiddleHandler(AgentHandler[RiddleInstance]):
    task = "riddle"
    instance_type = RiddleInstance
    released = threading.Event()
    """Ends what hangs."""
    hanging = threading.Event()
    """Something hangs."""

    async def init(self, phase: InitPhase[RiddleInstance]) -> PhaseData:
        sessions = {}
        if phase.instance.tools:
            sandbox = await phase.create_sandbox(SandboxSpec())
            sessions = await Toolbox(sandbox, phase.instance.tools).start()
        return {"maker": id(self), "sessions": sessions}

    async def run(self, phase: RunPhase[RiddleInstance]) -> PhaseData:
        await self._hang(phase.instance.hangs)
        toolbox = Toolbox(phase.sandbox, phase.instance.tools) if phase.sandbox is not None else None
        tools = toolbox.tools(phase.data["sessions"]) if toolbox is not None else []
        episode = await phase.converse([ChatMessage(Role.USER, phase.instance.question)], tools)
        return {"said": episode.last_text, "message": episode.final_message, "makers": [phase.data["maker"], id(self)]}

    async def eval(self, phase: EvalPhase[RiddleInstance]) -> Evaluation:
        said = phase.data["message"] or phase.data["said"]
        makers = len({*phase.data["makers"], id(self)})
        return Evaluation(float(said.strip() == phase.instance.answer), {"makers": float(makers)})

    async def _hang(self, how: str) -> None:
        match how:
            case "waits":
                self.hanging.set()
                await asyncio.Event().wait()
            case "refuses to stop":
                self.hanging.set()
                while not self.released.is_set():
                    try:
                        await asyncio.sleep(0.01)
                    except asyncio.CancelledError:
                        continue
            case "in a thread":
                self.hanging.set()
                await asyncio.to_thread(self.released.wait)
            case "blocks the loop":
                self.hanging.set()
                self.released.wait()


def riddle(question: str = "2 + 2", answer: str = "4", *, job_id: str | None = None, **instance: Any) -> Job:
    named = {} if job_id is None else {"job_id": job_id}
    values = {"question": question, "answer": answer, **instance}
    return Job(task="riddle", instance=values, backend_wait_s=1.0, **named)


def ended(service: LocalService, job: Job) -> Trajectory:
    with service.client() as client:
        client.submit(job)
        (trajectory,) = client.collect(1)
    return trajectory


def local(**options: Any) -> LocalService:
    return LocalService(**{"handlers": {"riddle": RiddleHandler}, "engine": say("4"), **options})


@pytest.fixture(scope="module")
def used_before() -> None:
    """The process has what it keeps for good, such as libuv's own pipe, and the process that forks."""
    forks.begin()
    with local():
        pass


GONE_S = 5.0
"""What other services of this process do meanwhile is over by then, such as a look at the machine by a thread."""


@pytest.fixture(autouse=True)
def nothing_is_left(used_before: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no thread, child process, descriptor or folder is left that was not there before.

    `tmp_path` is made before the folder for temporary files is another one.
    """
    RiddleHandler.released.clear()
    RiddleHandler.hanging.clear()
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = belongings(folder)
        yield
        RiddleHandler.released.set()
        gone_by = time.monotonic() + GONE_S
        while left := belongings(folder) - before:
            assert time.monotonic() < gone_by, left
            time.sleep(0.01)


def belongings(folder: str) -> Counter[str]:
    """The threads, child processes and descriptors of this process, and what is in a folder."""
    descriptors = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            descriptors.append(str(descriptor.readlink()).partition(":")[0])
        except FileNotFoundError:
            continue
    threads = [thread.name for thread in threading.enumerate()]
    children = [f"process {child.pid}" for child in alive_below()]
    return Counter([*descriptors, *threads, *children, *(path.name for path in Path(folder).iterdir())])


def alive_below() -> list[psutil.Process]:
    """The processes below this one that run. An execution server in it makes it a subreaper: it keeps ended orphans."""
    return [each for each in psutil.Process().children(recursive=True) if running(each)]


def running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def name_of(process: psutil.Process) -> str:
    """Return a process's name; empty: it has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


# Jobs ---------------------------------------------------------------------------------------------------------------


def test_a_job_runs_as_in_a_service() -> None:
    with local() as service:
        trajectory = ended(service, riddle())
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, None)
    assert trajectory.result.backend == "local"
    generated = trajectory.token_ids[trajectory.loss_mask]
    assert np.allclose(trajectory.logprobs[trajectory.loss_mask], -(1 + generated) / 1000)
    assert set(trajectory.weight_versions[trajectory.loss_mask]) == {0}
    assert trajectory.result.metrics["makers"] == 3  # an instance each for INIT, RUN and EVAL


def test_a_handler_that_was_made_serves_all_roles() -> None:
    with local(handlers={"riddle": RiddleHandler()}) as service:
        assert ended(service, riddle()).result.metrics["makers"] == 1


@pytest.mark.parametrize("kind", ["process", "bubblewrap"])
def test_tools_act_in_a_sandbox(kind: str) -> None:
    usable(kind)
    engine = say(tool_call("bash", command="echo $((40 + 2)) > answer; cat answer"), tool_call("finish", message="42"))
    with local(engine=engine, sandbox=kind) as service:
        trajectory = ended(service, riddle(answer="42", tools=("bash", "finish")))
    assert (trajectory.outcome, trajectory.reward, trajectory.result.stop_reason) == ("completed", 1.0, "finished")
    assert trajectory.result.metrics["tool_calls"] == 2


def test_a_turn_over_its_limit_is_shown_as_that() -> None:
    with local(engine=say("0123456789")) as service:
        job = msgspec.structs.replace(riddle(), sampling=Sampling(max_tokens=4))
        trajectory = ended(service, job)
    assert (trajectory.result.stop_reason, int(trajectory.loss_mask.sum())) == ("turn_length", 4)


def test_a_script_that_ends_is_said_in_the_jobs_error() -> None:
    with local(engine=say(tool_call("bash", command="true"))) as service:
        trajectory = ended(service, riddle(tools=("bash",), job_id="job-7"))
    assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
    assert trajectory.error is not None
    assert "job job-7 asks for turn 2, and the script has 1" in trajectory.error.message


def test_new_weights_are_in_the_trajectory(tmp_path: Path) -> None:
    with local() as service, service.client() as client:
        client.update_weights(tmp_path, 1)
        client.submit(riddle())
        (trajectory,) = client.collect(1)
    assert set(trajectory.weight_versions[trajectory.loss_mask]) == {1}


def test_the_installed_tasks_are_the_default() -> None:
    with LocalService(engine=say("I think \\boxed{2}")) as service:
        job = Job(task="math", instance={"problem": "1 + 1", "ground_truth": "2"})
        assert ended(service, job).reward == 1.0


def test_an_engine_of_ones_own() -> None:
    with local(engine=load_embedded_engine(None)) as service:
        trajectory = ended(service, msgspec.structs.replace(riddle(), sampling=Sampling(max_tokens=8)))
    assert trajectory.outcome == "completed"
    assert 0 < trajectory.loss_mask.sum() <= 8


def test_without_an_engine_a_job_that_talks_has_no_backend() -> None:
    with local(engine=None) as service:
        trajectory = ended(service, riddle())
    assert trajectory.error is not None
    assert (trajectory.outcome, trajectory.error.code) == ("infrastructure_error", "no_backend")


def test_a_batch_of_groups() -> None:
    engine = say(lambda prompt: "4" if "2 + 2" in prompt else "5")
    with (
        local(engine=engine) as service,
        service.client() as client,
        client.open_batch(target_groups=2, group_size=3, keep="all") as batch,
    ):
        batch.feed([riddle(), riddle("2 + 3")])
        groups = list(batch)
    assert sorted(group.rewards.tolist() for group in groups) == [[0.0] * 3, [1.0] * 3]


def test_jobs_and_results_survive_a_restart_of_the_rollout_broker() -> None:
    with local() as service, service.client() as client:
        client.submit(riddle(job_id=f"before-{n}") for n in range(4))
        service.brokers.stop("rollout")
        service.brokers.start_rollout_broker()
        client.submit(riddle(job_id="after"))
        assert {one.job_id for one in client.stream(timeout_s=30)} == {*(f"before-{n}" for n in range(4)), "after"}


def test_settings_of_a_topology_file() -> None:
    small = {"rollout_broker": {"job_limit_bytes": 2048}}
    with local(topology=small) as service, service.client() as client, pytest.raises(JobTooLarge) as caught:
        client.submit(riddle("x" * 2048))
    assert caught.value.limit_bytes == 2048


# Several, and where -------------------------------------------------------------------------------------------------


def test_several_services_at_once_do_not_meet() -> None:
    with local(engine=say("4")) as one, local(engine=say("5")) as other:
        assert one.run_dir != other.run_dir
        job = riddle(job_id="same")
        assert (ended(one, job).reward, ended(other, job).reward) == (1.0, 0.0)


def test_inside_a_running_loop() -> None:
    async def main() -> None:
        with local() as service:
            async with service.async_client() as client:
                await client.submit([riddle()])
                (trajectory,) = await client.collect(1)
        assert trajectory.reward == 1.0

    asyncio.run(main())


def test_one_that_was_never_started_leaves_nothing() -> None:
    assert local().run_dir.name  # and is collected


# How it ends --------------------------------------------------------------------------------------------------------


def test_a_test_that_fails_raises_its_own_error() -> None:
    service = local()

    def failing() -> None:
        with service:
            ended(service, riddle())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        failing()
    assert not hasattr(caught.value, "__notes__")
    assert not service.run_dir.exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["process", "bubblewrap"])
def test_jobs_under_way_leave_no_sandbox(kind: str) -> None:
    usable(kind)
    engine = say(tool_call("bash", command="sleep 600 & sleep 600"))
    with local(engine=engine, sandbox=kind, slots=2) as service, service.client() as client:
        client.submit(riddle(tools=("bash",)) for _ in range(4))  # two wait for RUN with a sandbox that INIT has made
        until(lambda: len(sleepers()) >= 2, "bash to run")
        until(lambda: len(list((service.run_dir / "sandboxes").glob("[!.]*"))) == 4, "the sandboxes")
    assert not sleepers()


def sleepers() -> list[psutil.Process]:
    return [each for each in alive_below() if name_of(each) == "sleep"]


def test_a_handler_that_waits_is_cancelled() -> None:
    with local() as service, service.client() as client:
        client.submit(riddle(hangs="waits"))
        assert RiddleHandler.hanging.wait(10)


HANGS = [
    ("refuses to stop", r"this did not stop: run of job stuck at .*test_local_service\.py:\d+$"),
    ("in a thread", r"this did not stop: the thread local-service-\d+-worker_\d+ at .*threading\.py:\d+$"),
    ("blocks the loop", r"this did not stop: the thread local-service at .*test_local_service\.py:\d+$"),
]


def hang(service: LocalService, how: str, error: Exception | None = None) -> None:
    """End a service in which a handler hangs, with an error of the test's own if there is one."""
    with service, service.client() as client:
        client.submit(riddle(hangs=how, job_id="stuck"))
        assert RiddleHandler.hanging.wait(10)
        if error is not None:
            raise error


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_service, "PHASES_LIMIT_S", 0.3)
    monkeypatch.setattr(loop_thread, "CANCEL_LIMIT_S", 0.5)
    monkeypatch.setattr(loop_thread, "BLOCKED_LIMIT_S", 1.0)
    monkeypatch.setattr(loop_thread, "THREAD_LIMIT_S", 1.0)


@pytest.mark.few(1)
@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(("how", "message"), HANGS, ids=[how for how, _ in HANGS])
def test_a_handler_that_cannot_be_stopped_is_named(how: str, message: str) -> None:
    service = local()
    with pytest.raises(TimeoutError, match=message):
        hang(service, how)
    assert not service.run_dir.exists()


@pytest.mark.usefixtures("short_limits")
def test_what_did_not_stop_is_a_note_of_the_tests_own_error() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        hang(local(), "refuses to stop", ZeroDivisionError())
    assert "run of job stuck" in caught.value.__notes__[0]


# Errors -------------------------------------------------------------------------------------------------------------


class Broken(RiddleHandler):
    def __init__(self) -> None:
        raise OSError("no such model")


class Misnamed(RiddleHandler):
    task = "other"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"handlers": {"riddle": object()}}, "task", "builtins:object.* is not a subclass of .*AgentHandler"),
    (
        {"handlers": {"riddle": Broken}},
        "task",
        "riddle .*Broken.* does not work: OSError: no such model",
    ),
    ({"handlers": {"riddle": Misnamed}}, "task", "task = 'other'; write 'riddle'"),
    ({"engine": "4"}, "engine", r"'4' is no Engine: it has no description, .*; say\(…\) makes one"),
    ({"engine": type(say("4"))}, "engine", "is no Engine: it is a class"),
    ({"slots": "8"}, "slots", "at least 1; not '8'"),
    ({"slots": 0}, "slots", "at least 1; not 0"),
    ({"handlers": {}}, "handlers", "one or more handlers"),
    ({"handlers": RiddleHandler}, "handlers", "by their tasks' names"),
    ({"topology": {"max_jobs": 1}}, "topology", "tables by their names"),
    ({"sandbox": "tent"}, "sandbox.kind", "'tent' is not a kind of sandbox"),
    ({"topology": {"gateway": {}}}, "gateway", "LocalService takes the tables .*; not gateway"),
    ({"topology": {"rollout_broker": {"max_job": 1}}}, "rollout_broker.max_job", "unknown field `max_job`"),
    ({"topology": {"rollout_broker": {"journal": "a"}}}, "rollout_broker.journal", "is in memory"),
]


@pytest.mark.parametrize(("options", "key", "message"), WRONG, ids=[message[:20] for *_, message in WRONG])
def test_what_is_wrong_is_named_at_once(options: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        local(**options)
    assert caught.value.key == key


def test_a_service_and_its_engine_serve_once() -> None:
    engine = say("4")
    service = LocalService(handlers={"riddle": RiddleHandler}, engine=engine)
    with service:
        pass
    with pytest.raises(ConfigError, match="runs once"), service:
        pass
    with pytest.raises(ConfigError, match="make another one"), LocalService(engine=engine):
        pass


def test_an_engine_that_describes_itself_wrongly_ends_the_start() -> None:
    engine = say("4")
    engine._weight_version = "newest"  # type: ignore[assignment]
    service = local(engine=engine)
    with pytest.raises(Exception, match="its weight version is 'newest'"), service:
        pytest.fail("it has started")


def test_an_unknown_task_is_refused_at_the_front_door() -> None:
    with local() as service, service.client() as client, pytest.raises(UnknownTask, match="chess"):
        client.submit(Job(task="chess", instance={}))


class TwiceHandler(RiddleHandler):
    """Begins a second conversation of the same name, after the first one or at once."""

    async def run(self, phase: RunPhase[RiddleInstance]) -> PhaseData:
        asked = [phase.converse([ChatMessage(Role.USER, phase.instance.question)], []) for _ in range(2)]
        if phase.instance.answer == "at once":
            await asyncio.gather(*asked)
        else:
            for one in asked:
                await one
        return {}


@pytest.mark.parametrize("when", ["later", "at once"])
def test_a_second_conversation_of_the_same_name_is_refused(when: str) -> None:
    with local(handlers={"riddle": TwiceHandler}) as service:
        trajectory = ended(service, Job(task="riddle", instance={"question": "2 + 2?", "answer": when}))
    assert trajectory.outcome == Outcome.FAILED
    assert trajectory.reward is None
    assert trajectory.error is not None
    assert trajectory.error.code == "handler_failed"
    assert "this rollout has a conversation named 'main' already" in trajectory.error.message


class GuessHandler(RiddleHandler):
    """A guessing game: the user says whether the policy's number is too small."""

    async def run(self, phase: RunPhase[RiddleInstance]) -> PhaseData:
        talk = phase.conversation([ChatMessage(Role.SYSTEM, "Guess.")])
        said = phase.instance.question
        while said != "Right.":
            turn = await talk.say(said)
            if turn.stop is not None:
                break
            right = turn.text == phase.instance.answer
            turn.reward = 1.0 if right else -0.1
            said = "Right." if right else "No."
        talk.end()
        return {"said": turn.text, "message": None, "makers": [phase.data["maker"], id(self)]}


def test_a_task_speaks_with_the_policy_turn_by_turn() -> None:
    with local(engine=say("3", "4"), handlers={"riddle": GuessHandler}) as service:
        trajectory = ended(service, Job(task="riddle", instance={"question": "2 + 2?", "answer": "4"}))
    assert (trajectory.outcome, trajectory.result.stop_reason) == (Outcome.COMPLETED, "environment")
    roles = "SYSTEM USER ASSISTANT USER ASSISTANT"
    assert [Role(role).name for role in trajectory.turns[:, 2]] == roles.split()
    assert trajectory.result.turn_rewards == ((2, -0.1), (4, 1.0))
    assert trajectory.result.conversations == ()


class DuelHandler(RiddleHandler):
    """Two players name a number, and the larger one wins; a user who is not trained asks."""

    async def run(self, phase: RunPhase[RiddleInstance]) -> PhaseData:
        user = phase.conversation([ChatMessage(Role.SYSTEM, "Ask.")], name="user", trained=False)
        asked = await user.say("Begin.")
        said = {}
        for name in ("white", "black"):
            talk = phase.conversation([ChatMessage(Role.SYSTEM, f"You are {name}.")], name=name)
            turn = await talk.say(asked.text)
            turn.reward = 0.25
            said[name] = turn.text
            talk.end()
        return {"said": said}

    async def eval(self, phase: EvalPhase[RiddleInstance]) -> Evaluation:
        white, black = (int(phase.data["said"][name]) for name in ("white", "black"))
        won = float(white > black) - float(white < black)
        rewards = {"white": won, "black": -won}
        return Evaluation(0.0, rewards=rewards if phase.instance.answer != "typo" else {"blck": won})


def test_self_play_is_informative_and_split_by_role() -> None:
    whites = iter("31")

    def answer(prompt: str) -> str:
        return "Which number?" if "Ask." in prompt else next(whites) if "white" in prompt else "2"

    engine = say(answer)
    with (
        local(engine=engine, handlers={"riddle": DuelHandler}) as service,
        service.client() as client,
        client.open_batch(target_groups=1, group_size=2) as batch,
    ):
        batch.feed([riddle()])
        (group,) = batch
    assert group.rewards.tolist() == [0.0, 0.0]
    white, black = group.split()
    assert (white.group_id, black.group_id) == (f"{group.group_id}/white", f"{group.group_id}/black")
    assert sorted(white.rewards.tolist()) == [-1.0, 1.0]
    assert black.rewards.tolist() == (-white.rewards).tolist()
    arrays = collate([white, black])
    assert arrays["rewards"].tolist() == [*white.rewards, *black.rewards]
    for one in group.trajectories:
        assert [(part.name, part.segments) for part in one.result.conversations] == [
            ("user", 0),
            ("white", 1),
            ("black", 1),
        ]
        assert [reward for _, reward in one.result.turn_rewards] == [0.25, 0.25]
        assert all(one.turns[turn, 2] == Role.ASSISTANT for turn, _ in one.result.turn_rewards)
        assert "Which number?" in one.result.notes["conversation user"]


def test_a_reward_of_a_conversation_that_is_not_there_is_refused_by_name() -> None:
    engine = say(lambda prompt: "Which number?" if "Ask." in prompt else "1")
    with local(engine=engine, handlers={"riddle": DuelHandler}) as service:
        trajectory = ended(service, Job(task="riddle", instance={"question": "", "answer": "typo"}))
        assert ended(service, Job(task="riddle", instance={"question": ""})).reward == 0.0
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FAILED, None)
    assert trajectory.error is not None
    assert "a reward for the conversation 'blck'; the rollout has: user, white, black" in trajectory.error.message


class MisnamedHandler(RiddleHandler):
    async def run(self, phase: RunPhase[RiddleInstance]) -> PhaseData:
        for name in phase.instance.question.split("|"):
            phase.conversation([ChatMessage(Role.USER, "Hello")], name=name)
        return {}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("the user", "a conversation's name is of letters, digits and . _ : -, and not 'the user'"),
        ("|".join(map(str, range(65))), "a rollout has at most 64 conversations"),
    ],
)
def test_names_of_conversations_that_no_result_can_have_are_refused(names: str, says: str) -> None:
    with local(handlers={"riddle": MisnamedHandler}) as service:
        trajectory = ended(service, Job(task="riddle", instance={"question": names}))
    assert trajectory.error is not None
    assert says in trajectory.error.message


@pytest.mark.parametrize("given", [{"task": "riddle"}, [{"task": "riddle"}], ["riddle"]])
def test_what_is_no_job_is_refused_with_what_is(given: Any) -> None:
    said = r"a job must be a prorl_zmq\.Job, such as .* and not a (dict|str)"
    with local() as service, service.client() as client, pytest.raises(TypeError, match=said):
        client.submit(given)


def test_a_harness_that_is_not_there_is_refused_when_its_job_is_submitted() -> None:
    with local() as service, service.client() as client:
        with pytest.raises(InvalidJob, match=r"no harness 'nope'; the service has .*claude-code.*command") as caught:
            client.submit(Job(task="riddle", instance={"question": "?"}, harness="nope"))
        assert caught.value.field == "harness"
