"""Handlers for benchmarks: phases that do nothing, or sleep for as long as the instance says."""

from __future__ import annotations

import asyncio
import time

import msgspec

from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import AgentHandler, Carry, EvalPhase, Evaluation, InitPhase, RunPhase
from prorl_zmq.trajectory import Role


class NothingInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No fields."""


class NothingHandler(AgentHandler[NothingInstance]):
    """Every phase ends at once: what is left is the service's own work."""

    task = "nothing"
    instance_type = NothingInstance

    async def run(self, phase: RunPhase[NothingInstance]) -> Carry:
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

    async def init(self, phase: InitPhase[SleepInstance]) -> Carry:
        """Sleep."""
        await asyncio.sleep(phase.instance.init_s)
        return {}

    async def run(self, phase: RunPhase[SleepInstance]) -> Carry:
        """Sleep."""
        started = time.monotonic()
        await asyncio.sleep(phase.instance.run_s)
        return {"started": started}

    async def eval(self, phase: EvalPhase[SleepInstance]) -> Evaluation:
        """Sleep."""
        await asyncio.sleep(phase.instance.eval_s)
        return Evaluation(1.0, {"started": float(phase.carry["started"])})


class ConverseHandler(AgentHandler[NothingInstance]):
    """RUN is one turn of the policy."""

    task = "converse"
    instance_type = NothingInstance

    async def run(self, phase: RunPhase[NothingInstance]) -> Carry:
        """Have an engine say something."""
        await phase.converse([ChatMessage(Role.USER, "Go on.")], [])
        return {}

    async def eval(self, phase: EvalPhase[NothingInstance]) -> Evaluation:
        """Find everything right."""
        del phase
        return Evaluation(1.0)


HANDLERS = {handler.task: handler for handler in (NothingHandler, SleepHandler, ConverseHandler)}
