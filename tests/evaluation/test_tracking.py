"""What `prorl eval --log` logs, read back from TensorBoard's files; a run that continues logs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prorl_zmq.errors import ErrorInfo
from prorl_zmq.evaluation.run_folder import TRAJECTORIES, RunFolder
from prorl_zmq.evaluation.summary import Counting, summarise
from prorl_zmq.evaluation.tracking import EvaluationLog, run_config, summary_values
from prorl_zmq.evaluation.transcript import TextReader, make_transcript
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.trackers import open_tracker
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Outcome

from ..trackers import readback
from .conftest import HOSTILE, made_plan, made_sample, made_trajectory

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.evaluation.plan import Plan

READER = TextReader(EmbeddedChatFormat(), ChatSettings(), "tiny")
COUNTING = Counting(ks=(1, 2), price_in=1.0, price_out=2.0)


def evaluate(folder: Path, plan: Plan, rewards: list[float | None]) -> None:
    """Take the results of so many rollouts as `prorl eval` does; None: an infrastructure error."""
    readback.library("tensorboardX")
    with RunFolder(folder, plan) as run, open_tracker("tensorboard", run="run", folder=folder / "trackers") as tracker:
        log = EvaluationLog(tracker, run)
        for index, reward in zip(run.missing(), rewards, strict=False):
            outcome = Outcome.COMPLETED if reward is not None else Outcome.INFRASTRUCTURE_ERROR
            sample = made_sample(plan, index.problem, index.sample, reward, outcome, trial=index.trial)
            if reward is None:
                lost = msgspec.structs.replace(sample.result, error=ErrorInfo("worker_lost", HOSTILE))
                sample = msgspec.structs.replace(sample, result=lost)
            trajectory = made_trajectory(sample.result, said=HOSTILE)
            run.add(sample, trajectory, make_transcript(sample.job_id, trajectory, READER))
            log.ended(sample)
        log.summed_up(summarise(run.plan, run.samples, COUNTING))


def test_an_evaluation_that_continues_logs_on(tmp_path: Path) -> None:
    plan = made_plan(problems=2, samples=2)
    evaluate(tmp_path, plan, [1.0, None])
    evaluate(tmp_path, plan, [0.0, 1.0, 1.0])
    points, (first, second) = readback.tensorboard(tmp_path / "trackers", "run")
    assert points["rollouts/count"] == [(1, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert points["reward/mean"] == [(1, 1.0), (2, 0.0), (3, 1.0), (4, 1.0)]
    assert points["seconds/run"][0] == (1, 6.0)
    assert points["eval/pass_at_1"] == [(1, 1.0), (4, 0.75)]
    assert points["eval/pass_at_2"] == [(4, 1.0)]
    assert points["eval/infrastructure_errors"] == [(1, 1.0), (4, 0.0)]
    assert points["eval/seconds/engine/mean"][-1] == (4, 4.0)
    assert points["eval/failures/infrastructure_error__worker_lost"] == [(1, 1.0)]
    assert points["eval/cost"][-1][0] == 4
    assert first.startswith("    ==== ")
    assert second.count("    ==== ") == 4
    assert "[system]\n    <|im_start|>system\n    Solve the problem." in second
    assert "<script>alert(1)</script>" in second
    assert not set("\x1b\u202e\x9b") & set(first + second)


def test_a_conversation_whose_file_is_damaged_is_left_out(tmp_path: Path) -> None:
    plan = made_plan(problems=2, samples=1)
    evaluate(tmp_path, plan, [1.0, 1.0])
    damaged, _ = sorted((tmp_path / TRAJECTORIES).glob("*.json"))
    damaged.write_bytes(b"{")
    evaluate(tmp_path, plan, [])
    _, tables = readback.tensorboard(tmp_path / "trackers", "run")
    assert [table.count("    ==== ") for table in tables] == [2, 1]


def test_an_evaluation_of_nothing_has_no_figures_that_are_not_numbers() -> None:
    values = summary_values(summarise(made_plan(), [], COUNTING))
    assert values == {"eval/ended": 0.0, "eval/infrastructure_errors": 0.0, "eval/counted": 0.0}


def test_what_may_be_secret_is_not_in_the_config() -> None:
    plan = made_plan(
        urls=("http://me:secret@gpu-7",), arguments=("--api-key", "secret"), engine_options={"k": "secret"}
    )
    config = run_config(plan)
    assert "secret" not in str(config)
    assert (config["engine"], config["samples"], config["problems"]) == ("embedded", 2, 2)
