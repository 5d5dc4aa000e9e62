"""A listening socket in a sandbox's own network: what connects is a command of that sandbox, and nothing else opens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import uvloop
from support.sandboxes import on_each_kind, on_isolated_kinds

from prorl_zmq.errors import SandboxFailed
from prorl_zmq.tools.containers.specification import SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.tools.sandbox.sandbox import ListeningSocket, Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

LIMIT_S = 30.0
TALK = 'exec 3<>"/dev/tcp/127.0.0.1/$0" && echo "$1" >&3 && cat <&3'
HEAR = 'exec 3<>"/dev/tcp/127.0.0.1/$0" && cat <&3'


async def talk(sandbox: Sandbox, listening: ListeningSocket, word: str) -> tuple[bytes, bytes]:
    """Have a command inside connect and say a word; return what was heard outside, and inside of the answer."""

    async def accept() -> bytes:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listening.listener)
        with connection:
            heard = await loop.sock_recv(connection, 100)
            await loop.sock_sendall(connection, b"answer")
            return heard

    port = urlsplit(listening.url).port
    async with asyncio.timeout(LIMIT_S):
        command = sandbox.exec(["bash", "-c", TALK, str(port), word], LIMIT_S)
        heard, result = await asyncio.gather(accept(), command)
    return heard, result.stdout


@on_each_kind
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_command_inside_reaches_the_process_that_listens(sandboxes: Sandboxes, runner: Callable[..., object]) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one")
        before = {path.name for path in sandbox.path.iterdir()}
        listening = await sandbox.listen()
        with listening.listener:
            assert sandbox.kind == "process" or listening.url == "http://127.0.0.1:8000"
            assert await talk(sandbox, listening, "word") == (b"word\n", b"answer")
            assert {path.name for path in sandbox.path.iterdir()} == before
        await sandbox.close()

    runner(main())


def test_each_sandbox_has_its_own_port(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        first, second = await asyncio.gather(sandboxes.create("one"), sandboxes.create("two"))
        listening = await asyncio.gather(first.listen(), second.listen())
        with listening[0].listener, listening[1].listener:
            both = await asyncio.gather(talk(first, listening[0], "first"), talk(second, listening[1], "second"))
            assert both == [(b"first\n", b"answer"), (b"second\n", b"answer")]
        await asyncio.gather(first.close(), second.close())

    asyncio.run(main())


ELSEWHERE = """
import asyncio, sys
from pathlib import Path
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.jobs import SandboxHandle

async def main():
    kind, path, command = sys.argv[1:]
    sandboxes = Sandboxes(kind, Path(path).parent)
    sandbox = await sandboxes.attach(SandboxHandle(kind, path))
    listener, url = await sandbox.listen()
    command = asyncio.create_task(sandbox.exec(["bash", "-c", command, url.rpartition(":")[2]], 30))
    connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listener), 30)
    connection.sendall(b"answer")
    connection.close()
    listener.close()
    print((await command).stdout)
    await sandbox.close()
    sandboxes.close()

asyncio.run(main())
"""


def test_a_process_that_attaches_can_listen(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one")
        sandbox.release()
        command = [sys.executable, "-P", "-c", ELSEWHERE, sandboxes.kind, str(sandbox.path)]
        process = await asyncio.create_subprocess_exec(*command, HEAR, stdout=subprocess.PIPE)
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert output == b"b'answer'\n"

    asyncio.run(main())


@on_isolated_kinds
def test_a_port_that_is_taken_is_said(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one")
        listening = await sandbox.listen()
        with pytest.raises(SandboxFailed, match=r"port 8000 .* is taken") as caught:
            await sandbox.listen()
        assert caught.value.fields["reason"] == "port"
        other = await sandbox.listen(8001)
        other.listener.close()
        listening.listener.close()
        again = await sandbox.listen()  # once it is closed it is free
        again.listener.close()
        await sandbox.close()

    asyncio.run(main())


SQUAT = "import socket; s = socket.socket(); s.bind(('0.0.0.0', 8000)); s.listen(); print('on', flush=True); s.accept()"


@on_isolated_kinds
def test_a_program_inside_that_took_the_port_gets_no_calls(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one")
        bash = await sandbox.bash()
        result = await bash.run(f'coproc python3 -c "{SQUAT}"; read -r word <&${{COPROC[0]}}; echo $word', LIMIT_S)
        assert result.output.split()[-1] == "on"
        with pytest.raises(SandboxFailed, match="is taken: a program inside listens there"):
            await sandbox.listen()
        await sandbox.end_processes()
        listening = await sandbox.listen()
        with listening.listener:
            assert await talk(sandbox, listening, "word") == (b"word\n", b"answer")
        await sandbox.close()

    asyncio.run(main())


@on_isolated_kinds
def test_the_sandbox_still_has_no_other_network(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one")
        host = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = host.sockets[0].getsockname()[1]
        listening = await sandbox.listen()
        with listening.listener:
            script = f"tail -n +3 /proc/net/dev; exec 3<>/dev/tcp/1.1.1.1/53; exec 3<>/dev/tcp/127.0.0.1/{port}"
            result = await sandbox.exec(["bash", "-c", script], LIMIT_S)
        assert [line.split()[0] for line in result.stdout.splitlines()] == [b"lo:"]
        assert b"Network is unreachable" in result.stderr
        assert b"Connection refused" in result.stderr
        host.close()
        await host.wait_closed()
        await sandbox.close()

    asyncio.run(main())


@on_isolated_kinds
def test_a_sandbox_with_the_hosts_network_gets_a_port_of_the_host(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one", SandboxSpec(network=True))
        first, second = await sandbox.listen(), await sandbox.listen()
        with first.listener, second.listener:
            assert first.url != second.url
            assert await talk(sandbox, first, "word") == (b"word\n", b"answer")
        await sandbox.close()

    asyncio.run(main())


def test_a_sandbox_that_is_gone_is_said(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one")
        await sandbox.close()
        with pytest.raises(SandboxFailed, match="gone"):
            await sandbox.listen()

    asyncio.run(main())
