"""Graders that misbehave, through a whole service."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorl_zmq import Job
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase
from prorl_zmq.testing import LocalService
from prorl_zmq.wire.messages.jobs import Outcome

sys.path.append(str(Path(__file__).parents[1] / "stages" / "grading"))  # the graders get the stage process's path
import judges

HANG_S = 10.0
"""Long enough for a grader on a busy machine to print what it prints."""
RIGHT = {"right": (judges.equal, ["1", "1"], 1.0), "wrong": (judges.equal, ["1", "2"], 0.0)}
"""Function, arguments, reward."""
BAD = {
    "hangs": (judges.sleep, [600.0], "hung", r"good night\n", f"longer than {HANG_S:g} s"),
    "crashes": (judges.crash, [], "crashed", r".*judges\.py.*", "ended its process"),
    "raises": (judges.chatter, [], "raised", r"x+", "OSError"),
    "gives-NaN": (judges.give, ["nan"], "result", r"", "returned nan"),
    "gives-a-string": (judges.give, ["text"], "result", r"", "returned '1.0'"),
}
"""Function, arguments, reason, pattern of the output, part of the message."""


class GradedInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    judged: str
    """A key of `RIGHT` or `BAD`."""


class GradedHandler(AgentHandler[GradedInstance]):
    task = "graded"
    instance_type = GradedInstance

    async def run(self, phase: RunPhase[GradedInstance]) -> PhaseData:
        return {}

    async def eval(self, phase: EvalPhase[GradedInstance]) -> Evaluation:
        function, arguments, *_ = {**RIGHT, **BAD}[phase.instance.judged]
        limit: dict[str, Any] = {"timeout_s": HANG_S} if function is judges.sleep else {}
        return Evaluation(await phase.grade(function, *arguments, **limit))


@pytest.mark.proof
def test_a_grader_that_hangs_crashes_or_gives_no_reward_is_an_infrastructure_error_with_its_output() -> None:
    with LocalService(handlers={"graded": GradedHandler}) as service, service.client() as client:
        client.submit(Job(task="graded", instance={"judged": name}, job_id=name) for name in (*BAD, *RIGHT))
        ended = {trajectory.job_id: trajectory for trajectory in client.stream(timeout_s=60)}
    assert ended.keys() == {*BAD, *RIGHT}
    for name, (_, _, reward) in RIGHT.items():
        assert (ended[name].outcome, ended[name].reward, ended[name].error) == (Outcome.COMPLETED, reward, None), name
    for name, (_, _, reason, output, said) in BAD.items():
        trajectory = ended[name]
        assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_ERROR, None), name
        assert trajectory.error is not None, name
        assert (trajectory.error.code, trajectory.error.fields["reason"]) == ("grader_failed", reason), name
        assert re.fullmatch(output, str(trajectory.error.fields["output"]), re.DOTALL), name
        assert said in trajectory.error.message, name
        assert trajectory.result.attempt == 1, name
