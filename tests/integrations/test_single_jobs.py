"""Rollouts for the frameworks that ask for one per call: OpenRLHF, AReaL; and Tinker's data."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import framework_types
import numpy as np
import pytest
from finished_groups import chat, group, rewritten, with_tool

from prorl_zmq import Job
from prorl_zmq.errors import InvalidJob, JobsLost, NotTrainable, RequestTimeout
from prorl_zmq.integrations.dataset_rows import dataset_rows
from prorl_zmq.integrations.openrlhf import agent_executor, response
from prorl_zmq.integrations.single_jobs import SingleJobs, row_of
from prorl_zmq.integrations.tinker import datums

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.data.trajectory import Trajectory

PARAMETERS = SimpleNamespace(temperature=0.5, top_p=1.0, top_k=-1, min_p=0.0)
JOB = Job(task="math", instance={"problem": "1 + 1", "ground_truth": "2"})


class Client:
    """Ends each job as `end` says, a few at a time and in reverse."""

    def __init__(self, end: Callable[[Job], Trajectory | None] = lambda job: chat([1], [2], job_id=job.job_id)) -> None:
        self.end = end
        self.submitted: list[Job] = []
        self.cancelled: list[str] = []
        self.errors: list[Exception] = []
        self._ended: list[Trajectory] = []

    async def submit(self, job: Job) -> None:
        self.submitted.append(job)
        if (trajectory := self.end(job)) is not None:
            self._ended.append(trajectory)

    async def collect(self, *, wait_s: float) -> list[Trajectory]:
        await asyncio.sleep(min(wait_s, 0.01))
        if self.errors:
            raise self.errors.pop()
        ended, self._ended = self._ended[-3:], self._ended[:-3]
        return ended[::-1]

    async def cancel(self, job_id: str, *, timeout_s: float) -> None:
        assert timeout_s > 0
        self.cancelled.append(job_id)

    async def close(self) -> None:
        pass


def test_each_caller_gets_its_own_trajectory() -> None:
    client = Client()
    made: list[Client] = []

    async def run() -> None:
        jobs = SingleJobs(lambda: made.append(client) or client)  # type: ignore[arg-type,return-value,func-returns-value]
        for _ in range(2):  # the collector ends with the last job, and begins again with the next
            asked = [Job(task="math", instance={}) for _ in range(20)]
            got = await asyncio.gather(*(jobs.run(job) for job in asked))
            assert [one.job_id for one in got] == [job.job_id for job in asked]
        await jobs.close()

    asyncio.run(run())
    assert made == [client]


def test_a_cancelled_call_cancels_its_job_and_no_other() -> None:
    client = Client(lambda job: None if job.job_id == "slow" else chat([1], [2], job_id=job.job_id))

    async def run() -> None:
        jobs = SingleJobs(lambda: client)  # type: ignore[arg-type,return-value]
        slow = asyncio.create_task(jobs.run(Job(task="math", instance={}, job_id="slow")))
        await asyncio.sleep(0.05)
        slow.cancel()
        assert (await jobs.run(Job(task="math", instance={}, job_id="other"))).job_id == "other"
        with pytest.raises(asyncio.CancelledError):
            await slow
        await jobs.close()

    asyncio.run(run())
    assert client.cancelled == ["slow"]


def test_what_the_service_lost_is_told_to_whom_it_concerns() -> None:
    client = Client(lambda _: None)

    async def run() -> None:
        jobs = SingleJobs(lambda: client)  # type: ignore[arg-type,return-value]
        tasks = [asyncio.create_task(jobs.run(Job(task="math", instance={}, job_id=name))) for name in "ab"]
        await asyncio.sleep(0.05)
        client.errors = [RequestTimeout("no answer"), JobsLost("gone", job_ids="a", count=1)]
        with pytest.raises(JobsLost):
            await tasks[0]
        with pytest.raises(RequestTimeout):
            await tasks[1]
        await jobs.close()

    asyncio.run(run())


def test_openrlhf_gets_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    framework_types.install(monkeypatch)
    client = Client(lambda job: with_tool(1.0, job_id=job.job_id))
    executor = agent_executor(connect=lambda: client)()  # type: ignore[arg-type,return-value]
    label = json.dumps(dataset_rows([JOB])[0])
    got = asyncio.run(executor.execute("?", label, PARAMETERS, 100, None, None))
    assert (got["prompt"], got["label"], got["reward"], got["scores"]) == ("?", label, 1.0, 1.0)
    assert got["observation_tokens"] == [1, 2, 3, 9, 10, 11, 8, 20, 21, 9, 12]
    assert got["action_ranges"] == [(4, 6), (10, 11)]
    assert got["rollout_log_probs"] == [0, 0, 0, 0, -0.25, -0.5, 0, 0, 0, 0, -1.0]
    assert got["truncated"] is False
    (job,) = client.submitted
    assert (job.instance, job.sampling.temperature, job.sampling.top_k) == (JOB.instance, 0.5, 0)
    assert job.job_id != JOB.job_id


def test_openrlhf_gets_no_reward_that_nobody_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    framework_types.install(monkeypatch)
    client = Client()
    rewards = iter([None, 1.0, None, None, None])
    client.end = lambda job: chat([1], [2], next(rewards), job_id=job.job_id)
    executor = agent_executor(lambda _prompt, _label: JOB, connect=lambda: client)()  # type: ignore[arg-type,return-value]

    async def run() -> None:
        assert (await executor.execute("?", "", PARAMETERS, 100, None, None))["reward"] == 1.0
        with pytest.raises(NotTrainable, match="reward None"):
            await executor.execute("?", "", PARAMETERS, 100, None, None)
        with pytest.raises(InvalidJob, match="images"):
            await executor.execute("?", "", PARAMETERS, 100, None, None, images=["a.png"])

    asyncio.run(run())
    assert len(client.submitted) == 5
    assert len({job.job_id for job in client.submitted}) == 5


@pytest.mark.parametrize("label", [None, "two", "[]", '{"task": "math"}'])
def test_a_label_that_makes_no_job(label: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    framework_types.install(monkeypatch)
    executor = agent_executor(connect=lambda: Client())()  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidJob, match=r"label|instance"):
        asyncio.run(executor.execute("?", label, PARAMETERS, 100, None, None))


def test_a_rollout_that_is_too_long_is_cut_and_marked() -> None:
    row = row_of(with_tool(1.0), "OpenRLHF")
    got = response(row, 5)
    assert got["observation_tokens"] == [1, 2, 3, 9, 10]
    assert got["action_ranges"] == [(4, 5)]
    assert got["truncated"] is True
    with pytest.raises(NotTrainable, match="4 tokens before the policy's first, and max_length is 4"):
        response(row, 4)


def test_areal_gets_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    framework_types.install(monkeypatch)
    torch = pytest.importorskip("torch", reason="it is of the extra [train]")
    from prorl_zmq.integrations.areal import tensors

    got = tensors(row_of(with_tool(1.0), "AReaL"))
    assert got["input_ids"].tolist() == [[1, 2, 3, 9, 10, 11, 8, 20, 21, 9, 12]]
    assert got["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]]
    assert got["versions"].tolist() == [[-1, -1, -1, -1, 4, 4, -1, -1, -1, -1, 5]]
    assert got["logprobs"].tolist() == [[0, 0, 0, 0, -0.25, -0.5, 0, 0, 0, 0, -1.0]]
    assert got["rewards"].tolist() == [1.0]
    kinds = {name: value.dtype for name, value in got.items()}
    assert kinds["input_ids"] == kinds["loss_mask"] == kinds["versions"] == torch.int32
    assert (kinds["attention_mask"], kinds["rewards"]) == (torch.bool, torch.float32)


def test_several_segments_are_refused_where_one_row_is_a_rollout() -> None:
    with pytest.raises(NotTrainable, match="several segments, each of which AReaL"):
        row_of(rewritten(1.0), "AReaL")


def test_tinker_gets_shifted_tokens_with_advantages() -> None:
    pytest.importorskip("tinker", reason="it is not installed")
    batch = [group("a", rewritten(1.0), chat([1], [2], 0.0)), group("b", with_tool(2.0), chat([1], [2], 1.0))]
    found = datums(batch)
    assert [one.model_input.to_ints() for one in found[3:]] == [[1, 2, 3, 9, 10, 11, 8, 20, 21, 9], [1, 9]]
    inputs = {name: value.to_numpy() for name, value in found[3].loss_fn_inputs.items()}
    assert inputs["target_tokens"].tolist() == [2, 3, 9, 10, 11, 8, 20, 21, 9, 12]
    assert inputs["logprobs"].tolist() == [0, 0, 0, -0.25, -0.5, 0, 0, 0, 0, -1.0]
    assert inputs["advantages"].tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0, 0, 0.5]
    assert inputs["target_tokens"].dtype == np.int64
    sums = [one.loss_fn_inputs["advantages"].to_numpy().sum() for one in found]
    assert sums == [1.0, 0.5, -0.5, 1.5, -0.5], "each segment has its rollout's advantage, whose mean counts rollouts"
