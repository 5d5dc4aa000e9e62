"""A stage process with handlers for tests: `python scripted.py ROLE SLOTS CONNECT RUN_DIR SANDBOX IMAGE`."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import SandboxFailed, SandboxUnavailable
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from prorl_zmq.stages.stage_process import StageOptions, StageProcess
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.toolbox import Toolbox, ToolName
from prorl_zmq.wire.messages.jobs import Phase

TOOLS: tuple[ToolName, ...] = ("bash", "ipython", "str_replace_editor", "think", "finish")
TOOL_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("bash", {"command": "echo one > ~/file; cd /usr; X=1"}),
    ("str_replace_editor", {"command": "str_replace", "path": "file", "old_str": "one", "new_str": "two"}),
    ("bash", {"command": "cat ~/file; pwd; echo $X"}),
    ("ipython", {"code": "a = 6"}),
    ("ipython", {"code": "a * 7"}),
    ("finish", {"message": "done"}),
]
ANSWERS = [
    "[no output]",
    "file is edited. It reads now:\n     1\ttwo\n",
    "two\n/usr\n1\n",
    "[no output]",
    "42\n",
    "done",
]
"""To `TOOL_CALLS`: each tool acts on what the others did, in sessions that INIT started."""


class ScriptedInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each phase does, by name."""

    init: str = ""
    run: str = ""
    eval: str = ""
    mark: str = ""
    """A file that a phase writes its process's pid to when it starts."""
    command: str = "true"
    """What `bash` runs."""


class ScriptedHandler(AgentHandler[ScriptedInstance]):
    """Phases that do what the test says."""

    task = "scripted"
    instance_type = ScriptedInstance
    eval_in_sandbox = True

    async def init(self, phase: InitPhase[ScriptedInstance]) -> PhaseData:
        if phase.instance.run == "tools":
            sandbox = await phase.create_sandbox(SandboxSpec())
            data = await act(phase.instance.init, phase.instance)
            return {"sessions": await Toolbox(sandbox, TOOLS).start(), "server": sandbox.path.name, **data}
        if phase.instance.run in ("bash", "many files"):
            sandbox = await phase.create_sandbox(SandboxSpec())
            if phase.instance.run == "many files":
                await asyncio.to_thread(touch_many, sandbox.workspace)
                mark(phase.instance)
        return await act(phase.instance.init, phase.instance)

    async def run(self, phase: RunPhase[ScriptedInstance]) -> PhaseData:
        if phase.instance.run == "tools":
            assert phase.sandbox is not None
            tools = {tool.name: tool for tool in Toolbox(phase.sandbox, TOOLS).tools(phase.data["sessions"])}
            heard = [await tools[name]({**arguments}, 60) for name, arguments in TOOL_CALLS]
            assert heard == ANSWERS, heard
            return {}
        if phase.instance.run == "bash":
            assert phase.sandbox is not None
            session = await phase.sandbox.bash()
            try:
                result = await session.run(phase.instance.command, timeout_s=600)
                return {"output": result.output}
            finally:
                await session.close()
        if phase.instance.run == "converse":
            mark(phase.instance)
            episode = await phase.converse([ChatMessage(Role.USER, "go on")], [])
            return {"text": episode.last_text}
        if phase.instance.run == "two turns":
            agent = phase.conversation([ChatMessage(Role.SYSTEM, "go on")])
            first = (await agent.say("one")).text
            await wait_for_go(phase.instance.mark)
            return {"text": f"{first} {(await agent.say('two')).text}"}
        if phase.instance.run == "second waits":
            return await act("wait" if place_of(phase.job.job_id) == 1 else "", phase.instance)
        return await act(phase.instance.run, phase.instance)

    async def eval(self, phase: EvalPhase[ScriptedInstance]) -> Evaluation:
        await act(phase.instance.eval, phase.instance)
        alternate = place_of(phase.job.job_id) % 2
        rewards = {"nan": math.nan, "text": "much", "alternate": alternate, "one": 1.0}
        return Evaluation(rewards.get(phase.instance.eval, 0.5), {"pid": float(os.getpid())})


def place_of(job_id: str) -> int:
    """Give which job of its group it is; 0 if it belongs to none."""
    return int(job_id.rpartition(".")[2]) if "." in job_id else 0


def mark(instance: ScriptedInstance) -> None:
    if instance.mark:  # whoever sees the file sees all of it
        half = Path(f"{instance.mark}.half-{os.getpid()}")  # several phases may write it at once
        half.write_text(str(os.getpid()))
        half.rename(instance.mark)


def touch_many(folder: Path) -> None:
    """Leave so many files that removing them outlasts several heartbeats."""
    for number in range(12_000):
        (folder / str(number)).touch()


def first_time(instance: ScriptedInstance) -> bool:
    died = Path(f"{instance.mark}.died")
    first = not died.exists()
    died.touch()
    return first


async def wait_for_go(mark: str) -> None:
    """Wait until the test says that the phase may end; say that it waits, and that it ends."""
    assert mark, "who waits needs a `mark`, or its files go to the working folder"
    touch(f"{mark}.waits")
    while not exists(f"{mark}.go"):  # noqa: ASYNC110 - the test may be another process
        await asyncio.sleep(0.02)
    touch(f"{mark}.ended")


def touch(path: str) -> None:
    Path(path).touch()


def exists(path: str) -> bool:
    return Path(path).exists()


async def act(what: str, instance: ScriptedInstance) -> PhaseData:
    """Do one of the things that a test can ask of a phase."""
    if what:
        mark(instance)
    match what:
        case "sleep" | "many files":
            await asyncio.sleep(600)
        case "wait":
            await wait_for_go(instance.mark)
        case "raise":
            raise ValueError("the task's own code is wrong")
        case "infrastructure":
            raise SandboxFailed("the disk is on fire")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die once" if first_time(instance):
            os.kill(os.getpid(), signal.SIGKILL)
        case "big data":
            return {"big": "x" * (16 * 2**20)}
        case "no data":
            return None  # type: ignore[return-value]
        case "odd data":
            return {"a": {1: 2}}
        case "long error":
            raise SandboxUnavailable("x" * (8 * 2**20), kind=Path("/"))  # type: ignore[arg-type]
    return {"pid": os.getpid()}


def main() -> None:
    role, slots, connect, run_dir, sandbox, image = sys.argv[1:]
    options: dict[str, Any] = {"role": Phase(role), "slots": int(slots), "connect": connect, "sandbox": sandbox}
    options["image"] = image
    process = StageProcess(
        StageOptions(node="local", run_dir=Path(run_dir), **options), {"scripted": ScriptedHandler()}
    )
    uvloop.run(process.run())


if __name__ == "__main__":
    main()
