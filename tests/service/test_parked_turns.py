"""Turns that an engine's host parks, in a whole service: whoever dies meanwhile, no turn is lost or differs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from support.waiting import until

from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.wire.messages.jobs import Sampling

from .test_backends_fail import START_S, Moods, states, status_of, talk

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq import Job, RolloutClient

    from .conftest import TestService


def job(name: str) -> Job:
    return msgspec.structs.replace(talk(), job_id=name, sampling=Sampling(1.0, 20, seed=7))


class Engine:
    """One engine whose KV cache is as a test says."""

    def __init__(self, service: TestService, folder: Path) -> None:
        self.moods = Moods(service, folder)
        self._kv = folder / "small.kv"
        self._fill(4096, used=0.0)
        self.moods.start("small", "well")
        self.process = service.processes[-1]

    def _fill(self, capacity: int, used: float) -> None:
        content = {"capacity_tokens": capacity, "used": used, "preempted": 0, "waiting": 2 * (used > 0.9)}
        new = self._kv.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.replace(self._kv)

    def park_one(self, client: RolloutClient, capacity: int) -> None:
        """Submit two jobs: the turn of `old` is under way, and that of `new` is parked."""
        self._fill(capacity, used=1.0)
        self.moods.set("small", "pause")
        for name, counts in (("old", (1, 0)), ("new", (1, 1))):
            client.submit(job(name))
            until(lambda counts=counts: self.counts(client) == counts, f"the turn of {name}")  # type: ignore[misc]

    def counts(self, client: RolloutClient) -> tuple[int, int]:
        load = status_of(client, "small").load
        return (load.running, load.parked) if load is not None else (0, 0)

    def calm(self) -> None:
        self._fill(4096, used=0.0)
        self.moods.set("small", "well")


@pytest.mark.proof
@pytest.mark.parametrize("killed", ["none", "host", "stage", "broker"])
def test_a_parked_turn_is_neither_lost_nor_different(service: TestService, tmp_path: Path, killed: str) -> None:
    service.brokers.stop("backend")
    with BackendJournal(tmp_path / "journal") as journal:
        service.brokers.start_backend_broker(journal)
        run = service.processes[1]
        engine = Engine(service, tmp_path)
        with service.client() as client:
            until(lambda: states(client) == {"small": "ready"}, "the engine", START_S)
            client.submit(job("alone"))
            (alone,) = client.stream(timeout_s=60)
            engine.park_one(client, int(1.5 * np.argmax(alone.loss_mask)))
            match killed:
                case "host":
                    engine.process.kill()
                    (tmp_path / "other.kv").write_text((tmp_path / "small.kv").read_text())  # their contexts are equal
                    engine.moods.start("other", "well")
                case "stage":
                    run.kill()
                    service.start_stage("run")
                case "broker":
                    service.brokers.stop("backend")
                    service.brokers.start_backend_broker(journal)
                    until(lambda: engine.counts(client) == (1, 1), "the next broker, which knows both", START_S)
            engine.calm()
            done = list(client.stream(timeout_s=60))
            assert {one.job_id for one in done} == {"old", "new"}
            for one in done:
                assert (one.outcome, one.result.attempt) == ("completed", 2 if killed == "stage" else 1)
                np.testing.assert_array_equal(one.token_ids, alone.token_ids)
                np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=1e-5)
                np.testing.assert_array_equal(one.weight_versions, alone.weight_versions)
        service.brokers.stop("backend")


@pytest.mark.proof
def test_a_cancelled_job_whose_turn_is_parked_ends_at_once(service: TestService, tmp_path: Path) -> None:
    engine = Engine(service, tmp_path)
    with service.client() as client:
        until(lambda: states(client) == {"small": "ready"}, "the engine", START_S)
        client.submit(job("alone"))
        (alone,) = client.stream(timeout_s=60)
        engine.park_one(client, int(1.5 * np.argmax(alone.loss_mask)))
        client.cancel(["new"])
        cancelled = next(iter(client.stream(timeout_s=10)))
        assert (cancelled.job_id, cancelled.outcome) == ("new", "cancelled")
        until(lambda: engine.counts(client) == (1, 0), "nothing that is parked", 10.0)
        engine.calm()
        assert [one.outcome for one in client.stream(timeout_s=60)] == ["completed"]
