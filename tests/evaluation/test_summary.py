"""How results become figures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from prorl_zmq.errors import ErrorInfo
from prorl_zmq.evaluation.display import summary_tables
from prorl_zmq.evaluation.summary import Counting, default_ks, summarise
from prorl_zmq.wire.messages.jobs import ConversationPart, Outcome

from .conftest import made_plan, made_sample

if TYPE_CHECKING:
    from prorl_zmq.evaluation.run_folder import Sample


def test_infrastructure_errors_are_no_answers() -> None:
    plan = made_plan(2, 4)
    samples = [made_sample(plan, 0, sample, reward=1.0) for sample in range(2)]
    samples += [
        made_sample(plan, 0, sample, outcome=Outcome.INFRASTRUCTURE_ERROR, code="engine_failed") for sample in (2, 3)
    ]
    samples += [made_sample(plan, 1, sample, reward=0.0) for sample in range(4)]
    summary = summarise(plan, samples, Counting((1, 4)))
    assert (summary.ended, summary.counted, summary.infrastructure_errors) == (8, 6, 2)
    one, four = summary.passes
    assert one.estimate is not None
    assert one.estimate.value == pytest.approx(0.5)
    assert summary.pass_1_with_errors is not None
    assert summary.pass_1_with_errors.value == pytest.approx(0.25)
    assert (four.left_out, four.estimate and four.estimate.problems) == (1, 1)


def test_failed_ones_and_those_out_of_time_are_not_solved_and_cancelled_ones_were_not_run() -> None:
    plan = made_plan(1, 4)
    samples = [
        made_sample(plan, 0, 0, reward=1.0),
        made_sample(plan, 0, 1, outcome=Outcome.FAILED, code="sandbox_limit_exceeded"),
        made_sample(plan, 0, 2, outcome=Outcome.TIMEOUT, code="phase_timeout"),
        made_sample(plan, 0, 3, outcome=Outcome.CANCELLED, code="cancelled"),
    ]
    summary = summarise(plan, samples, Counting())
    assert (summary.ended, summary.counted) == (3, 3)
    assert summary.passes[0].estimate is not None
    assert summary.passes[0].estimate.value == pytest.approx(1 / 3)
    assert summary.reward is not None
    assert summary.reward.value == pytest.approx(1 / 3)
    assert {(row.outcome, row.code, row.count) for row in summary.failures} == {
        ("failed", "sandbox_limit_exceeded", 1),
        ("timeout", "phase_timeout", 1),
    }


@pytest.mark.parametrize("code", ["handler_failed", "invalid_job", "sandbox_failed", "unknown_task"])
def test_what_the_task_itself_did_wrong_is_no_answer(code: str) -> None:
    plan = made_plan(1, 2)
    samples = [made_sample(plan, 0, 0, reward=1.0), made_sample(plan, 0, 1, outcome=Outcome.FAILED, code=code)]
    summary = summarise(plan, samples, Counting())
    assert (summary.ended, summary.counted, summary.infrastructure_errors) == (2, 1, 1)


@pytest.mark.parametrize(("threshold", "solved"), [(1.0, 2), (0.5, 3), (0.0, 4)])
def test_the_threshold_says_what_is_solved(threshold: float, solved: int) -> None:
    plan = made_plan(1, 4)
    rewards = (0.0, 0.5, 1.0 - 1e-12, 1.0)  # a sum of fractions may miss 1 by so much
    samples = [made_sample(plan, 0, sample, reward=reward) for sample, reward in enumerate(rewards)]
    summary = summarise(plan, samples, Counting((1,), threshold))
    assert summary.problems[0].solved == solved
    assert summary.problems[0].reward == pytest.approx(2.5 / 4)


def test_failures_are_told_apart_by_outcome_code_and_stop_reason() -> None:
    plan = made_plan(1, 5)
    samples = [made_sample(plan, 0, sample, reward=0.0, stop_reason="max_turns") for sample in range(3)]
    samples += [
        made_sample(plan, 0, 3, reward=0.0),
        made_sample(plan, 0, 4, outcome=Outcome.FAILED, code="invalid_job", message="why"),
    ]
    rows = summarise(plan, samples, Counting()).failures
    assert [(row.reason, row.count) for row in rows] == [
        ("not solved: max_turns", 3),
        ("failed: invalid_job", 1),
        ("not solved: done", 1),
    ]
    assert (rows[1].message, rows[1].share) == ("why", 0.2)


def test_graders_that_fail_in_several_ways_are_told_apart() -> None:
    plan = made_plan(1, 4)
    samples = []
    for number, reason in enumerate(("hung", "raised", "hung")):
        sample = made_sample(plan, 0, number, outcome=Outcome.INFRASTRUCTURE_ERROR, code="grader_failed")
        error = ErrorInfo("grader_failed", "why", {"reason": reason})
        samples.append(msgspec.structs.replace(sample, result=msgspec.structs.replace(sample.result, error=error)))
    rows = summarise(plan, samples, Counting()).failures
    assert [(row.reason, row.count) for row in rows] == [
        ("infrastructure error: grader_failed (hung)", 2),
        ("infrastructure error: grader_failed (raised)", 1),
    ]


def test_each_trained_conversation_has_a_mean_reward_of_its_own() -> None:
    plan = made_plan(2, 2)

    def game(problem: int, sample: int, white: float) -> Sample:
        one = made_sample(plan, problem, sample, reward=0.0)
        parts = (
            ConversationPart("white", 0, 1, reward=white),
            ConversationPart("black", 1, 1, reward=-white),
            ConversationPart("user", 2, 0, trained=False),
        )
        return replace(one, result=replace(one.result, conversations=parts))

    samples = [game(0, 0, 1.0), game(0, 1, 0.0), game(1, 0, 1.0)]
    samples.append(made_sample(plan, 1, 1, outcome=Outcome.INFRASTRUCTURE_ERROR, code="engine_failed"))
    summary = summarise(plan, samples, Counting())
    assert {name: (one.value, one.problems) for name, one in summary.agents.items()} == {
        "black": (-0.75, 2),
        "white": (0.75, 2),
    }
    screen = io.StringIO()
    Console(file=screen, width=80).print(summary_tables(summary))
    assert "mean reward of white" in screen.getvalue()
    assert summarise(plan, samples[3:], Counting()).agents == {}


def test_the_interval_of_a_mean_is_within_what_rewards_can_be() -> None:
    plan = made_plan(2, 1)
    reward = summarise(
        plan, [made_sample(plan, problem, reward=problem / 2) for problem in range(2)], Counting()
    ).reward
    assert reward is not None
    assert (reward.value, reward.low, reward.high) == (0.25, 0.0, 1.0)


def test_cost_is_of_the_tokens_that_each_price_is_for() -> None:
    plan = made_plan(2, 1)
    metrics = {"prompt_tokens": 1e6, "cached_tokens": 4e5, "generated_tokens": 2e5}
    samples = [made_sample(plan, problem, reward=float(problem), metrics=metrics) for problem in range(2)]
    whole = summarise(plan, samples, Counting(price_in=1.0, price_cached=0.1, price_out=10.0)).cost
    assert whole is not None
    assert whole.per_problem == pytest.approx(0.6 + 0.04 + 2.0)
    assert (whole.total, whole.per_solved) == pytest.approx((2 * whole.per_problem, 2 * whole.per_problem))
    uncached = summarise(plan, samples, Counting(price_in=1.0)).cost
    assert uncached is not None
    assert uncached.total == pytest.approx(2.0)
    assert summarise(plan, samples, Counting()).cost is None


def test_times_are_shares_of_the_whole_and_parts_of_run_are_within_it() -> None:
    plan = made_plan(1, 2)
    timings = {"init_queue": 1.0, "init": 1.0, "run": 6.0, "engine": 3.0, "tool.bash": 2.0, "eval": 2.0}
    samples = [made_sample(plan, 0, sample, timings=timings) for sample in range(2)]
    rows = {row.name: row for row in summarise(plan, samples, Counting()).times}
    assert list(rows) == ["init_queue", "init", "run", "engine", "tool.bash", "eval"]
    assert sum(row.share or 0.0 for row in rows.values() if not row.within) == pytest.approx(1.0)
    assert (rows["engine"].within, rows["engine"].share) == ("run", pytest.approx(0.3))
    assert (rows["run"].p50, rows["run"].p95, rows["run"].total) == (6.0, 6.0, 12.0)


def test_tasks_and_forms_have_figures_of_their_own() -> None:
    plan = made_plan(3, 1)
    samples = [made_sample(plan, 0, row_format="aime"), made_sample(plan, 1, reward=0.0, row_format="dapo")]
    samples.append(made_sample(plan, 2, task="swe", row_format="swe-bench"))
    summary = summarise(plan, samples, Counting())
    assert [(row.name, row.problems, row.pass_1 and row.pass_1.value) for row in summary.tasks] == [
        ("math", 2, 0.5),
        ("swe", 1, 1.0),
    ]
    assert [row.name for row in summary.row_formats] == ["aime", "dapo", "swe-bench"]


def test_an_evaluation_without_results_has_figures_too() -> None:
    summary = summarise(made_plan(2, 2), [], Counting((1, 2)))
    assert (summary.rollouts, summary.ended) == (4, 0)
    assert [row.estimate for row in summary.passes] == [None, None]


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (10, (1, 2, 4, 8, 10))]
)
def test_which_k_are_reported(samples: int, ks: tuple[int, ...]) -> None:
    assert default_ks(samples) == ks
