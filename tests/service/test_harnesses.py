"""Agent programs that lead rollouts through a whole service: any task, in each kind of sandbox, with kills."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from beside import beside
from command_lines import line_of
from needed import lacking, usable
from rootfs import root_filesystem
from support.waiting import until

from prorl_zmq import EpisodeLimits, Job, PhaseLimits, RolloutClient, Sampling
from prorl_zmq.errors import ConfigError
from prorl_zmq.service.child import ChildService
from prorl_zmq.stages.harness.adapter import load_adapter
from prorl_zmq.stages.harness.harness_store import HarnessStore
from prorl_zmq.tasks.swe_formats import eval_script
from prorl_zmq.wire.messages.jobs import Harness

sys.path.append(str(Path(__file__).parents[1] / "stages"))
from swe_image import TEST_COMMAND, make_image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.stages.harness.adapter import ScriptedTurn

pytestmark = pytest.mark.proof

WAIT_S = 120.0
TOPOLOGY = """\
backends = []
stage = [{{role = "init"}}, {{role = "run", slots = {slots}}}, {{role = "eval"}}]

[sandbox]
kind = "{kind}"
image = {image}
image_folders = {folders}
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
    "named:": ["The end."],
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
    Job(task="harness", job_id="named", instance={"prompt": "named: x", "check": "echo why; false"}, harness=HARNESS),
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
    return [each for each in below if each.is_running() and words in line_of(each)]


@contextmanager
def serving(
    folder: Path, kind: str, speech: dict[str, list[Any]] = SPEECHES, images: Path | None = None, slots: int = 8
) -> Iterator[RolloutClient]:
    image = json.dumps(str(root_filesystem()) if kind == "apptainer" else "")
    folders = json.dumps([str(images)] if images is not None else [])
    service = ChildService(folder, TOPOLOGY.format(kind=kind, image=image, folders=folders, slots=slots))
    speeches = folder / "speeches.json"
    speeches.write_text(json.dumps(speech))
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
    assert rewards == {
        "checked": 1.0,
        "graded": 1.0,
        "shell": 1.0,
        "named": 0.0,
        "math": 0.0,
        "quiet": None,
        "missing": None,
    }
    for name in ("checked", "shell"):
        one = done[name]
        assert (one.result.stop_reason, one.result.metrics["main_turns"], len(one.segments())) == ("done", 2.0, 1)
        assert one.loss_mask.sum() == one.result.metrics["main_tokens"]
        assert one.result.notes["calls"].count("\n") == 1
    assert done["math"].result.notes["answer"] == "\\boxed{43}"
    assert done["named"].result.notes["check"] == "exit code 1\nwhy"
    quiet, missing = done["quiet"], done["missing"]
    assert (quiet.outcome, quiet.error.code, quiet.result.attempt) == ("infrastructure_error", "harness_failed", 2)
    assert (missing.outcome, missing.error.code) == ("failed", "invalid_job")
    assert "chess" in missing.error.message


@pytest.mark.timeout(200)
def test_a_rollout_whose_run_process_dies_is_tried_again() -> None:
    waits = instance("waits: write 42 to answer.", check=CHECK)
    job = Job(task="harness", job_id="waits", instance=waits, limits=PhaseLimits(run_s=60), episode=EpisodeLimits())
    others = commands("stage_run.json")  # of services that other tests of this process share
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, serving(Path(folder), "process") as client:
        client.submit(job)
        until(lambda: commands("sleep 3"), "the program in RUN")
        (run,) = (each for each in commands("stage_run.json") if each not in others)
        run.send_signal(signal.SIGKILL)
        (one,) = client.stream(timeout_s=WAIT_S)
    assert (one.reward, one.result.attempt) == (1.0, 2)
    assert one.loss_mask.sum() == one.result.metrics["main_tokens"]


REAL = ("claude-code", "codex", "opencode", "qwen-code", "pi", "mini-swe-agent", "openhands")
MADE = Path(__file__).resolve().parents[2] / ".harnesses"
MENDS = "sed 's/[*] 3/* 2/' /testbed/calculator.py > /tmp/mended; cp /tmp/mended /testbed/calculator.py"
"""Qwen Code edits no file in place that it has not read."""


def said(turn: ScriptedTurn) -> Any:
    return [turn.tool, dict(turn.arguments)] if turn.tool else turn.text


def real_jobs(images: Path) -> tuple[list[Job], dict[str, list[Any]]]:
    """A shell job and a job of software engineering for each program, and what the policy says in them."""
    image, before = make_image(images)
    episode, sampling = EpisodeLimits(max_turns=12, max_tokens=200_000), Sampling(max_tokens=2048)
    jobs: list[Job] = []
    speeches: dict[str, list[Any]] = {}
    for name in REAL:
        adapter = load_adapter(name)
        instances = {
            "shell": {"instruction": f"{name} in shell: write 42 to answer.", "check": CHECK},
            "swe": {
                "instance_id": f"project__calculator-{name}",
                "image": str(image),
                "directory": "/testbed",
                "problem_statement": f"{name} in swe: double(2) is 6, not 4.",
                "base_commit": before,
                "fail_to_pass": ["tests/test_double.py::test_two"],
                "pass_to_pass": ["tests/test_double.py::test_zero"],
                "eval_script": eval_script(TEST_COMMAND, "/testbed"),
                "log_parser": "parse_log_pytest",
            },
        }
        for task, command in (("shell", "echo 42 > answer"), ("swe", MENDS)):
            speeches[f"{name} in {task}:"] = [said(adapter.shell_turn(command)), said(adapter.final_turn())]
            jobs.append(
                Job(
                    task=task,
                    job_id=f"{name}-{task}",
                    instance=instances[task],
                    harness=Harness(name),
                    episode=episode,
                    sampling=sampling,
                )
            )
    return jobs, speeches


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"])
def test_real_programs_solve_what_the_policy_knows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable(kind)
    if MADE.is_dir() and "PRORL_HARNESSES" not in os.environ:
        monkeypatch.setenv("PRORL_HARNESSES", str(MADE))
    missing = {name for name in REAL if not installed(name)}
    if missing - {"openhands"}:
        lacking("harness", f"{', '.join(sorted(missing))} not installed; run: make harnesses")
    jobs, speeches = real_jobs(tmp_path)
    # Of these kinds only Apptainer has a layer over an image that can be written.
    wanted = [
        job
        for job in jobs
        if Harness.of(job.harness).name not in missing and (kind == "apptainer" or job.task == "shell")
    ]
    with (
        tempfile.TemporaryDirectory(prefix="prorl-t-") as folder,
        serving(Path(folder), kind, speeches, tmp_path, slots=4) as client,
    ):
        client.submit(wanted)
        done = {one.job_id: one for one in client.stream(timeout_s=350)}
    found = {name: (str(one.outcome), one.reward, one.error) for name, one in done.items()}
    assert found == {job.job_id: ("completed", 1.0, None) for job in wanted}
    for one in done.values():
        assert one.loss_mask.sum() == one.result.metrics["main_tokens"]
        assert len(one.segments()) == 1


def installed(name: str) -> bool:
    try:
        HarnessStore().find(name)
    except ConfigError:
        return False
    return True
