from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
from finished_groups import Turn, chat, group, groups, rewritten, trajectory, with_tool
from framework_source import lifted
from hypothesis import given

from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import NotTrainable
from prorl_zmq.integrations.skyrl import TrajectoryID, generator_output

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq import Group

VERSION = "0.3.0"


@pytest.fixture(scope="module")
def validate() -> Callable[..., None]:
    """SkyRL's own `validate_generator_output`."""
    names = ("validate_generator_output", "_validate_step_wise_fields")
    known = {"np": np, "logger": logging.getLogger("skyrl"), "GeneratorOutput": dict}
    function: Callable[..., None] = lifted("skyrl", VERSION, "skyrl/train/utils/trainer_utils.py", names, known)[
        names[0]
    ]
    return function


def test_an_output_without_steps() -> None:
    output = generator_output(
        [group("a", chat([1, 2], [3, 4], 0.0, stop_reason="turn_length"), with_tool(1.0, metrics={"turns": 2.0}))]
    )
    times = output.pop("trajectory_generation_times")
    assert len(times) == 2
    assert output.pop("rollout_metrics")["generate/max_num_tokens"] == 7.0
    assert output == {
        "prompt_token_ids": [[1, 2, 9], [1, 2, 3, 9]],
        "response_ids": [[3, 4], [10, 11, 8, 20, 21, 9, 12]],
        "rewards": [0.0, 1.0],
        "loss_masks": [[1, 1], [1, 1, 0, 0, 0, 0, 1]],
        "stop_reasons": ["length", "stop"],
        "rollout_logprobs": [[-0.5, -1.0], [-0.25, -0.5, 0.0, 0.0, 0.0, 0.0, -1.0]],
        "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 1)],
        "rollout_expert_indices": None,
        "is_last_step": None,
        "env_metrics": [{}, {"turns": 2.0}],
    }


def test_an_output_step_by_step() -> None:
    timings = {"init": 1.0, "run": 2.0, "eval": 0.5, "run_queue": 99.0}
    output = generator_output([group("a", rewritten(1.0, timings=timings), chat([1], [2], 0.0))], step_wise=True)
    assert output["is_last_step"] == [False, True, True]
    assert [tid.to_string() for tid in output["trajectory_ids"]] == ["a_0", "a_0", "a_1"]
    assert output["rewards"] == [1.0, 1.0, 0.0]
    assert output["trajectory_generation_times"] == [3.5, 3.5, 0.0]
    assert output["rollout_metrics"]["generate/trajectory_completion_time_mean"] == 1.75


def test_rewards_of_turns_are_at_their_tokens() -> None:
    turns = [Turn(Role.USER, [1]), Turn(Role.ASSISTANT, [9], [(2, -0.5, 0), (3, -0.5, 0)], reward=-0.25)]
    turns += [Turn(Role.USER, [4]), Turn(Role.ASSISTANT, [9], [(5, -0.5, 0)])]
    groups = [group("a", trajectory(turns, 1.0), chat([1], [2, 3], 0.5))]
    output = generator_output(groups, token_rewards=True)
    assert output["rewards"] == [[0.0, -0.25, 0.0, 0.0, 1.25], [0.0, 0.5]]
    assert generator_output(groups)["rewards"] == [1.0, 0.5]


def test_several_segments_need_steps() -> None:
    with pytest.raises(NotTrainable, match=r"job x has several segments.*step_wise_trajectories"):
        generator_output([group("a", rewritten(job_id="x"))])


def test_the_experiment_says_which_skyrl_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="it is of the extra [train]")
    name = "prorl_zmq.integrations.skyrl.experiment"
    with pytest.raises(ImportError, match=r"skyrl is not installed: pip install 'skyrl~=0.3.0'"):
        importlib.import_module(name)
    info = tmp_path / "skyrl-9.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl\nVersion: 9.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = r"skyrl 9.1.0 is installed; prorl_zmq was tested with skyrl 0.3"
    with pytest.warns(UserWarning, match=words), pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


@pytest.mark.proof
@given(groups())
def test_skyrl_accepts_any_batch_step_by_step(validate: Callable[..., None], batch: list[Group]) -> None:
    validate(sum(map(len, batch)), generator_output(batch, step_wise=True), step_wise=True)


@pytest.mark.proof
def test_skyrl_accepts_a_batch_without_steps(validate: Callable[..., None]) -> None:
    batch = [group("a", chat([1], [2], 0.0), with_tool()), group("b", chat([1], [2, 3]), chat([4], [5]))]
    validate(4, generator_output(batch))
    broken = generator_output(batch)
    broken["loss_masks"][1].pop()
    with pytest.raises(AssertionError, match="loss masks must have the same length"):
        validate(4, broken)  # it does look
