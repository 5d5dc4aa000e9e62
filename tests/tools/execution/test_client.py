"""The client of an execution server that is broken or hostile: whatever it sends, each call ends with one error."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_zmq.errors import ErrorInfo, InternalError, ProrlError, SandboxFailed
from prorl_zmq.tools.execution import messages
from prorl_zmq.tools.execution.calls import SandboxCalls
from prorl_zmq.tools.execution.client import ExecutionClient, RemoteBash
from prorl_zmq.tools.execution.messages import ERROR, FRAME, FRAME_LIMIT_BYTES, RESULT, SOCKET, encode, frame
from prorl_zmq.tools.execution.passed_socket import pass_descriptors, receive_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

LIMIT_S = 20.0
GONE = "the execution server of the sandbox one is gone"


@asynccontextmanager
async def answered(folder: Path, answer: Callable[[int], list[bytes] | None]) -> AsyncIterator[ExecutionClient]:
    """Connect to a server that sends `answer(number)` to each request, and closes the connection after None."""
    path = folder / "one"
    path.mkdir()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while header := await reader.read(FRAME.size):
            length, number = FRAME.unpack(header)
            await reader.readexactly(length)
            pieces = answer(number)
            if pieces is None:
                break
            for piece in pieces:
                writer.write(piece)
        writer.close()

    async with await asyncio.start_unix_server(serve, path / SOCKET):
        client = await ExecutionClient.connect(path)
        try:
            async with asyncio.timeout(LIMIT_S):
                yield client
        finally:
            client.close()
            await client.wait_closed()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "begins with b''", id="empty"),
        pytest.param(b"X" + encode(b"data"), "begins with b'X'", id="mark"),
        pytest.param(RESULT, "truncated", id="no result"),
        pytest.param(RESULT + encode(7), "Expected `bytes`, got `int`", id="type"),
        pytest.param(RESULT + b"\x91" * 100_000, "Expected `bytes`", id="nested"),
        pytest.param(RESULT + encode(b"data") + b"more", "trailing", id="more than a result"),
        pytest.param(ERROR + encode({"code": "x"}), "missing required field", id="error"),
        pytest.param(ERROR + encode({"code": "x", "message": "y", "fields": {"z": []}}), "fields", id="fields"),
        pytest.param(ERROR + b"\x82\xa4code\xa1\xff\xa7message\xa1m", "decode", id="no UTF-8"),
    ],
)
def test_a_reply_that_cannot_be_read_is_an_error_of_the_server(content: bytes, said: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with answered(tmp_path, lambda number: [frame(number, content)]) as client:
            with pytest.raises(InternalError, match="reply cannot be read") as caught:
                await client.call(SandboxCalls.read_file, "x", 10)
            assert said in caught.value.message

    asyncio.run(main())


@pytest.mark.parametrize("number", [0, 2, 2**64 - 1])
def test_replies_to_no_request_are_dropped(number: int, tmp_path: Path) -> None:
    """Each request has one reply: those of another number, and a second one, reach no call."""
    strange, wrong = frame(number, RESULT + encode(b"strange")), RESULT + encode(b"second")

    def answer(asked: int) -> list[bytes]:
        own = frame(asked, RESULT + encode(b"%d" % asked))
        return [strange * 5_000 if asked == 1 else b"", own, frame(asked, wrong), own[:3], own[3:]]

    async def main() -> None:
        async with answered(tmp_path, answer) as client:
            for asked in (1, 2, 3):
                assert await client.call(SandboxCalls.read_file, "x", 10) == b"%d" % asked

    asyncio.run(main())


def test_a_reply_beyond_the_limit_ends_the_connection(tmp_path: Path) -> None:
    """Its header alone made the client wait for 4 GiB, and hold what came of them."""

    async def main() -> None:
        lost = asyncio.Event()
        async with answered(tmp_path, lambda number: [FRAME.pack(FRAME_LIMIT_BYTES + 1, number)]) as client:
            client.when_lost(lost.set)
            with pytest.raises(SandboxFailed, match=GONE):
                await client.call(SandboxCalls.read_file, "x", 10)
            await lost.wait()
            with pytest.raises(SandboxFailed, match=GONE):
                await client.call(SandboxCalls.read_file, "x", 10)

    asyncio.run(main())


@pytest.mark.parametrize("part", [b"", b"\0", FRAME.pack(100, 1), frame(1, RESULT + encode(b"x" * 100))[:-1]])
def test_a_server_that_closes_in_the_middle_fails_all_calls(part: bytes, tmp_path: Path) -> None:
    def answer(number: int) -> list[bytes] | None:
        return [] if number == 1 else [part] if number == 2 else None

    async def main() -> None:
        async with answered(tmp_path, answer) as client:
            calls = [client.call(SandboxCalls.read_file, "x", 10) for _ in range(3)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [(type(one), str(one)) for one in results] == [(SandboxFailed, GONE)] * 3
            bash = RemoteBash(client, 1)
            await bash.close()  # it ended with its sandbox

    asyncio.run(main())


def test_an_unknown_error_is_an_error_of_its_words(tmp_path: Path) -> None:
    info = ErrorInfo("of_a_later_release", "words", {"message": "others", "self": 1})

    async def main() -> None:
        async with answered(tmp_path, lambda number: [frame(number, ERROR + encode(info))]) as client:
            with pytest.raises(ProrlError, match="words") as caught:
                await client.call(SandboxCalls.read_file, "x", 10)
            assert caught.value.info() == msgspec.structs.replace(info, code="error")

    asyncio.run(main())


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_server_that_passes_no_tcp_socket_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()

    def send(name: str, *passing: int) -> None:
        with socket.socket(socket.AF_UNIX) as channel, messages.short_path(folder, name) as path:
            channel.connect(path)
            if passing:
                socket.send_fds(channel, [b"S"], passing)

    async def main() -> None:
        unix, null = socket.socket(socket.AF_UNIX), os.open(os.devnull, os.O_RDONLY)
        before = descriptors()

        async def connected(name: str) -> None:
            send(name)

        async def passed(name: str, descriptor: int) -> None:
            send(name, descriptor)

        async def silent(name: str) -> None:
            assert name

        for ask, said in (
            (silent, "passed no descriptor"),
            (connected, "passed no descriptor"),
            (lambda name: passed(name, null), "Socket operation on non-socket"),
            (lambda name: passed(name, unix.fileno()), "passed no descriptor of TCP"),
        ):
            with pytest.raises(SandboxFailed, match=said):
                await receive_socket(folder, ask)
        assert descriptors() == before
        assert list(folder.iterdir()) == []
        unix.close()
        os.close(null)

    asyncio.run(main())


def test_a_socket_is_passed_to_a_waiting_process_only(tmp_path: Path) -> None:
    with socket.socket() as listening, pytest.raises(SandboxFailed, match=r"cannot be passed to \.pass-none"):
        pass_descriptors([listening.fileno()], tmp_path, ".pass-none")
