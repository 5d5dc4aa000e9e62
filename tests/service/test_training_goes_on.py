"""A service that is started again continues the training before it, or begins a new one."""

from __future__ import annotations

import tempfile
from itertools import repeat
from pathlib import Path

import pytest
from support.services import PROCESS, Service
from support.waiting import until

from prorl_zmq import Job, errors

TOPOLOGY = PROCESS
ONE = Job(task="math", instance={"problem": "1 + 1?", "ground_truth": "2"})


def started(folder: Path, *flags: str) -> Service:
    service = Service(folder, TOPOLOGY, *flags)
    service.wait_ready()
    return service


def test_a_service_that_is_started_again_knows_the_weights_that_were_announced() -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:
        folder = Path(name)
        first = started(folder)
        try:
            with first.client() as client:
                client.set_weight_version(5)
        finally:
            first.close()
        again = started(folder)
        try:
            assert any("continuing the training that announced weights 5" in line for line in again.lines)
            with again.client() as client:
                until(lambda: [one.state for one in client.backends.list()] == ["behind"], "the engine to be behind")
                listed = again.run("backends", "list").stdout
                assert "behind" in listed
                assert "serves weights 0 where 5 are wanted" in " ".join(listed.split())
                job = Job(task=ONE.task, instance=ONE.instance, backend_wait_s=0.5)
                with client.open_batch(2, 4, keep="all", max_staleness=0, max_given_up=1, adopt=False) as batch:
                    batch.feed(repeat(job))
                    with pytest.raises(errors.BatchFailed, match="`prorl backends list` says why no backend takes"):
                        batch.next_group(60)
                again.run("backends", "set-version", "0")
                with client.open_batch(2, 4, keep="all", max_staleness=0, adopt=False) as batch:
                    batch.feed(repeat(ONE))
                    assert len(list(batch)) == 2
                client.set_weight_version(7)
        finally:
            again.close()
        new = started(folder, "--new-training")
        try:
            assert any("a new training: weights 7" in line for line in new.lines)
            with new.client() as client, client.open_batch(2, 4, keep="all", max_staleness=0) as batch:
                batch.feed(repeat(ONE))
                assert len(list(batch)) == 2
        finally:
            new.close()
