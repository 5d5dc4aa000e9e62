"""Agent programs that lead rollouts through a whole service: any task, in each kind of sandbox, with kills."""

from __future__ import annotations

import json
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from beside import beside
from rootfs import root_filesystem

from prorl_zmq import EpisodeLimits, Job, PhaseLimits, RolloutClient
from prorl_zmq.service.child import ChildService
from prorl_zmq.wire.messages.jobs import Harness

from .conftest import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 120.0
TOPOLOGY = """\
backends = []
stage = [{{role = "init"}}, {{role = "run"}}, {{role = "eval"}}]

[sandbox]
kind = "{kind}"
image = {image}
"""
AGENT = (Path(__file__).parents[1] / "stages/harness/small_agent.py").read_text()
HARNESS = Harness("command", arguments=("python3", "-c", AGENT, "{url}", "{key}"))
WRITES = ["bash", {"command": "echo 42 > answer"}]
CHECK = "[ $(cat answer) = 42 ]"
SPEECHES: dict[str, list[Any]] = {
    "checked:": [WRITES, "The end."],
    "graded:": ["I think \\boxed{42}"],
    "shell:": [WRITES, "The end."],
    "math:": ["I think \\boxed{43}"],
    "silent:": ["The end."],
    "waits:": [["bash", {"command": "sleep 3"}], WRITES, "The end."],
}


def instance(prompt: str, **more: Any) -> dict[str, Any]:
    harness = {"name": "command", "arguments": list(HARNESS.arguments)}
    return {"harness": harness, "prompt": prompt, **more}


MATH = {"task": "math", "instance": {"problem": "not shown", "ground_truth": "42"}}
JOBS = [
    Job(task="harness", job_id="checked", instance=instance("checked: write 42 to answer.", check=CHECK)),
    Job(task="harness", job_id="graded", instance=instance("graded: what is 6 times 7?", grader=MATH)),
    Job(
        task="shell",
        job_id="shell",
        instance={"instruction": "shell: write 42 to answer.", "check": CHECK},
        harness=HARNESS,
    ),
    Job(task="math", job_id="math", instance={"problem": "math: 6 times 7?", "ground_truth": "42"}, harness=HARNESS),
    Job(
        task="harness",
        job_id="quiet",
        instance={"harness": {"name": "command", "arguments": ["true"]}, "prompt": "x", "check": "true"},
        max_attempts=2,
    ),
    Job(
        task="harness", job_id="missing", instance={"harness": "chess", "prompt": "x", "check": "true"}, max_attempts=1
    ),
]


def commands(words: str) -> list[psutil.Process]:
    """The processes below this one with these words in their command lines."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if each.is_running() and words in " ".join(each.cmdline())]


@contextmanager
def serving(folder: Path, kind: str) -> Iterator[RolloutClient]:
    image = json.dumps(str(root_filesystem()) if kind == "apptainer" else "")
    service = ChildService(folder, TOPOLOGY.format(kind=kind, image=image))
    speeches = folder / "speeches.json"
    speeches.write_text(json.dumps(SPEECHES))
    engine = str(Path(__file__).with_name("knowing_engine.py"))
    with (
        service,
        beside([engine, f"ipc://{service.run_dir}/backend_broker", f"ipc://{folder}/engine", str(speeches)]),
        RolloutClient(service.front_door, timeout_s=60) as client,
    ):
        service.wait_ready(client)
        yield client


@pytest.mark.timeout(200)
def test_a_program_leads_any_task(sandbox_kind: str) -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, serving(Path(folder), sandbox_kind) as client:
        client.submit(JOBS)
        done = {one.job_id: one for one in client.stream(timeout_s=WAIT_S)}
    rewards = {name: one.reward for name, one in done.items()}
    assert rewards == {"checked": 1.0, "graded": 1.0, "shell": 1.0, "math": 0.0, "quiet": None, "missing": None}
    for name in ("checked", "shell"):
        one = done[name]
        assert (one.result.stop_reason, one.result.metrics["main_turns"], len(one.segments())) == ("done", 2.0, 1)
        assert one.loss_mask.sum() == one.result.metrics["main_tokens"]
        assert one.result.notes["calls"].count("\n") == 1
    assert done["math"].result.notes["answer"] == "\\boxed{43}"
    quiet, missing = done["quiet"], done["missing"]
    assert (quiet.outcome, quiet.error.code, quiet.result.attempt) == ("infrastructure_error", "harness_failed", 2)
    assert (missing.outcome, missing.error.code) == ("infrastructure_error", "harness_failed")
    assert "chess" in missing.error.message


@pytest.mark.timeout(200)
def test_a_rollout_whose_run_process_dies_is_tried_again() -> None:
    waits = instance("waits: write 42 to answer.", check=CHECK)
    job = Job(task="harness", job_id="waits", instance=waits, limits=PhaseLimits(run_s=60), episode=EpisodeLimits())
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, serving(Path(folder), "process") as client:
        client.submit(job)
        until(lambda: commands("sleep 3"), "the program in RUN")
        (run,) = commands("--role run")
        run.send_signal(signal.SIGKILL)
        (one,) = client.stream(timeout_s=WAIT_S)
    assert (one.reward, one.result.attempt) == (1.0, 2)
    assert one.loss_mask.sum() == one.result.metrics["main_tokens"]
