from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.hosting.engine_figures import SILENT_S, EngineFigures
from prorl_zmq.inference.hosting.room import LEAST, RESUMED_S
from prorl_zmq.inference.kv_figures import KvFigures
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import Backend, BackendHeld, EngineLoad
from prorl_zmq.wire.messages.engines import VersionSpan

CONTEXT = 1_000
IDLE = KvFigures(10_000, 0.0, 0, 0)


class Host:
    """The figures of an engine whose KV cache a test describes; a heartbeat each second."""

    def __init__(self, *, kv: bool = True, slots: int = 64) -> None:
        self.say: Any = IDLE
        engine: Any = SimpleNamespace(description=SimpleNamespace(kv=kv), kv_figures=self._kv_figures)
        backend = Backend(backend_id="x", endpoint="ipc://x", max_in_flight=slots, context_tokens=CONTEXT)
        self.figures = EngineFigures(engine, backend, 0.0)
        self.now = 0.0
        self.asked = 0

    def _kv_figures(self, now: float) -> Any:
        assert now == self.now
        self.asked += 1
        if isinstance(self.say, Exception):
            raise self.say
        return self.say

    def beats(self, count: int = 1, *, updating: bool = False) -> EngineLoad:
        for _ in range(count):
            self.now += 1.0
            self.figures.measure(self.now, updating=updating)
            load = self.figures.load(0, self.now)
            assert codec.decode(codec.encode(load), EngineLoad) == load, "else the broker refuses the heartbeat"
        return load

    def turn(self, job: str, prompt: int, generated: int = 10, cached: int = 0, seed: int = 0) -> int:
        ids = np.random.default_rng(seed).integers(0, 1000, prompt + generated).astype(np.int32)
        done = Generation(
            ids[prompt:], np.zeros(generated, np.float32), (VersionSpan(0, 0, generated),), "stop", cached_tokens=cached
        )
        return self.figures.note_turn(job, ids[:prompt], done, self.now)


def test_the_room_is_known_with_the_first_figures() -> None:
    host = Host()
    assert host.figures.room is None
    load = host.beats()
    assert host.figures.room == 10_000 // (CONTEXT // 2)
    assert (load.kv_tokens, load.kv_used, load.queued, load.preempted, load.again_tokens) == (10_000, 0.0, 0, 0, 0)


def test_an_engine_that_reports_nothing_is_not_asked_and_has_no_room() -> None:
    host = Host(kv=False)
    host.turn("job", 100)
    load = host.beats(100)
    assert (host.figures.room, host.asked, load.kv_tokens, load.prompt_tokens) == (None, 0, 0, 100)


def test_an_engine_whose_first_figures_are_late_takes_its_slots_for_a_minute() -> None:
    host = Host(slots=24)
    host.say = None
    host.beats(int(SILENT_S))
    assert host.figures.room == 24
    host.beats()
    assert host.figures.room is None, "it has no figures"
    host.say = IDLE
    host.beats()
    assert host.figures.room == 10_000 // (CONTEXT // 2)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        dataclasses.replace(IDLE, used=-0.5),
        dataclasses.replace(IDLE, used=float("nan")),
        dataclasses.replace(IDLE, used=1.5),
        dataclasses.replace(IDLE, capacity_tokens=-1),
        dataclasses.replace(IDLE, capacity_tokens=0),
        dataclasses.replace(IDLE, capacity_tokens=10**300),
        dataclasses.replace(IDLE, capacity_tokens=10**400),
        dataclasses.replace(IDLE, waiting=10**30),
        dataclasses.replace(IDLE, waiting=-3),
        dataclasses.replace(IDLE, preempted=float("inf")),  # type: ignore[arg-type]
        dataclasses.replace(IDLE, used="much"),  # type: ignore[arg-type]
        SimpleNamespace(capacity_tokens=10),
        RuntimeError("no figures"),
    ],
)
def test_nonsense_of_an_engine_counts_as_no_report(nonsense: Any, caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    host.say = nonsense
    assert host.beats(3).kv_tokens == 0
    assert host.figures.room == 64, "its slots"
    host.say = IDLE
    host.beats()
    known = host.figures.room
    host.say = nonsense
    with caplog.at_level(logging.WARNING, "prorl.engine"):
        assert host.beats(int(SILENT_S) + 2).kv_tokens == 10_000
    assert host.figures.room == known, "the last number stays"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is said once a minute"


def test_a_full_cache_is_never_more_than_full() -> None:
    host = Host()
    host.beats()
    host.say = dataclasses.replace(IDLE, used=1.0)
    assert host.beats(2_000).kv_used <= 1.0


def test_half_a_cache_takes_half_as_many() -> None:
    host = Host()
    host.beats()
    host.say = dataclasses.replace(IDLE, capacity_tokens=5_000)
    host.beats()
    assert host.figures.room == 10


def test_slots_are_the_most_and_some_rollouts_always_run() -> None:
    host = Host(slots=7)
    host.beats()
    assert host.figures.room == 7
    host.say = dataclasses.replace(IDLE, capacity_tokens=10)
    host.beats()
    assert host.figures.room == LEAST


def test_contexts_of_held_rollouts_take_room() -> None:
    host = Host()
    host.figures.note_held(BackendHeld("beat", rollouts=2, ended=0))
    host.turn("a", 900)
    host.turn("b", 100)
    host.turn("gone", 100)
    host.turn("a", 1_900, seed=1)
    host.beats()
    assert host.figures.room == 2 + (10_000 - (910 + 1_910) - 500) // 500, "the latest two jobs are held"


def test_a_prefix_computed_again_counts_once_the_engine_has_named_cached_tokens() -> None:
    host = Host()
    host.figures.note_held(BackendHeld("beat", rollouts=1, ended=0))
    host.turn("a", 1_000)
    assert host.turn("a", 1_500, cached=0) == 0
    assert host.beats().again_tokens == 0, "it may not report cached tokens at all"
    assert host.turn("b", 1_000, cached=1, seed=2) == 0
    assert host.beats().again_tokens == 1_010
    assert host.turn("b", 1_500, cached=0, seed=2) == 1_010


def test_new_weights_are_no_loss_and_figures_of_a_pause_do_not_count() -> None:
    host = Host()
    host.figures.note_held(BackendHeld("beat", rollouts=20, ended=0))
    host.turn("a", 1_000, cached=1)
    host.beats()
    room = host.figures.room
    host.say = dataclasses.replace(IDLE, preempted=5, waiting=20, used=1.0)
    assert host.beats(updating=True).preempted == 5
    host.figures.note_weights(host.now)
    host.turn("a", 1_500)
    assert host.beats(int(RESUMED_S) - 2).again_tokens == 0
    assert (room, host.figures.room) == (18, 17), "the context grew by 500"
    host.beats(4)
    assert host.figures.room is not None
    assert host.figures.room < 17, "these preemptions count"
