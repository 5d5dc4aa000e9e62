"""`Summary`: the figures of an evaluation, for `summary.json`, the reports and the terminal.

`completed` rollouts count by their reward and are solved from the threshold on; `failed` and `timeout` ones (the agent,
or its time) count as not solved, with reward 0. An `infrastructure_error`, a failure of the task's own code or image,
and a sandbox that was not ready in time say nothing about the model: such a rollout is left out and counted separately,
and pass@1 is also given with all of them as not solved. Cancelled rollouts count as not run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import numpy as np

from ..data.conversations import trained_rewards
from ..wire.messages.jobs import Outcome
from .passes import Estimate, Tally, mean_estimate, pass_estimate
from .run_folder import is_solved, says_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..wire.messages.jobs import Result
    from .plan import Plan
    from .run_folder import Sample

STAYS = ("init_queue", "init", "run_queue", "run", "eval_queue", "eval")
"""The consecutive timings of a rollout."""
WITHIN_RUN = ("engine", "chat")
"""Parts of `run`, with `tool.NAME`."""
SHOWN_MESSAGE = 300

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Counting:
    """How results are counted."""

    ks: tuple[int, ...] = (1,)
    threshold: float = 1.0
    """The least reward of a solved problem."""
    price_in: float | None = None
    """Per million prompt tokens that were not in the prefix cache."""
    price_cached: float | None = None
    """Per million that were; None: the same price."""
    price_out: float | None = None
    """Per million generated tokens."""


class PassRow(msgspec.Struct, frozen=True, kw_only=True):
    k: Annotated[int, msgspec.Meta(ge=1)]
    estimate: Estimate | None
    """None: no problem has that many samples that count."""
    left_out: int
    """Problems that have fewer."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How a measure is distributed over rollouts."""

    name: str
    count: int
    mean: float
    p50: float
    p95: float
    total: float
    share: float | None = None
    """The share of the rollouts' whole time; None: the measure is not a time."""
    within: str = ""
    """The stay that this is a part of."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    total: float
    per_problem: float
    per_solved: float | None
    """Per solved rollout; None: none is."""


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that ended without a solution, for one reason."""

    outcome: str
    code: str
    """The error's code, with its `reason` if it has one; empty: no error, a wrong answer."""
    stop_reason: str
    """Of the episode, where no error ended the rollout."""
    count: int
    share: float
    """Of all rollouts that ended."""
    example: str
    message: str

    @property
    def reason(self) -> str:
        what = "not solved" if self.outcome == Outcome.COMPLETED else self.outcome.replace("_", " ")
        why = ", ".join(part for part in (self.code, self.stop_reason) if part)
        return f"{what}: {why}" if why else what


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """The problems of one task, or of one row format."""

    name: str
    problems: int
    rollouts: int
    infrastructure_errors: int
    pass_1: Estimate | None
    best: PassRow
    """At the largest k."""
    reward: Estimate | None
    generated_tokens: float
    """Per rollout."""
    seconds: float
    """Per rollout, queues included."""


class ProblemRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    line: int
    task: str
    row_format: str
    samples: int
    """Those that count."""
    solved: int
    infrastructure_errors: int
    reward: float | None
    """The mean; None: no sample counts."""
    prompt_tokens: float
    cached_tokens: float
    generated_tokens: float
    """Of all its rollouts together, as the two before."""
    seconds: float
    """Per rollout."""
    cost: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    threshold: float
    rollouts: int
    """How many the plan has."""
    ended: int
    """Those with a result, infrastructure errors included."""
    counted: int
    """Those that pass@k is of."""
    infrastructure_errors: int
    outcomes: dict[str, int]
    passes: tuple[PassRow, ...]
    pass_1_with_errors: Estimate | None
    """pass@1 if all infrastructure errors were failures."""
    reward: Estimate | None
    agents: dict[str, Estimate] = {}
    """The mean reward of each trained conversation, by its name; empty: rollouts have one, `main`."""
    tokens: tuple[Distribution, ...]
    cost: Cost | None
    times: tuple[Distribution, ...]
    failures: tuple[FailureRow, ...]
    tasks: tuple[GroupRow, ...]
    row_formats: tuple[GroupRow, ...]
    problems: tuple[ProblemRow, ...]
    models: tuple[str, ...] = ()
    weight_versions: tuple[int, ...] = ()


def summarise(plan: Plan, samples: Sequence[Sample], counting: Counting) -> Summary:
    """Return the figures of a plan from the newest result of each rollout."""
    ended = [sample for sample in samples if sample.result.outcome != Outcome.CANCELLED]
    by_problem = _grouped(ended, lambda sample: sample.index.problem)
    problems = tuple(_problem_row(by_problem[index], counting) for index in sorted(by_problem))
    outcomes = _grouped(ended, lambda sample: str(sample.result.outcome))
    return Summary(
        threshold=counting.threshold,
        rollouts=plan.rollouts,
        ended=len(ended),
        counted=sum(row.samples for row in problems),
        infrastructure_errors=sum(row.infrastructure_errors for row in problems),
        outcomes={name: len(outcomes[name]) for name in sorted(outcomes)},
        passes=tuple(_pass_row(problems, k) for k in counting.ks),
        pass_1_with_errors=pass_estimate(
            [Tally(row.samples + row.infrastructure_errors, row.solved) for row in problems], 1
        ),
        reward=_mean_reward(problems),
        agents=_agents(by_problem.values()),
        tokens=_tokens(ended),
        cost=_whole_cost(problems),
        times=_times(ended),
        failures=_failures(ended, counting.threshold),
        tasks=_groups(ended, lambda sample: sample.result.task, counting),
        row_formats=_groups(ended, lambda sample: sample.row_format, counting),
        problems=problems,
        models=tuple(sorted({sample.model for sample in ended} - {""})),
        weight_versions=tuple(sorted({version for sample in ended for version in sample.versions})),
    )


def counts(sample: Sample) -> bool:
    return not says_nothing(sample.result)


def seconds_of(result: Result) -> float:
    return sum(result.timings.get(name, 0.0) for name in STAYS)


def default_ks(samples: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on up to the number of samples, and that."""
    return (*(2**power for power in range(samples.bit_length()) if 2**power < samples), samples)


def _grouped(samples: Iterable[Sample], key: Callable[[Sample], Key]) -> dict[Key, list[Sample]]:
    groups: defaultdict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[key(sample)].append(sample)
    return groups


def _pass_row(problems: Sequence[ProblemRow], k: int) -> PassRow:
    tallies = [Tally(row.samples, row.solved) for row in problems]
    return PassRow(k=k, estimate=pass_estimate(tallies, k), left_out=sum(tally.samples < k for tally in tallies))


def _agents(by_problem: Iterable[Sequence[Sample]]) -> dict[str, Estimate]:
    means: defaultdict[str, list[float]] = defaultdict(list)
    for samples in by_problem:
        earned: defaultdict[str, list[float]] = defaultdict(list)
        for sample in samples:
            for name, reward in trained_rewards(sample.result).items() if counts(sample) else ():
                earned[name].append(reward or 0.0)
        for name, rewards in earned.items():
            means[name].append(float(np.mean(rewards)))
    estimates = {name: _reward_estimate(means[name]) for name in sorted(means)}
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def _mean_reward(problems: Sequence[ProblemRow]) -> Estimate | None:
    return _reward_estimate([row.reward for row in problems if row.reward is not None])


def _reward_estimate(rewards: Sequence[float]) -> Estimate | None:
    """Return the mean of problems' mean rewards."""
    estimate = mean_estimate(rewards)
    if estimate is None or not all(0 <= reward <= 1 for reward in rewards):
        return estimate
    low, high = np.clip((estimate.low, estimate.high), 0.0, 1.0).tolist()  # of few problems it is wider
    return replace(estimate, low=low, high=high)


def _problem_row(samples: Sequence[Sample], counting: Counting) -> ProblemRow:
    counted = [sample for sample in samples if counts(sample)]
    first = samples[0]
    prompt, cached, generated = (
        sum(sample.result.metrics.get(name, 0.0) for sample in samples)
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens")
    )
    rewards = [sample.result.reward or 0.0 for sample in counted]
    return ProblemRow(
        name=first.problem,
        line=first.line,
        task=first.result.task,
        row_format=first.row_format,
        samples=len(counted),
        solved=sum(is_solved(sample.result, counting.threshold) for sample in counted),
        infrastructure_errors=len(samples) - len(counted),
        reward=float(np.mean(rewards)) if rewards else None,
        prompt_tokens=prompt,
        cached_tokens=cached,
        generated_tokens=generated,
        seconds=float(np.mean([seconds_of(sample.result) for sample in samples])),
        cost=_cost(prompt, cached, generated, counting),
    )


def _cost(prompt: float, cached: float, generated: float, counting: Counting) -> float | None:
    if counting.price_in is None and counting.price_out is None:
        return None
    price_in = counting.price_in or 0.0
    price_cached = price_in if counting.price_cached is None else counting.price_cached
    whole = (prompt - cached) * price_in + cached * price_cached + generated * (counting.price_out or 0.0)
    return whole / 1e6


def _whole_cost(problems: Sequence[ProblemRow]) -> Cost | None:
    costs = [row.cost for row in problems if row.cost is not None]
    if not costs:
        return None
    solved = sum(row.solved for row in problems)
    total = sum(costs)
    return Cost(total=total, per_problem=total / len(costs), per_solved=total / solved if solved else None)


def _distribution(name: str, values: Sequence[float], whole: float | None = None, within: str = "") -> Distribution:
    total = float(np.sum(values))
    p50, p95 = np.percentile(values, (50, 95)).tolist()
    share = None if whole is None else (total / whole if whole > 0 else 0.0)
    mean = total / len(values)
    return Distribution(
        name=name, count=len(values), mean=mean, p50=p50, p95=p95, total=total, share=share, within=within
    )


def _tokens(samples: Sequence[Sample]) -> tuple[Distribution, ...]:
    """Return token counts, turns and tool calls as distributions over rollouts."""
    if not samples:
        return ()
    names = ("prompt_tokens", "cached_tokens", "generated_tokens", "turns", "tool_calls")
    return (
        _distribution("tokens", [float(sample.result.tokens) for sample in samples]),
        *(_distribution(name, [sample.result.metrics.get(name, 0.0) for sample in samples]) for name in names),
    )


def _times(samples: Sequence[Sample]) -> tuple[Distribution, ...]:
    """Return the seconds of each stay, and of its parts, as distributions over the rollouts that have them."""
    whole = sum(seconds_of(sample.result) for sample in samples)
    there = {name for sample in samples for name in sample.result.timings}
    tools = sorted(name for name in there if name.startswith("tool."))
    order = []
    for stay in STAYS:
        order.append((stay, ""))
        if stay == "run":
            order += [(name, "run") for name in (*WITHIN_RUN, *tools)]
    rows = []
    for name, within in order:
        values = [sample.result.timings[name] for sample in samples if name in sample.result.timings]
        if values:
            rows.append(_distribution(name, values, whole, within))
    return tuple(rows)


def _failures(samples: Sequence[Sample], threshold: float) -> tuple[FailureRow, ...]:
    groups = _grouped((sample for sample in samples if not is_solved(sample.result, threshold)), _kind_of_failure)
    rows = [
        FailureRow(
            outcome=outcome,
            code=code,
            stop_reason=stop_reason,
            count=len(group),
            share=len(group) / len(samples),
            example=group[0].job_id,
            message=group[0].result.error.message[:SHOWN_MESSAGE] if group[0].result.error is not None else "",
        )
        for (outcome, code, stop_reason), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.count, row.reason)))


def _kind_of_failure(sample: Sample) -> tuple[str, str, str]:
    """Return the outcome, the error's code, and the stop reason where there is no error."""
    result = sample.result
    if result.error is None:
        return str(result.outcome), "", result.stop_reason
    reason = result.error.fields.get("reason")  # such as `hung` of `grader_failed`
    code = f"{result.error.code} ({reason})" if isinstance(reason, str) else result.error.code
    return str(result.outcome), code, ""


def _groups(samples: Sequence[Sample], key: Callable[[Sample], str], counting: Counting) -> tuple[GroupRow, ...]:
    rows = []
    for name, group in sorted(_grouped(samples, key).items()):
        by_problem = _grouped(group, lambda sample: sample.index.problem)
        problems = [_problem_row(one, counting) for one in by_problem.values()]
        rows.append(
            GroupRow(
                name=name,
                problems=len(problems),
                rollouts=len(group),
                infrastructure_errors=sum(row.infrastructure_errors for row in problems),
                pass_1=_pass_row(problems, 1).estimate,
                best=_pass_row(problems, max(counting.ks)),
                reward=_mean_reward(problems),
                generated_tokens=float(np.mean([one.result.metrics.get("generated_tokens", 0.0) for one in group])),
                seconds=float(np.mean([seconds_of(one.result) for one in group])),
            )
        )
    return tuple(rows)
