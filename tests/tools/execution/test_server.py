"""The execution server as a whole: leases, kills of each process, sessions, and what a client may send."""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
from served import LIMIT_S, gone, server_pid, use
from support.sandboxes import on_each_kind, on_isolated_kinds

from prorl_zmq.errors import (
    EndpointInUse,
    InvalidToolCall,
    MalformedMessage,
    ProrlError,
    SandboxFailed,
    ToolSessionLost,
)
from prorl_zmq.tools.containers.specification import Bind, Limits, SandboxSpec
from prorl_zmq.tools.editor.arguments import EditorArguments
from prorl_zmq.tools.execution import messages
from prorl_zmq.tools.execution.calls import REQUESTS
from prorl_zmq.tools.execution.client import ExecutionClient
from prorl_zmq.tools.execution.messages import SOCKET
from prorl_zmq.tools.execution.server import LOCK, ExecutionServer, _reply
from prorl_zmq.tools.processes.process_tree import children
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.wire.messages.jobs import SandboxKind


def asked(sandbox: Sandbox, request: bytes) -> bytes:
    """Send a request on a connection of its own; return the reply."""
    with socket.socket(socket.AF_UNIX) as line, messages.short_path(sandbox.path) as address:
        line.settimeout(LIMIT_S)
        line.connect(address)
        line.sendall(messages.frame(7, request))
        length, number = messages.FRAME.unpack(line.recv(messages.FRAME.size, socket.MSG_WAITALL))
        assert number == 7
        return line.recv(length, socket.MSG_WAITALL)


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


def test_a_sandbox_ends_with_its_folder(kind: SandboxKind, image: str, tmp_path: Path) -> None:
    """As that of a service goes, with all sandboxes of jobs under way, long before their leases are over."""

    async def main() -> None:
        sandboxes = Sandboxes(kind, tmp_path / "sandboxes", image=image, lease_s=3600.0)
        sandbox = await sandboxes.create("one")
        server = os.pidfd_open(server_pid(sandbox))
        sandbox.path.rename(tmp_path / "elsewhere")
        ended, _, _ = await asyncio.to_thread(select.select, [server], [], [], 20.0)
        os.close(server)
        assert ended
        sandboxes.close()

    asyncio.run(main())


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


@pytest.mark.parametrize("victim", ["server", "runtime", "holder"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_of_any_process_leaves_nothing(
    sandboxes: Sandboxes, victim: str, number: int, survivors: Callable[[str], list[str]]
) -> None:
    depth = ["server", "runtime", "holder"].index(victim)
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
    assert survivors(str(sandboxes.root)) == []


def test_a_container_that_is_killed_again_and_again_starts_again_each_time(sandboxes: Sandboxes) -> None:
    """The end of one container, told late, ended the next one as it started."""
    if sandboxes.kind == "process":
        pytest.skip("plain processes have no container")

    async def main() -> None:
        sandbox = await sandboxes.create("one")
        bash = await sandbox.bash()
        for _ in range(12):
            runtime, *_ = children(server_pid(sandbox))
            holder = runtime
            while below := children(holder):
                holder = below[0]
            running = asyncio.create_task(bash.run("sleep 3600", LIMIT_S))
            await asyncio.sleep(0.02)
            os.kill(holder, signal.SIGKILL)
            assert (await running).restarted
            assert (await bash.run("echo on", LIMIT_S)).output == "on\n"
        await sandbox.close()

    asyncio.run(main())


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


@pytest.mark.few(3)
@on_each_kind
@pytest.mark.parametrize("victims", ["holder", "holder and spawner", "holder, spawner and server"])
def test_a_kill_of_the_holder_leaves_nothing(
    kind: SandboxKind, image: str, tmp_path: Path, victims: str, survivors: Callable[[str], list[str]]
) -> None:
    """Of the stage process alone, and together with what it started."""
    if kind == "process" and "server" in victims:
        pytest.skip("plain processes have no container, and no process is left that could end them")
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


@on_isolated_kinds
def test_an_agent_that_kills_all_it_can_costs_only_its_processes(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        await bash.run("echo 1 > file; cd /usr", LIMIT_S)
        await bash.run("sleep 3600 &", LIMIT_S)
        result = await bash.run("kill -9 -1; sleep 0.5; jobs; pwd", LIMIT_S)
        assert not result.restarted  # bash spares itself, and the container's first process cannot be killed
        assert result.output.splitlines()[-1] == "/usr"
        assert (await bash.run("cat ~/file", LIMIT_S)).output == "1\n"
        assert (await sandbox.exec(["cat", "file"], LIMIT_S)).stdout == b"1\n"

    use(sandboxes, body)


def test_processes_are_ended_and_files_stay(sandboxes: Sandboxes, survivors: Callable[[str], list[str]]) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        await bash.run(f"echo 1 > file; (trap '' TERM HUP; setsid sleep {mark}) & sleep {mark} &", LIMIT_S)
        await sandbox.end_processes()
        assert survivors(mark) == []
        assert (await sandbox.exec(["cat", "file"], LIMIT_S)).stdout == b"1\n"
        await sandbox.end_processes()
        result = await bash.run("cat file", LIMIT_S)
        assert (result.output, result.restarted) == ("1\n", True)

    use(sandboxes, body)


# What clients send ----------------------------------------------------------------------------------------------------


def test_two_servers_on_one_socket(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (sandbox.path / LOCK).exists()
        second = ExecutionServer(sandbox.path, "process", SandboxSpec())
        with pytest.raises(EndpointInUse, match="already serves"):
            await second.run(lambda: None)
        assert (await sandbox.exec(["true"], LIMIT_S)).exit_code == 0

    use(sandboxes_of("process"), body)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x05\0\0\0" + bytes(8) + b"hello", messages.FRAME.pack(2**32 - 1, 1), messages.FRAME.pack(9, 1) + b"123"],
    ids=["nothing", "no request", "too large", "cut off"],
)
def test_garbage_on_the_socket_harms_nobody(sandboxes_of: SharedSandboxes, garbage: bytes) -> None:
    async def body(sandbox: Sandbox) -> None:
        with socket.socket(socket.AF_UNIX) as line:
            folder = os.open(sandbox.path, os.O_PATH)
            line.connect(f"/proc/self/fd/{folder}/{SOCKET}")
            os.close(folder)
            line.sendall(garbage)
            assert (await sandbox.exec(["echo", "on"], LIMIT_S)).stdout == b"on\n"
        assert (await sandbox.exec(["echo", "on"], LIMIT_S)).stdout == b"on\n"

    use(sandboxes_of("process"), body)


@pytest.mark.parametrize(
    "content",
    [b"\x82\xa4type\xabread_file\xa1x" + b"\x91" * 100_000, b"\x82\xa4type\xabread_file\xa4path\xa1\xff"],
    ids=["nested", "no UTF-8"],
)
def test_a_request_that_cannot_be_read_gets_a_reply(sandboxes_of: SharedSandboxes, content: bytes) -> None:
    """It ended the connection, and with it all calls that were running."""

    async def body(sandbox: Sandbox) -> None:
        assert b"malformed_message" in asked(sandbox, content)

    use(sandboxes_of("process"), body)


def test_two_requests_of_one_number_end_the_connection(
    sandboxes_of: SharedSandboxes, survivors: Callable[[str], list[str]]
) -> None:
    """The first one's command outlived the connection."""
    mark = f"3600.{uuid.uuid4().int}"
    request = messages.frame(1, messages.encode(REQUESTS["exec"](("sleep", mark), 3600.0, b"", 10, {}, "", "")))

    async def body(sandbox: Sandbox) -> None:
        with socket.socket(socket.AF_UNIX) as line, messages.short_path(sandbox.path) as address:
            line.settimeout(LIMIT_S)
            line.connect(address)
            line.sendall(2 * request)
            with suppress(ConnectionResetError):
                assert await asyncio.to_thread(line.recv, 1) == b""
        assert await asyncio.to_thread(survivors, mark) == []
        assert (await sandbox.exec(["echo", "on"], LIMIT_S)).stdout == b"on\n"

    use(sandboxes_of("process"), body)


@pytest.mark.parametrize("lease_s", [math.nan, 0.0, -1.0])
def test_a_lease_has_a_length(sandboxes_of: SharedSandboxes, lease_s: float) -> None:
    """Of NaN seconds it never expired, and the server stayed for ever."""

    async def body(sandbox: Sandbox) -> None:
        assert b"malformed_message" in asked(sandbox, messages.encode(messages.Take(lease_s)))
        await sandbox.check()

    use(sandboxes_of("process"), body)


def test_a_command_that_no_program_takes_costs_nothing_else(sandboxes: Sandboxes) -> None:
    """The container counted as disturbed and was started again, without its processes, and the call failed."""

    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        await bash.run("X=1; sleep 3600 &", LIMIT_S)
        for command, environment, said in (
            (["echo", "a\0b"], {}, b"null byte"),
            ([""], {}, b"empty"),
            (["echo"], {"A=": "1"}, b"variable name"),
            (["echo"], {"A": "\0"}, b"null byte"),
        ):
            result = await sandbox.exec(command, LIMIT_S, environment=environment)
            assert (result.exit_code, said in result.stderr) == (126, True), result
        with pytest.raises(InvalidToolCall, match="the command is empty"):
            await sandbox.exec([], LIMIT_S)
        with pytest.raises(InvalidToolCall, match=r"cannot be sent: .* surrogates"):
            await sandbox.exec(["echo", "\ud800"], LIMIT_S)
        assert (await sandbox.exec(["pwd"], LIMIT_S, directory="/a\0")).exit_code == 0
        result = await bash.run("echo $X; jobs -r", LIMIT_S)
        assert result.output.startswith("1\n[1]+")
        assert not result.restarted

    use(sandboxes, body)


def test_a_time_limit_that_is_over_is_no_time(sandboxes_of: SharedSandboxes) -> None:
    """A negative one, as a caller's reckoning of what is left may give, was no limit."""

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sleep", "3600"], -1.0)).timed_out
        bash = await sandbox.bash()
        assert (await bash.run("sleep 3600", -1.0)).timed_out
        for wrong in (
            sandbox.exec(["true"], math.nan),
            bash.run("true", math.nan),
            bash.run("true", LIMIT_S, math.nan),
        ):
            with pytest.raises(MalformedMessage, match=r"timeout_s|wait_s"):
                await wrong
        assert (await bash.run("echo on", LIMIT_S)).output == "on\n"

    use(sandboxes_of("process"), body)


def test_sizes_modes_and_ports_are_checked(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("x", b"hello")
        for wrong, said in (
            (sandbox.read_file("x", -1), "limit_bytes"),
            (sandbox.exec(["true"], 1.0, output_limit_bytes=-1), "output_limit_bytes"),
            (sandbox.write_file("x", b"", mode=-1), "mode"),
            (sandbox.write_file("x", b"", mode=0o10000), "mode"),
            (sandbox.listen(-1), "port"),
            (sandbox.listen(65536), "port"),
        ):
            with pytest.raises(MalformedMessage, match=said):
                await wrong
        with pytest.raises(InvalidToolCall, match="cannot be sent"):
            await sandbox.read_file("x", 2**70)
        assert await sandbox.read_file("x", 2**62) == b"hello"  # it asked for that much memory

    use(sandboxes_of("process"), body)


def test_a_result_that_no_reply_holds_is_an_error() -> None:
    assert _reply(bytes(5)) == messages.RESULT + messages.encode(bytes(5))
    for result, said in (
        (bytes(messages.FRAME_LIMIT_BYTES), b"bytes; at most"),
        ("\ud800", b"surrogates"),
        (2**70, b"serialize ints"),
    ):
        reply = _reply(result)
        assert reply.startswith(messages.ERROR)
        assert said in reply


@pytest.mark.parametrize("name", ["_open", "__init__", "end_everything"])
def test_only_public_calls_are_requests(sandboxes_of: SharedSandboxes, name: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        reply = asked(sandbox, msgspec.msgpack.encode({"type": name}))
        assert reply.startswith(messages.ERROR)
        assert b"malformed_message" in reply

    use(sandboxes_of("process"), body)


def test_sessions_that_are_closed_or_were_never_there_say_so(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        await bash.close()
        await bash.close()
        for session in (bash, sandbox.bash_session(99), sandbox.cell_session(99)):
            with pytest.raises(ToolSessionLost):
                await session.run("1", LIMIT_S)

    use(sandboxes_of("process"), body)


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


@on_isolated_kinds
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


def test_a_client_of_a_dead_server_is_told_at_once(sandboxes_of: SharedSandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes_of("process").create("killed")
        call = asyncio.ensure_future(sandbox.exec(["sleep", "3600"], 3600))
        await asyncio.sleep(0.2)
        os.kill(server_pid(sandbox), signal.SIGKILL)
        with pytest.raises(ProrlError, match="is gone"):
            await asyncio.wait_for(call, 10)
        with pytest.raises(SandboxFailed):
            await ExecutionClient.connect(sandbox.path)
        await sandbox.close()

    asyncio.run(main())


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
def test_a_wrong_specification_is_said_and_starts_nothing(
    sandboxes_of: SharedSandboxes, spec: SandboxSpec, where: str
) -> None:
    async def main() -> None:
        sandboxes = sandboxes_of("process")
        with pytest.raises(SandboxFailed, match=where) as caught:
            await sandboxes.create("one", spec)
        assert caught.value.reason == "specification"
        assert list(sandboxes.root.iterdir()) == []

    asyncio.run(main())


# Tool sessions --------------------------------------------------------------------------------------------------------


def test_a_kernel_is_reached_through_the_server(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        kernel = await sandbox.kernel([sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
        assert (await kernel.run("a = 6", 60)).text == ""
        assert (await kernel.run("a * 7", 60)).text.strip() == "42"
        with pytest.raises(SandboxFailed):
            await sandbox.kernel(["/no/such/kernel", "{connection_file}"])

    use(sandboxes_of("process"), body)


def test_an_image_without_python_is_said_when_the_session_starts(
    sandboxes_of: SharedSandboxes, small_image: Path
) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFailed, match="python"):
            await sandbox.ipython()
        arguments = EditorArguments(command="create", path="/workspace/file", file_text="one\n")
        assert (await sandbox.edit(arguments, LIMIT_S)).ok
        assert (await (await sandbox.bash()).run("cat file", LIMIT_S)).output == "one\n"

    use(sandboxes_of("bubblewrap"), body, SandboxSpec(image=str(small_image)))


def test_a_server_that_was_stopped_counts_that_for_no_command(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        server = server_pid(sandbox)
        bash = await sandbox.bash()
        running = asyncio.gather(
            bash.run("sleep 3; echo done", 2.5), sandbox.exec(["sh", "-c", "sleep 3; echo done"], 2.5)
        )
        await asyncio.sleep(0.5)
        os.kill(server, signal.SIGSTOP)
        await asyncio.sleep(2.5)
        os.kill(server, signal.SIGCONT)
        for result in await running:
            assert not result.timed_out
            assert result.exit_code == 0
        assert (await bash.run("sleep 60", 1.0)).timed_out

    use(sandboxes, body)


@on_each_kind
def test_an_editor_on_a_full_disk_loses_nothing(kind: SandboxKind, image: str, tmp_path: Path) -> None:
    """The sandbox's folder lies on a small file system of its own; what the model gets is a text."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
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
