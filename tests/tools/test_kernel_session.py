from __future__ import annotations

import asyncio
import threading
import uuid
from typing import TYPE_CHECKING

import psutil
import pytest
import uvloop
from pythons import LIMIT_S, interpreter, use
from support.sandboxes import main_and_proofs

from prorl_zmq.errors import SandboxFailed, ToolSessionLost
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.tools.sessions.cell_session import PNG_SIGNATURE, CellResult
from prorl_zmq.tools.sessions.kernel_session import IPYKERNEL, KernelSession
from prorl_zmq.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from prorl_zmq.tools.containers.container import Container

    Run = Callable[..., None]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def command(place: str) -> tuple[str, ...]:
    return (interpreter(place), *IPYKERNEL[1:])


@pytest.fixture(params=main_and_proofs("process", "bubblewrap"))
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run a body on a session of a kernel."""

    def run(body: Callable[[KernelSession], Awaitable[None]], runner: Callable[..., object] = uvloop.run) -> None:
        async def main(container: Container) -> None:
            session = KernelSession(container, argv=command(request.param))
            try:
                await session.start()
                await body(session)
            finally:
                await session.close()
                await session.close()

        use(request.param, tmp_path, main, runner)

    return run


@pytest.mark.parametrize("runner", [uvloop.run, pytest.param(asyncio.run, marks=pytest.mark.proof)])
def test_results(kernel: Run, runner: Callable[..., object]) -> None:
    async def body(session: KernelSession) -> None:
        for code, text in (
            ("1+1", "2\n"),
            ("x = 5", ""),
            ("x", "5\n"),
            ("print('a'); x", "a\n5\n"),
            ("", ""),
            ("from IPython.display import *; display(HTML('<b>b</b>'), Markdown('# t'))", "b\n# t\n"),
            ("import asyncio; await asyncio.sleep(0.001); 3", "3\n"),
        ):
            assert await session.run(code, LIMIT_S) == CellResult(text), code
        for code, error, text in (
            ("1/0", "ZeroDivisionError", "division by zero"),
            ("input()", "StdinNotImplementedError", "does not support input"),
        ):
            result = await session.run(code, LIMIT_S)
            assert (result.error, result.restarted) == (error, False)
            assert text in result.text
            assert "\033" not in result.text
        result = await session.run("x = 'y' * 300_000\nprint(x)", LIMIT_S)
        assert result.dropped_bytes == 300_001 - 65_536

    kernel(body, runner)


@pytest.mark.proof(quick=True)
def test_figures_are_images(kernel: Run) -> None:
    async def body(session: KernelSession) -> None:
        result = await session.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]);", 120)
        assert result.ok, result.text
        assert [image[:8] for image in result.images] == [PNG_SIGNATURE]

    kernel(body)


@pytest.mark.proof(quick=True)
def test_a_large_cell_starts_no_thread_and_nothing_opens_a_port(kernel: Run) -> None:
    """Messages of 64 KiB and more would be sent without a copy, by a thread of pyzmq's."""
    before = threading.enumerate()

    async def body(session: KernelSession) -> None:
        assert (await session.run(f"x = '{'0' * 10**6}'; len(x)", LIMIT_S)).text == "1000000\n"
        assert threading.enumerate() == before
        assert session._process is not None
        for process in (psutil.Process(), psutil.Process(session._process._child.pid)):
            assert process.net_connections("inet") == []
        fork = "import os, sys\nif not os.fork(): print('child'); sys.stdout.flush(); os._exit(0)\nprint(os.wait()[1])"
        result = await session.run(fork, LIMIT_S)
        assert "0\n" in result.text
        assert not result.restarted

    kernel(body)


@pytest.mark.proof(quick=True)
def test_the_time_limit_interrupts_and_state_is_kept(kernel: Run) -> None:
    async def body(session: KernelSession) -> None:
        await session.run("import time; x = 1", LIMIT_S)
        for code in ("print('begun'); time.sleep(3600)", "while True: pass", "while True: print('x' * 100)"):
            result = await session.run(code, 0.5)
            assert (result.timed_out, result.restarted) == (True, False), code
            assert await session.run("x", LIMIT_S) == CellResult("1\n"), code

    kernel(body)


@pytest.mark.proof(quick=True)
def test_what_cannot_be_interrupted_is_replaced(kernel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.tools.sessions.cell_session.INTERRUPT_LIMIT_S", 0.1)
    monkeypatch.setattr("prorl_zmq.tools.sessions.cell_session.KILL_LIMIT_S", 0.1)

    async def body(session: KernelSession) -> None:
        result = await session.run("import itertools; sum(itertools.count())", 0.5)
        assert (result.timed_out, result.restarted) == (True, True)
        assert await session.run("1", LIMIT_S) == CellResult("1\n")

    kernel(body)


ENDS = (
    ("import os; os.kill(os.getpid(), 9)", "signal 9 (SIGKILL)"),
    ("import ctypes; ctypes.string_at(0)", "signal 11 (SIGSEGV)"),
    ("exit()", "exit"),
    ("import os; os._exit(3)", "exited with code 3"),
)


@pytest.mark.proof(quick=True)
def test_a_kernel_that_ends_is_told_at_once_and_replaced(kernel: Run) -> None:
    async def body(session: KernelSession) -> None:
        for code, ended in ENDS:
            result = await session.run(code, LIMIT_S)
            assert ended in result.ended, code
            assert (result.restarted, result.timed_out) == (True, False), code
            assert await session.run("1", LIMIT_S) == CellResult("1\n"), code

    kernel(body)


def test_cancellation_and_close(
    kernel: Run, survivors: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "prorl_zmq.tools.sessions.cell_session.INTERRUPT_LIMIT_S", 10
    )  # a busy machine must not cost the state
    mark = f"3600.{uuid.uuid4().int}"

    async def body(session: KernelSession) -> None:
        await session.run("x = 1; import subprocess", LIMIT_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run(f"subprocess.run(['sleep', '{mark}'])", 3600), 0.5)
        assert survivors(mark) == []
        assert await session.run("x", LIMIT_S) == CellResult("1\n")
        await session.run(f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True);", LIMIT_S)
        call = asyncio.ensure_future(session.run("while True: pass", 3600))
        await asyncio.sleep(0.2)
        await session.close()
        with pytest.raises(ToolSessionLost, match="closed"):
            await call

    kernel(body)
    assert survivors(mark) == []


def test_a_link_in_a_sockets_place_is_not_followed(tmp_path: Path) -> None:
    """A kernel command that puts links to a socket of the host where its own sockets should be."""

    async def main(container: Container) -> None:
        outside = tmp_path / "s"
        met = asyncio.Event()

        async def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            met.set()
            writer.close()

        server = await asyncio.start_unix_server(on_connection, outside)
        link = f'for n in 1 2 3 4 5; do ln -s {outside} "$(dirname "$1")/k-$n"; done; touch ~/linked'
        session = KernelSession(container, argv=("sh", "-c", link, "sh", "{connection_file}"))
        with pytest.raises(SandboxFailed, match="ended as it started"):
            await session.start()
        assert (container.workspace / "linked").exists()
        assert not met.is_set()
        await session.close()
        server.close()
        await server.wait_closed()

    use("process", tmp_path, main, asyncio.run)


def test_no_kernel_is_said_at_the_start(tmp_path: Path) -> None:
    async def main(container: Container) -> None:
        for argv, words in (
            (("no-such-kernel",), "has no no-such-kernel"),
            ((interpreter("process"), "-m", "no_such_kernel"), "No module named no_such_kernel"),
        ):
            session = KernelSession(container, argv=argv)
            with pytest.raises(SandboxFailed, match=words) as caught:
                await session.start()
            assert caught.value.reason == "kernel"
            await session.close()

    use("process", tmp_path, main, asyncio.run)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_tool_jupyter_runs_a_kernel_that_the_handler_names(tmp_path: Path) -> None:
    async def main() -> None:
        sandboxes = Sandboxes("process", tmp_path / "sandboxes")
        sandbox = await sandboxes.create("one")
        toolbox = Toolbox(sandbox, ["jupyter"], kernel=command("process"))
        (tool,) = toolbox.tools(await toolbox.start())
        assert await tool({"code": "x = 2"}, LIMIT_S) == "[no output]"
        assert await tool({"code": "x + 1"}, LIMIT_S) == "3\n"
        died = await tool({"code": "import os; os._exit(3)"}, LIMIT_S)
        assert "[the kernel process ended: it exited with code 3]\n[the kernel was restarted; variables" in died
        assert "IPython" not in str(tool.schema())
        with pytest.raises(SandboxFailed, match="the sandbox has no nothing"):
            await Toolbox(sandbox, ["jupyter"], kernel=["nothing"]).start()
        await sandbox.close()
        sandboxes.close(LIMIT_S)

    uvloop.run(main())
