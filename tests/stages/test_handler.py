"""Handlers: how they are found, what they announce, and how a job ends whose phase raised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_zmq import Job, errors
from prorl_zmq.stages.handler import failure_of, load_handlers
from prorl_zmq.stages.handlers.check_script import check_reward
from prorl_zmq.stages.handlers.math import MathHandler
from prorl_zmq.stages.handlers.shell import ShellHandler
from prorl_zmq.stages.harness.adapter import known_harnesses
from prorl_zmq.wire.messages.jobs import Outcome
from prorl_zmq.wire.messages.stages import Task

if TYPE_CHECKING:
    from pathlib import Path


def test_the_tasks_that_come_with_the_package_are_found() -> None:
    handlers = load_handlers()
    assert isinstance(handlers["shell"], ShellHandler)
    assert isinstance(handlers["math"], MathHandler)
    assert list(load_handlers(["math"])) == ["math"]


def test_unknown_task() -> None:
    offered = "code, environment, harbor, harness, math, outside, sample, score, shell, stem, swe"
    with pytest.raises(errors.ConfigError, match=f"no installed package offers task chess; offered: {offered}"):
        load_handlers(["chess"])


USERS_PACKAGE = """
import msgspec
from prorl_zmq.stages.handler import AgentHandler, Evaluation

class EchoInstance(msgspec.Struct):
    word: str

class EchoHandler(AgentHandler[EchoInstance]):
    task = "echo"
    instance_type = EchoInstance
    async def run(self, phase):
        return {}
    async def eval(self, phase):
        return Evaluation(1.0)

class OtherHandler(EchoHandler):
    task = "other"

class UntoldInstance(msgspec.Struct):
    word: "Nothing"

class Untold(EchoHandler):
    task = "untold"
    instance_type = UntoldInstance

class NotAHandler:
    pass
"""


LOAD = """
import json, sys
from prorl_zmq.errors import ConfigError
from prorl_zmq.stages.handler import load_handlers

problems = {}
for task in sys.argv[1:]:
    try:
        load_handlers([task])
    except ConfigError as error:
        problems[task] = error.message
print(json.dumps([list(load_handlers()), problems]))
"""
NO_HANDLERS = {
    "no-handler": ("my_tasks:NotAHandler", "(my_tasks:NotAHandler, of my-tasks) is not a subclass of AgentHandler"),
    "third": ("my_tasks:OtherHandler", "has task = 'other'; write 'third'"),
    "untold": (
        "my_tasks:Untold",
        "the handler of task untold (my_tasks:Untold) does not work: NameError: name 'Nothing'",
    ),
    "no-attribute": ("my_tasks:Missing", "has no attribute 'Missing'"),
    "no-module": ("missing:EchoHandler", "No module named 'missing'"),
    "function": ("json:loads", "(json:loads, of my-tasks) is not a subclass of AgentHandler"),
}


def test_users_package_adds_a_task_and_broken_handlers_cost_only_those_who_ask(tmp_path: Path) -> None:
    """A package that nobody used ended every stage process, `prorl eval` and `prorl tasks`."""
    (tmp_path / "my_tasks.py").write_text(USERS_PACKAGE)
    info = tmp_path / "my_tasks-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-tasks\nVersion: 1\n")
    targets = {"echo": "my_tasks:EchoHandler", **{name: target for name, (target, _) in NO_HANDLERS.items()}}
    lines = "".join(f"{name} = {target}\n" for name, target in targets.items())
    (info / "entry_points.txt").write_text(f"[prorl_zmq.handlers]\n{lines}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", LOAD, "echo", *NO_HANDLERS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    tasks, problems = json.loads(done.stdout)
    assert tasks == [
        "code",
        "echo",
        "environment",
        "harbor",
        "harness",
        "math",
        "outside",
        "sample",
        "score",
        "shell",
        "stem",
        "swe",
    ]
    assert problems.keys() == NO_HANDLERS.keys()
    for name, (_, said) in NO_HANDLERS.items():
        assert said in problems[name]
        assert said in done.stderr
        assert f"the task {name} is left out" in done.stderr


def test_handler_announces_the_fields_of_its_instances() -> None:
    assert ShellHandler().describe() == Task(
        "shell",
        fields={
            "instruction": "str",
            "check": "str",
            "files": "dict[str, str]",
            "image": "str",
            "tools": "list[str]",
            "output_limit_bytes": "int",
        },
        optional=("files", "image", "tools", "output_limit_bytes"),
        harnesses=tuple(known_harnesses()),
    )


def test_instance_is_checked_again_where_it_is_used() -> None:
    with pytest.raises(errors.InvalidJob) as caught:
        ShellHandler().parse_instance(Job(task="shell", instance={"instruction": "a", "check": 5}))
    assert caught.value.field == "$.check"


@pytest.mark.parametrize(
    ("error", "outcome", "retry"),
    [
        (ValueError("x"), Outcome.FAILED, False),
        (errors.InvalidJob("x"), Outcome.FAILED, False),
        (errors.EngineFailed("x"), Outcome.INFRASTRUCTURE_ERROR, True),
        (errors.SandboxFailed("x"), Outcome.INFRASTRUCTURE_ERROR, True),
        (errors.ToolSessionLost("x"), Outcome.INFRASTRUCTURE_ERROR, True),
        (errors.NoBackend("x"), Outcome.INFRASTRUCTURE_ERROR, False),
        (errors.NoBackend("x", version_gone=True), Outcome.INFRASTRUCTURE_ERROR, True),
        (errors.SandboxUnavailable("x"), Outcome.INFRASTRUCTURE_ERROR, False),
        (errors.PhaseTimeout("x"), Outcome.TIMEOUT, False),
    ],
)
def test_outcome_of_an_error(error: Exception, outcome: Outcome, retry: bool) -> None:
    failure = failure_of(error)
    assert (failure.outcome, failure.retry) == (outcome, retry)
    assert failure.error.message.endswith("x")


@pytest.mark.parametrize("error", [errors.SandboxLimitExceeded("x"), errors.SandboxBroken("x")])
def test_what_an_agent_itself_caused_earns_nothing_and_is_not_repeated(error: errors.ProrlError) -> None:
    failure = failure_of(error)
    assert (failure.outcome, failure.reward, failure.retry) == (Outcome.FAILED, 0.0, False)


@pytest.mark.parametrize(
    ("output", "exit_code", "reward"),
    [
        ("", 0, 1.0),
        ("", 1, 0.0),
        ("reward: 0.25\n", 0, 0.25),
        ("reward: 1\n", 1, 0.0),
        ("all well\nreward: 0\n\n", 0, 0.0),
        ("reward: 0.5\nand then more\n", 0, 1.0),
        ("0.5\n", 0, 1.0),
        ("reward: -0.1\n", 0, -0.1),
        ("reward: 2e3\n", 0, 2000.0),
    ],
)
def test_reward_of_a_check_script(output: str, exit_code: int, reward: float) -> None:
    assert check_reward(output, exit_code) == reward


@pytest.mark.parametrize("named", ["nan", "inf", "-Infinity", "1e39", "much", ""])
def test_reward_that_is_none_fails_the_job(named: str) -> None:
    with pytest.raises(errors.HandlerFailed, match="must be a finite number"):
        check_reward(f"reward: {named}\n", 0)


def test_job_is_plain_data_both_ways() -> None:
    job = Job(task="shell", instance={"instruction": "a", "check": "b"})
    assert msgspec.convert(msgspec.to_builtins(job), Job) == job
