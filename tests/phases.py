"""EVAL as a stage process gives it to a handler, for tests of handlers alone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prorl_zmq.stages.grading.grader_pool import GraderPool
from prorl_zmq.stages.handler import EvalPhase
from prorl_zmq.stages.judge import judge_of_endpoints
from prorl_zmq.stages.other_models import ChatEndpoints
from prorl_zmq.wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_zmq.tools.containers.specification import SandboxSpec
    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
    from prorl_zmq.wire.messages.jobs import Job


@asynccontextmanager
async def eval_phase(
    job: Job,
    instance: Any,
    data: dict[str, Any],
    sandboxes: Sandboxes | None = None,
    sandbox: Sandbox | None = None,
    pool: GraderPool | None = None,
) -> AsyncIterator[EvalPhase[Any]]:
    """Give a phase whose fresh sandboxes are closed at its end.

    Args:
        job: what is judged.
        instance: the job's, parsed.
        data: what RUN returned.
        sandboxes: makes the fresh ones.
        sandbox: what RUN left, if the handler evaluates in it.
        pool: the grader processes; None: some of its own.
    """
    fresh: list[Sandbox] = []

    async def create(spec: SandboxSpec) -> Sandbox:
        assert sandboxes is not None
        fresh.append(await sandboxes.create(f"{job.job_id}.eval-{new_id()[:8]}", spec))
        return fresh[-1]

    graders, judges = pool or GraderPool(1), ChatEndpoints()
    try:
        yield EvalPhase(job, instance, data, sandbox, create, graders.call, judge_of_endpoints(job, judges))
    finally:
        await judges.close()
        if pool is None:
            graders.close()
        for each in fresh:
            await each.close()
