"""The execution server as a whole: leases, kills of each process, limits, and what a client may send."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from needed import usable

from prorl_zmq.errors import EndpointInUse, ProrlError, SandboxFailed, SandboxLimitExceeded, ToolSessionLost
from prorl_zmq.tools.editor.arguments import EditorArguments
from prorl_zmq.tools.execution import messages
from prorl_zmq.tools.execution.client import ExecutionClient
from prorl_zmq.tools.execution.server import LOCK, SOCKET, ExecutionServer
from prorl_zmq.tools.processes import children
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.tools.sandbox.specification import Bind, Limits, SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from prorl_zmq.messages import SandboxKind
    from prorl_zmq.tools.sandbox.sandbox import Sandbox

LIMIT_S = 30.0


def use(sandboxes: Sandboxes, body: Callable[[Sandbox], Awaitable[None]], spec: SandboxSpec | None = None) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one", spec)
        try:
            await body(sandbox)
        finally:
            await sandbox.close()
        assert list(sandboxes.root.iterdir()) == []

    asyncio.run(main())


async def gone(path: Path) -> bool:
    deadline = time.monotonic() + 20
    while await asyncio.to_thread(path.exists):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def server_pid(sandbox: Sandbox) -> int:
    """Ask the kernel who is at the other end of the sandbox's socket."""
    with socket.socket(socket.AF_UNIX) as line:
        folder = os.open(sandbox.path, os.O_PATH)
        try:
            line.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)
        return int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def runtime_pids(server: int) -> list[int]:
    found = [server]
    for pid in found:
        found += children(pid)
    return found[1:]


# Leases ---------------------------------------------------------------------------------------------------------------


def test_a_sandbox_that_nobody_holds_ends_with_its_lease(
    kind: SandboxKind, image: str, tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def main() -> None:
        sandboxes = Sandboxes(kind, tmp_path / "sandboxes", image=image, lease_s=2.0)
        sandbox = await sandboxes.create("one")
        bash = await sandbox.bash()
        await bash.run(f"setsid sleep {mark} & sleep {mark} &", LIMIT_S)
        await asyncio.sleep(3)
        assert sandbox.held  # it is renewed as long as it is held
        sandbox.release()
        assert await gone(sandbox.path)
        sandboxes.close()

    asyncio.run(main())
    assert survivors(mark) == []
    assert survivors(str(tmp_path)) == []


def test_whoever_takes_a_sandbox_cuts_the_holder_off(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        call = asyncio.ensure_future(sandbox.exec(["sleep", "3600"], 3600))
        await asyncio.sleep(0.3)
        other = await sandboxes.attach(sandbox.handle)
        with pytest.raises(SandboxFailed, match="is gone"):
            await call
        assert (await other.exec(["true"], LIMIT_S)).exit_code == 0
        again = await sandboxes.attach(other.handle)
        await again.close()

    use(sandboxes, body)


# Kills ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["server", "runtime", "first inside", "holder"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_of_any_process_leaves_nothing(
    sandboxes: Sandboxes, victim: str, number: int, tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    """Of each: the server, the runtime, the namespaces' first process, the shell that holds them."""
    depth = ["server", "runtime", "first inside", "holder"].index(victim)
    if depth and sandboxes.kind == "process":
        pytest.skip("plain processes have no container")
    mark = f"3600.{uuid.uuid4().int}"

    async def main() -> None:
        sandbox = await sandboxes.create("one")
        server = server_pid(sandbox)
        chain = [server]
        while below := children(chain[-1]):
            chain.append(below[0])
        bash = await sandbox.bash()
        await bash.run(f"(trap '' TERM HUP; setsid sleep {mark}) & sleep {mark} &", LIMIT_S)
        os.kill(chain[depth], number)
        if depth == 0:
            assert await gone(sandbox.path)
            with pytest.raises(SandboxFailed):
                await sandbox.exec(["true"], LIMIT_S)
        else:
            result = await bash.run("sleep 3600", 3)
            assert result.restarted or (result.timed_out and number == signal.SIGTERM)  # which some of them ignore
            assert (await bash.run("echo on", LIMIT_S)).output == "on\n"
        await sandbox.close()

    asyncio.run(main())
    assert survivors(mark) == []
    assert survivors(str(tmp_path)) == []


HOLD = """
import asyncio, sys
from pathlib import Path
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

async def main():
    sandboxes = Sandboxes(sys.argv[1], Path(sys.argv[2]), image=sys.argv[3], lease_s=1.0)
    sandbox = await sandboxes.create("one")
    bash = await sandbox.bash()
    await bash.run(f"setsid sleep {sys.argv[4]} & sleep {sys.argv[4]} &", 30)
    print("ready", flush=True)
    await bash.run(f"sleep {sys.argv[4]}", 3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("victims", ["holder", "holder and spawner", "holder, spawner and server"])
def test_a_kill_of_the_holder_leaves_nothing(
    kind: SandboxKind, image: str, tmp_path: Path, victims: str, survivors: Callable[[str], list[str]]
) -> None:
    """Of the stage process alone, and together with what it started."""
    if kind == "process" and "server" in victims:
        pytest.skip("nobody is left to find plain processes")
    mark = f"3600.{uuid.uuid4().int}"
    root = tmp_path / "sandboxes"
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, kind, str(root), image, mark], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    (spawner,) = children(holder.pid)
    (server,) = children(spawner)
    holder.kill()
    if "spawner" in victims:
        os.kill(spawner, signal.SIGKILL)
    if "server" in victims:
        os.kill(server, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert survivors(mark) == []
    if "server" not in victims:
        assert asyncio.run(gone(root / "one"))
    assert survivors(str(root)) == []


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_an_agent_that_kills_all_it_can_costs_only_its_processes(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        await bash.run("echo 1 > file; cd /usr", LIMIT_S)
        result = await bash.run("kill -9 -1; sleep 3600", LIMIT_S)
        assert result.restarted  # bash spares itself, but not its container
        assert (await bash.run("cat ~/file", LIMIT_S)).output == "1\n"
        assert (await sandbox.exec(["cat", "file"], LIMIT_S)).stdout == b"1\n"

    use(sandboxes, body)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param("bomb() { bomb | bomb & }; bomb; sleep 20", id="forks"),
        pytest.param(
            "for i in 1 2 3 4 5 6 7 8; do python3 -c 'import time; x = bytearray(10**8); x[::4096] = x[::4096]; "
            "time.sleep(20)' & done; sleep 20",
            id="memory",
        ),
    ],
)
def test_a_bomb_ends_its_sandbox_and_not_the_node(
    sandboxes: Sandboxes, image: str, bomb: str, survivors: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Without a limit for all processes together the first needs the whole table, and the second 800 MB."""
    limits = Limits(memory_bytes=400 * 2**20, processes=64)
    limit = "processes" if "bomb()" in bomb else "memory_bytes"

    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        if limit == "processes" and os.geteuid() != 0:
            # The kernel itself refuses a user's forks, and the session comes back.
            assert (await bash.run(bomb, 3)).timed_out
            return
        with pytest.raises(SandboxLimitExceeded) as caught:
            await bash.run(bomb, 15)
        assert caught.value.limit == limit
        with pytest.raises(SandboxLimitExceeded):
            await sandbox.exec(["true"], LIMIT_S)

    use(sandboxes, body, SandboxSpec(limits=limits))
    assert survivors(str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_a_single_process_has_limits(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["bash", "-c", "ulimit -v; ulimit -f; ulimit -u; ulimit -c"], LIMIT_S)
        assert result.stdout.split() == [b"4194304", b"1048576", b"512", b"0"]
        result = await sandbox.exec(["python3", "-c", "bytes(8 * 2**30)"], LIMIT_S)
        assert b"MemoryError" in result.stderr
        result = await sandbox.exec(["truncate", "-s", "2G", "file"], LIMIT_S)
        assert result.exit_code == 153 or b"too large" in result.stderr

    use(sandboxes, body)


# What clients send ----------------------------------------------------------------------------------------------------


def test_two_servers_on_one_socket(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (sandbox.path / LOCK).exists()
        second = ExecutionServer(sandbox.path, "process", SandboxSpec())
        with pytest.raises(EndpointInUse, match="already serves"):
            await second.run(lambda: None)
        assert (await sandbox.exec(["true"], LIMIT_S)).exit_code == 0

    sandboxes = Sandboxes("process", tmp_path / "sandboxes")
    use(sandboxes, body)
    sandboxes.close()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x05\0\0\0" + bytes(8) + b"hello", messages.FRAME.pack(2**32 - 1, 1), messages.FRAME.pack(9, 1) + b"123"],
    ids=["nothing", "no request", "too large", "cut off"],
)
def test_garbage_on_the_socket_harms_nobody(tmp_path: Path, garbage: bytes) -> None:
    async def body(sandbox: Sandbox) -> None:
        with socket.socket(socket.AF_UNIX) as line:
            folder = os.open(sandbox.path, os.O_PATH)
            line.connect(f"/proc/self/fd/{folder}/{SOCKET}")
            os.close(folder)
            line.sendall(garbage)
            assert (await sandbox.exec(["echo", "on"], LIMIT_S)).stdout == b"on\n"
        assert (await sandbox.exec(["echo", "on"], LIMIT_S)).stdout == b"on\n"

    sandboxes = Sandboxes("process", tmp_path / "sandboxes")
    use(sandboxes, body)
    sandboxes.close()


def test_sessions_that_are_closed_or_were_never_there_say_so(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        await bash.close()
        await bash.close()
        for session in (bash, sandbox.bash_session(99), sandbox.cell_session(99)):
            with pytest.raises(ToolSessionLost):
                await session.run("1", LIMIT_S)

    sandboxes = Sandboxes("process", tmp_path / "sandboxes")
    use(sandboxes, body)
    sandboxes.close()


def test_a_cancelled_call_has_ended_its_command(sandboxes: Sandboxes, survivors: Callable[[str], list[str]]) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        await bash.run("X=1", LIMIT_S)
        for call in (bash.run(f"sleep {mark}", 3600), sandbox.exec(["sleep", mark], 3600)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.3)
            assert survivors(mark) == []
        assert (await bash.run("echo $X", LIMIT_S)).output == "1\n"

    use(sandboxes, body)


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_binds_environment_and_directory_are_as_asked(sandboxes: Sandboxes, image: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("1")
    spec = SandboxSpec(
        image=image,
        binds=(Bind(str(shared), "/mnt" if image else "/data"), Bind(str(shared), "/workspace/rw", writable=True)),
        environment={"ADDED": "2"},
        directory="/usr/bin",
    )
    place = spec.binds[0].target

    async def body(sandbox: Sandbox) -> None:
        script = f"cat {place}/file; pwd; echo $ADDED; echo 3 > /workspace/rw/new && cat {place}/new; touch {place}/no"
        result = await sandbox.exec(["sh", "-c", script], LIMIT_S)
        assert result.stdout == b"1/usr/bin\n2\n3\n"
        assert b"Read-only" in result.stderr
        assert (await (await sandbox.bash()).run("pwd", LIMIT_S)).output == "/usr/bin\n"

    use(sandboxes, body, spec)
    assert not (shared / "no").exists()


def test_a_client_of_a_dead_server_is_told_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        sandboxes = Sandboxes("process", tmp_path / "sandboxes")
        sandbox = await sandboxes.create("one")
        call = asyncio.ensure_future(sandbox.exec(["sleep", "3600"], 3600))
        await asyncio.sleep(0.2)
        os.kill(server_pid(sandbox), signal.SIGKILL)
        with pytest.raises(ProrlError, match="is gone"):
            await asyncio.wait_for(call, 10)
        with pytest.raises(SandboxFailed):
            await ExecutionClient.connect(sandbox.path)
        await sandbox.close()
        sandboxes.close()

    asyncio.run(main())


# Tool sessions --------------------------------------------------------------------------------------------------------


def test_a_kernel_is_reached_through_the_server(tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        kernel = await sandbox.kernel([sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
        assert (await kernel.run("a = 6", 60)).text == ""
        assert (await kernel.run("a * 7", 60)).text.strip() == "42"
        with pytest.raises(SandboxFailed):
            await sandbox.kernel(["/no/such/kernel", "{connection_file}"])

    sandboxes = Sandboxes("process", tmp_path / "s")
    use(sandboxes, body)
    sandboxes.close()


def test_an_image_without_python_is_said_when_the_session_starts(tmp_path: Path, small_image: Path) -> None:
    usable("bubblewrap")

    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFailed, match="python"):
            await sandbox.ipython()
        arguments = EditorArguments(command="create", path="/workspace/file", file_text="one\n")
        assert (await sandbox.edit(arguments, LIMIT_S)).ok
        assert (await (await sandbox.bash()).run("cat file", LIMIT_S)).output == "one\n"

    sandboxes = Sandboxes("bubblewrap", tmp_path / "s", image=str(small_image))
    use(sandboxes, body)
    sandboxes.close()


def test_an_editor_on_a_full_disk_loses_nothing(kind: SandboxKind, image: str, tmp_path: Path) -> None:
    """The sandbox's folder lies on a small file system of its own; what the model gets is a text."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    root = tmp_path / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(root)], check=True)
    try:
        sandboxes = Sandboxes(kind, root / "s", image=image)

        async def body(sandbox: Sandbox) -> None:
            await sandbox.write_file("file", b"one\n")
            bash = await sandbox.bash()
            filled = await bash.run("head -c 10000000 /dev/zero > big", LIMIT_S)
            assert "No space left" in filled.output
            arguments = EditorArguments(command="str_replace", path="file", old_str="one", new_str="two" * 100_000)
            outcome = await sandbox.edit(arguments, LIMIT_S)
            assert not outcome.ok
            assert "disk is full" in outcome.text
            assert await sandbox.read_file("file") == b"one\n"
            with pytest.raises(SandboxFailed, match="space"):
                await sandbox.write_file("other", b"x" * 100_000)
            assert (await bash.run("rm big; cat file", LIMIT_S)).output == "one\n"

        use(sandboxes, body)
        sandboxes.close()
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


# A hostile model ------------------------------------------------------------------------------------------------------

STOPPER = """
import os, signal
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid()):
            try:
                with open(f"/proc/{name}/stat") as stat:
                    if "python" not in stat.read():
                        os.kill(int(name), signal.SIGSTOP)
                os.kill(int(name), signal.SIGSTOP) if int(name) > os.getpid() else None
            except OSError:
                pass
"""


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_a_command_that_stops_whatever_starts_does_not_hang_the_server(
    sandboxes: Sandboxes, tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    """The server waited for ever for a child that was stopped between joining the container and its program."""

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("stop.py", STOPPER.encode())
        await (await sandbox.bash()).run("python3 stop.py & sleep 0.3", LIMIT_S)
        with suppress(SandboxFailed):
            await asyncio.wait_for(sandbox.exec(["true"], 1), 40)

    use(sandboxes, body)
    assert survivors(str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_a_holder_that_was_stopped_does_not_outlive_a_killed_server(
    sandboxes: Sandboxes, tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    """A command may stop the shell that holds the container, and keep the pipe open whose end is to end it."""
    mark = f"3600.{uuid.uuid4().int}"
    script = f"""
        for process in /proc/[0-9]*; do
            if grep -q 'read -r line' $process/cmdline; then exec 9>$process/fd/0; kill -STOP ${{process#/proc/}}; fi
        done 2>/dev/null
        (trap '' TERM HUP; setsid sleep {mark}) &
        trap '' TERM HUP
    """

    async def main() -> None:
        sandbox = await sandboxes.create("one")
        await (await sandbox.bash()).run(script, LIMIT_S)
        os.kill(server_pid(sandbox), signal.SIGKILL)
        assert await gone(sandbox.path)
        await sandbox.close()

    asyncio.run(main())
    assert survivors(mark) == []
    assert survivors(str(tmp_path)) == []


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_calls_at_once_after_the_containers_death_never_leave_it(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """Two of them started it again at one time, and a command ran with the host's root for its own."""
    (tmp_path / "host").write_text("the host's")
    killer = "for p in /proc/[0-9]*; do grep -q 'read -r line' $p/cmdline && kill -9 ${p#/proc/}; done 2>/dev/null"

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("mine", b"1")
        for _ in range(3):
            calls = [sandbox.exec(["sh", "-c", f"cat mine {tmp_path}/host"], LIMIT_S) for _ in range(6)]
            first = asyncio.ensure_future(sandbox.exec(["bash", "-c", killer], LIMIT_S))
            results = await asyncio.gather(*calls, sandbox.read_file("mine"), return_exceptions=True)
            await asyncio.wait((first,))
            for result in results:
                assert isinstance(result, SandboxFailed | bytes) or (result.stdout in (b"1", b""))
        assert (await sandbox.exec(["cat", "mine"], LIMIT_S)).stdout == b"1"

    use(sandboxes, body)


TAKEOVER = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.syscall(250, 1, 0, 0, 0, 0))  # a user namespace, a keyring
"""


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_a_command_makes_no_user_namespace_and_no_keyring(sandboxes: Sandboxes) -> None:
    """As root to the kernel it could mount cgroup file systems in one, and write the service's own limits."""

    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", TAKEOVER], LIMIT_S)
        assert result.stdout == b"-1 -1\n"
        result = await sandbox.exec(
            ["python3", "-c", "import threading; threading.Thread(target=print).start()"], LIMIT_S
        )
        assert (result.exit_code, result.stdout) == (0, b"\n")

    use(sandboxes, body)


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_the_hosts_devices_keep_their_modes(sandboxes: Sandboxes) -> None:
    """A service of root owns them; `chmod 0 /dev/null` inside took it from the whole host."""

    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(
            ["sh", "-c", "chmod 666 /dev/null /dev/zero; echo x > /dev/null && echo on"], LIMIT_S
        )
        assert result.stdout == b"on\n"
        assert result.stderr.count(b"chmod:") == 2

    use(sandboxes, body)


def test_whoever_held_a_sandbox_once_does_not_remove_it(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        other = await sandboxes.attach(sandbox.handle)
        await sandbox.close()
        assert (await other.exec(["true"], LIMIT_S)).exit_code == 0
        await other.close()

    use(sandboxes, body)


def test_a_file_call_finds_nothing_of_the_servers(sandboxes: Sandboxes) -> None:
    """A link to /proc/self/fd/2 gave the service's own log, and let it be cut."""

    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["ln", "-s", "/proc/self/fd/2", "/tmp/link"], LIMIT_S)
        with pytest.raises(SandboxFailed):
            await sandbox.read_file("/tmp/link")
        with pytest.raises(SandboxFailed):
            await sandbox.write_file("/tmp/link", b"")
        await sandbox.exec(["rm", "-f", "/tmp/link"], LIMIT_S)

    use(sandboxes, body)


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
@pytest.mark.parametrize(
    "script",
    [
        "import mmap; m = mmap.mmap(-1, 500 << 20); [m.__setitem__(i, 1) for i in range(0, len(m), 4096)]",
        "import threading, time; [threading.Thread(target=time.sleep, args=(9,)).start() for _ in range(300)]",
    ],
    ids=["shared memory", "threads"],
)
def test_what_is_shared_and_threads_count_too(sandboxes: Sandboxes, script: str) -> None:
    spec = SandboxSpec(limits=Limits(memory_bytes=300 * 2**20, processes=100))

    async def body(sandbox: Sandbox) -> None:
        call = sandbox.exec(["python3", "-c", f"{script}; import time; time.sleep(9)"], LIMIT_S)
        try:
            result = await call
        except SandboxLimitExceeded:
            return
        # The kernel refused it: a thread to a user, memory beyond the address space.
        assert b"can't start new thread" in result.stderr or b"Cannot allocate" in result.stderr

    use(sandboxes, body, spec)


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (SandboxSpec(binds=(Bind("relative", "/mnt"),)), "source"),
        (SandboxSpec(limits=Limits(processes=-1)), "processes"),
        (SandboxSpec(environment={"A=B": ""}), "environment"),
        (SandboxSpec(environment={"A": "x" * 200_000}), "bytes"),
        (SandboxSpec(directory="here"), "directory"),
        (SandboxSpec(writable=True), "writable"),  # type: ignore[arg-type]
    ],
    ids=["bind", "limit", "name", "size", "directory", "type"],
)
def test_a_wrong_specification_is_said_and_starts_nothing(tmp_path: Path, spec: SandboxSpec, where: str) -> None:
    async def main() -> None:
        sandboxes = Sandboxes("process", tmp_path / "s")
        with pytest.raises(SandboxFailed, match=where) as caught:
            await sandboxes.create("one", spec)
        assert caught.value.reason == "specification"
        assert list(sandboxes.root.iterdir()) == []
        sandboxes.close()

    asyncio.run(main())
