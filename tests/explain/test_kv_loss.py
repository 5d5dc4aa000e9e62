"""Backends that compute prefixes again, in recordings made by hand and in those of a simulated engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from prorl_zmq.explain.diagnosis import diagnose
from prorl_zmq.explain.kv_loss import SHARE, WINDOW_S, kv_losses
from prorl_zmq.explain.one_job import explain_job
from prorl_zmq.explain.rollout import EngineCall, Rollout, shifted, within
from prorl_zmq.wire.messages.jobs import Phase, StepTokens

from .recordings import Parts, recording, rollout, work

if TYPE_CHECKING:
    from prorl_zmq.explain.recording import Recording

PROMPT = 10_000


def ran(job_id: str, began: float, calls: list[EngineCall], backend: str = "b") -> Rollout:
    """Return a rollout that did nothing but generate."""
    parts: Parts = {"engine": calls[-1].ended - began}
    return rollout(job_id, [replace(work(Phase.RUN, began, parts, backend=backend), calls=tuple(calls))], began)


def one_call(
    at: float, seconds: float, again: int, prompt: int = PROMPT, cached: int = 0, generated: int = 100
) -> EngineCall:
    return EngineCall(at, at + seconds, StepTokens(prompt, cached, again, generated))


def calls_of(losses: list[int], every_s: float = 1.0, backend: str = "b") -> list[Rollout]:
    """Return rollouts of one generation each, which lose so many tokens."""
    return [
        ran(f"{backend}-{number}", number * every_s, [one_call(number * every_s, every_s, lost)], backend)
        for number, lost in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "is_named"),
    [
        ([0] * 200 + [3_000] * 80 + [0] * 200, True),
        ([0] * 200 + [3_000] * 30 + [0] * 200, False),
        ([1_900] * 400, False),
        ([2_100] * 400, True),
        ([9_000] * 8, False),
    ],
    ids=["for 80 s", "for 30 s", "less than a fifth", "more than a fifth", "few generations"],
)
def test_a_fifth_for_a_minute_is_too_much(losses: list[int], is_named: bool) -> None:
    found = kv_losses(recording(calls_of(losses)))
    assert set(found) == ({"b"} if is_named else set())
    if is_named:
        assert found["b"].again_tokens == sum(losses)
        assert found["b"].window_s == WINDOW_S
        assert SHARE < found["b"].share <= max(losses) / PROMPT


def test_of_a_short_run_half_of_its_time_counts() -> None:
    found = kv_losses(recording(calls_of([5_000] * 40, every_s=0.1)))
    assert found["b"].window_s == pytest.approx(2.0)
    assert found["b"].share == pytest.approx(0.5)


def test_only_the_backend_that_lost_something_is_named() -> None:
    good, bad = calls_of([0] * 100), calls_of([4_000] * 100, backend="x")
    assert set(kv_losses(recording(good, bad))) == {"x"}


def thrashing(count: int, loses: bool, token_s: float, generated_s: float, seed: int = 0) -> Recording:
    """Simulate an engine that computes one prompt at a time, for so many rollouts of four turns, of which six run."""
    draw = np.random.default_rng(seed)
    free = [0.0] * 6
    engine_free = 0.0
    turns = sorted((float(began), job) for job, began in enumerate(free))
    rollouts: dict[int, list[EngineCall]] = {job: [] for job in range(6)}
    lengths = {job: int(draw.integers(2_000, 6_000)) for job in range(6)}
    done, following = [], 6
    while turns:
        at, job = turns.pop(0)
        calls = rollouts[job]
        before = calls[-1].tokens.prompt + 100 if calls else 0
        prompt = before + (400 if calls else lengths[job])
        cached = 0 if loses else before
        began = max(at, engine_free)
        engine_free = began + (prompt - cached) * token_s
        generated = int(draw.integers(50, 150))
        ended = engine_free + generated * generated_s
        calls.append(EngineCall(at, ended, StepTokens(prompt, cached, before - cached, generated)))
        if len(calls) < 4:
            turns.append((ended + float(draw.uniform(0.0, 0.2)), job))
        else:
            done.append(ran(f"job-{job}", calls[0].began, calls))
            if following < count:
                rollouts[following], lengths[following] = [], int(draw.integers(2_000, 6_000))
                turns.append((ended, following))
                following += 1
        turns.sort()
    return recording(done, slots={(Phase.RUN, "n"): 6})


@pytest.mark.parametrize("seed", range(3))
def test_the_gain_is_about_that_of_an_engine_that_loses_nothing(seed: int) -> None:
    lost, kept = (thrashing(80, loses, 50e-6, 0.5e-3, seed) for loses in (True, False))
    loss = kv_losses(lost)["b"]
    assert loss.share > 0.5
    explanation = diagnose(lost, "the run")
    assert (explanation.finding.kind, explanation.finding.name) == ("kv", "b"), explanation.sentences
    assert kept.wall_s < 0.6 * lost.wall_s
    assert explanation.finding.without_s == pytest.approx(kept.wall_s, rel=0.35)
    said = " ".join(explanation.sentences)
    assert "The KV cache of backend b bounded the run" in said
    assert 'fewer slots or `schedule = "kv"`, more engines, or shorter contexts' in said


def test_where_prompts_cost_little_their_loss_does_too() -> None:
    lost = thrashing(80, True, 0.5e-6, 0.01)
    loss = kv_losses(lost)["b"]
    assert loss.is_known
    assert loss.of_time < 0.15
    assert diagnose(lost, "the run").finding.kind == "engine"


def test_where_all_prompts_are_alike_their_cost_is_not_known() -> None:
    loss = kv_losses(recording(calls_of([4_000] * 100)))["b"]
    assert not loss.is_known
    assert loss.of_time == pytest.approx(0.4), "an upper bound"
    explanation = diagnose(recording(calls_of([4_000] * 100), slots={(Phase.RUN, "n"): 1}), "the run")
    assert explanation.finding.kind == "kv"
    assert "it is not known how much of the engine's time they took" in explanation.doubts


def test_a_backend_that_generated_nothing_has_its_loss_too() -> None:
    prompts = [PROMPT + 500 * (number % 40) for number in range(80)]
    calls = [one_call(number, prompt * 50e-6, 6_000, prompt, generated=0) for number, prompt in enumerate(prompts)]
    loss = kv_losses(recording([ran(f"job-{number}", call.began, [call]) for number, call in enumerate(calls)]))["b"]
    assert loss.is_known
    assert loss.of_time == pytest.approx(80 * 6_000 / sum(prompts), rel=0.01)


def test_no_more_than_the_prompt_was_computed_again() -> None:
    rollouts = calls_of([0] * 100 + [10**12] * 100)
    loss = kv_losses(recording(rollouts))["b"]
    assert (loss.share, loss.again_tokens) == (1.0, 100 * PROMPT)
    odd = ran("odd", 0.0, [one_call(0.0, 1.0, 10**12), one_call(1.0, 6.0, 0)])
    assert "computed 50% of its prompt tokens again" in explain_job(odd, rollouts).sentences[-1]
    assert ran("empty", 0.0, [one_call(0.0, 1.0, 5, prompt=0)]).again_tokens == (0, 0)


def test_generations_have_their_place_in_a_part_and_by_another_clock() -> None:
    one = ran("job", 10.0, [one_call(10.0, 5.0, 0), one_call(20.0, 5.0, 7)])
    (calls,) = (each.calls for each in within(one, 18.0, 30.0).works)
    assert [call.tokens.again for call in calls] == [7]
    (calls,) = (each.calls for each in shifted(one, 100.0).works)
    assert [(call.began, call.ended) for call in calls] == [(110.0, 115.0), (120.0, 125.0)]


def test_a_job_says_what_the_engine_computed_again_for_it() -> None:
    jobs = calls_of([0] * 10)
    slow = ran("slow", 0.0, [one_call(0.0, 1.0, 0), one_call(1.0, 6.0, 8_000)])
    found = explain_job(slow, jobs)
    assert "The engine computed 40% of its prompt tokens again, which it had cached" in found.sentences[-1]


def test_waiting_for_room_is_no_lack_of_a_backend() -> None:
    rollouts = []
    for number in range(30):
        began = number * 0.5
        parts: Parts = {"room": 1.5, "engine": 0.5}
        rollouts.append(rollout(f"job-{number}", [work(Phase.RUN, began, parts)], began))
    explanation = diagnose(recording(rollouts), "the run")
    assert (explanation.finding.kind, explanation.finding.name) == ("engine", "room")
    assert explanation.sentences[0].startswith("The wait for room in an engine bounded the run")
    assert (
        explanation.sentences[1]
        == "Rollouts waited until others ended, since no ready engine took more (see `prorl backends list`)."
    )
    assert explanation.sentences[2].startswith(
        "With room for all rollouts (more engines, or shorter contexts), it would"
    )
    assert "the wait for room" in {row.part for row in explanation.parts}
