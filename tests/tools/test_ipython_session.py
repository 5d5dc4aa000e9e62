from __future__ import annotations

import asyncio
import threading
import uuid
from typing import TYPE_CHECKING

import psutil
import pytest
import uvloop
from pythons import LIMIT_S, Run, interpreter, runner_of, use
from support.sandboxes import main_and_proofs

from prorl_zmq.errors import SandboxFailed, ToolSessionLost
from prorl_zmq.tools.sessions.cell_session import CODE_LIMIT_BYTES, CellResult
from prorl_zmq.tools.sessions.ipython_session import IPythonSession

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.tools.containers.container import Container


pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

WITH_IPYTHON = main_and_proofs("process", "bubblewrap", "apptainer")
in_an_image_too = pytest.mark.parametrize("anywhere", [*WITH_IPYTHON, "image"], indirect=True)
"""The contract of a Python without IPython, which an image has; the rest is tested there by proofs."""
on_both_loops = pytest.mark.parametrize("runner", [uvloop.run, pytest.param(asyncio.run, marks=pytest.mark.proof)])
"""Sessions run in execution servers, whose loop is uvloop's."""
NO_IPYTHON = 'raise ModuleNotFoundError("No module named IPython", name="IPython")\n'


@pytest.fixture(params=[*WITH_IPYTHON, pytest.param("image", marks=pytest.mark.proof)])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run a body on a session, with and without IPython."""
    return runner_of(request.param, tmp_path)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which nothing but the end of Python can come of an interrupt: no machine is too busy for these."""
    monkeypatch.setattr("prorl_zmq.tools.sessions.cell_session.INTERRUPT_LIMIT_S", 0.1)
    monkeypatch.setattr("prorl_zmq.tools.sessions.cell_session.KILL_LIMIT_S", 0.1)


Cases = list[tuple[str, str]]

CASES: dict[str, Cases] = {
    "the last expression is shown, and state is kept": [
        ("1+1", "2\n"),
        ("_ + 1", "3\n"),
        ("x = 5", ""),
        ("x", "5\n"),
        ("def f(a):\n    return a * x\n\nf(2)", "10\n"),
        ("'a\\nb'", "'a\\nb'\n"),
        ("None", ""),
        ("", ""),
        ("# nothing", ""),
        ("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))).__name__", "'A'\n"),
    ],
    "whoever writes is read, in order": [
        ("print('a', end=''); import os; os.system('echo b'); print('c', end='')", "ab\nc"),
        ("import sys; sys.stderr.write('e'); print('o'); os.write(1, b'w\\n'); 1", "eo\nw\n1\n"),
        ("import subprocess; subprocess.run(['echo', 's']).returncode", "s\n0\n"),
        ("_ = sys.stdout.buffer.write(b'\\xff\\xc3\\xa9\\n')", "\ufffdé\n"),
        ("print('\\ud800')", "\\ud800\n"),
        ("import ctypes; _ = ctypes.CDLL(None).puts(b'from C')", "from C\n"),
        ("_ = ctypes.CDLL(None).printf(b'no newline')", "no newline"),
        ("print('x' * 60000)", "x" * 60000 + "\n"),
        ("\n".join(f"print({i})" for i in range(2000)), "".join(f"{i}\n" for i in range(2000))),
    ],
    "await on the top level": [
        ("import asyncio\nasync def g(v): await asyncio.sleep(0.001); return v\nawait g(7)", "7\n"),
        ("q = asyncio.Queue(); t = asyncio.create_task(g(8)) if False else None", ""),
        ("await q.put(1)\nloop = asyncio.get_running_loop(); t = asyncio.create_task(g(9))", ""),
        ("(await q.get(), await t, loop is asyncio.get_running_loop())", "(1, 9, True)\n"),
        ("asyncio.run(g(3))", "3\n"),
        ("async with asyncio.Lock(): print('in')", "in\n"),
    ],
    "what a cell does to its streams is put right before the next": [
        ("import sys, io; sys.stdout = io.StringIO(); print('lost')", ""),
        ("print('on')", "on\n"),
        ("sys.stdout.close()", ""),
        ("print('on')", "on\n"),
        ("import os; os.close(1); os.close(2)", ""),
        ("print('on'); _ = os.system('echo on')", "on\non\n"),
        ("os.dup2(os.open('/dev/null', os.O_WRONLY), 1);", None),  # type: ignore[list-item]
        ("print('on')", "on\n"),
        ("import builtins; del builtins.print, builtins.len", ""),
        ("print(len('on'))", "2\n"),
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", ""),
        ("1+1", "2\n"),
    ],
}


@in_an_image_too
def test_results(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        for name, cases in CASES.items():
            for code, text in cases:
                result = await session.run(code, LIMIT_S)
                assert result == CellResult(result.text if text is None else text), (name, code)

    anywhere(body)


@pytest.mark.few(1)
@in_an_image_too
@on_both_loops
def test_errors_are_told_without_colours(anywhere: Run, runner: Callable[..., object]) -> None:
    async def body(session: IPythonSession) -> None:
        for code, error, text in (
            ("def f():\n    return 1 / 0\n\nf()", "ZeroDivisionError", "return 1 / 0"),
            ("if True", "SyntaxError", "SyntaxError"),
            ("nope", "NameError", "name 'nope' is not defined"),
            ("input('Name? ')", "EOFError", "input('Name? ')"),
            ("import sys; sys.exit(3)", "SystemExit", "SystemExit: 3"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
            ("def g(): g()\ng()", "RecursionError", "maximum recursion depth"),
            ("raise BaseException('\\0\\ud800')", "BaseException", ""),
            ("print('before'); await nope()", "NameError", "before\n"),
        ):
            result = await session.run(code, LIMIT_S)
            assert (result.error, result.restarted, result.ok) == (error, False, False), code
            assert text in result.text, code
            assert "\033" not in result.text
            assert "<ipython driver>" not in result.text or "input" in code, result.text
        assert await session.run("1", LIMIT_S) == CellResult("1\n")

    anywhere(body, runner)


FLOODS = ("print('x' * 10**8)", "import os; os.system('yes x | head -c 100000000')")


@pytest.mark.proof(quick=True)
def test_a_flood_is_cut_in_the_middle(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        for flood in FLOODS:
            before = psutil.Process().memory_info().rss
            result = await session.run(f"print('first')\n{flood};\nprint('last')", LIMIT_S)
            assert result.text.startswith("first\n"), flood
            assert result.text.endswith("\nlast\n"), flood
            assert result.dropped_bytes > 9e7, flood
            assert len(result.text) < 66_000, flood
            assert psutil.Process().memory_info().rss - before < 20e6, flood

    anywhere(body)


@pytest.mark.proof(quick=True)
def test_a_long_cell(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        assert (await session.run(f"x = '{'0123456789' * 200_000}'; len(x)", LIMIT_S)).text == "2000000\n"
        with pytest.raises(ValueError, match="at most"):
            await session.run("#" * (CODE_LIMIT_BYTES + 1), LIMIT_S)
        assert (await session.run("len(x)", LIMIT_S)).text == "2000000\n"

    anywhere(body)


@pytest.mark.proof(quick=True)
@in_an_image_too
def test_late_output_is_not_taken_for_the_next_cells(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        await session.run("import threading; t = threading.Timer(0.02, print, ['late']); t.start()", LIMIT_S)
        assert session._process is not None
        async with asyncio.timeout(LIMIT_S):
            while session._output.content() != b"late\n":  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.01)
        assert await session.run("t.join(); 1", LIMIT_S) == CellResult("1\n")

    anywhere(body)


@pytest.mark.few(1)
@in_an_image_too
@on_both_loops
def test_the_time_limit_interrupts_and_state_is_kept(anywhere: Run, runner: Callable[..., object]) -> None:
    async def body(session: IPythonSession) -> None:
        await session.run("import asyncio, time, subprocess, itertools, os; x = 1", LIMIT_S)
        for code in (
            "print('begun'); time.sleep(3600); print('no')",
            "while True: pass",
            "subprocess.run(['sleep', '3600'])",
            "for i in itertools.count(): os.system('sleep 3600'); time.sleep(3600)",
            "import asyncio\nawait asyncio.sleep(3600)",
            "await asyncio.sleep(0)\nwhile True: pass",
            "import threading; threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); time.sleep(3600)",
        ):
            result = await session.run(code, 0.3)
            assert (result.timed_out, result.restarted, result.ok) == (True, False, False), (code, result)
            assert "no\n" not in result.text
            assert await session.run("x", LIMIT_S) == CellResult("1\n"), code

    anywhere(body, runner)


UNINTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nwhile True: pass",
    "import itertools; sum(itertools.count())",
    "import ctypes; ctypes.CDLL(None).sigignore(2); ctypes.CDLL(None).pause()",
    "import re; re.match('(a*)*b', 'a' * 64)",
)


@pytest.mark.proof(quick=True)
@pytest.mark.usefixtures("short_limits")
def test_what_cannot_be_interrupted_is_replaced(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        for code in UNINTERRUPTIBLE:
            await session.run("x = 1", LIMIT_S)
            result = await session.run(code, 0.3)
            # A regular expression may notice the interrupt; then nothing was lost.
            assert result.timed_out, code
            assert result.restarted or "re.match" in code, code
            assert (await session.run("1", LIMIT_S)) == CellResult("1\n"), code

    anywhere(body)


@pytest.mark.proof(quick=True)
def test_an_ignored_interrupt_is_back_in_the_next_cell(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        await session.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); x = 1", LIMIT_S)
        assert not (await session.run("while True: pass", 0.2)).restarted
        assert (await session.run("x", LIMIT_S)).text == "1\n"

    anywhere(body)


@pytest.mark.proof(quick=True)
def test_an_interrupt_at_any_moment_does_not_lose_the_session(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        for i in range(20):
            await session.run(f"x = {i}", LIMIT_S)
            result = await session.run("y = [n for n in range(10000)]", 0.0004 * i)
            assert not result.restarted
            assert await session.run("x", LIMIT_S) == CellResult(f"{i}\n")

    anywhere(body)


ENDS = (
    ("import ctypes; print('before'); ctypes.string_at(0)", "signal 11 (SIGSEGV)"),
    ("import os; print('before', end=''); os.kill(os.getpid(), 9)", "signal 9 (SIGKILL)"),
    ("import os; print('before', end=''); os._exit(4)", "exited with code 4"),
    ("print('before'); exit()", "exited with code 0"),
    ("print('before'); quit()", "exited with code 0"),
    ("import os; print('before'); os.closerange(3, 2000)", "exited with code 1"),
    ("import os; print('before'); os.execlp('false', 'false')", "exited with code 1"),
    ("import builtins; print('before'); builtins.__dict__.clear()", "exited with code 1"),
)


@pytest.mark.few(1)
@in_an_image_too
def test_the_end_of_python_is_told(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        for code, ended in ENDS:
            await session.run("import os; os.chdir('/usr'); x = 1", LIMIT_S)
            result = await session.run(code, LIMIT_S)
            assert ended in result.ended, (code, result)
            assert result.restarted, code
            assert result.text.startswith("before"), code
            result = await session.run("import os; print(os.getcwd()); x", LIMIT_S)
            assert (result.text.split("\n")[0], result.error, result.restarted) == ("/usr", "NameError", False), code

    anywhere(body)


@pytest.mark.proof(quick=True)
def test_python_that_ends_between_cells_is_told_and_replaced(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        await session.run("import threading, os; threading.Timer(0.02, os._exit, [3]).start()", LIMIT_S)
        assert session._process is not None
        await session._process._child.wait(LIMIT_S)
        assert await session.run("1", LIMIT_S) == CellResult("1\n", restarted=True)
        assert await session.run("1", LIMIT_S) == CellResult("1\n")

    anywhere(body)


@pytest.mark.proof(quick=True)
def test_a_forked_child_does_not_answer(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        fork = "import os\npid = os.fork()\nif pid: print('parent', os.waitpid(pid, 0)[1])\nelse: print('child')"
        assert await session.run(fork, LIMIT_S) == CellResult("child\nparent 0\n")
        pool = (
            "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))"
        )
        assert await session.run(pool, LIMIT_S) == CellResult("[1, 2]\n")
        assert await session.run("1", LIMIT_S) == CellResult("1\n")

    anywhere(body)


FORGE = """
import os, struct, json, stat
def forge(number, kind, content, length=None):
    for fd in map(int, os.listdir('/proc/self/fd')):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, struct.pack('!IIc', len(content) if length is None else length, number, kind) + content)
        except OSError:
            pass
done = lambda error: json.dumps({'error': error, 'directory': '/'}).encode()
"""


@pytest.mark.proof(quick=True)
@pytest.mark.usefixtures("short_limits")
def test_a_forged_frame_spoils_no_more_than_its_own_session(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        async def forging(code: str) -> CellResult:
            await session.run(FORGE, LIMIT_S)
            assert session._process is not None
            return await session.run(f"N = {session._process._number + 1}; {code}", LIMIT_S)

        assert await forging("forge(N + 1, b'D', done('x')); forge(N - 1, b'D', done('x')); 7") == CellResult("7\n")
        result = await forging("forge(N, b'I', b'no png'); forge(N, b'D', done('forged')); print('late')")
        assert (result.error, result.dropped_images, result.restarted) == ("forged", 1, False)
        assert (await session.run("1", LIMIT_S)).text.endswith("1\n")
        for code in (
            "forge(N, b'D', b'no json')",
            "forge(N, b'D', b'{}')",
            "forge(N, b'D', done('x' * 8_000_000))",
            "forge(N, b'D', json.dumps({'error': '', 'directory': '/' * 8_000_000}).encode())",
            "forge(N, b'?', b'')",
            "forge(N, b'D', b'', 2**31)",
            "forge(N, b'D', b'\\xff' * 10**6, 5)",
        ):
            result = await forging(code)
            assert result.restarted, code
            assert "descriptor by which it is controlled" in result.ended
            assert await session.run("1", LIMIT_S) == CellResult("1\n")
        await session.run(FORGE, LIMIT_S)
        assert (await session.run("while True: forge(77, b'I', b'x' * 10**6)", 0.5)).timed_out
        assert (await session.run("1", LIMIT_S)).text == "1\n"

    anywhere(body)


@pytest.mark.few(1)
@pytest.mark.parametrize("ignoring", ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "])
def test_cancellation_ends_the_cell_first(
    anywhere: Run, survivors: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, ignoring: str
) -> None:
    if ignoring:
        monkeypatch.setattr("prorl_zmq.tools.sessions.cell_session.INTERRUPT_LIMIT_S", 0.1)
        monkeypatch.setattr("prorl_zmq.tools.sessions.cell_session.KILL_LIMIT_S", 0.1)
    mark = f"3600.{uuid.uuid4().int}"

    async def body(session: IPythonSession) -> None:
        await session.run("x = 1; import subprocess", LIMIT_S)
        code = f"{ignoring}p = subprocess.Popen(['sleep', '{mark}'])\nwhile True: pass"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run(code, 3600), 0.3)
        assert survivors(mark) == []
        result = await session.run("x", LIMIT_S)
        assert result.restarted == bool(ignoring)
        assert result.text == "1\n" or ignoring
        assert not (await session.run("1", LIMIT_S)).restarted

    anywhere(body)


def test_closing_leaves_nothing(anywhere: Run, survivors: Callable[[str], list[str]]) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def body(session: IPythonSession) -> None:
        start = f"import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True);"
        await session.run(start, LIMIT_S)
        call = asyncio.ensure_future(session.run("while True: pass", 3600))
        await asyncio.sleep(0.2)
        await session.close()
        for late in (call, session.run("1", LIMIT_S), session.start()):
            with pytest.raises(ToolSessionLost, match="closed"):
                await late

    anywhere(body)
    assert survivors(mark) == []


@pytest.mark.proof(quick=True)
def test_calls_at_one_time_run_one_after_the_other(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        calls = (session.run(f"print({i}); import time; time.sleep(0.001); {i}", LIMIT_S) for i in range(20))
        assert [result.text for result in await asyncio.gather(*calls)] == [f"{i}\n{i}\n" for i in range(20)]

    anywhere(body)


@pytest.mark.proof(quick=True)
def test_no_port_no_thread_and_nothing_in_the_workspace(anywhere: Run) -> None:
    before = threading.enumerate()

    async def body(session: IPythonSession) -> None:
        assert session._process is not None
        child = psutil.Process(session._process._child.pid)
        assert child.net_connections("inet") == []
        assert threading.enumerate() == before  # those of a runner of tests are there already
        assert (await session.run("import os; os.listdir()", LIMIT_S)).text == "[]\n"
        result = await session.run("import sys; sys.argv, 'jedi' in sys.modules, sys.path[0]", LIMIT_S)
        assert result.text == "([''], False, '')\n"

    anywhere(body)


@pytest.mark.proof(quick=True)
def test_a_module_of_the_workspace_takes_no_others_place_at_a_restart(anywhere: Run) -> None:
    async def body(session: IPythonSession) -> None:
        write = "for name in ('json', 'random', 'IPython', 'traceback'): open(name + '.py', 'w').write('1/0')"
        await session.run(write, LIMIT_S)
        await session.run("exit()", LIMIT_S)
        assert await session.run("1", LIMIT_S) == CellResult("1\n")
        await session.run("open('mine.py', 'w').write('x = 4')", LIMIT_S)
        assert await session.run("import mine; mine.x", LIMIT_S) == CellResult("4\n")

    anywhere(body)


@pytest.mark.parametrize("place", [*main_and_proofs("process", "apptainer"), "image"])
def test_without_ipython(place: str, tmp_path: Path) -> None:
    def hide(container: Container) -> None:
        if place == "process":  # it has IPython; a module without the name's things takes its place
            folder = tmp_path / "without"
            folder.mkdir(exist_ok=True)
            (folder / "IPython.py").write_text(NO_IPYTHON)
            container.spec.environment["PYTHONPATH"] = str(folder)

    async def main(container: Container) -> None:
        hide(container)
        session = IPythonSession(container, python=interpreter(place), ipython="require")
        with pytest.raises(SandboxFailed, match="pip install ipython") as caught:
            await session.start()
        assert caught.value.reason == "ipython"
        await session.close()
        session = IPythonSession(container, python=interpreter(place))
        await session.start()
        assert session.ipython_version == ""
        result = await session.run("%timeit 1", LIMIT_S)
        assert "IPython is not installed here" in result.text
        assert (await session.run("1 +", LIMIT_S)).text.count("IPython") == 0
        await session.close()

    use(place, tmp_path, main, uvloop.run)


def test_no_python_is_said_at_the_start(tmp_path: Path) -> None:
    async def main(container: Container) -> None:
        session = IPythonSession(container, python="python-that-is-not")
        with pytest.raises(SandboxFailed, match="has no Python: python-that-is-not") as caught:
            await session.start()
        assert caught.value.reason == "python"
        with pytest.raises(ToolSessionLost, match="is lost"):
            await session.run("1", LIMIT_S)
        await session.close()
        for program, words in (("false", "it said nothing"), ("cat", "cat: ")):
            session = IPythonSession(container, python=program)
            with pytest.raises(SandboxFailed, match=words):
                await session.start()
            await session.close()

    use("process", tmp_path, main, uvloop.run)
