"""Several models in one service: scores during rollouts, trainers of two models, and adapters on one engine.

Scores: an engine generates rollouts throughout, and in turns scores long texts too. Scoring is given a quarter of the
engine's time while generations are under way (`ScoreQueue`), so rollouts should keep at least three quarters of their
tokens per second: the median of the turns, each against the rollouts alone before and after it. All scores are compared
with a rescoring in float64.

A teacher: the same rollouts, in turns with and without another model as their `teacher`, on the same cores.

Two trainers: each updates a model of its own, step by step and without regard to the other, and samples after each
update. Each token's model, version and log-prob must be those of the weights that its trainer published last.

Two trainers that learn with peft on adapters of one engine (`models_training.py`), and adapters on a real vLLM
(`models_adapters.py`): a quick run is without them.
"""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from engines import WITHOUT, vllm_python
from harness import Incomplete, Row, main

from prorl_zmq import EpisodeLimits, Job, RolloutClient, Sampling
from prorl_zmq.data.reward_curve import CLEAR, rise
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.hosting.score_queue import SHARE
from prorl_zmq.inference.policy import Policy
from prorl_zmq.service.child import ChildService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from prorl_zmq import Trajectory
    from prorl_zmq.data.scores import Scores

TEXT = 2_000
"""Tokens of a scored text."""
TOP = 20
ROLLOUTS, ANSWER = 32, 256
"""Rollouts at a time, and the tokens of each."""
MODELS = ("policy", "b")
SAMPLES, SHORT = 32, 32
"""Of a step of a trainer, and the tokens of each."""
NOISE = 0.05
BYTES = 256
"""Token ids of plain text in the embedded engine's vocabulary."""
CLOSE = 1e-4
CALLS, TURNS = 2_000, 8
"""Of adapters: mixed calls, and turns of what is timed."""
TOPOLOGY = """\
backends = [{{kind = "embedded"}}, {{kind = "embedded", name = "{other}"}}]
stage = [
    {{role = "init", slots = 16}}, {{role = "run", slots = 96}}, {{role = "eval", slots = 16}},
    {{role = "score", slots = 64}},
]

[rollout_broker]
ready_limit = 96

[sandbox]
kind = "process"
"""


class Scoring(NamedTuple):
    """What came of scoring during rollouts."""

    during: float
    """Tokens of rollouts per second, the median of the turns."""
    kept: float
    """To those of rollouts alone, the median of the turns."""
    scored: float
    """Tokens of texts per second."""
    error: float
    """Largest difference of a log-prob to float64."""


class Taught(NamedTuple):
    """What came of rollouts with a teacher."""

    rate: float
    """Tokens of rollouts per second, the median of the turns."""
    kept: float
    """To those without a teacher, the median of the turns."""
    error: float
    """Largest difference of a log-prob to float64."""


@dataclass
class Training:
    """What came of two trainers."""

    tokens: int = 0
    wrong: int = 0
    """Tokens of another model or version."""
    error: float = 0.0
    updates_s: list[float] = field(default_factory=list)


@contextmanager
def two_models() -> Iterator[ChildService]:
    """Run a service of two models."""
    with (
        tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder,
        ChildService(Path(folder), TOPOLOGY.format(other=MODELS[1])) as service,
    ):
        with RolloutClient(service.front_door, timeout_s=60) as client:
            service.wait_ready(client)
            until = time.monotonic() + 60
            while {one.backend.name for one in client.backends.list()} != {*MODELS}:
                assert time.monotonic() < until, "an engine did not start"
                client.collect(1, wait_s=0.1)
        yield service


def sample(model: str, seed: int, tokens: int = ANSWER, teacher: str = "") -> Job:
    """Make a job of one reply, which nothing ends early."""
    prompt = np.random.default_rng(seed).integers(0, BYTES, 8)
    return Job(
        task="sample",
        instance={"token_ids": prompt.tolist(), "turn_ends": False},
        sampling=Sampling(max_tokens=tokens),
        episode=EpisodeLimits(max_turns=1, max_tokens=2**31 - 1),
        model=model,
        teacher=teacher,
    )


class Rollouts(threading.Thread):
    """Keeps rollouts of the policy under way until `stop`, and counts their tokens."""

    def __init__(self, front_door: str, teacher: str = "") -> None:
        super().__init__(name="rollouts", daemon=True)
        self.ended: list[Trajectory] = []
        """The latest."""
        self._front_door = front_door
        self._teacher = teacher
        self._ending = threading.Event()
        self._tokens = 0

    def run(self) -> None:
        seed = 0
        with RolloutClient(self._front_door, timeout_s=60) as client:
            client.submit(sample("policy", seed := seed + 1, teacher=self._teacher) for _ in range(ROLLOUTS))
            while not self._ending.is_set():
                ended = client.collect(ROLLOUTS, wait_s=1.0)
                assert all(one.outcome == "completed" for one in ended), ended
                client.submit(sample("policy", seed := seed + 1, teacher=self._teacher) for _ in ended)
                self._tokens += sum(int(one.loss_mask.sum()) for one in ended)
                self.ended = ended or self.ended

    def stop(self) -> None:
        """Wait for its end."""
        self._ending.set()
        self.join()

    @contextmanager
    def measured(self, rates: list[float]) -> Iterator[None]:
        """Note the tokens per second of a time."""
        before, began = self._tokens, time.monotonic()
        yield
        rates.append((self._tokens - before) / (time.monotonic() - began))


def measure_scoring(front_door: str, turns: int, texts: int, alone_s: float) -> Scoring:
    """Score texts during rollouts, so many in each turn."""
    alone: list[float] = []
    during: list[float] = []
    scores: list[Scores] = []
    with RolloutClient(front_door, timeout_s=60) as client:
        client.submit(sample("policy", 0, TEXT - 8))
        (one,) = client.stream(timeout_s=120)
        random = np.random.default_rng(1)
        written = [
            replace(one, token_ids=random.integers(0, BYTES, TEXT).astype(np.int32)) for _ in range(turns * texts)
        ]
        rollouts, scored_s = Rollouts(front_door), 0.0
        rollouts.start()
        try:
            time.sleep(2.0)  # until rollouts end at all times
            for turn in range(turns):
                with rollouts.measured(alone):
                    time.sleep(alone_s)
                began = time.monotonic()
                with rollouts.measured(during):
                    scores += client.score(written[turn * texts :][:texts], model="policy", top=TOP)
                scored_s += time.monotonic() - began
            with rollouts.measured(alone):
                time.sleep(alone_s)
        finally:
            rollouts.stop()
    kept = np.array(during) / [(before + after) / 2 for before, after in pairwise(alone)]
    error = max(error_of(*each) for each in zip(written, scores, strict=True))
    return Scoring(float(np.median(during)), float(np.median(kept)), len(written) * TEXT / scored_s, error)


def measure_teacher(front_door: str, turns: int, turn_s: float) -> Taught:
    """Run rollouts in turns without and with a teacher."""
    rates: dict[str, list[float]] = {"": [], f"{MODELS[1]}:{TOP}": []}
    error = 0.0
    for _ in range(turns):
        for teacher, measured in rates.items():
            rollouts = Rollouts(front_door, teacher)
            rollouts.start()
            try:
                time.sleep(2.0)  # until rollouts end at all times
                with rollouts.measured(measured):
                    time.sleep(turn_s)
            finally:
                rollouts.stop()
            if teacher:
                assert rollouts.ended, "no rollout ended"
                error = max(error, *(teaching_error(one) for one in rollouts.ended))
    alone, taught = (np.array(values) for values in rates.values())
    return Taught(float(np.median(taught)), float(np.median(taught / alone)), error)


def teaching_error(trajectory: Trajectory) -> float:
    """Give the largest difference of a teacher's records to float64."""
    records, rows = trajectory.records, trajectory.records.rows("teacher")
    exact = exact_logprobs(base_policy(), trajectory.token_ids)[rows - 1]
    own = records["teacher_logprobs"] - exact[np.arange(len(rows)), trajectory.token_ids[rows]]
    likeliest = records["teacher_top_logprobs"] + np.partition(-exact, range(TOP), 1)[:, :TOP]
    return max(float(np.abs(each).max()) for each in (own, likeliest))


def error_of(text: Trajectory, scores: Scores) -> float:
    """Give the largest difference of a text's scores to float64."""
    exact = exact_logprobs(base_policy(), text.token_ids)
    rows = np.arange(len(exact))
    own = scores.logprobs[1:] - exact[rows, text.token_ids[1:]]
    named = scores.top_logprobs[1:] - exact[rows[:, None], scores.top_ids[1:]]
    likeliest = scores.top_logprobs[1:] + np.partition(-exact, range(TOP), 1)[:, :TOP]
    return max(float(np.abs(each).max()) for each in (own, named, likeliest))


def exact_logprobs(policy: Policy, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Give the distribution at each token of a text but the first, float64 [T - 1, V]."""
    wide = Policy({name: value.astype(np.float64) for name, value in policy.parameters.items()})  # type: ignore[misc]
    logits = wide.logits(wide.contexts(token_ids))[1:].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    exact: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return exact


def changed(number: int) -> Policy:
    """Give weights of their own."""
    policy, random = base_policy().copy(), np.random.default_rng(number)
    weights = policy.parameters["output_weight"]
    policy.parameters["output_weight"] = weights + random.normal(0, NOISE, weights.shape).astype(weights.dtype)
    return policy


def train(front_door: str, folder: Path, model: str, steps: int) -> Training:
    """Update a model step by step, and sample after each update."""
    found, first = Training(), 1 + 1000 * MODELS.index(model)
    with RolloutClient(front_door, timeout_s=60) as client:
        for version in range(first, first + steps):
            policy, path = changed(version), folder / f"{model}-{version}.npz"
            policy.save(path)
            began = time.monotonic()
            client.update_weights(path, version, model=model)
            found.updates_s.append(time.monotonic() - began)
            client.submit(sample(model, seed, SHORT) for seed in range(SAMPLES))
            for one in client.stream(timeout_s=120):
                assert one.outcome == "completed", one.error
                mask = one.loss_mask
                right = one.weight_versions[mask] == version
                found.tokens += len(right)
                found.wrong += int((~right).sum()) if one.result.model == model else len(right)
                exact = exact_logprobs(policy, one.token_ids)[np.flatnonzero(mask) - 1, one.token_ids[mask]]
                found.error = max(found.error, float(np.abs(one.logprobs[mask] - exact).max()))
    return found


def train_both(front_door: str, steps: int) -> Training:
    """Run the two trainers at a time; give their sum."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as place, ThreadPoolExecutor(len(MODELS)) as threads:
        trained = [threads.submit(train, front_door, Path(place), model, steps) for model in MODELS]
        both = [one.result() for one in trained]
    return Training(
        sum(one.tokens for one in both),
        sum(one.wrong for one in both),
        max(one.error for one in both),
        [seconds for one in both for seconds in one.updates_s],
    )


def measure(quick: bool) -> list[Row]:
    turns, texts, steps = (3, 4, 3) if quick else (8, 32, 20)
    with two_models() as service:
        scoring = measure_scoring(service.front_door, turns, texts, 2.0 if quick else 15.0)
        taught = measure_teacher(service.front_door, *((1, 1.0) if quick else (turns // 2, 10.0)))
        training = train_both(service.front_door, steps)
    least = 1 - SHARE
    rows = [
        Row(
            f"rollouts while {turns * texts} texts of {TEXT:,} tokens are scored, p50 of {turns} turns",
            scoring.during,
            "tokens/s",
            "rollouts alone",
            scoring.kept,
            f"at least {least:g}×: scoring has {SHARE:g} of the time",
            scoring.kept >= least,
        ),
        Row("scored in that time", scoring.scored, "tokens/s"),
        error_row(f"scores with the {TOP} likeliest tokens: largest difference to float64", scoring.error),
        Row(
            "rollouts with a teacher on the same cores, p50 of turns",
            taught.rate,
            "tokens/s",
            "rollouts without one",
            taught.kept,
        ),
        error_row(
            f"the teacher's log-probs and those of its {TOP} likeliest tokens: largest difference to float64",
            taught.error,
        ),
        wrong_row(
            f"two models, each updated {steps} times by its own trainer: tokens of another model or version",
            training.wrong,
            f"of {training.tokens:,}",
        ),
        error_row("their log-probs: largest difference to float64 of that version's weights", training.error),
        Row("an update of one model, p50", 1e3 * float(np.median(training.updates_s)), "ms"),
    ]
    if quick:
        return rows
    if importlib.util.find_spec("peft") is None:
        raise Incomplete("peft is not installed: make .venv/.train", rows)
    rows += training_rows()
    python = vllm_python()
    if python is None:
        raise Incomplete(WITHOUT, rows)
    return [*rows, *adapter_rows(python)]


def error_row(what: str, error: float) -> Row:
    return Row(what, 1e6 * error, "millionths", target=f"under {1e6 * CLOSE:g}", holds=error < CLOSE)


def wrong_row(what: str, wrong: int, of: str) -> Row:
    return Row(what, wrong, of, target="none", holds=wrong == 0)


def training_rows() -> list[Row]:
    """Give the rows of two trainers that learn."""
    from models_training import STEPS, measure_training

    trained = measure_training(STEPS)
    rises = {model: rise(one.rewards) for model, one in trained.items()}
    least = min(one.errors for one in rises.values() if one is not None)
    tokens, wrong = (sum(getattr(one, name) for one in trained.values()) for name in ("tokens", "wrong"))
    error = max(one.error for one in trained.values())
    return [
        Row(
            f"two adapters of one engine, each trained {STEPS} steps at a task of its own: the smaller rise of reward",
            least,
            "standard errors",
            target=f"at least {CLEAR:g}",
            holds=least >= CLEAR,
        ),
        *(
            Row(
                f"adapter {model}, last third of the steps, mean",
                one.last,
                "reward",
                "first third",
                one.last / one.first,
            )
            for model, one in rises.items()
            if one is not None
        ),
        wrong_row(
            "their batches' tokens of another adapter, or of another version than their trainer published last",
            wrong,
            f"of {tokens:,}",
        ),
        error_row("their log-probs: largest difference to the trainer's own", error),
    ]


def adapter_rows(python: str) -> list[Row]:
    """Give the rows of adapters on a real vLLM."""
    from models_adapters import SLOTS, measure_adapters

    found = measure_adapters(python, CALLS, TURNS)
    beyond_ms = found.publish_ms - found.first_ms
    return [
        wrong_row(
            f"calls over {SLOTS} adapters of one vLLM, updated meanwhile: by a wrong one or version, as peft rescores",
            found.wrong,
            f"of {found.calls:,}",
        ),
        Row(
            "their log-probs: largest difference to peft",
            1e6 * found.error,
            "millionths",
            "another adapter or version, the nearest",
            found.error / found.nearest_other,
            f"under {1e6 * CLOSE:g}",
            found.error < CLOSE,
        ),
        Row(
            f"{SLOTS} adapters",
            found.eight,
            "tokens per CPU second",
            "one adapter",
            found.kept,
            "at least 0.85×",
            found.kept >= 0.85,
        ),
        Row("one adapter", found.one, "tokens per CPU second"),
        Row(
            "an adapter's update to its first token, beyond a token of a loaded one",
            beyond_ms,
            "ms",
            target="under 1 s",
            holds=beyond_ms < 1e3,
        ),
        Row(
            "adapters back after kill -9 of engine and host, without a trainer",
            found.restored,
            f"of {SLOTS}",
            target="all",
            holds=found.restored == SLOTS,
        ),
        Row("from the new host's start to the last one's tokens, vLLM's start included", found.restart_s, "s"),
    ]


if __name__ == "__main__":
    main("models", "scores during rollouts, and two models with trainers of their own", measure)
