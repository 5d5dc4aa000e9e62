"""Prove Harbor tasks: the reference solution must earn 1, and doing nothing 0.

Both run as jobs do, in sandboxes of this process, without a model: the solution's `solve.sh` or nothing takes the place
of the agent.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from ...errors import InvalidJob, ProrlError
from ...wire.messages.base import new_id
from ...wire.messages.jobs import Job
from ..handler import InitPhase
from .harbor import HarborHandler, evaluate, run_steps
from .harbor_verifier import unpacked

if TYPE_CHECKING:
    from ...tasks.harbor_task import HarborTask, Step
    from ...tools.containers.specification import SandboxSpec
    from ...tools.sandbox.sandbox import Sandbox
    from ...tools.sandbox.sandboxes import Sandboxes
    from ...wire.messages.jobs import PhaseLimits
    from ..handler import Evaluation

SOLUTION = "/solution"
SOLVE_S = 3600.0
"""Longest solution of a step without a limit, in seconds."""
SOLVE = 'test -x /solution/solve.sh && exec /solution/solve.sh; exec "$0" /solution/solve.sh'
WORDS = 1000

Agent = Literal["oracle", "no-op"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What one agent earned in one task."""

    agent: Agent
    reward: float | None
    """None: there is no reward, and `problem` says why."""
    problem: str
    """Also the end of what the verifier printed, if the reward is not the expected one."""

    @property
    def holds(self) -> bool:
        return self.reward == (1.0 if self.agent == "oracle" else 0.0)


async def prove(task: HarborTask, limits: PhaseLimits, sandboxes: Sandboxes, agent: Agent) -> Proof:
    """Run a task with its solution, or with nothing, in place of an agent. Never raises for what is the task's own."""
    made: list[Sandbox] = []

    async def create(spec: SandboxSpec) -> Sandbox:
        made.append(await sandboxes.create(f"{agent}-{new_id()[:12]}", spec))
        return made[-1]

    job = Job(task=HarborHandler.task, instance={}, limits=limits)
    handler = HarborHandler()
    plain = msgspec.structs.replace(task, tools=())
    said: list[str] = []

    async def act(step: Step) -> bool:
        if agent == "oracle":
            said.append(await _solve(task, step, made[0]))
        return False

    try:
        async with asyncio.timeout(limits.init_s):
            data = await handler.init(InitPhase(job, plain, create))
        async with asyncio.timeout(limits.run_s):
            data = await run_steps(plain, made[0], data, act, create)
            if handler.ends_processes(plain):
                await made[0].end_processes()
        async with asyncio.timeout(limits.eval_s):
            evaluation = await evaluate(plain, made[0], data, create)
        return _proof(agent, evaluation, "\n".join(said))
    except TimeoutError:
        return Proof(agent, None, "a phase took longer than its limit")
    except ProrlError as error:
        return Proof(agent, None, error.message)
    finally:
        for sandbox in made:
            with suppress(ProrlError):
                await sandbox.close()


def _proof(agent: Agent, evaluation: Evaluation, said: str) -> Proof:
    proof = Proof(agent, evaluation.reward, "")
    if proof.holds:
        return proof
    words = f"{said}\n{evaluation.notes.get('verifier', '')}".strip()[-WORDS:]
    earned = f"{'the solution' if agent == 'oracle' else 'doing nothing'} earns {proof.reward:g}"
    return Proof(agent, proof.reward, f"{earned}: {words}" if words else earned)


async def _solve(task: HarborTask, step: Step, sandbox: Sandbox) -> str:
    """Run the solution of a step; return the end of what it printed if it failed.

    Raises:
        InvalidJob: there is none.
    """
    packed = step.solution or task.solution
    if not packed:
        raise InvalidJob("the task has no solution/solve.sh", field="solution")
    await sandbox.replace_folders({SOLUTION: unpacked(packed)}, sandbox.spec.user)
    done = await sandbox.exec(
        ["/bin/bash", "-c", f"{{ {SOLVE}; }} 2>&1", "/bin/bash"],
        step.agent_s or SOLVE_S,
        environment={"DEBIAN_FRONTEND": "noninteractive", **task.solution_variables},
    )
    if done.exit_code == 0:
        return ""
    how = "did not end in time" if done.timed_out else f"ended with {done.exit_code}"
    return f"solve.sh {how}: {done.stdout.decode(errors='replace').strip()[-WORDS:]}"
