"""Rollouts of Harbor task folders through a whole service, for bench/harbor.py: one that solves, one that does nothing.

A scripted policy takes the place of a model: it runs the folder's solution with the agent's bash. What each verifier
left in /logs/verifier is kept, with the rewards that were read from it.
"""

from __future__ import annotations

import base64
import gzip
import io
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_zmq.errors import GraderFailed, InvalidRecord
from prorl_zmq.stages.handler import InitPhase
from prorl_zmq.stages.handlers import harbor
from prorl_zmq.stages.handlers.harbor_verifier import LOGS, Grade, verify
from prorl_zmq.tasks.harbor_folder import find_task_folders, read_task_folder
from prorl_zmq.tasks.harbor_task import Environment, HarborTask, NetworkPolicy, Step, Verifier
from prorl_zmq.tasks.loading import load_rows
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.images.image import apptainer_program
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_zmq.tools.sandbox.sandbox import Sandbox

NOTHING = "Do nothing at all."
"""The system message of the rollouts that solve nothing."""
MARK = "<|im_start|>"
UNPACK = """\
where=/solution
mkdir -p $where 2> /dev/null || where=/tmp/solution
mkdir -p $where
echo {archive} | base64 -d | tar xzf - -C $where
({variables}bash $where/solve.sh)\
"""
COLLECT_S = 1200.0

Graded = tuple[bytes, dict[str, float] | None]
"""A tar file of `/logs/verifier`, and the rewards that were read; None: an error."""


@dataclass
class Played:
    """What came of the rollouts."""

    rewards: dict[tuple[str, str], float | None] = field(default_factory=dict)
    """By folder, and `oracle` or `no-op`."""
    problems: dict[tuple[str, str], str] = field(default_factory=dict)
    graded: list[Graded] = field(default_factory=list)
    """What each verification wrote and returned."""


def build_images(root: Path, images: Path, bases: Sequence[str], limit_s: float) -> float:
    """Build the images of all folders as a user would, and print what is missing; return the seconds that it took."""
    command = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "tasks", "images", str(root), "--build"]
    command += ["--images", str(images), *bases]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        print(done.stdout, done.stderr)
    return time.perf_counter() - began


def play(root: Path, images: Path, slots: int) -> Played:
    """Roll out each folder twice."""
    played = Played()
    commands: dict[str, str] = {}
    for folder in find_task_folders(root):
        commands |= _commands(read_task_folder(folder, with_solution=True).task)

    def policy(prompt: str) -> str:
        asked = prompt.split(MARK)[-2]
        if NOTHING in prompt or asked.startswith("tool"):
            return "done"
        instruction = asked.removeprefix("user\n").removesuffix("\n").removesuffix("<|im_end|>")
        return tool_call("bash", command=commands[instruction])

    async def kept(sandbox: Sandbox, *arguments: Any, **options: Any) -> Grade:
        grade = await verify(sandbox, *arguments, **options)
        played.graded.append((await sandbox.pack([LOGS]), grade.rewards))
        return grade

    harbor.verify = kept
    try:
        topology = {"sandbox": {"image_folders": [str(images)]}}
        handlers = {"harbor": harbor.HarborHandler}
        with (
            LocalService(
                handlers=handlers, engine=say(policy), sandbox="apptainer", slots=slots, topology=topology
            ) as service,
            service.client() as client,
        ):
            names: dict[str, tuple[str, str]] = {}
            for agent, options in (("oracle", {}), ("no-op", {"system": NOTHING})):
                for row in load_rows(root, options=options):
                    if isinstance(row, InvalidRecord):
                        raise row
                    (job_id,) = client.submit(msgspec.structs.replace(row.job, max_attempts=1))
                    names[job_id] = (row.name, agent)
            for trajectory in client.stream(timeout_s=COLLECT_S):
                name = names[trajectory.job_id]
                played.rewards[name] = trajectory.reward
                if trajectory.error is not None:
                    played.problems[name] = trajectory.error.message
    finally:
        harbor.verify = verify
    return played


def _commands(task: HarborTask) -> dict[str, str]:
    """Return what solves each step in bash, by its instruction."""
    variables = "".join(f"export {name}={shlex.quote(value)}; " for name, value in task.solution_variables.items())
    found = {}
    for step in task.steps:
        archive = base64.b64encode(step.solution or task.solution).decode()
        found[step.instruction] = UNPACK.format(archive=archive, variables=variables)
    return found


async def grade_files(image: Path, written: Sequence[Mapping[str, str]]) -> list[Graded]:
    """Grade in one sandbox; each verifier writes the given files to `/logs/verifier`."""
    graded: list[Graded] = []
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        sandboxes = Sandboxes("apptainer", Path(folder) / "sandboxes", image=str(image))
        sandbox = await sandboxes.create("grades", SandboxSpec(writable="disk", fakeroot=True))
        try:
            for files in written:
                lines = [f"printf %s {shlex.quote(text)} > {LOGS}/{name}" for name, text in files.items()]
                rewards = None
                with suppress(GraderFailed):
                    grade = await verify(sandbox, Verifier(), [_packed("\n".join(lines))], NetworkPolicy(), "/")
                    rewards = grade.rewards
                graded.append((await sandbox.pack([LOGS]), rewards))
        finally:
            await sandbox.close()
            sandboxes.close(5)
    return graded


def _packed(script: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("test.sh")
        member.size = len(script.encode())
        archive.addfile(member, io.BytesIO(script.encode()))
    return gzip.compress(content.getvalue())


@dataclass
class Starts:
    """Seconds, of which each took turns with the others."""

    init: list[float] = field(default_factory=list)
    create: list[float] = field(default_factory=list)
    """The sandbox alone, a part of INIT."""
    bare: list[float] = field(default_factory=list)
    """`apptainer exec IMAGE true`."""
    isolated: list[float] = field(default_factory=list)
    """The same without the host's files and network."""


async def start_times(image: Path, rounds: int) -> Starts:
    quiet = (str(apptainer_program()), "--quiet", "exec")
    isolated = (*quiet, "--containall", "--net", "--network", "none", *(("--no-privs",) if os.geteuid() == 0 else ()))
    starts = Starts()
    task = HarborTask(
        "start", (Step("Start."),), environment=Environment(workdir="/app", network=NetworkPolicy("public"))
    )
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        sandboxes = Sandboxes("apptainer", Path(folder) / "sandboxes", image=str(image))
        made: list[Sandbox] = []

        async def create(spec: SandboxSpec) -> Sandbox:
            began = time.perf_counter()
            made.append(await sandboxes.create(f"start-{len(made)}", spec))
            starts.create.append(time.perf_counter() - began)
            return made[-1]

        try:
            for _ in range(rounds + 1):
                began = time.perf_counter()
                await harbor.HarborHandler().init(InitPhase(Job(task="harbor", instance={}), task, create))
                starts.init.append(time.perf_counter() - began)
                await made[-1].close()
                for command, seconds in ((quiet, starts.bare), (isolated, starts.isolated)):
                    began = time.perf_counter()
                    subprocess.run([*command, image, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=True)  # noqa: ASYNC221 - nothing else runs
                    seconds.append(time.perf_counter() - began)
        finally:
            sandboxes.close(5)
    for values in (starts.init, starts.create, starts.bare, starts.isolated):
        del values[0]  # the first one starts the spawner, and reads the image from the disk
    return starts
