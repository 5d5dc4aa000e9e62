"""The `shell` task's EVAL on workspaces that a hostile policy left."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from needed import usable
from phases import eval_phase

from prorl_zmq import Job, PhaseLimits
from prorl_zmq.stages.handler import InitPhase
from prorl_zmq.stages.handlers.shell import ShellHandler, ShellInstance
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.stages.handler import Evaluation
    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.specification import SandboxSpec

PYTHON_CHECK = "/usr/bin/python3 -c \"import json, sys; sys.exit(open('answer.txt').read() != '42')\""


@pytest.fixture(params=["bubblewrap", "process"])
def kind(request: pytest.FixtureRequest) -> str:
    usable(request.param)
    return str(request.param)


def judge(kind: str, folder: Path, check: str, leave: Callable[[Path], None], eval_s: float = 600.0) -> Evaluation:
    """Evaluate what `leave` leaves in the workspace."""

    async def run() -> Evaluation:
        sandboxes = Sandboxes(kind, folder / "sandboxes")  # type: ignore[arg-type]
        sandbox: Sandbox = await sandboxes.create("job.1")
        try:
            leave(sandbox.workspace)
            limits = PhaseLimits(eval_s=eval_s)
            job = Job(task="shell", instance={"instruction": "", "check": check}, limits=limits)
            async with eval_phase(job, ShellInstance("", check), {}, sandboxes, sandbox) as phase:
                return await ShellHandler().eval(phase)
        finally:
            await sandbox.close()
            sandboxes.close()
            assert list((folder / "sandboxes").iterdir()) == []

    return asyncio.run(run())


def test_right_and_wrong_answers(kind: str, tmp_path: Path) -> None:
    assert judge(kind, tmp_path, PYTHON_CHECK, lambda at: _write(at / "answer.txt", "42")).reward == 1.0
    assert judge(kind, tmp_path, PYTHON_CHECK, lambda at: _write(at / "answer.txt", "41")).reward == 0.0


@pytest.mark.parametrize("planted", ["usercustomize", "module", "bashrc"])
def test_planted_startup_files_earn_nothing(kind: str, planted: str, tmp_path: Path) -> None:
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

    assert judge(kind, tmp_path, PYTHON_CHECK, leave).reward == 0.0


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
def test_a_check_never_reads_itself(kind: str, answer: str, tmp_path: Path) -> None:
    """`grep -q 4711 answer.txt` finds 4711 in its own command line."""

    def leave(workspace: Path) -> None:
        (workspace / "sub").mkdir()
        links = {"answer.txt": answer, "here": ".", "sub/up": "..", "root": "/", "sub/answer.txt": f"../{answer}"}
        for name, leads_to in links.items():
            (workspace / name).symlink_to(leads_to)

    check = "grep -q 4711 answer.txt || grep -q 4711 sub/answer.txt"
    assert judge(kind, tmp_path, check, leave).reward == 0.0
    assert judge(kind, tmp_path, "tr '\\0' '\\n' </proc/$$/cmdline | grep -q 47[1]1", leave).reward == 0.0


def test_links_within_the_files_stay(kind: str, tmp_path: Path) -> None:
    def leave(workspace: Path) -> None:
        (workspace / "sub").mkdir()
        _write(workspace / "answer.txt", "42")
        for name, leads_to in {"a": "answer.txt", "sub/b": "../a", "c": "./sub/b", "d": "sub"}.items():
            (workspace / name).symlink_to(leads_to)

    assert judge(kind, tmp_path, '[ "$(cat a sub/b c d/b)" = 42424242 ]', leave).reward == 1.0


def test_a_check_that_does_not_end_earns_nothing(kind: str, tmp_path: Path) -> None:
    evaluation = judge(kind, tmp_path, "sleep 60", lambda _: None, eval_s=2.0)
    assert (evaluation.reward, evaluation.metrics) == (0.0, {"check_timed_out": 1.0})


def test_workspace_that_is_too_deep_to_copy_earns_nothing(kind: str, tmp_path: Path) -> None:
    def leave(workspace: Path) -> None:
        folder = os.open(workspace, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=folder)
            deeper = os.open("d", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = deeper
        os.close(folder)

    evaluation = judge(kind, tmp_path, "exit 0", leave)
    assert (evaluation.reward, evaluation.metrics) == (0.0, {"uncopyable_files": 1.0})


def test_an_instance_chooses_how_much_output_its_agent_sees(kind: str, tmp_path: Path) -> None:
    async def run() -> None:
        sandboxes = Sandboxes(kind, tmp_path / "sandboxes")  # type: ignore[arg-type]
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
            sandboxes.close()

    asyncio.run(run())


def test_an_output_limit_out_of_bounds_is_no_instance() -> None:
    with pytest.raises(msgspec.ValidationError, match=r">= 1024 - at `\$.output_limit_bytes`"):
        msgspec.convert({"instruction": "", "check": "true", "output_limit_bytes": 10}, ShellInstance)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
