"""The jobs of bench/chaos.py: real `shell` and `math` work with known rewards, each made from its number.

Only the check script of a `shell` job holds the job's own reward, and returns it only if it finds the file that INIT
placed: another job's reward, a default, or a reward without a sandbox is detected. A `math` job has an answer that no
policy gives, so 0.0 is the only honest reward. The prompt holds the job's name, so another job's trajectory is detected
too. A saboteur's policy cheats instead of solving its task (see chaos_engine.py), and must earn 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from chaos_engine import SABOTAGES

from prorl_zmq.inference.tokenizer import decode
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Job, Outcome, PhaseLimits, Sampling

if TYPE_CHECKING:
    from prorl_zmq import Trajectory

EPISODE = EpisodeLimits(max_turns=3, max_tokens=512, tool_call_s=10.0)
LIMITS = PhaseLimits(init_s=60.0, run_s=120.0, eval_s=60.0)
SABOTEURS_EPISODE = EpisodeLimits(max_turns=3, tool_call_s=60.0)
SABOTEURS_LIMITS = PhaseLimits(init_s=60.0, run_s=40.0, eval_s=40.0)
"""Long enough that a strike (`LAST_S`) is not the larger part of one: where it is, nothing is said of the agent."""
SABOTEURS_ATTEMPTS = 10
"""More than strikes can cost one: what ends without a reward after these did so by the saboteur's doing."""
MATH_EVERY = 3
"""One of so many jobs is a `math` job."""
SABOTEUR_EVERY = 20
SABOTEURS_CHECK = 'while [ -e slow ]; do sleep 0.1; done; [ "$(cat answer)" = 42 ] || grep -q 4711 answer.txt'


def job_name(seed: int, number: int) -> str:
    """Give a job's id."""
    return f"chaos-{seed}-{number}"


def is_saboteurs(number: int) -> bool:
    """Return whether a job is a saboteur's, where sandboxes are isolated."""
    return bool(number % MATH_EVERY) and number % SABOTEUR_EVERY == SABOTEUR_EVERY // 2


def expected_reward(number: int) -> float:
    """Give the only reward that a job can earn."""
    return 0.0 if number % MATH_EVERY == 0 else (number % 997 + 1) / 1000


def make_job(seed: int, number: int, *, saboteurs: bool = True) -> Job:
    """Make job number `number`; the same again, byte for byte, for the same seed."""
    name = job_name(seed, number)
    sampling = Sampling(max_tokens=40, seed=seed * 1_000_003 + number)
    if saboteurs and is_saboteurs(number):
        form = tuple(SABOTAGES)[number // SABOTEUR_EVERY % len(SABOTAGES)]
        instance = {"instruction": f"{name}: sabotage {form}.", "check": SABOTEURS_CHECK}
        return Job(
            task="shell",
            instance=instance,
            job_id=name,
            sampling=Sampling(seed=number),
            episode=SABOTEURS_EPISODE,
            limits=SABOTEURS_LIMITS,
            max_attempts=SABOTEURS_ATTEMPTS,
        )
    if number % MATH_EVERY == 0:
        instance = {"problem": f"{name}: how many?", "ground_truth": "-987654321"}
        return Job(task="math", instance=instance, job_id=name, sampling=sampling, episode=EPISODE, limits=LIMITS)
    instance = {
        "instruction": f"{name}: read data.txt, and write its last number to answer.txt.",
        "files": {"data.txt": "".join(f"{number + line}\n" for line in range(10)), ".placed/by_init": name},
        "check": f'[ "$(cat .placed/by_init)" = {name} ] && echo "reward: {expected_reward(number)}"\n',
    }
    return Job(task="shell", instance=instance, job_id=name, sampling=sampling, episode=EPISODE, limits=LIMITS)


def oddity(seed: int, number: int, trajectory: Trajectory, *, saboteurs: bool = True) -> str:
    """Say what is wrong with a result; nothing if it can be true. What a saboteur's earns is counted elsewhere."""
    result = trajectory.result
    if not (saboteurs and is_saboteurs(number)):
        if result.outcome != Outcome.COMPLETED:
            return "" if trajectory.reward is None else f"{result.outcome} with reward {trajectory.reward}"
        if trajectory.reward != expected_reward(number):
            return f"reward {trajectory.reward}, not {expected_reward(number)}"
    elif result.outcome != Outcome.COMPLETED:
        return ""
    arrays = (trajectory.logprobs, trajectory.loss_mask, trajectory.weight_versions)
    if not result.tokens or any(len(array) != result.tokens for array in (trajectory.token_ids, *arrays)):
        return f"arrays that are not of {result.tokens} tokens"
    if not trajectory.loss_mask.any() or not np.isfinite(trajectory.logprobs).all():
        return "no tokens of the policy, or log-probs that are no numbers"
    if f"{job_name(seed, number)}:" not in decode(trajectory.token_ids):
        return "the conversation of another job"
    return ""
