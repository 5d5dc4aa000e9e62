"""The steps of a training, through a whole service."""

from __future__ import annotations

import json

from support.commands import prorl
from support.waiting import until

from prorl_zmq import Job
from prorl_zmq.testing import LocalService, say


def test_a_training_is_shown_step_by_step() -> None:
    with (
        LocalService(engine=say("I think \\boxed{2}")) as service,
        service.client() as client,
    ):
        none = prorl("training", "--connect", service.front_door)
        assert (none.returncode, "no batch with rollouts was closed" in none.stderr) == (2, True)
        job = Job(task="math", instance={"problem": "1 + 1", "ground_truth": "2"})
        for version in (1, 2):
            with client.open_batch(2, 2, keep="all", batch_id=f"step-{version}") as batch:
                batch.feed([job, Job(task="math", instance=job.instance)])
                assert [group.rewards.tolist() for group in batch] == [[1.0, 1.0]] * 2
            client.set_weight_version(version)
            job = Job(task="math", instance=job.instance)
        with client.open_batch(2, 2, keep="all", batch_id="step-3") as batch:
            batch.feed([job, Job(task="math", instance=job.instance)])
            groups = iter(batch)
            next(groups)
            until(lambda: client.status().batches[0].kept == 2, "rollouts of the weights before")
            client.set_weight_version(3)
            next(groups)
        done = prorl("training", "--connect", service.front_door, "--json")
        assert done.returncode == 0, done.stderr
        training = json.loads(done.stdout)["training"]
        first, second, third = training["steps"]
        assert training["session"] == client.session
        assert [(step["batch_id"], step["weight_version"], step["reward"]) for step in (first, second)] == [
            ("step-1", 0, 1.0),
            ("step-2", 1, 1.0),
        ]
        assert (first["rollouts"], first["groups"], second["staleness"]) == (4, 2, 0.0)
        assert 0.0 <= second["overlap"] <= 1.0
        assert (third["staleness"], third["staleness_most"]) == (0.5, 1.0)
        table = prorl("training", "--connect", service.front_door, "--last", "1").stdout
        assert "step-3" in table
        assert "step-2" not in table
        other = prorl("training", "--connect", service.front_door, "--session", "nobody")
        assert "of session nobody" in other.stderr
