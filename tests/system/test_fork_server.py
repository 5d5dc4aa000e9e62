"""`ForkServer`: its processes are as good as started ones, and end as they do, whatever happens to the server."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
from command_lines import words_of
from support.waiting import until

from prorl_zmq.errors import ConfigError
from prorl_zmq.system import fork_server, open_files
from prorl_zmq.system.fork_server import ForkServer, Preload, ServerLost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prorl_zmq.system.fork_server import ForkedProcess

LIMIT_S = 30.0
PLUGINS = Preload(group="own.tasks", what="task")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["numpy", "zmq", "threading"]) as made:
        yield made


@pytest.fixture
def own_server() -> Iterator[ForkServer]:
    """A server that the test may harm."""
    with ForkServer() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules a server and its processes can import."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@contextmanager
def running(server: ForkServer, script: Path, source: str, *arguments: str, **how: object) -> Iterator[ForkedProcess]:
    script.write_text(textwrap.dedent(source))
    process = server.start([str(script), *arguments], **how)  # type: ignore[arg-type]
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(server: ForkServer, script: Path, source: str, *arguments: str, **how: object) -> list[str]:
    """The words that a script prints."""
    with running(server, script, source, *arguments, stdout=subprocess.PIPE, text=True, **how) as process:
        words, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        return str(words).split()


def install(folder: Path, version: str, digest: str = "one") -> None:
    """Install a package that offers a task."""
    info = folder / "own_package.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own-package\nVersion: {version}\n")
    (info / "RECORD").write_text(f"own_handler.py,sha256={digest},20\n")
    (info / "entry_points.txt").write_text("[own.tasks]\nown = own_handler:Own\n")


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


WAITS = "import signal; print('waits', flush=True); signal.pause()"


def test_a_fork_is_a_child_of_its_client_and_leads_a_session(server: ForkServer, tmp_path: Path) -> None:
    script = "import os; print(os.getpid(), os.getppid(), os.getsid(0))"
    with running(server, tmp_path / "s.py", script, stdout=subprocess.PIPE, text=True) as process:
        words, _ = process.communicate(timeout=LIMIT_S)
    assert [int(word) for word in words.split()] == [process.pid, os.getpid(), process.pid]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("sys.exit(7)", 7),
        ("sys.exit(258)", 2),
        ("sys.exit('in words')", 1),
        ("1 / 0", 1),
        ("os._exit(9)", 9),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_exit_codes_are_those_of_an_interpreter(server: ForkServer, tmp_path: Path, end: str, code: int) -> None:
    script = f"import atexit, os, signal, sys\natexit.register(print, 'at exit')\nprint('unflushed')\n{end}"
    with running(server, tmp_path / "s.py", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        forked = one.communicate(timeout=LIMIT_S)
    started = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "s.py")], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert one.returncode == started.returncode == code
    assert forked[0] == started.stdout
    assert forked[1].splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_traceback_begins_with_the_program(server: ForkServer, tmp_path: Path) -> None:
    with running(server, tmp_path / "s.py", "1 / 0", stderr=subprocess.PIPE, text=True) as process:
        _, words = process.communicate(timeout=LIMIT_S)
    assert "ZeroDivisionError" in words
    assert "fork" not in words.replace(str(tmp_path), "")


def test_threads_of_a_program_are_waited_for(server: ForkServer, tmp_path: Path) -> None:
    script = """
        import threading, time
        def late():
            while threading.main_thread().is_alive(): time.sleep(0.001)
            print("late")
        threading.Thread(target=late).start()
    """
    assert said(server, tmp_path / "s.py", script) == ["late"]


def test_signals_are_as_in_a_fresh_interpreter(server: ForkServer, tmp_path: Path) -> None:
    script = """
        import signal
        print(*(f"{number.name}={signal.getsignal(number)!r}" for number in signal.valid_signals()
              if isinstance(number, signal.Signals)), signal.pthread_sigmask(signal.SIG_BLOCK, ()), sep=";")
    """
    forked = said(server, tmp_path / "s.py", script)
    started = subprocess.run([sys.executable, "-P", str(tmp_path / "s.py")], capture_output=True, text=True, check=True)
    assert forked == started.stdout.split()


def test_a_module_runs_as_with_m(server: ForkServer, folder: Path) -> None:
    (folder / "own_module.py").write_text(
        "import sys\nprint(__name__, __spec__.name, sys.modules['__main__'].__dict__ is globals(), *sys.argv)\n"
    )
    with server.start(["-m", "own_module", "a b", ""], stdout=subprocess.PIPE, text=True) as process:
        words, _ = process.communicate(timeout=LIMIT_S)
    assert words == f"__main__ own_module True {folder}/own_module.py a b \n"


def test_a_preloaded_module_runs_once_more_as_the_program(folder: Path) -> None:
    (folder / "own_module.py").write_text("print(__name__)\n")
    with ForkServer(["own_module"]) as server:
        process = server.start(["-m", "own_module"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        assert process.communicate(timeout=LIMIT_S)[0] == "__main__\n"


def test_the_environment_and_the_folder_are_the_clients(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os; print(os.getcwd(), os.environ.get('ONE'), ascii(os.environ.get('TWO')))"
    monkeypatch.setenv("ONE", "1")
    monkeypatch.chdir(tmp_path)
    assert said(server, tmp_path / "s.py", script) == [str(tmp_path), "1", "None"]
    other = tmp_path / "other"
    other.mkdir()
    assert said(server, tmp_path / "s.py", script, env={"TWO": "\udcff"}, cwd=other) == [
        str(other),
        "None",
        r"'\udcff'",
    ]


def test_the_command_line_is_the_programs(server: ForkServer, tmp_path: Path) -> None:
    with running(server, tmp_path / "s.py", WAITS, "--role", "a b", stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waits\n"
        words = words_of(psutil.Process(process.pid))
    assert list(filter(None, words)) == [sys.executable, "-P", str(tmp_path / "s.py"), "--role", "a b"]


def test_a_very_long_command_line_is_cut_for_others_only(server: ForkServer, tmp_path: Path) -> None:
    script = "import sys; print(len(sys.argv[1]))"
    assert said(server, tmp_path / "s.py", script, "x" * 100_000) == ["100000"]


def test_a_program_has_the_descriptors_that_it_is_given_and_no_others(server: ForkServer, tmp_path: Path) -> None:
    script = "import os; print(*sorted(int(one) for one in os.listdir('/proc/self/fd')))"
    one, other = socket.socketpair()
    with one, other:
        high = os.dup2(other.fileno(), 700)
        forked = said(server, tmp_path / "s.py", script, pass_fds=(one.fileno(), high))
        started = subprocess.run(
            [sys.executable, "-P", str(tmp_path / "s.py")],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            pass_fds=(one.fileno(), high),
        )
        assert forked == started.stdout.split()
        script = "import os, sys; os.write(int(sys.argv[1]), b'here')"
        said(server, tmp_path / "s.py", script, "700", pass_fds=(high,))
        os.close(high)
        assert one.recv(10) == b"here"


def test_standard_streams(server: ForkServer, tmp_path: Path) -> None:
    script = "import sys; print(sys.stdin.read().upper()); print('bad', file=sys.stderr)"
    with running(
        server, tmp_path / "s.py", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert sorted(process.communicate("gr\u00fc\u00df".encode(), timeout=LIMIT_S)[0].split()) == [
            b"GR\xc3\x9cSS",
            b"bad",
        ]
    with running(server, tmp_path / "s.py", "print(len(input()))", stdin=subprocess.DEVNULL) as process:
        assert process.wait(LIMIT_S) == 1  # the end of the file


def test_output_that_cannot_be_written(server: ForkServer, tmp_path: Path) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for environment, code in ((buffered, 120), ({**buffered, "PYTHONUNBUFFERED": "1"}, 1)):
        full = os.open("/dev/full", os.O_WRONLY)
        with running(server, tmp_path / "s.py", "print(1)", stdout=full, env=environment) as process:
            os.close(full)
            assert process.wait(LIMIT_S) == code


def test_forks_draw_other_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    script = "import random, numpy; print(random.random(), numpy.random.random())"
    drawn = {word for _ in range(3) for word in said(server, tmp_path / "s.py", script)}
    assert len(drawn) == 6


def test_the_limit_of_open_files_is_the_one_that_the_client_began_with(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(open_files, "_limits", [(soft - 1, hard)])
    script = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert said(server, tmp_path / "s.py", script) == [str(soft - 1), str(hard)]


def test_niceness(server: ForkServer, tmp_path: Path) -> None:
    ours = os.nice(0)
    assert said(server, tmp_path / "s.py", "import os; print(os.nice(0))", nice=3) == [str(min(19, ours + 3))]


def test_what_cannot_be_started_raises_as_a_popen_does(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        server.start([str(tmp_path / "s.py")], cwd=tmp_path / "missing")
    with pytest.raises(OSError, match="Bad file descriptor"):
        server.start([str(tmp_path / "s.py")], pass_fds=(499,))
    assert said(server, tmp_path / "s.py", "print('next')") == ["next"]
    with server.start([str(tmp_path / "missing.py")], stderr=subprocess.PIPE, text=True) as process:
        assert "FileNotFoundError" in process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 1


def test_no_more_processes_may_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the system's, and the server serves on."""
    (folder / "no_more.py").write_text(
        "import errno, os\nreal = os.fork\nleft = [int(os.environ['LEFT'])]\n"
        "def fork():\n"
        "    left[0] -= 1\n"
        "    if left[0] == -1: raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "    return real()\n"
        "os.fork = fork\n"
    )
    for left in ("0", "1"):  # the first fork of an order fails, or the second
        monkeypatch.setenv("LEFT", left)
        with ForkServer(["no_more"]) as server:
            with pytest.raises(BlockingIOError):
                server.start([str(folder / "s.py")])
            pid = server.pid
            if left == "0":
                assert said(server, folder / "s.py", "print(1)") == ["1"]
            assert server.pid == pid


def test_a_fork_ends_with_its_client_and_so_does_the_server(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    client = tmp_path / "client.py"
    client.write_text(
        "import signal, sys\nfrom prorl_zmq.system.fork_server import ForkServer\n"
        "server = ForkServer()\nprocess = server.start([sys.argv[1]], stdout=-3)\n"
        "print(process.pid, server.pid, flush=True)\nsignal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-P", client, tmp_path / "waits.py"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        os.kill(pids[1], signal.SIGSTOP)
        assert not any(ended(pid) for pid in pids)
        process.kill()
    until(lambda: all(ended(pid) for pid in pids), "the end of its processes")


def test_a_server_that_another_thread_started_outlives_the_thread(own_server: ForkServer, tmp_path: Path) -> None:
    found: list[ForkedProcess] = []
    (tmp_path / "s.py").write_text(WAITS)

    def start() -> None:
        found.append(own_server.start([str(tmp_path / "s.py")], stdout=subprocess.PIPE))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    pid = own_server.pid
    with found[0] as process:
        assert process.stdout.readline() == b"waits\n"
        assert said(own_server, tmp_path / "other.py", "print(1)") == ["1"]
        assert own_server.pid == pid
        assert process.poll() is None
        process.kill()


def test_processes_outlive_a_server_and_the_next_order_starts_another(
    own_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "FORK_LIMIT_S", 1000.0)  # which a dead server does not cost
    with running(own_server, tmp_path / "s.py", WAITS, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waits\n"
        pid = own_server.pid
        os.kill(pid, signal.SIGKILL)
        assert said(own_server, tmp_path / "other.py", "print(1)") == ["1"]
        assert own_server.pid != pid
        assert ended(pid)
        assert process.poll() is None
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_server_that_stands_still_is_replaced(
    own_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.preload()
    monkeypatch.setattr(fork_server, "FORK_LIMIT_S", 0.5)
    pid = own_server.pid
    os.kill(pid, signal.SIGSTOP)
    assert said(own_server, tmp_path / "s.py", "print(1)") == ["1"]
    assert ended(pid)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_server_that_dies_in_the_middle_of_an_order_starts_a_process_once(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "dies.py").write_text(
        textwrap.dedent(
            """
            import os, signal, pathlib
            real, place, mark = os.fork, os.environ["PLACE"], pathlib.Path(os.environ["MARK"])
            server = os.getpid()
            count = 0
            def fork():
                global count
                count += 1
                here = {"before": 1, "between": 2, "after": 2}[place] == count and not mark.exists()
                if here and place != "after": mark.touch(); os.kill(server, signal.SIGKILL)
                pid = real()
                if here and place == "after" and pid: mark.touch(); os.kill(server, signal.SIGKILL)
                return pid
            os.fork = fork
            """
        )
    )
    monkeypatch.setenv("PLACE", place)
    monkeypatch.setenv("MARK", str(folder / "mark"))
    log = folder / "log"
    script = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), b'ran ')"
    before = psutil.Process().children()
    with ForkServer(["dies"]) as server:
        server.preload()
        with running(server, folder / "s.py", script, str(log)) as process:
            assert process.wait(LIMIT_S) == 0
    assert (folder / "mark").exists()
    assert log.read_text() == "ran "
    until(lambda: psutil.Process().children() == before, "the end of those that had no order")


def test_an_order_ends_although_the_process_that_forks_stands_still(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "stops.py").write_text(
        textwrap.dedent(
            """
            import os, signal
            forks = 0
            def before():
                global forks
                forks += 1
                if forks == 2: os.kill(os.getpid(), signal.SIGSTOP)
            os.register_at_fork(before=before)
            """
        )
    )
    monkeypatch.setattr(fork_server, "FORK_LIMIT_S", 0.5)
    before = psutil.Process().children()
    with ForkServer(["stops"]) as server, pytest.raises(ServerLost, match="does not answer"):
        server.start([str(folder / "s.py")])
    until(lambda: psutil.Process().children() == before, "the end of what stood still")


def test_a_server_that_never_lives_is_an_error(folder: Path) -> None:
    (folder / "deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with ForkServer(["deadly"]) as server, pytest.raises(ServerLost, match="died"):
        server.start([str(folder / "s.py")])


def test_closing_ends_an_order_that_waits(folder: Path) -> None:
    (folder / "endless.py").write_text("import signal\nsignal.pause()\n")
    server = ForkServer(["endless"])
    raised: list[Exception] = []

    def start() -> None:
        try:
            server.start([str(folder / "s.py")])
        except ServerLost as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: server.pid, "the server")
    pid = server.pid
    server.close()
    thread.join(LIMIT_S)
    assert [str(error) for error in raised] == ["the fork server was closed"]
    assert ended(pid)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, name='watcher', daemon=True).start()",
            r"starts a thread \(watcher\)",
        ),
        ("import zmq\ncontext = zmq.Context()", "makes a ZeroMQ context"),
        ("import zmq.asyncio\ncontext = zmq.asyncio.Context.instance()", "makes a ZeroMQ context"),
    ],
)
def test_a_module_that_no_fork_could_use_is_refused(folder: Path, text: str, problem: str) -> None:
    install(folder, "1")
    (folder / "own_handler.py").write_text(text)
    with ForkServer(["zmq", PLUGINS]) as server:
        who = r"the task own \(own_handler:Own, of own-package\)"
        with pytest.raises(ConfigError, match=rf"^{who}: the module own_handler {problem}.* `__init__`"):
            server.start([str(folder / "s.py")])
        assert server.pid == 0
        (folder / "own_handler.py").write_text("import zmq\nwith zmq.Context(): pass\n")
        assert said(server, folder / "s.py", "import own_handler; print(own_handler.zmq.__name__)") == ["zmq"]


def test_a_module_that_cannot_be_imported_is_left_to_the_process(folder: Path) -> None:
    (folder / "broken.py").write_text("raise RuntimeError('broken here')\n")
    how = {"stderr": subprocess.PIPE, "text": True}
    with (
        ForkServer(["broken", "missing_here"]) as server,
        running(server, folder / "s.py", "import broken", **how) as process,
    ):
        assert "RuntimeError: broken here" in process.communicate(timeout=LIMIT_S)[1]


def test_more_can_be_imported_later(own_server: ForkServer, folder: Path) -> None:
    (folder / "own_module.py").write_text("import os\nmaker = os.getpid()\n")
    script = "import own_module; print(own_module.maker)"
    assert said(own_server, folder / "s.py", script) != [str(own_server.pid)]
    own_server.preload(["own_module"])
    assert said(own_server, folder / "s.py", script) == [str(own_server.pid)]
    os.kill(own_server.pid, signal.SIGKILL)
    assert said(own_server, folder / "s.py", script) == [str(own_server.pid)]


def test_a_server_whose_packages_were_upgraded_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    install(folder, "1")
    module = folder / "own_handler.py"
    module.write_text("value = 1\n")
    script = "import own_handler; print(own_handler.value)"
    with ForkServer([PLUGINS]) as server:
        assert server.renew_if_changed() == []
        assert said(server, folder / "s.py", script) == ["1"]
        pid = server.pid
        assert server.renew_if_changed() == []
        module.write_text("value = 22\n")
        assert said(server, folder / "s.py", script) == ["1"]
        assert server.pid == pid
        assert server.renew_if_changed() == [f"{module} was changed"]
        assert said(server, folder / "s.py", script) == ["22"]
        assert ended(pid)
        for version, digest, change in (
            ("1", "other", "own-package 1 was installed again"),
            ("2", "other", "own-package was upgraded from 1 to 2"),
        ):
            install(folder, version, digest)
            assert server.renew_if_changed() == [change]
            server.preload()
        shutil.rmtree(folder / "own_package.dist-info")
        assert server.renew_if_changed() == ["own-package was removed"]
        server.preload()
        install(folder, "3")
        assert server.renew_if_changed() == ["own-package 3 was installed"]


def test_orphans_are_adopted_only_while_a_block_runs() -> None:
    script = textwrap.dedent(
        """
        import os
        from prorl_zmq.system.processes import _is_subreaper, adopting_orphans, become_subreaper
        with adopting_orphans():
            with adopting_orphans(): pass
            assert _is_subreaper()
        assert not _is_subreaper()
        with adopting_orphans(): become_subreaper()
        assert _is_subreaper()
        with adopting_orphans(): pass
        assert _is_subreaper()
        """
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)
