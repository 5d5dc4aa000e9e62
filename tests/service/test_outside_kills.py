"""Rollouts of programs outside, whose service's processes are killed: what goes on, and what is lost."""

from __future__ import annotations

import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import psutil
import pytest
from command_lines import line_of
from support.waiting import until

from prorl_zmq import Job, RolloutClient, Sampling
from prorl_zmq.client.outside_calls import reached_at
from prorl_zmq.service.child import ChildService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.client.blocking.endpoint import Endpoint

pytestmark = pytest.mark.proof

TOPOLOGY = """\
stage = [{role = "init"}, {role = "run", slots = 4}, {role = "eval"}]

[sandbox]
kind = "process"
"""
JOB = Job(task="outside", instance={}, sampling=Sampling(max_tokens=4))
WAIT_S = 90.0


@contextmanager
def serving() -> Iterator[tuple[ChildService, RolloutClient]]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = ChildService(Path(folder), TOPOLOGY)
        with service, RolloutClient(service.front_door, timeout_s=60) as client:
            service.wait_ready(client)
            yield service, client


def kill(service: ChildService, words: str) -> None:
    below = psutil.Process().children(recursive=True)
    (found,) = [one for one in below if words in line_of(one) and str(service.run_dir) in line_of(one)]
    found.send_signal(signal.SIGKILL)
    until(lambda: not found.is_running() or found.status() == psutil.STATUS_ZOMBIE, "its end")


def chat(rollout: Endpoint) -> None:
    with openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0) as model:
        model.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hello."}])


@pytest.mark.timeout(200)
def test_a_rollout_goes_on_beside_a_broker_that_is_killed() -> None:
    with serving() as (service, client), client.endpoint(JOB) as rollout:
        chat(rollout)
        kill(service, "rollout_broker.json")
        chat(rollout)  # nobody but the RUN process and the engine is needed for it
        until(lambda: reached_at(client.trace(rollout.job_id, timeout_s=60)) == rollout.base_url, "the address", WAIT_S)
        trajectory = rollout.finish(reward=0.5, timeout_s=WAIT_S)
    assert (trajectory.outcome, trajectory.reward, trajectory.result.metrics["turns"]) == ("completed", 0.5, 2)


@pytest.mark.timeout(200)
def test_a_rollout_whose_run_process_is_killed_is_lost_and_not_tried_again() -> None:
    with serving() as (service, client):
        with client.endpoint(JOB) as rollout:
            chat(rollout)
            kill(service, "stage_run.json")
            with pytest.raises(openai.APIConnectionError):
                chat(rollout)
            trajectory = rollout.finish(reward=1.0, timeout_s=WAIT_S)
        assert (trajectory.outcome, trajectory.reward, trajectory.result.attempt) == ("infrastructure_error", None, 1)
        with client.endpoint(JOB, timeout_s=WAIT_S) as another:  # once the process is there again
            chat(another)
            assert another.finish(reward=1.0).reward == 1.0
