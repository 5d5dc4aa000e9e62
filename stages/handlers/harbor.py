"""The `harbor` task: a Harbor task folder, run as Harbor runs it.

    INIT    a sandbox from the image, with its own network namespace; healthcheck
    RUN     the agent gets the instruction; of a task with several steps, each step is also graded here
    EVAL    the tests enter, and `tests/test.sh` runs in the agent's sandbox, or in a fresh one with its artifacts

The agent's processes are ended before the tests enter, unless the task says that the verifier looks at them (`live`).
Network: programs reach allowed hosts through a proxy (see `egress_proxy`); the host's network is never shared, so
rollouts cannot reach each other, nor services of the node.
"""

from __future__ import annotations

import asyncio
import io
import math
import tarfile
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from ...data.trajectory import Role
from ...errors import GraderFailed, HandlerFailed, InvalidJob, SandboxFailed, SandboxLimitExceeded
from ...inference.chat import ChatMessage
from ...tasks.harbor_task import Environment, HarborTask, Healthcheck, NetworkPolicy, Step
from ...tools.containers.specification import Limits, SandboxSpec
from ...tools.sandbox.egress_proxy import PORT, proxy_variables
from ...tools.toolbox import Toolbox
from ...wire.messages.jobs import Outcome
from ..handler import AgentHandler, EvalPhase, Evaluation, Failure, InitPhase, PhaseData, RunPhase, failure_of
from .harbor_verifier import (
    LOGS,
    REWARD,
    TESTS,
    Grade,
    allowed_hosts,
    failed,
    open_network,
    unpacked,
    verifier_tools,
    verify,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ...tools.sandbox.sandbox import Sandbox
    from ...wire.messages.jobs import Job, McpServer

    Create = Callable[[SandboxSpec], Awaitable[Sandbox]]
    Act = Callable[[Step], Awaitable[bool]]
    """Works on a step; returns whether its time was over."""

SYSTEM_MESSAGE = """\
You work in a Linux container, in the folder {directory}. Do the task that the user describes; nobody can answer \
questions. Check your result before you end. Call finish when you are done.\
"""
ROOT = "root"
AGENT_LOGS, ARTIFACTS = "/logs/agent", "/logs/artifacts"
PROCESSES = 4096
FILE_BYTES = 16 * 2**30
ADDRESS_SPACE_BYTES = 2**46
"""As much as a program may reserve; what it uses counts as memory."""
PREPARE = 'mkdir -p -- "$0" || exit 1; test ! -e /tests || echo tests'
SETUP_S = 60.0
ARTIFACTS_LIMIT_BYTES = 64 * 2**20
WORDS = 2000


class HarborHandler(AgentHandler[HarborTask]):
    task = "harbor"
    instance_type = HarborTask
    eval_in_sandbox = True

    def ends_processes(self, instance: HarborTask) -> bool:
        return not (instance.live or any(step.verifier.collect for step in instance.steps))

    def mcp_servers(self, job: Job, instance: HarborTask) -> Sequence[McpServer]:
        return (*job.mcp, *instance.mcp)

    async def init(self, phase: InitPhase[HarborTask]) -> PhaseData:
        task = phase.instance
        users = {step.agent_user for step in task.steps}
        if len(users) > 1:
            raise InvalidJob("all steps of a harbor task must have the same agent user", field="steps")
        for step in task.steps:
            for policy in (step.agent_network, step.verifier.network, task.environment.network):
                allowed_hosts(policy or NetworkPolicy())
        networks = [agents_network(task, step) for step in task.steps]
        sandbox, has_tests = await _sandbox(phase.create_sandbox, task.environment, user=users.pop(), networks=networks)
        has_tests = has_tests and len(task.steps) == 1  # of several steps, /tests has only a step's own, as in Harbor
        owners = {AGENT_LOGS: sandbox.spec.user, ARTIFACTS: sandbox.spec.user}
        owners[LOGS] = task.steps[0].verifier.user or ROOT
        for owner in set(owners.values()):
            await sandbox.replace_folders({path: b"" for path, of in owners.items() if of == owner}, owner)
        if task.environment.healthcheck is not None:
            await _check_health(sandbox, task.environment.healthcheck)
        return {"sessions": await Toolbox(sandbox, task.tools).start(), "has_tests": has_tests}

    async def run(self, phase: RunPhase[HarborTask]) -> PhaseData:
        if phase.sandbox is None:
            raise SandboxFailed("a harbor job needs its sandbox, and has none")
        sandbox = phase.sandbox

        async def act(step: Step) -> bool:
            return await self._act(phase, sandbox, step)

        return await run_steps(phase.instance, sandbox, phase.data, act, phase.create_sandbox)

    async def eval(self, phase: EvalPhase[HarborTask]) -> Evaluation:
        if phase.sandbox is None:
            raise SandboxFailed("a harbor job needs its sandbox, and has none")
        return await evaluate(phase.instance, phase.sandbox, phase.data, phase.create_sandbox)

    def eval_exception(self, job: Job, error: Exception) -> Failure:  # noqa: ARG002 - the base's signature
        return _failure(error)

    def run_exception(self, job: Job, error: Exception) -> Failure:  # noqa: ARG002 - the base's signature
        return _failure(error)

    async def _act(self, phase: RunPhase[HarborTask], sandbox: Sandbox, step: Step) -> bool:
        """Let the agent work on a step; return whether its time was over."""
        task = phase.instance
        system = task.system or SYSTEM_MESSAGE.format(directory=sandbox.spec.directory)
        # The tools stay open: to close a bash would kill the servers that it started.
        tools = Toolbox(sandbox, task.tools).tools(phase.data["sessions"])
        opening = [ChatMessage(Role.SYSTEM, system)]
        try:
            async with asyncio.timeout(step.agent_s):
                if not step.name:
                    await phase.converse([*opening, ChatMessage(Role.USER, step.instruction)], tools)
                else:
                    await phase.conversation(opening, tools, name=step.name).say(step.instruction)
        except TimeoutError:
            if step.agent_s is None:
                raise
            return True
        return False


async def run_steps(task: HarborTask, sandbox: Sandbox, data: PhaseData, act: Act, create: Create) -> PhaseData:
    """Let an agent act on each step; grade all but the last one, which EVAL grades. Return the data for `evaluate`.

    A step whose rewards are below its `min_reward` is the last one.
    """
    graded: list[dict[str, float]] = []
    has_tests, timed_out = bool(data["has_tests"]), 0
    for step in task.steps:
        await _prepare_step(step, sandbox)
        async with AsyncExitStack() as stack:
            await open_network(sandbox, agents_network(task, step), stack)
            timed_out += await act(step)
        if step is task.steps[-1]:
            break
        if not task.live:
            await sandbox.end_processes()
        grade = await _graded(task, step, sandbox, create, has_tests=has_tests)
        graded.append(grade.rewards)
        if _is_below(grade.rewards, step):
            return {"graded": graded, "agent_timed_out": timed_out}
        await sandbox.replace_folders({TESTS: b"", LOGS: b"", AGENT_LOGS: b""}, sandbox.spec.user)
    return {"graded": graded, "last": len(task.steps) - 1, "has_tests": has_tests, "agent_timed_out": timed_out}


async def evaluate(task: HarborTask, sandbox: Sandbox, data: PhaseData, create: Create) -> Evaluation:
    """Grade the last step, and return the reward of all."""
    graded: list[dict[str, float]] = list(data["graded"])
    output = ""
    if "last" in data:
        step = task.steps[data["last"]]
        grade = await _graded(task, step, sandbox, create, has_tests=bool(data["has_tests"]))
        graded.append(grade.rewards)
        output = grade.output
    grade = Grade(graded[-1] if task.reward == "final" else _means(graded), output)
    metrics = {f"reward_{name}": value for name, value in grade.rewards.items() if name != REWARD}
    if len(task.steps) > 1:
        metrics["steps_graded"] = float(len(graded))
    if data.get("agent_timed_out"):
        metrics["agent_timed_out"] = float(data["agent_timed_out"])
    return Evaluation(grade.reward, metrics, {"verifier": output} if output else {})


async def _prepare_step(step: Step, sandbox: Sandbox) -> None:
    directory = sandbox.spec.directory
    if step.workdir:
        archive = unpacked(step.workdir)
        await sandbox.unpack(archive, directory)
        if _has_setup(archive):
            done = await sandbox.exec(["/bin/bash", "setup.sh"], SETUP_S, directory=directory)
            if done.exit_code or done.timed_out:
                words = (done.stderr or done.stdout).decode(errors="replace").strip()[-WORDS:]
                raise SandboxFailed(f"setup.sh of step {step.name} failed ({done.exit_code}): {words}", reason="start")
    if step.healthcheck is not None:
        await _check_health(sandbox, step.healthcheck)


def _has_setup(archive: bytes) -> bool:
    """Return whether a step's own files have a setup.sh; one that the agent left is not run."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return any(name.removeprefix("./") == "setup.sh" for name in files.getnames())


def _is_below(rewards: dict[str, float], step: Step) -> bool:
    return any(rewards.get(name, -math.inf) < least for name, least in step.min_reward.items())


def _means(graded: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each reward; a step without it counts as 0."""
    names = {name: None for rewards in graded for name in rewards}
    return {name: sum(rewards.get(name, 0.0) for rewards in graded) / len(graded) for name in names}


def agents_network(task: HarborTask, step: Step) -> NetworkPolicy:
    return step.agent_network or task.environment.network


async def _sandbox(
    create: Create,
    environment: Environment,
    *,
    user: str,
    networks: list[NetworkPolicy],
) -> tuple[Sandbox, bool]:
    """Make a sandbox whose commands start in the working directory, as a user; return whether its image has /tests."""
    directory = environment.workdir or "/"
    variables = dict(environment.variables)
    if any(policy.mode != "no-network" for policy in networks):
        variables = proxy_variables(PORT) | variables
    spec = SandboxSpec(
        image=environment.image,
        binds=verifier_tools(),
        environment=variables,
        directory=directory,
        user=user or ROOT,
        writable="disk",
        fakeroot=True,
        limits=Limits(
            memory_bytes=environment.memory_bytes,
            address_space_bytes=ADDRESS_SPACE_BYTES,
            processes=PROCESSES,
            file_bytes=FILE_BYTES,
            cpus=environment.cpus,
        ),
    )
    sandbox = await create(spec)
    if not sandbox.changes_images:
        raise HandlerFailed(
            f"harbor jobs change files of their image, which sandboxes of kind {sandbox.kind} cannot: start the "
            "service with --sandbox apptainer",
            exception="SandboxKind",
        )
    made = await sandbox.exec(["/bin/sh", "-c", PREPARE, directory], SETUP_S, directory="/", user=ROOT)
    if made.exit_code:
        words = made.stderr.decode(errors="replace").strip()
        raise SandboxFailed(f"the working directory {directory} cannot be made: {words}", reason="image")
    if spec.user != ROOT:
        checked = await sandbox.exec(["true"], SETUP_S)
        if checked.exit_code:
            words = checked.stderr.decode(errors="replace").strip()
            raise SandboxFailed(f"the agent's user cannot be used: {words}", reason="specification")
    return sandbox, made.stdout == b"tests\n"


async def _graded(task: HarborTask, step: Step, sandbox: Sandbox, create: Create, *, has_tests: bool) -> Grade:
    """Grade a step in the agent's sandbox, or in a fresh one with the artifacts.

    If the output says that the verifier's tools are missing, an agent may have planted the line, to have its 0 replaced
    by an attempt of the job. So the verifier also runs in a sandbox without anything of the agent's. If the tools are
    missing there too, the infrastructure has failed. If not, either the network failed for a moment or the line is the
    agent's: the verifier runs once more, and its reward counts.

    Raises:
        GraderFailed: there is no reward; `reason` is `tools` only if the tools are missing without the agent as well.
    """
    verifier, separate = step.verifier, step.verifier.separate
    for each in verifier.collect:
        done = await sandbox.exec(["/bin/bash", "-c", each.command], each.timeout_s, user=each.user or ROOT)
        if done.exit_code or done.timed_out:
            words = (done.stderr or done.stdout).decode(errors="replace").strip()[-WORDS:]
            raise failed(f"the command that collects for the verifier failed ({done.exit_code}): {words}", words)
    if separate is not None or (verifier.collect and not task.live):
        await sandbox.end_processes()  # none may change what is judged, or packed, from now on
    network = verifier.network or (separate or task.environment).network
    tests = [] if verifier.tests_in_image else [task.tests, step.tests]
    image_tests = await _image_tests(task, create) if has_tests and separate is None else b""
    packed = await _artifacts(task, step, sandbox) if separate is not None else []

    async def judge(*, unseen: bool = False) -> Grade:
        """Verify what the agent has done, or what is there without an agent (`unseen`)."""
        where = sandbox
        if unseen or separate is not None:
            where, _ = await _sandbox(create, separate or task.environment, user=verifier.user, networks=[])
        for archive in () if unseen else packed:
            await where.unpack(archive)
        return await verify(where, verifier, tests, network, where.spec.directory, image_tests)

    grade = await judge()
    if not grade.missing:
        return grade
    missing = ""
    with suppress(GraderFailed):  # the verifier may need something of the agent's to write a reward
        missing = (await judge(unseen=True)).missing
    if missing:
        raise failed(f"the verifier could not install its tools: {missing}", grade.output, reason="tools")
    return await judge()


async def _image_tests(task: HarborTask, create: Create) -> bytes:
    """Return what the image has at `/tests`, which the agent may have changed in its own sandbox."""
    fresh = await create(SandboxSpec(image=task.environment.image, fakeroot=True))
    try:
        return await fresh.pack([TESTS])
    finally:
        await fresh.close()


async def _artifacts(task: HarborTask, step: Step, sandbox: Sandbox) -> list[bytes]:
    """Return the artifacts, each as a tar file; later ones replace earlier ones."""
    excludes = {ARTIFACTS: ()} | {each.source.rstrip("/"): each.exclude for each in (*task.artifacts, *step.artifacts)}
    packed, left = [], ARTIFACTS_LIMIT_BYTES
    for source, exclude in excludes.items():
        try:
            packed.append(await sandbox.pack([source], exclude, left))
        except SandboxFailed as error:
            if error.fields.get("reason") != "size":
                raise
            message = f"the artifacts take more than {ARTIFACTS_LIMIT_BYTES} bytes, with {source}"
            raise SandboxLimitExceeded(message, limit="artifact_bytes") from error
        left -= len(packed[-1])
    return packed


async def _check_health(sandbox: Sandbox, check: Healthcheck) -> None:
    """Run a healthcheck until it succeeds.

    Raises:
        SandboxFailed: it failed too often.
    """
    started, failures = time.monotonic(), 0
    while True:
        done = await sandbox.exec(["/bin/bash", "-c", check.command], check.timeout_s, user=ROOT)
        if done.exit_code == 0 and not done.timed_out:
            return
        begins = time.monotonic() - started < check.start_period_s
        failures += not begins
        if failures >= check.retries:
            words = (done.stderr or done.stdout).decode(errors="replace").strip()[-WORDS:]
            raise SandboxFailed(f"the healthcheck failed {failures} times: {words}", reason="start")
        await asyncio.sleep(check.start_interval_s if begins else check.interval_s)


def _failure(error: Exception) -> Failure:
    if isinstance(error, GraderFailed) and error.fields.get("reason") == "tools":
        return Failure(Outcome.INFRASTRUCTURE_ERROR, error.info(), retry=True)
    return failure_of(error)
