"""The demo's training loop: a trainer that knows the service only through `RolloutClient`.

Each step submits the jobs of some prompts, collects their trajectories, learns from them, writes the new weights, and
has the engine serve them. The reward is what the check script in the sandbox said; nothing else is learned from.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ..client.blocking.client import RolloutClient
from ..inference.base_policy import build_base_policy
from ..inference.tokenizer import decode
from .grpo import Grpo, GrpoSettings, StepStats
from .plot import draw_rewards
from .service import demo_service
from .tasks import make_jobs

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

    from ..data.trajectory import Trajectory
    from .display import Display

STALL_S = 120.0
"""Longest time without a finished job."""


@dataclass(slots=True)
class Summary:
    """What the demo measured: `demo/summary.json`."""

    reward_first: float = 0.0
    """Mean reward of the first step, before anything was learned."""
    reward_last: float = 0.0
    """Mean reward of the last step."""
    rollouts: int = 0
    seconds: float = 0.0
    """From the first submission to the last step's end."""
    seed: int = 0
    sandbox: str = ""
    outcomes: dict[str, int] = field(default_factory=dict)
    logprob_gap: float = 0.0
    """Largest difference between the engine's log-prob of a token and the trainer's own for the same weights."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward per step."""


def train(out: Path, seed: int, settings: GrpoSettings, sandbox: str, display: Display) -> Summary:
    """Run the demo, and leave `reward.png`, `trajectories.jsonl` and `summary.json` in `out`.

    Raises:
        ProrlError: the service did not start, or stopped answering.
    """
    weights = out / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    display.say("building the base policy (what a pretrained model would be)")
    policy = build_base_policy()
    policy.save(weights / "0.npz")
    grpo = Grpo(policy, settings, seed)
    summary = Summary(seed=seed, sandbox=sandbox)
    display.say("starting the service: two brokers, INIT, RUN and EVAL, one engine")
    with demo_service(out, weights / "0.npz", sandbox) as service, RolloutClient(service.front_door) as client:
        service.wait_ready(client)
        started = time.monotonic()
        with (out / "trajectories.jsonl").open("w", encoding="utf-8") as record, display:
            for step in range(settings.steps):
                began = time.monotonic()
                trajectories = _roll_out(client, step, seed, settings, display)
                _record(record, step, trajectories)
                stats = grpo.step(trajectories)
                path = weights / f"{grpo.weight_version}.npz"
                policy.save(path)
                client.update_weights(path.absolute(), grpo.weight_version)
                (weights / f"{grpo.weight_version - 1}.npz").unlink()
                display.stepped(step, stats, time.monotonic() - began)
                _add(summary, stats, trajectories)
        summary.seconds = time.monotonic() - started
    draw_rewards(summary.rewards, out / "reward.png")
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    return summary


def _roll_out(
    client: RolloutClient, step: int, seed: int, settings: GrpoSettings, display: Display
) -> list[Trajectory]:
    name = f"step{step}"
    jobs = make_jobs(settings.groups, settings.group_size, seed * 10_000 + step, settings.temperature, name)
    client.submit(jobs)
    trajectories: list[Trajectory] = []
    done: Counter[str] = Counter()
    for trajectory in client.stream(timeout_s=STALL_S):
        trajectories.append(trajectory)
        done[trajectory.group_id] += 1
        finished = sum(count == settings.group_size for count in done.values())
        display.collected(client, step, finished, settings.groups)
    return trajectories


def _record(file: TextIO, step: int, trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        row = {
            "step": step,
            "job_id": trajectory.job_id,
            "group_id": trajectory.group_id,
            "outcome": trajectory.outcome,
            "reward": trajectory.reward,
            "stop_reason": trajectory.result.stop_reason,
            "weight_version": int(trajectory.weight_versions.max(initial=-1)),
            "tokens": trajectory.result.tokens,
            "error": trajectory.error.message if trajectory.error is not None else None,
            "timings": trajectory.result.timings,
            "text": decode(trajectory.token_ids),
        }
        file.write(json.dumps(row) + "\n")


def _add(summary: Summary, stats: StepStats, trajectories: list[Trajectory]) -> None:
    if not summary.rewards:
        summary.reward_first = stats.reward
    summary.reward_last = stats.reward
    summary.rewards.append(stats.reward)
    summary.rollouts += stats.rollouts
    summary.logprob_gap = max(summary.logprob_gap, stats.logprob_gap)
    summary.outcomes = dict(Counter(summary.outcomes) + Counter(str(t.outcome) for t in trajectories))
