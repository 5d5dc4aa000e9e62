"""NeMo Gym: what it is told of rollouts and failures; and Gym itself, as it is, on a whole service."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gym_python
import letters
import pytest
from finished_groups import chat, groups, rewritten, with_tool
from hypothesis import given

from prorl_zmq import Job, RolloutClient
from prorl_zmq.data.rows import rows_of
from prorl_zmq.errors import Busy, ErrorInfo, InvalidJob, JobsLost, RequestTimeout, UnknownTask
from prorl_zmq.integrations import session
from prorl_zmq.integrations.dataset_rows import dataset_rows
from prorl_zmq.integrations.nemo_gym.response import output_items, split_failures
from prorl_zmq.integrations.nemo_gym.rollouts import GymRollouts
from prorl_zmq.integrations.session import check_version
from prorl_zmq.integrations.single_jobs import row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prorl_zmq import Group
    from prorl_zmq.data.trajectory import Trajectory

JOB = Job(task="math", instance={"problem": "1 + 1", "ground_truth": "2"})
ROW: dict[str, Any] = {**dataset_rows([JOB])[0], "_ng_task_index": 3, "_ng_rollout_index": 1}
EXAMPLE = Path(__file__).parents[2] / "prorl_zmq" / "examples" / "trainers" / "nemo_gym"


# What Gym is told -----------------------------------------------------------------------------------------------------


def seen_by_nemo_rl(items: list[dict[str, Any]]) -> tuple[list[int], list[bool], list[float]]:
    """Put a rollout's items together as NeMo RL does, with its assertion: ids, whether they are trained, log-probs."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for item in items:
        if "generation_token_ids" not in item:
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        assert prompt[: len(ids)] == ids, "each item begins with all of the one before"
        assert len(generated) == len(item["generation_log_probs"]) > 0
        new = len(prompt) - len(ids)
        ids = prompt + generated
        mask += [False] * new + [True] * len(generated)
        logprobs += [0.0] * new + item["generation_log_probs"]
    return ids, mask, logprobs


@given(groups())
def test_the_items_of_a_rollout_are_its_tokens_up_to_the_last_trained_one(batch: list[Group]) -> None:
    for row in rows_of(batch):
        items = json.loads(json.dumps(output_items(row)))
        ids, mask, logprobs = seen_by_nemo_rl(items)
        end = len(ids)
        assert ids == row.arrays.token_ids[:end].tolist()
        assert mask == row.arrays.loss_mask[:end].tolist()
        assert logprobs == row.arrays.logprobs[:end].tolist()
        assert not row.arrays.loss_mask[end:].any()
        messages = [item for item in items if item["type"] == "message"]
        assert [item["status"] for item in messages[:-1]] == ["completed"] * (len(messages) - 1)
        assert messages[-1]["status"] == ("incomplete" if row.truncated else "completed")


def test_tools_answers_are_items_at_their_places() -> None:
    first, answer, last = output_items(row_of(with_tool(1.0, job_id="j"), "NeMo Gym"))
    assert (first["type"], first["id"], first["role"]) == ("message", "msg_j_4", "assistant")
    assert (first["prompt_token_ids"], first["generation_token_ids"]) == ([1, 2, 3, 9], [10, 11])
    assert answer == {"type": "function_call_output", "call_id": "call_j_6", "output": ""}
    assert last["prompt_token_ids"] == [1, 2, 3, 9, 10, 11, 8, 20, 21, 9]
    assert (last["generation_token_ids"], last["generation_log_probs"]) == ([12], [-1.0])


class Client:
    """Ends each job as `end` says: with a trajectory, an error of `submit`, or not at all."""

    def __init__(self, end: Callable[[Job], Trajectory | Exception | None]) -> None:
        self.end = end
        self.submitted: list[Job] = []
        self.cancelled: list[str] = []
        self.closed = False
        self._ended: list[Trajectory] = []

    async def submit(self, job: Job) -> None:
        self.submitted.append(job)
        ended = self.end(job)
        if isinstance(ended, Exception):
            raise ended
        if ended is not None:
            self._ended.append(ended)

    async def collect(self, *, wait_s: float) -> list[Trajectory]:
        await asyncio.sleep(min(wait_s, 0.01))
        ended, self._ended = self._ended, []
        return ended

    async def cancel(self, job_id: str, *, timeout_s: float) -> None:
        assert timeout_s > 0
        self.cancelled.append(job_id)

    async def close(self) -> None:
        self.closed = True


def run(client: Client, *rows: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        rollouts = GymRollouts(lambda: client, **options)  # type: ignore[arg-type,return-value]
        answers = await asyncio.gather(*(rollouts.run(row) for row in rows))
        await rollouts.close()
        return answers

    answers = asyncio.run(main())
    assert client.closed == bool(client.submitted)
    return json.loads(json.dumps(answers, allow_nan=False))  # type: ignore[no-any-return]


def test_a_rollout_is_the_row_with_its_reward_response_and_metrics() -> None:
    client = Client(lambda job: with_tool(0.5, job_id=job.job_id, stop_reason="max_turns", metrics={"tool_calls": 2.0}))
    (answer,) = run(client, ROW)
    (job,) = client.submitted
    assert (job.task, job.instance, job.group_id) == ("math", JOB.instance, "gym-3")
    assert ROW.items() <= answer.items()
    assert (answer["reward"], answer["truncated"], answer["stop_reason"]) == (0.5, True, "max_turns")
    assert (answer["weight_version"], answer["job_id"]) == (4, job.job_id)
    assert (answer["tool_calls"], answer["malformed_tool_calls"]) == (2.0, 0.0)
    response = answer["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (8, 3, 11)
    assert seen_by_nemo_rl(response["output"])[0] == [1, 2, 3, 9, 10, 11, 8, 20, 21, 9, 12]


def test_a_rollout_that_ended_by_itself_is_completed() -> None:
    (answer,) = run(Client(lambda job: chat([1], [2], job_id=job.job_id, stop_reason="done")), ROW)
    assert (answer["response"]["status"], answer["response"]["incomplete_details"]) == ("completed", None)


def test_a_row_goes_before_the_configuration() -> None:
    client = Client(lambda job: chat([1], [2], job_id=job.job_id))
    options: dict[str, Any] = {
        "task": "shell",
        "sampling": {"temperature": 0.5, "max_tokens": 7, "top_k": 5},
        "episode": {"max_turns": 3},
    }
    given_there = {"input": "?", "temperature": 0.0, "top_p": None, "max_output_tokens": 9, "tools": []}
    run(client, {"instance": {}}, {**ROW, "responses_create_params": given_there}, **options)
    bare, full = client.submitted
    assert (bare.task, bare.sampling.temperature, bare.sampling.max_tokens) == ("shell", 0.5, 7)
    assert (full.task, full.sampling.temperature, full.sampling.max_tokens) == ("math", 0.0, 9)
    assert (full.sampling.top_p, full.sampling.top_k, full.episode.max_turns) == (1.0, 5, 3)


def test_rows_without_an_index_are_grouped_by_their_job() -> None:
    client = Client(lambda job: chat([1], [2], job_id=job.job_id))
    one, other = {"task": "math", "instance": {"a": 1}}, {"task": "math", "instance": {"a": 2}}
    run(client, one, other, one, {**one, "_ng_task_index": "my own / index"})
    names = [job.group_id for job in client.submitted]
    assert names[0] == names[2] == names[3] != names[1]
    assert len({job.job_id for job in client.submitted}) == 4


FAILED = ErrorInfo("handler_failed", "the task's code raised")
UNKNOWN = ErrorInfo("unknown_task", "gone in the meantime")


@pytest.mark.parametrize(
    ("row", "end", "kind", "mark", "words"),
    [
        ({"instance": {}}, None, "invalid_job", "_ng_failure_terminal", "rows without task"),
        ({**ROW, "instance": "{"}, None, "invalid_job", "_ng_failure_terminal", "instance"),
        ({**ROW, "responses_create_params": {"temperature": 9}}, None, "invalid_job", "_ng_failure_terminal", "temp"),
        ({**ROW, "responses_create_params": [1]}, None, "internal_error", "", "AttributeError"),
        (ROW, UnknownTask("no such task"), "unknown_task", "_ng_failure_terminal", "no such task"),
        (ROW, RequestTimeout("no reply"), "request_timeout", "_ng_no_persist", "no reply"),
        (ROW, JobsLost("gone", job_ids="a", count=1), "jobs_lost", "_ng_no_persist", "gone"),
        (ROW, OverflowError("int too big"), "internal_error", "", "int too big"),
        (ROW, {"outcome": "failed", "error": FAILED}, "handler_failed", "", "code raised"),
        (ROW, {"outcome": "failed", "error": UNKNOWN}, "unknown_task", "_ng_failure_terminal", "gone"),
        (ROW, {"outcome": "cancelled"}, "not_trainable", "", "reward None"),
        (ROW, rewritten, "not_trainable", "", "history = 'append'"),
        (ROW, None, "wait_limit", "", "within wait_s = 0.2 s"),
    ],
)
def test_what_has_no_reward_is_told_as_a_failure_without_one(
    row: dict[str, Any], end: Any, kind: str, mark: str, words: str
) -> None:
    def ending(job: Job) -> Any:
        if isinstance(end, dict):
            return chat([1], [2], None, job_id=job.job_id, **end)
        return end(1.0, job_id=job.job_id) if callable(end) else end

    client = Client(ending)
    (answer,) = run(client, {**row, "reward": 1.0}, wait_s=0.2)
    assert "reward" not in answer
    assert answer["_ng_failure_class"] == kind
    assert [name for name in ("_ng_failure_terminal", "_ng_no_persist") if answer.get(name)] == ([mark] if mark else [])
    assert words in answer["error_message"]
    assert (answer["response"]["status"], answer["response"]["output"]) == ("failed", [])
    assert answer["task"] == row["task"] if "task" in row else True
    assert client.cancelled == ([answer["job_id"]] if kind == "wait_limit" else [])
    assert split_failures([answer, {"reward": 1.0}]) == ([{"reward": 1.0}], {kind: 1})


def test_a_full_service_is_waited_for() -> None:
    busy = [Busy("full", retry_after_s=1.0), Busy("full", retry_after_s=1.0)]
    client = Client(lambda job: busy.pop() if busy else chat([1], [2], job_id=job.job_id))
    (answer,) = run(client, ROW)
    assert answer["reward"] == 1.0
    assert len({job.job_id for job in client.submitted}) == 1


@pytest.mark.parametrize("options", [{"sampling": {"heat": 1}}, {"episode": {"max_turns": 0}}, {"episode": {"x": 1}}])
def test_a_wrong_configuration_is_refused_before_the_first_row(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"heat|max_turns|`x`"):
        GymRollouts(lambda: None, **options)  # type: ignore[arg-type,return-value]


def test_another_version_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "version", lambda _: "0.7.0")
    with pytest.warns(UserWarning, match=r"^nemo-gym 0.7.0 is installed; prorl_zmq was tested with nemo-gym 0.4$"):
        check_version("nemo-gym", "0.4")


def test_without_gym_the_agent_says_what_to_install() -> None:
    if importlib.util.find_spec("nemo_gym") is not None:
        pytest.skip("only a machine without NeMo Gym shows it")
    with pytest.raises(ImportError, match=r"^nemo-gym is not installed: pip install 'nemo-gym~=0.4.0'$"):
        importlib.import_module("prorl_zmq.integrations.nemo_gym.agent")


# Gym itself -----------------------------------------------------------------------------------------------------------


class Service:
    """`prorl serve` in a fixed run folder, so that one that was killed can be started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "serve", "--config", "topology.toml"]
        with Path(self.folder, "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder / "example",
                env={**os.environ, "PRORL_RUN_DIR": str(self.run_dir)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        with self.client() as client:
            client.submit(JOB)
            assert [trajectory.outcome for trajectory in client.stream()] == ["completed"]

    def client(self) -> RolloutClient:
        return RolloutClient(f"ipc://{self.run_dir}/front_door", timeout_s=90)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(40)
            self._process = None


class Gym:
    """The example's commands, in a copy of its folder."""

    def __init__(self, folder: Path, environment: dict[str, str], service: Service, collect: str) -> None:
        self.folder, self.environment, self.service, self._collect = folder, environment, service, collect

    def command(self, rows: list[dict[str, Any]], out: str, repeats: int) -> str:
        words = {"input": [{"role": "user", "content": "?"}]}
        lines = [json.dumps({"responses_create_params": words, **row}) + "\n" for row in rows]
        (self.folder / f"{out}_rows.jsonl").write_text("".join(lines))
        names = f"--input {out}_rows.jsonl --output {out}.jsonl"
        return f"gym eval run --no-serve --agent prorl_agent {names} --num-repeats {repeats}"

    def run(self, command: str, limit_s: float = 120.0) -> str:
        return gym_python.run(command, self.folder, self.environment, limit_s)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]

    def aggregate(self, name: str) -> dict[str, Any]:
        (found,) = json.loads((self.folder / f"{name}_aggregate_metrics.json").read_text())
        return dict(found)


@pytest.fixture(scope="module")
def gym() -> Iterator[Gym]:
    """Gym's servers and the service, started by what the example's README says, word for word."""
    gym_python.gym_python()
    commands = [line.strip() for line in (EXAMPLE / "README.md").read_text().splitlines() if line.startswith("    ")]
    _, _, rows, link, start, collect = commands
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        example = folder / "example"
        shutil.copytree(EXAMPLE, example)
        environment = gym_python.environment(folder, folder / "run")
        (folder / "package").mkdir()
        letters.register(folder / "package", patch)
        service = Service(folder)
        service.start()
        try:
            gym_python.run(f"{rows} && {link}", example, environment)
            with gym_python.GymServers(start, example, environment):
                yield Gym(example, environment, service, collect)
        finally:
            service.stop()


proof = [pytest.mark.proof, pytest.mark.timeout(400), pytest.mark.xdist_group("one service for NeMo Gym")]
PARSED = """
import json, sys
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseOutputMessageForTraining as Message
for line in open(sys.argv[1]):
    output = NeMoGymResponse.model_validate(json.loads(line)["response"]).output
    print(sum(isinstance(item, Message) for item in output), len(output))
"""
ANSWERS = """
from nemo_gym.server_utils import ServerClient
import requests
head = ServerClient.load_from_global_config()
agent = head.global_config_dict["prorl_agent"]["responses_api_agents"]["prorl_agent"]
for path, body in (("v1/responses", {"input": "?"}), ("run", {"responses_create_params": {"unknown": 1}})):
    answer = requests.post(f"http://{agent['host']}:{agent['port']}/{path}", json=body)
    print(answer.status_code, answer.json().get("_ng_failure_class", ""))
"""
OTHER_VERSION = """
import importlib.metadata
importlib.metadata.version = lambda _: "0.7.0"
import prorl_zmq.integrations.nemo_gym.agent
"""


class TestGym:
    pytestmark = proof

    def test_it_collects_whole_rollouts_by_the_readmes_commands(self, gym: Gym) -> None:
        begun = time.monotonic()
        printed = gym.run(gym._collect)
        taken_s = time.monotonic() - begun
        assert '"failed": 0' in printed
        found = gym.lines("out")
        assert sorted((row["_ng_task_index"], row["_ng_rollout_index"]) for row in found) == [
            (task, place) for task in (0, 1) for place in range(4)
        ]
        assert len({row["job_id"] for row in found}) == 8
        turns = []
        for row in found:
            items = row["response"]["output"]
            ids, mask, _ = seen_by_nemo_rl(items)
            assert sum(mask) == row["response"]["usage"]["output_tokens"]
            assert len(ids) <= row["response"]["usage"]["total_tokens"]
            turns.append(sum(item["type"] == "message" for item in items))
        parsed = gym_python.run([str(gym_python.gym_python()), "-c", PARSED, "out.jsonl"], gym.folder, gym.environment)
        numbers = [tuple(map(int, line.split())) for line in parsed.splitlines()]
        assert [messages for messages, _ in numbers] == turns
        aggregate = gym.aggregate("out")
        assert aggregate["key_metrics"]["mean/reward"] == statistics.mean(row["reward"] for row in found)
        assert aggregate["agent_metrics"]["failed"] == 0
        print(f"8 of 8 in {taken_s:.1f} s, {sum(turns)} messages")

    def test_failures_are_told_and_not_averaged(self, gym: Gym) -> None:
        rows = [
            {"task": "letters", "instance": {"name": "a", "has_tool": True}},
            {"task": "letters", "instance": {"name": "b", "fails": True}},
            {"task": "nobody", "instance": {}},
            {"instance": {}},
        ]
        command = gym.command(rows, "bad", 3)
        gym.run(command)
        good, failed = gym.lines("bad"), gym.lines("bad_failures")
        assert [row["_ng_task_index"] for row in good] == [0] * 3
        messages = [sum(item["type"] == "message" for item in row["response"]["output"]) for row in good]
        assert max(messages) > 1, "the model calls the tool by chance"
        told = {(row["_ng_task_index"], row["_ng_failure_class"], row.get("_ng_failure_terminal")) for row in failed}
        assert told == {(1, "handler_failed", None), (2, "unknown_task", True), (3, "invalid_job", True)}
        assert len(failed) == 9
        assert not any("reward" in row for row in failed)
        aggregate = gym.aggregate("bad")
        mean = statistics.mean(row["reward"] for row in good)
        assert mean > 0
        assert aggregate["key_metrics"]["mean/reward"] == pytest.approx(mean)
        assert aggregate["agent_metrics"]["failed"] == 9
        assert aggregate["agent_metrics"]["failed/handler_failed"] == 3
        assert [task["_ng_task_index"] for task in aggregate["group_level_metrics"]] == [0]
        gym.run(f"{command} --resume")
        again = gym.lines("bad_failures")[9:]
        assert {(row["_ng_task_index"], row["_ng_failure_class"]) for row in again} == {(1, "handler_failed")}
        assert len(again) == 3, "what is useless to repeat is not repeated"

    def test_another_version_is_said_and_used(self, gym: Gym) -> None:
        printed = gym_python.run([str(gym_python.gym_python()), "-c", OTHER_VERSION], gym.folder, gym.environment)
        assert "nemo-gym 0.7.0 is installed; prorl_zmq was tested with nemo-gym 0.4" in printed

    def test_whole_rollouts_only(self, gym: Gym) -> None:
        printed = gym_python.run([str(gym_python.gym_python()), "-c", ANSWERS], gym.folder, gym.environment)
        assert printed.split() == ["501", "200", "invalid_job"]

    def test_a_collection_that_is_stopped_leaves_no_jobs(self, gym: Gym) -> None:
        with gym.service.client() as client:
            before = client.status().outcomes
            with self._collecting(gym, "stopped", wait_s=0.5) as process:  # so that most are still to come
                process.kill()
            status = client.status()
            while any([*status.queued.values(), *status.running.values()]):
                time.sleep(0.1)
                status = client.status()
        assert status.outcomes.get("cancelled", 0) - before.get("cancelled", 0) > 200  # type: ignore[call-overload]

    def test_a_service_that_is_killed_gives_no_rewards_and_a_resumed_run_has_them_all(self, gym: Gym) -> None:
        with self._collecting(gym, "killed", wait_s=0.1) as process:
            gym.service.stop(signal.SIGKILL)
            process.wait(120)
            assert process.returncode == 0
        before = gym.lines("killed")
        assert 0 < len(before) < 400
        # Whatever died first, the engine or the broker.
        assert not any("reward" in row for row in gym.lines("killed_failures"))
        metrics = gym.aggregate("killed")["agent_metrics"]
        assert metrics["failed"] == 400 - len(before)
        assert metrics["failed/request_timeout"] > 0
        assert metrics["mean/reward"] == pytest.approx(statistics.mean(row["reward"] for row in before))
        gym.service.start()
        gym.run(f"{self._command(gym, 'killed', wait_s=0.1)} --resume")
        after = gym.lines("killed")
        assert after[: len(before)] == before
        assert len({(row["_ng_task_index"], row["_ng_rollout_index"]) for row in after}) == len(after) == 400
        assert gym.aggregate("killed")["agent_metrics"]["failed"] == 0

    @staticmethod
    def _command(gym: Gym, name: str, wait_s: float = 0.0) -> str:
        rows = [{"task": "letters", "instance": {"name": each, "wait_s": wait_s}} for each in "ab"]
        return gym.command(rows, name, 200)

    def _collecting(self, gym: Gym, name: str, wait_s: float = 0.0) -> subprocess.Popen[bytes]:
        """Start a collection, and wait for its first rollout."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {self._command(gym, name, wait_s)}"],
            cwd=gym.folder,
            env=gym.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        out = gym.folder / f"{name}.jsonl"
        for _ in range(1200):
            if out.is_file() and out.stat().st_size:
                return process
            assert process.poll() is None
            time.sleep(0.05)
        raise AssertionError("no rollout came")
