"""A model that attacks what holds it: each test is named after what it once could do."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from served import LIMIT_S, gone, server_pid, use

from prorl_zmq.errors import SandboxFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
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


INJECTION = """
import ctypes, os, struct, time
libc = ctypes.CDLL(None)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
(holder,) = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()
             and b"read -r line" in open(f"/proc/{p}/cmdline", "rb").read()
             and open(f"/proc/{p}/comm").read() == "sh\\n"]
open("/workspace/fake", "w").write("#!/bin/sh\\necho forged\\n")
os.chmod("/workspace/fake", 0o755)
open("/workspace/taken.py", "w").write('''
import ctypes, os, time
libc = ctypes.CDLL(None)
uid, gid = os.getuid(), os.getgid()
libc.unshare(0x10020000)
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    try:
        open("/proc/self/" + name, "w").write(text)
    except OSError:
        pass
libc.mount(b"/workspace/fake", os.path.realpath("/usr/bin/python3").encode(), None, 4096, None)
time.sleep(1000)
''')
libc.ptrace(16, holder, None, None)
os.waitpid(holder, 0)
registers = (ctypes.c_ulonglong * 27)()
libc.ptrace(12, holder, None, ctypes.addressof(registers))
base = (registers[19] - 8192) & ~15
words, places = b"", []
for word in (b"/usr/bin/python3", b"/workspace/taken.py"):
    places.append(base + len(words))
    words += word + bytes(1)
words += bytes(-len(words) % 8)
arguments = base + len(words)
words += b"".join(struct.pack("<Q", place) for place in (*places, 0))
for i in range(0, len(words), 8):
    libc.ptrace(5, holder, base + i, int.from_bytes(words[i : i + 8], "little"))
registers[10], registers[14], registers[13], registers[12] = 59, places[0], arguments, 0  # execve
registers[15] = (1 << 64) - 1
registers[16] -= 2
libc.ptrace(13, holder, None, ctypes.addressof(registers))
libc.ptrace(17, holder, None, None)
time.sleep(1)
print(open(f"/proc/{holder}/cmdline").read().replace(chr(0), " "))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack is written for this machine's registers")
@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"], indirect=True)
def test_a_holder_that_was_taken_over_moves_no_later_command(sandboxes: Sandboxes) -> None:
    """It went to a mount namespace with another python3, and the next check ran there."""

    async def body(sandbox: Sandbox) -> None:
        taken = await sandbox.exec(["python3", "-c", INJECTION], LIMIT_S)
        assert b"taken.py" in taken.stdout, taken
        result = await sandbox.exec(["python3", "-c", "print('honest')"], LIMIT_S)
        assert result.stdout == b"honest\n"

    use(sandboxes, body)
