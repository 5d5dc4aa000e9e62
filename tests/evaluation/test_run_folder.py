"""What a run folder keeps whatever happens, and what it refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from prorl_zmq.errors import ConfigError, ErrorInfo
from prorl_zmq.evaluation.plan import RolloutIndex
from prorl_zmq.evaluation.run_folder import RESULTS, SERVICE, RunFolder, read_plan, read_samples, repair
from prorl_zmq.evaluation.service import RUN_DIR
from prorl_zmq.evaluation.transcript import make_transcript
from prorl_zmq.service.child import RUN_DIR_PREFIX
from prorl_zmq.wire.messages.jobs import Outcome

from .conftest import made_plan, made_sample, made_trajectory

if TYPE_CHECKING:
    from prorl_zmq.evaluation.run_folder import Sample

HOLD = """
import sys, msgspec
from pathlib import Path
from prorl_zmq.evaluation.plan import Plan
from prorl_zmq.evaluation.run_folder import RunFolder
with RunFolder(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Plan)):
    print("has it", flush=True)
    sys.stdin.read()
"""


def add(folder: RunFolder, sample: Sample) -> None:
    trajectory = made_trajectory(sample.result)
    whole = msgspec.structs.replace(sample, result=trajectory.result)
    folder.add(whole, trajectory, make_transcript(sample.job_id, trajectory, None))


def test_it_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    plan = made_plan(2, 2)
    with RunFolder(tmp_path / "run", plan) as folder:
        assert folder.missing() == [RolloutIndex(0, 0), RolloutIndex(1, 0), RolloutIndex(0, 1), RolloutIndex(1, 1)]
        add(folder, made_sample(plan, 1, 0))
        add(folder, made_sample(plan, 0, 1, outcome=Outcome.FAILED))
    with RunFolder(tmp_path / "run", made_plan(2, 2)) as again:
        assert again.plan == plan  # with its run id
        assert again.missing() == [RolloutIndex(0, 0), RolloutIndex(1, 1)]
        assert again.has(made_sample(plan, 1, 0).job_id)
        with np.load(tmp_path / "run" / "trajectories" / f"{again.samples[0].job_id}.npz") as arrays:
            assert len(arrays["token_ids"]) == again.samples[0].result.tokens > 0


@pytest.mark.parametrize("outcome", [Outcome.INFRASTRUCTURE_ERROR, Outcome.CANCELLED])
def test_what_says_nothing_of_the_model_is_run_again_and_the_newest_counts(tmp_path: Path, outcome: Outcome) -> None:
    plan = made_plan(1, 1)
    with RunFolder(tmp_path, plan) as folder:
        add(folder, made_sample(plan, 0, outcome=outcome))
        assert folder.missing() == [RolloutIndex(0, 0, trial=1)]
        add(folder, made_sample(plan, 0, trial=1))
        assert folder.missing() == []
    with RunFolder(tmp_path, plan) as folder:
        assert [sample.index.trial for sample in folder.samples] == [1]


@pytest.mark.parametrize(("phase", "again"), [("init", True), ("run", False)])
def test_a_sandbox_that_took_too_long_says_nothing_of_the_model(tmp_path: Path, phase: str, again: bool) -> None:
    plan = made_plan(1, 1)
    sample = made_sample(plan, 0, outcome=Outcome.TIMEOUT)
    error = ErrorInfo("phase_timeout", "too long", {"phase": phase})
    with RunFolder(tmp_path, plan) as folder:
        add(folder, msgspec.structs.replace(sample, result=msgspec.structs.replace(sample.result, error=error)))
        assert bool(folder.missing()) is again


def test_a_disk_that_is_full_for_a_while_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = made_plan(3, 1)

    def write(descriptor: int, content: bytes) -> int:
        if room:
            return written(descriptor, content[: room.pop()])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written, room = os.write, [20]
    with RunFolder(tmp_path, plan) as folder:
        add(folder, made_sample(plan, 0))
        with monkeypatch.context() as full:
            full.setattr(os, "write", write)
            with pytest.raises(ConfigError, match="No space left"):
                add(folder, made_sample(plan, 1))
        add(folder, made_sample(plan, 2))
    assert [sample.index.problem for sample in read_samples(tmp_path / RESULTS)] == [0, 2]


@pytest.mark.parametrize("torn", [b'{"problem": "p', b"\0" * 512, b"\0" * 512 + b"\n", b"{"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    plan = made_plan(2, 1)
    with RunFolder(tmp_path, plan) as folder:
        add(folder, made_sample(plan, 0))
    whole = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(whole + torn)
    with RunFolder(tmp_path, plan) as folder:
        assert folder.missing() == [RolloutIndex(1, 0)]
        assert (tmp_path / RESULTS).read_bytes() == whole
        add(folder, made_sample(plan, 1))
    assert len(read_samples(tmp_path / RESULTS)) == 2


def test_every_cut_of_the_results_leaves_the_lines_before_it(tmp_path: Path) -> None:
    plan = made_plan(3, 1)
    with RunFolder(tmp_path, plan) as folder:
        for problem in range(3):
            add(folder, made_sample(plan, problem))
    whole = (tmp_path / RESULTS).read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        (tmp_path / RESULTS).write_bytes(whole[:cut])
        kept = max([end for end in ends if end <= cut], default=0)
        assert repair(tmp_path / RESULTS) == cut - kept
        assert (tmp_path / RESULTS).read_bytes() == whole[:kept]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    plan = made_plan(2, 1)
    with RunFolder(tmp_path, plan) as folder:
        add(folder, made_sample(plan, 0))
    whole = (tmp_path / RESULTS).read_bytes()
    (tmp_path / RESULTS).write_bytes(b"{}\n" + whole)
    with (
        pytest.raises(ConfigError, match=r"results\.jsonl, line 1: .*missing required field"),
        RunFolder(tmp_path, plan),
    ):
        pass


def test_more_samples_and_problems_go_on_with_what_there_is(tmp_path: Path) -> None:
    plan = made_plan(1, 1, limit=1)
    with RunFolder(tmp_path, plan) as folder:
        add(folder, made_sample(plan, 0))
    with RunFolder(tmp_path, made_plan(2, 3)) as folder:
        assert (folder.plan.run_id, folder.plan.rollouts) == (plan.run_id, 6)
        assert folder.missing() == [
            RolloutIndex(1, 0),
            RolloutIndex(0, 1),
            RolloutIndex(1, 1),
            RolloutIndex(0, 2),
            RolloutIndex(1, 2),
        ]
        add(folder, made_sample(folder.plan, 1, 2))
    with (
        pytest.raises(ConfigError, match="--limit was 0 and is 1; the problems were 2 and are 1"),
        RunFolder(tmp_path, made_plan(1, 3, limit=1)),
    ):
        pass
    with RunFolder(tmp_path, made_plan(2, 3)) as folder:
        assert len(folder.missing()) == 4


def test_jobs_keep_their_names_where_nothing_has_come_yet(tmp_path: Path) -> None:
    """They may be at work in a service that runs on."""
    with RunFolder(tmp_path, made_plan(2, 2)) as folder:
        run_id = folder.plan.run_id
    with RunFolder(tmp_path, made_plan(2, 2)) as folder:
        assert folder.plan.run_id == run_id


def test_a_plan_of_which_nothing_has_come_is_no_hindrance(tmp_path: Path) -> None:
    with RunFolder(tmp_path, made_plan(3, 8)):
        pass
    other = made_plan(1, 2, temperature=0.5)
    with RunFolder(tmp_path, other) as folder:
        assert (folder.plan, folder.plan.rollouts) == (other, 2)
    assert read_plan(tmp_path) == other


def test_another_plan_is_refused_with_what_differs_and_fresh_puts_the_old_one_aside(tmp_path: Path) -> None:
    plan = made_plan(3, 8)
    with RunFolder(tmp_path, plan) as folder:
        add(folder, made_sample(plan, 0))
    other = made_plan(2, 4, temperature=0.5)
    with pytest.raises(ConfigError) as refused, RunFolder(tmp_path, other):
        pass
    for part in ("--samples was 8 and is 4", "--temperature was not given and is 0.5", "problems were 3 and are 2"):
        assert part in refused.value.message
    assert "--fresh" in refused.value.message
    killed = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX))  # what the evaluation's service had, when it was killed
    (tmp_path / SERVICE / RUN_DIR).write_text(str(killed))
    with RunFolder(tmp_path, other, fresh=True) as folder:
        assert len(folder.missing()) == 8
    assert not killed.exists()
    assert len(read_samples(tmp_path / "earlier" / plan.run_id / RESULTS)) == 1
    with RunFolder(tmp_path, other, fresh=True):  # a second one of the same name has a place too
        pass
    assert len(list((tmp_path / "earlier").iterdir())) == 2


def test_another_plan_takes_the_folder_of_one_whose_rollouts_all_failed_for_other_reasons(tmp_path: Path) -> None:
    """After the task's file was mended, the command that was to run the rollouts again was refused."""
    plan = made_plan(2, 1)
    with RunFolder(tmp_path, plan) as folder:
        add(folder, made_sample(plan, 0, outcome=Outcome.FAILED, code="handler_failed"))
        assert folder.earlier is None
    other = made_plan(2, 1, temperature=0.5)
    with RunFolder(tmp_path, other) as folder:
        assert folder.earlier == tmp_path / "earlier" / plan.run_id
        assert (folder.plan, folder.samples, len(folder.missing())) == (other, [], 2)
    assert len(read_samples(tmp_path / "earlier" / plan.run_id / RESULTS)) == 1


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is not an evaluation's folder"), RunFolder(tmp_path, made_plan()):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="it is not a folder"), RunFolder(tmp_path / "thesis.tex", made_plan()):
        pass


def test_one_process_at_a_time_has_it(tmp_path: Path) -> None:
    plan = made_plan()
    command = [sys.executable, "-P", "-c", HOLD, str(tmp_path), msgspec.json.encode(plan).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "has it\n"
            with pytest.raises(ConfigError, match="another `prorl eval` is at work"), RunFolder(tmp_path, plan):
                pass
        finally:
            holder.kill()
    with RunFolder(tmp_path, plan):  # the kernel let go of it
        pass


@pytest.mark.parametrize(
    ("content", "said"), [("{}", "is not a plan of an evaluation"), ("no json", "is not a plan of an evaluation")]
)
def test_a_damaged_plan_is_said(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=said), RunFolder(tmp_path, made_plan()):
        pass
    with RunFolder(tmp_path, made_plan(), fresh=True):
        assert (tmp_path / "earlier" / "unknown" / "plan.json").read_text() == content
