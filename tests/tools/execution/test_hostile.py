"""A model that attacks what holds it: each test is named after what it once could do."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from served import LIMIT_S, gone, server_pid, use
from support.sandboxes import main_and_proofs, on_isolated_kinds

from prorl_zmq.errors import SandboxFailed, SandboxLimitExceeded
from prorl_zmq.tools.containers.specification import Limits, SandboxSpec
from prorl_zmq.tools.processes.process_tree import children, descendants

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes


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


@pytest.mark.parametrize("kind", main_and_proofs("apptainer", "bubblewrap"), indirect=True)
def test_a_command_that_stops_whatever_starts_does_not_hang_the_server(
    sandboxes: Sandboxes, survivors: Callable[[str], list[str]]
) -> None:
    """The server waited for ever for a child that was stopped between joining the container and its program."""

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("stop.py", STOPPER.encode())
        await (await sandbox.bash()).run("python3 stop.py & sleep 0.3", LIMIT_S)
        with suppress(SandboxFailed):
            await asyncio.wait_for(sandbox.exec(["true"], 1), 40)

    use(sandboxes, body)
    assert survivors(str(sandboxes.root)) == []


HOLDER = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
opened = []
for name in ("exe", "mem", "fd/0", "environ", "root", "cwd"):
    try:
        os.close(os.open(f"/proc/1/{name}", os.O_RDONLY))
        opened.append(name)
    except PermissionError:
        pass
try:
    os.chmod("/proc/1/exe", 0o4777)
    opened.append("chmod")
except PermissionError:
    pass
for request in (16, 0x4206):  # attach, seize
    if libc.ptrace(request, 1, None, None) == 0:
        opened.append(f"trace {request}")
for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGCONT, signal.SIGSEGV):
    os.kill(1, number)
print(opened, open("/proc/1/comm").read().strip())
"""


@on_isolated_kinds
def test_nothing_inside_can_touch_the_holder(sandboxes: Sandboxes) -> None:
    """In its place were the host's bwrap, whose mode a command could change, and a shell that it could trace."""

    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", HOLDER], LIMIT_S)
        assert (result.stdout, result.stderr) == (b"[] prorl-holder\n", b"")
        assert (await sandbox.exec(["true"], LIMIT_S)).exit_code == 0

    use(sandboxes, body)


PROGRAMS = "for p in /proc/[0-9]*; do readlink $p/exe; done | sort -u"


@on_isolated_kinds
def test_no_program_of_the_host_is_seen_running(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        seen = (await bash.run(PROGRAMS, LIMIT_S)).output.split()
        assert seen  # its own
        for path in seen:
            assert (await sandbox.exec(["test", "-x", path], LIMIT_S)).exit_code == 0, path
            changed = await sandbox.exec(["chmod", "4777", path], LIMIT_S)
            assert changed.exit_code != 0, path

    use(sandboxes, body)


TRACED = """
import ctypes, os, signal, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
stranger = subprocess.Popen(["sleep", "60"])
words = (ctypes.c_size_t * 2)()
print(libc.ptrace(16, stranger.pid, None, None), libc.ptrace(0x4206, stranger.pid, None, None),
      libc.process_vm_writev(stranger.pid, words, 1, words, 1, 0), ctypes.get_errno())
stranger.kill()
child = os.fork()
if child == 0:
    libc.ptrace(0, 0, None, None)  # trace me
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(7)
os.waitpid(child, 0)
libc.ptrace(7, child, None, None)  # go on
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@on_isolated_kinds
def test_a_command_traces_its_own_children_only(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", TRACED], LIMIT_S)
        assert result.stdout == b"-1 -1 -1 1\n7\n"

    use(sandboxes, body)


SIBLING = """
import ctypes, os, platform, signal, time
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
if ctypes.CDLL(None).syscall(clone, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:  # CLONE_PARENT: a sibling, no child
    os.setsid()
    held = bytearray(os.urandom(1)) * (100 * 2**20)
    time.sleep(60)
time.sleep(20)
"""


@on_isolated_kinds
def test_a_commands_sibling_is_watched_too(sandboxes: Sandboxes) -> None:
    """It was the execution server's child, and below no command."""

    async def main() -> None:
        sandbox = await sandboxes.create("one", SandboxSpec(limits=Limits(memory_bytes=200 * 2**20)))
        try:
            hold = ["python3", "-c", SIBLING]
            with pytest.raises(SandboxLimitExceeded) as caught:  # each alone is within the limit
                await asyncio.gather(*(sandbox.exec(hold, LIMIT_S) for _ in range(3)))
            assert caught.value.limit == "memory_bytes"
        finally:
            await sandbox.close()

    asyncio.run(main())


@on_isolated_kinds
def test_what_a_command_started_does_not_outlive_a_killed_server(
    sandboxes: Sandboxes, survivors: Callable[[str], list[str]]
) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def main() -> None:
        sandbox = await sandboxes.create("one")
        await (await sandbox.bash()).run(f"(trap '' TERM HUP; setsid sleep {mark}) & trap '' TERM HUP", LIMIT_S)
        os.kill(server_pid(sandbox), signal.SIGKILL)
        assert await gone(sandbox.path)
        await sandbox.close()

    asyncio.run(main())
    assert survivors(mark) == []
    assert survivors(str(sandboxes.root)) == []


@on_isolated_kinds
def test_the_runtimes_end_is_the_containers(sandboxes: Sandboxes, survivors: Callable[[str], list[str]]) -> None:
    """What runs inside was below no process that the watch knew from then on."""
    mark = f"3600.{uuid.uuid4().int}"

    async def body(sandbox: Sandbox) -> None:
        await (await sandbox.bash()).run(f"setsid sleep {mark} &", LIMIT_S)
        (runtime,) = (pid for pid in children(server_pid(sandbox)) if children(pid) and "bash" not in name_of(pid))
        os.kill(runtime, signal.SIGKILL)
        assert await asyncio.to_thread(survivors, mark) == []
        assert (await sandbox.exec(["true"], LIMIT_S)).exit_code == 0

    use(sandboxes, body)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


@on_isolated_kinds
def test_calls_at_once_after_the_containers_death_never_leave_it(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """Two of them started it again at one time, and a command ran with the host's root for its own."""
    (tmp_path / "host").write_text("the host's")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("mine", b"1")
        for _ in range(3):
            calls = [sandbox.exec(["sh", "-c", f"cat mine {tmp_path}/host"], LIMIT_S) for _ in range(6)]
            for pid in descendants(server_pid(sandbox)):
                with suppress(OSError):
                    if name_of(pid) == "prorl-holder\n":
                        os.kill(pid, signal.SIGKILL)
            results = await asyncio.gather(*calls, sandbox.read_file("mine"), return_exceptions=True)
            for result in results:
                assert isinstance(result, SandboxFailed | bytes) or (result.stdout in (b"1", b""))
        assert (await sandbox.exec(["cat", "mine"], LIMIT_S)).stdout == b"1"

    use(sandboxes, body)


TAKEOVER = """
import ctypes, fcntl, os, signal
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.syscall(250, 1, 0, 0, 0, 0))  # a user namespace, a keyring
with open("/usr/bin/env") as file:
    print(fcntl.fcntl(file, fcntl.F_GETFD))
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except PermissionError:
        print("no lease")
"""


@on_isolated_kinds
def test_a_command_makes_no_user_namespace_no_keyring_and_no_lease(sandboxes: Sandboxes) -> None:
    """As root to the kernel it could mount cgroup file systems in one, write the service's own limits, and make who
    opens a file of the host wait."""

    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", TAKEOVER], LIMIT_S)
        assert result.stdout == b"-1 -1\n1\nno lease\n"
        result = await sandbox.exec(
            ["python3", "-c", "import threading; threading.Thread(target=print).start()"], LIMIT_S
        )
        assert (result.exit_code, result.stdout) == (0, b"\n")

    use(sandboxes, body)


@on_isolated_kinds
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
