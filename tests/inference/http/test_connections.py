from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest
from aiohttp import web

from prorl_zmq.errors import ConfigError, EngineFailed
from prorl_zmq.inference.http.connections import ANSWER_LIMIT_BYTES, Connections


def test_a_busy_server_is_asked_again(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            answers = [web.Response(status=429, headers={"Retry-After": "0"}), web.Response(status=503), None]

            def handle(_: Any) -> web.Response:
                return answers.pop(0) or web.json_response({"well": 1})

            server.handlers["/generate"] = handle
            connections = Connections(server.url)
            answer = await connections.generate("/generate", b"{}")
            assert (answer.status, answer.body) == (200, b'{"well": 1}')
            assert len(server.requests) == 3
            await connections.close()

    asyncio.run(main())


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [{}, {"Retry-After": "3600"}])
def test_a_server_that_stays_busy_has_failed(serving: Any, status: int, headers: dict[str, str]) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: web.Response(status=status, headers=headers, text="full house")
            connections = Connections(server.url, retry_s=0.4)
            with pytest.raises(EngineFailed, match=f"busy .* {status} full house") as caught:
                await connections.generate("/generate", b"{}")
            assert caught.value.unreachable
            await connections.close()

    asyncio.run(main())


def test_other_errors_are_answers(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: web.Response(status=500, text="x" * 2000)
            connections = Connections(server.url)
            answer = await connections.generate("/generate", b"{}")
            assert answer.status == 500
            assert answer.excerpt() == "500 " + "x" * 300 + " …"
            assert len(server.requests) == 1
            await connections.close()

    asyncio.run(main())


def test_nothing_listens(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            url = server.url
        connections = Connections(url)
        with pytest.raises(EngineFailed, match=f"{url} cannot be reached") as caught:
            await connections.generate("/generate", b"{}")
        assert caught.value.unreachable
        with pytest.raises(EngineFailed, match="cannot be reached"):
            await connections.control("GET", "/health", timeout_s=5)
        await connections.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed the connection without an answer|failed: Client"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices"', "middle of its answer"),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"cho\r\n', "middle of its answer"),
        (b"HTTP/1.1 200", "failed|closed the connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "failed"),
    ],
)
def test_a_broken_answer_is_a_failure(scripted: Any, answer: bytes, words: str) -> None:
    async def main() -> None:
        async with scripted(answer) as (url, _):
            connections = Connections(url)
            with pytest.raises(EngineFailed, match=words) as caught:
                await connections.generate("/generate", b"{}")
            assert caught.value.unreachable
            await connections.close()

    asyncio.run(main())


def test_a_connection_closed_before_the_answer_is_tried_once_more(scripted: Any) -> None:
    async def main() -> None:
        good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        async with scripted(b"", good) as (url, asked):
            connections = Connections(url)
            assert (await connections.generate("/generate", b"{}")).body == b"{}"
            assert len(asked) == 2
            await connections.close()
        async with scripted(b"") as (url, asked):
            connections = Connections(url)
            with pytest.raises(EngineFailed):
                await connections.generate("/generate", b"{}")
            assert len(asked) == 2
            await connections.close()

    asyncio.run(main())


def test_an_endless_answer_is_refused(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: web.Response(body=b"x" * 100_000)
            connections = Connections(server.url)
            with pytest.raises(EngineFailed, match="more than 1000 bytes"):
                await connections.generate("/generate", b"{}", limit_bytes=1000)
            server.handlers["/health"] = lambda _: web.Response(body=b"x" * (ANSWER_LIMIT_BYTES + 1))
            with pytest.raises(EngineFailed, match="more than"):
                await connections.control("GET", "/health", timeout_s=10)
            await connections.close()

    asyncio.run(main())


def test_a_compressed_answer_is_not_unpacked(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            bomb = gzip.compress(b" " * 10**6)
            headers = {"Content-Encoding": "gzip"}
            server.handlers["/generate"] = lambda _: web.Response(body=bomb, headers=headers)
            connections = Connections(server.url)
            assert (await connections.generate("/generate", b"{}", limit_bytes=10_000)).body == bomb
            await connections.close()

    asyncio.run(main())


def test_cancelling_closes_the_connection(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: asyncio.sleep(3600)
            connections = Connections(server.url)
            task = asyncio.create_task(connections.generate("/generate", b"{}"))
            await server.until(lambda: server.requests)
            assert not server.cancelled.is_set()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(10):
                await server.cancelled.wait()
            await connections.close()

    asyncio.run(main())


def test_closing_ends_those_who_wait_with_a_failure(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: asyncio.sleep(3600)
            connections = Connections(server.url, limit=2)
            tasks = [asyncio.create_task(connections.generate("/generate", b"{}")) for _ in range(5)]
            await server.until(lambda: len(server.requests) == 2)
            await connections.close()
            await connections.close()
            async with asyncio.timeout(10):
                for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(outcome, EngineFailed)
                    assert "were closed" in str(outcome)
            with pytest.raises(EngineFailed, match="were closed"):
                await connections.generate("/generate", b"{}")
            assert len(server.requests) == 2

    asyncio.run(main())


def test_generations_do_not_hold_up_a_pause(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: asyncio.sleep(3600)
            connections = Connections(server.url, limit=1)
            tasks = [asyncio.create_task(connections.generate("/generate", b"{}")) for _ in range(3)]
            await server.until(lambda: server.asked("/generate"))
            assert (await connections.control("GET", "/health", timeout_s=10)).status == 200
            assert len(server.asked("/generate")) == 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await connections.close()

    asyncio.run(main())


def test_a_silent_server_is_waited_for_only_as_long_as_told(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/pause"] = lambda _: asyncio.sleep(3600)
            connections = Connections(server.url)
            with pytest.raises(EngineFailed, match=r"did not answer within 0.2 s"):
                await connections.control("POST", "/pause", timeout_s=0.2)
            await connections.close()

    asyncio.run(main())


def test_a_large_prompt_is_sent_whole(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda content: web.json_response(len(content))
            connections = Connections(server.url)
            body = ("[" + ",".join(["123456"] * 500_000) + "]").encode()
            assert (await connections.generate("/generate", body)).body == b"500000"
            await connections.close()

    asyncio.run(main())


def test_the_key_is_sent(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: web.json_response({})
            for key in ("secret", None):
                connections = Connections(server.url, api_key=key)
                assert (await connections.generate("/generate", b"{}")).status == 200
                await connections.close()
            assert server.keys == ["Bearer secret", None]

    asyncio.run(main())


def test_a_key_that_a_server_quotes_is_in_no_error(serving: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            server.handlers["/generate"] = lambda _: web.Response(status=401, text="wrong key: secret")
            connections = Connections(server.url, api_key="secret")
            assert (await connections.generate("/generate", b"{}")).excerpt() == "401 wrong key: [secret]"
            await connections.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 secret\r\n\r\n", b"HTTP/1.1 200 OK\r\nx\x01secret\r\n\r\n", b"secret\r\n\r\n"]
)
def test_a_key_in_what_is_no_http_is_in_no_error(said: bytes) -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writer.write(said)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key="secret")
            with pytest.raises(EngineFailed, match=r"\[secret\]"):
                await connections.generate("/generate", b"{}")
            await connections.close()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["gpu-7:8000", "tcp://gpu-7:8000", "http://", "https:///path", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="not an HTTP address"):
            Connections(url)

    asyncio.run(main())
