"""The `swe` task: an issue, a repository at its base, and tests that decide whether a patch resolves it.

    INIT    the instance's image, with a writable layer; the repository at its base, without any later history
    RUN     the agent with bash and editor; its changes become a patch
    EVAL    a fresh sandbox of the image, on any node; the base, the patch, the tests; graded by the `swebench` package

The reward is 1.0 if the tests report resolved, else 0.0 with a note: also for an empty patch, one that does not apply,
and tests that hang or exceed the sandbox's limits. Failures around the agent are infrastructure errors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import HandlerFailed, SandboxFailed, SandboxLimitExceeded
from ...tasks.swe import SweInstance
from ...tasks.swe_formats import ROW_FORMATS
from ...tools.containers.specification import Limits, SandboxSpec
from ...tools.toolbox import Toolbox
from ...wire.messages.jobs import Outcome
from ..cut_text import is_whole
from ..handler import AgentHandler, EvalPhase, Evaluation, Failure, InitPhase, PhaseData, RunPhase, failure_of
from . import swe_repository as repository
from .swe_report import Report, official_script, r2e_report, report
from .tool_episode import run_episode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ...tools.execution.messages import ExecResult
    from ...tools.sandbox.sandbox import Sandbox
    from ...wire.messages.jobs import Job

SYSTEM_MESSAGE = """\
You are a software engineer. The repository is in {directory}. Resolve the issue that the user describes by changing \
the repository's source, so that its tests pass; do not change the tests. Find out first where the fault is, mend it, \
and run the tests that have to do with it. Call finish when you are done.\
"""
NO_IMAGE = ("image", "no_image")
"""The reasons of a `SandboxFailed` after which another name of the image is tried."""
FILE_BYTES = 4 * 2**30
LOG_LIMIT_BYTES = 8 * 2**20
APPLY_S = 120.0
"""Longest time to apply a patch, in seconds; a large repository takes some seconds."""
GRADING_MARGIN_S = 15.0
"""The part of EVAL's limit that is left for parsing the tests' output."""
NOTED = 4000


class SweHandler(AgentHandler[SweInstance]):
    task = "swe"
    instance_type = SweInstance
    row_formats = ROW_FORMATS

    async def init(self, phase: InitPhase[SweInstance]) -> PhaseData:
        instance = phase.instance
        sandbox = await _sandbox(phase.create_sandbox, instance, network=False)
        base_commit = await repository.prepare(sandbox, instance)
        return {"sessions": await Toolbox(sandbox, instance.tools).start(), "base_commit": base_commit}

    async def run(self, phase: RunPhase[SweInstance]) -> PhaseData:
        instance = phase.instance
        if phase.sandbox is None:
            raise SandboxFailed("a swe job needs its sandbox, and has none")
        system = SYSTEM_MESSAGE.format(directory=instance.directory)
        await run_episode(phase, instance.tools, system, instance.problem_statement)
        taken = await repository.take_patch(phase.sandbox, instance, phase.data["base_commit"])
        return {"patch": taken.text, "problem": taken.problem, "left_out": taken.left_out}

    def stored_data(self, instance: SweInstance, notes: Mapping[str, str]) -> PhaseData | None:
        del instance
        patch = notes.get("patch")
        if not is_whole(patch) or "\ufffd" in patch:  # its bytes were not text
            return None
        problem = "" if patch.strip() else notes.get("problem", "")
        data = {"patch": patch.encode().decode("latin-1"), "problem": problem}
        return data | ({"left_out": notes["left_out"]} if "left_out" in notes else {})

    async def eval(self, phase: EvalPhase[SweInstance]) -> Evaluation:
        started = time.monotonic()
        instance, patch = phase.instance, str(phase.data.get("patch", "")).encode("latin-1")
        notes = {"patch": patch.decode(errors="replace")}
        if left_out := str(phase.data.get("left_out", "")):
            notes["left_out"] = left_out
        if not patch.strip():
            return _unresolved({"empty_patch": 1.0}, notes, str(phase.data.get("problem") or "the patch is empty"))
        script = instance.eval_script or await phase.grade(official_script, _columns(instance), returns=str)
        sandbox = await _sandbox(phase.create_sandbox, instance, network=instance.network)
        await repository.prepare(sandbox, msgspec.structs.replace(instance, hidden=[]))
        until = started + phase.job.limits.eval_s - GRADING_MARGIN_S
        left_s = until - time.monotonic()
        if left_s < min(instance.tests_s, (until - started) / 2):
            raise SandboxFailed(
                f"setting up took {time.monotonic() - started:.0f} s of the {phase.job.limits.eval_s:g} s that EVAL "
                "has (limits.eval_s), and leaves the tests too little",
                reason="start",
            )
        try:
            apply_s = min(APPLY_S, left_s / 2)
            if problem := await repository.apply_patch(sandbox, instance, patch, apply_s):
                return _unresolved({"patch_applied": 0.0}, notes, f"the patch does not apply: {problem}")
            limit_s = min(instance.tests_s, until - time.monotonic())
            done = await _run_tests(sandbox, instance, script, limit_s)
        except SandboxLimitExceeded as error:
            return _unresolved({"sandbox_limit_exceeded": 1.0}, notes, error.message)
        log = done.stdout.decode(errors="replace")
        notes["tests"] = log[-NOTED:]
        if done.timed_out:
            return _unresolved({"tests_timed_out": 1.0}, notes, f"the tests did not end within {limit_s:g} s")
        return _evaluation(await self._report(phase, log), instance, notes)

    def init_exception(self, job: Job, error: Exception) -> Failure:  # noqa: ARG002 - the base's signature
        """Return the outcome of a failed INIT: a missing image is an infrastructure error, as is a failed sandbox."""
        return _failure(error)

    def eval_exception(self, job: Job, error: Exception) -> Failure:  # noqa: ARG002 - the base's signature
        return _failure(error)

    async def _report(self, phase: EvalPhase[SweInstance], log: str) -> Report:
        instance = phase.instance
        grader: Callable[..., Report] = r2e_report
        expected = instance.expected_output
        if instance.grading != "r2e":
            fields = ("instance_id", "repo", "version", "log_parser", "fail_to_pass", "pass_to_pass")
            grader, expected = report, {name: getattr(instance, name) for name in fields}
        found: Report = await phase.grade(grader, expected, log, returns=Report)
        return found


async def _sandbox(
    create: Callable[[SandboxSpec], Awaitable[Sandbox]], instance: SweInstance, *, network: bool
) -> Sandbox:
    """Make the instance's sandbox, from a directory image of its name, or a SIF file."""
    spec = SandboxSpec(
        image=instance.image,
        environment=instance.environment,
        directory=instance.directory,
        writable="disk",
        fakeroot=True,
        network=network,
        limits=Limits(memory_bytes=instance.memory_bytes, processes=instance.processes, file_bytes=FILE_BYTES),
        output_limit_bytes=instance.output_limit_bytes,
    )
    try:
        sandbox = await create(spec)
    except SandboxFailed as error:
        if error.fields.get("reason") not in NO_IMAGE or instance.image.endswith(".sif"):
            raise
        try:
            sandbox = await create(msgspec.structs.replace(spec, image=f"{instance.image}.sif"))
        except SandboxFailed as second:
            raise (error if second.fields.get("reason") in NO_IMAGE else second) from None
    if not sandbox.changes_images:
        raise HandlerFailed(
            f"swe jobs change files of their image, which sandboxes of kind {sandbox.kind} cannot: start the service "
            "with --sandbox apptainer",
            exception="SandboxKind",
        )
    return sandbox


async def _run_tests(sandbox: Sandbox, instance: SweInstance, script: str, limit_s: float) -> ExecResult:
    """Run an evaluation script, with one stream for both of its outputs, which keeps their order.

    Bash reads the whole script before a test runs: a test could rewrite a file or the rest of an input.
    """
    return await sandbox.exec(
        ["/bin/bash", "-c", 'script=$(cat); exec </dev/null 2>&1; eval "$script"'],
        timeout_s=limit_s,
        stdin=script.encode(),
        output_limit_bytes=LOG_LIMIT_BYTES,
        environment={"HOME": instance.environment.get("HOME", "/tmp")},  # noqa: S108 - the sandbox's own
    )


def _failure(error: Exception) -> Failure:
    if isinstance(error, SandboxFailed) and error.fields.get("reason") == "image":
        return Failure(Outcome.INFRASTRUCTURE_ERROR, error.info())
    return failure_of(error)


def _columns(instance: SweInstance) -> dict[str, Any]:
    """Return an instance as a row of SWE-bench, with the columns that its test specification needs."""
    return {
        "instance_id": instance.instance_id,
        "repo": instance.repo,
        "version": instance.version,
        "base_commit": instance.base_commit,
        "test_patch": instance.test_patch,
        "image_assets": {
            "test_patch": [{"path": path, "url": url} for path, url in instance.test_images.items()],
        },
        "FAIL_TO_PASS": msgspec.json.encode(instance.fail_to_pass).decode(),
        "PASS_TO_PASS": msgspec.json.encode(instance.pass_to_pass).decode(),
    }


def _evaluation(found: Report, instance: SweInstance, notes: dict[str, str]) -> Evaluation:
    metrics = {
        "resolved": float(found.resolved),
        "patch_applied": 1.0,
        "tests_ran": float(found.ran),
        "fail_to_pass": found.fail_to_pass / max(1, len(instance.fail_to_pass)),
        "pass_to_pass": found.pass_to_pass / max(1, len(instance.pass_to_pass or instance.expected_output)),
    }
    if found.problem:
        notes["problem"] = found.problem
    if found.failed:
        notes["failed_tests"] = "\n".join(found.failed)
    return Evaluation(float(found.resolved), metrics, notes)


def _unresolved(metrics: dict[str, float], notes: dict[str, str], problem: str) -> Evaluation:
    return Evaluation(0.0, {"resolved": 0.0, **metrics}, {**notes, "problem": problem})
