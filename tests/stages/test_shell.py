"""The `shell` task's EVAL on workspaces that a hostile policy left."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from phases import eval_phase
from support.sandboxes import main_and_proofs

from prorl_zmq import Job, PhaseLimits
from prorl_zmq.stages.handler import InitPhase
from prorl_zmq.stages.handlers.shell import ShellHandler, ShellInstance

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.sandboxes import SharedSandboxes

    from prorl_zmq.stages.handler import Evaluation
    from prorl_zmq.tools.containers.specification import SandboxSpec
    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

PYTHON_CHECK = "/usr/bin/python3 -c \"import json, sys; sys.exit(open('answer.txt').read() != '42')\""


@pytest.fixture(params=main_and_proofs("bubblewrap", "process"))
def sandboxes(request: pytest.FixtureRequest, sandboxes_of: SharedSandboxes) -> Sandboxes:
    return sandboxes_of(request.param)


on_both_kinds = pytest.mark.parametrize("sandboxes", ["bubblewrap", "process"], indirect=True)


def judge(sandboxes: Sandboxes, check: str, leave: Callable[[Path], None], eval_s: float = 600.0) -> Evaluation:
    """Evaluate what `leave` leaves in the workspace."""

    async def run() -> Evaluation:
        sandbox: Sandbox = await sandboxes.create("job.1")
        try:
            leave(sandbox.workspace)
            limits = PhaseLimits(eval_s=eval_s)
            job = Job(task="shell", instance={"instruction": "", "check": check}, limits=limits)
            async with eval_phase(job, ShellInstance("", check), {}, sandboxes, sandbox) as phase:
                return await ShellHandler().eval(phase)
        finally:
            await sandbox.close()
            assert list(sandboxes.root.iterdir()) == []

    return asyncio.run(run())


@on_both_kinds
def test_right_and_wrong_answers(sandboxes: Sandboxes) -> None:
    assert judge(sandboxes, PYTHON_CHECK, lambda at: _write(at / "answer.txt", "42")).reward == 1.0
    assert judge(sandboxes, PYTHON_CHECK, lambda at: _write(at / "answer.txt", "41")).reward == 0.0


@on_both_kinds
@pytest.mark.parametrize("planted", ["usercustomize", "module", "bashrc"])
def test_planted_startup_files_earn_nothing(sandboxes: Sandboxes, planted: str) -> None:
    def leave(workspace: Path) -> None:
        if planted == "usercustomize":
            for version in range(9, 16):
                site = workspace / ".local/lib" / f"python3.{version}" / "site-packages"
                site.mkdir(parents=True)
                _write(site / "usercustomize.py", "import os; os._exit(0)")
        elif planted == "module":
            _write(workspace / "json.py", "import os; os._exit(0)")
        else:
            for name in (".bashrc", ".bash_profile", ".profile"):
                _write(workspace / name, "exit 0")

    assert judge(sandboxes, PYTHON_CHECK, leave).reward == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "/proc/self/cmdline",
        "../proc/self/cmdline",
        "../../proc/self/environ",
        "here/here/../../proc/self/cmdline",
        "sub/up/../../../proc/self/cmdline",
        "/proc/$PPID/cmdline",
        "/dev/fd/255",
        "root/proc/self/cmdline",
    ],
)
def test_a_check_never_reads_itself(sandboxes: Sandboxes, answer: str) -> None:
    """`grep -q 4711 answer.txt` finds 4711 in its own command line."""

    def leave(workspace: Path) -> None:
        (workspace / "sub").mkdir()
        links = {"answer.txt": answer, "here": ".", "sub/up": "..", "root": "/", "sub/answer.txt": f"../{answer}"}
        for name, leads_to in links.items():
            (workspace / name).symlink_to(leads_to)

    check = "grep -q 4711 answer.txt || grep -q 4711 sub/answer.txt"
    assert judge(sandboxes, check, leave).reward == 0.0
    assert judge(sandboxes, "tr '\\0' '\\n' </proc/$$/cmdline | grep -q 47[1]1", leave).reward == 0.0


def test_links_within_the_files_stay(sandboxes: Sandboxes) -> None:
    def leave(workspace: Path) -> None:
        (workspace / "sub").mkdir()
        _write(workspace / "answer.txt", "42")
        for name, leads_to in {"a": "answer.txt", "sub/b": "../a", "c": "./sub/b", "d": "sub"}.items():
            (workspace / name).symlink_to(leads_to)

    assert judge(sandboxes, '[ "$(cat a sub/b c d/b)" = 42424242 ]', leave).reward == 1.0


def test_a_check_that_does_not_end_earns_nothing(sandboxes: Sandboxes) -> None:
    evaluation = judge(sandboxes, "sleep 60", lambda _: None, eval_s=2.0)
    assert (evaluation.reward, evaluation.metrics) == (0.0, {"check_timed_out": 1.0})


def test_workspace_that_is_too_deep_to_copy_earns_nothing(sandboxes: Sandboxes) -> None:
    def leave(workspace: Path) -> None:
        folder = os.open(workspace, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=folder)
            deeper = os.open("d", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = deeper
        os.close(folder)

    evaluation = judge(sandboxes, "exit 0", leave)
    assert (evaluation.reward, evaluation.metrics) == (0.0, {"uncopyable_files": 1.0})


def test_an_instance_chooses_how_much_output_its_agent_sees(sandboxes: Sandboxes) -> None:
    async def run() -> None:
        made: list[Sandbox] = []

        async def create(spec: SandboxSpec) -> Sandbox:
            made.append(await sandboxes.create("job.1", spec))
            return made[0]

        instance = {"instruction": "", "check": "true", "output_limit_bytes": 2000}
        job = Job(task="shell", instance=instance)
        try:
            data = await ShellHandler().init(InitPhase(job, msgspec.convert(instance, ShellInstance), create))
            bash = made[0].bash_session(data["sessions"]["bash"])
            assert (await bash.run("head -c 5000 /dev/zero", 20)).dropped_bytes == 3000
        finally:
            for sandbox in made:
                await sandbox.close()

    asyncio.run(run())


def test_an_output_limit_out_of_bounds_is_no_instance() -> None:
    with pytest.raises(msgspec.ValidationError, match=r">= 1024 - at `\$.output_limit_bytes`"):
        msgspec.convert({"instruction": "", "check": "true", "output_limit_bytes": 10}, ShellInstance)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
