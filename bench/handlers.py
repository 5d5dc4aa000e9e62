"""Handlers for benchmarks: phases that do nothing, sleep for the instance's time, or stay until stopped."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Literal

import msgspec
from bell import rung
from dapo_prompts import GROUP, Ran, rollouts_of
from recorded_tokens import context_of, experts_of

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.wire.records import EXPERTS


class NothingInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No fields."""


class NothingHandler(AgentHandler[NothingInstance]):
    """Every phase ends at once: what is left is the service's own work."""

    task = "nothing"
    instance_type = NothingInstance

    async def run(self, phase: RunPhase[NothingInstance]) -> PhaseData:
        """Do nothing."""
        del phase
        return {}

    async def eval(self, phase: EvalPhase[NothingInstance]) -> Evaluation:
        """Find everything right."""
        del phase
        return Evaluation(1.0)


class SleepInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long each phase takes, in seconds."""

    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0


class SleepHandler(AgentHandler[SleepInstance]):
    """Every phase sleeps. `started` in the metrics is RUN's start on the machine's monotonic clock."""

    task = "sleep"
    instance_type = SleepInstance

    async def init(self, phase: InitPhase[SleepInstance]) -> PhaseData:
        """Sleep."""
        await asyncio.sleep(phase.instance.init_s)
        return {}

    async def run(self, phase: RunPhase[SleepInstance]) -> PhaseData:
        """Sleep."""
        started = time.monotonic()
        await asyncio.sleep(phase.instance.run_s)
        return {"started": started}

    async def eval(self, phase: EvalPhase[SleepInstance]) -> Evaluation:
        """Sleep."""
        await asyncio.sleep(phase.instance.eval_s)
        return Evaluation(1.0, {"started": float(phase.data["started"])})


class ConverseHandler(AgentHandler[NothingInstance]):
    """RUN is one turn of the policy."""

    task = "converse"
    instance_type = NothingInstance

    async def run(self, phase: RunPhase[NothingInstance]) -> PhaseData:
        """Have an engine say something."""
        await phase.converse([ChatMessage(Role.USER, "Go on.")], [])
        return {}

    async def eval(self, phase: EvalPhase[NothingInstance]) -> Evaluation:
        """Find everything right."""
        del phase
        return Evaluation(1.0)


class RecordedInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout of bench/record_losses.py: what determines its tokens, and how many follow the policy's."""

    seed: int
    tokens: int


class RecordedHandler(AgentHandler[RecordedInstance]):
    """RUN is one turn of the policy, and a long answer to it with experts for all tokens but the last."""

    task = "recorded"
    instance_type = RecordedInstance

    async def run(self, phase: RunPhase[RecordedInstance]) -> PhaseData:
        """Write the seed's tokens and experts."""
        trajectory = (await phase.converse([ChatMessage(Role.USER, "Go on.")], [])).trajectory
        trajectory.begin_turn(Role.TOOL)
        trajectory.add_context(context_of(phase.instance.seed, phase.instance.tokens))
        trajectory.add_records({EXPERTS: experts_of(phase.instance.seed, trajectory.tokens - 1)})
        return {}

    async def eval(self, phase: EvalPhase[RecordedInstance]) -> Evaluation:
        """Find everything right."""
        del phase
        return Evaluation(1.0)


class GradedInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt of bench/dapo.py."""

    prompt: int
    mean_s: float
    """The mean length of rollouts."""
    ledger: str
    """File that gets a `Ran` for each RUN, as a line of JSON."""


class GradedHandler(AgentHandler[GradedInstance]):
    """RUN sleeps, and EVAL gives a reward, as dapo_prompts.py has it for the prompt; the place is the seed's."""

    task = "graded"
    instance_type = GradedInstance

    async def run(self, phase: RunPhase[GradedInstance]) -> PhaseData:
        """Sleep, and note when."""
        instance, place = phase.instance, (phase.job.sampling.seed or 0) % GROUP
        rollouts = rollouts_of(instance.prompt)
        started, whole = time.monotonic(), False
        try:
            await asyncio.sleep(float(rollouts.lengths[place]) * instance.mean_s)
            whole = True
        finally:
            _note(instance.ledger, Ran(phase.job.job_id, instance.prompt, started, time.monotonic(), whole))
        return {"reward": float(rollouts.rewards[place])}

    async def eval(self, phase: EvalPhase[GradedInstance]) -> Evaluation:
        """Give what RUN came to."""
        return Evaluation(phase.data["reward"])


def _note(path: str, ran: Ran) -> None:
    with Path(path).open("ab") as ledger:
        ledger.write(msgspec.json.encode(ran) + b"\n")


class HoldInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job that keeps its slot until it is stopped, or its bell lets it go."""

    bell: str
    """The bell's path (see bell.py)."""
    within: Literal["tool", "generation", "nothing"]
    """Where it stays: in a tool call of its sandbox, in a generation beside its sandbox, or without any sandbox."""


class HoldHandler(AgentHandler[HoldInstance]):
    """RUN goes to the given point, rings, and stays there; EVAL reports when that was."""

    task = "hold"
    instance_type = HoldInstance

    async def init(self, phase: InitPhase[HoldInstance]) -> PhaseData:
        """Make the sandbox, with a bash in it."""
        if phase.instance.within == "nothing":
            return {}
        sandbox = await phase.create_sandbox(SandboxSpec())
        return {"bash": (await sandbox.bash()).number}

    async def run(self, phase: RunPhase[HoldInstance]) -> PhaseData:
        """Stay."""
        within = phase.instance.within
        if within == "generation":  # the engine rings
            await phase.converse([ChatMessage(Role.USER, "Go on.")], [])
            return {}
        bash = phase.sandbox.bash_session(phase.data["bash"]) if phase.sandbox is not None else None
        if bash is not None:
            await bash.run("true", phase.job.limits.run_s)
        async with rung(phase.instance.bell, within, phase.job.job_id) as go:
            await (go() if bash is None else bash.run("sleep infinity", phase.job.limits.run_s))
        return {}

    async def eval(self, phase: EvalPhase[HoldInstance]) -> Evaluation:
        """Find everything right."""
        del phase
        return Evaluation(1.0, {"judged": time.monotonic()})


HANDLERS = {
    handler.task: handler
    for handler in (NothingHandler, SleepHandler, ConverseHandler, RecordedHandler, GradedHandler, HoldHandler)
}
