"""`HttpLink`: an MCP server that runs already, over streamable HTTP; the operator allows its address.

    POST {url}, Accept: application/json, text/event-stream     one message; the answer is JSON or a stream of events
    GET {url}, Accept: text/event-stream                        what the server sends between answers; 405: it does not
    DELETE {url}                                                ends the session

The session's id and the version of the protocol are headers. Redirects are not followed, since the key must not reach
another address; nothing is unpacked, since a packed answer could be far larger than its size says. The key
is hidden in all that a server says.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp

from ...system.logs import HIDDEN
from ..processes.child import to_the_end
from .session import MESSAGE_LIMIT_BYTES, Link

if TYPE_CHECKING:
    from collections.abc import Coroutine

CONNECT_S = 10.0
CLOSE_S = 2.0
"""Seconds in which a server must answer the end of a session."""
WORDS = 300
"""Characters of a refusal, in errors."""
JSON, EVENTS = "application/json", "text/event-stream"


class HttpLink(Link):
    """A session with one server.

    Args:
        url: its address.
        key: sent as a bearer token; empty: none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self._url, self._key = url, key
        self._headers = {"Accept": f"{JSON}, {EVENTS}", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[int | str, asyncio.Task[None]] = {}
        self._sent = 0

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)

    def send(self, message: bytes, number: int | None) -> None:
        self._sent += 1
        self._start(number if number is not None else f"note {self._sent}", self._post(message, number))

    def listen(self, *, on: bool) -> None:
        """Do nothing: each answer comes with its request."""

    def forget(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()

    def agreed(self, protocol: str) -> None:
        self._headers["MCP-Protocol-Version"] = protocol
        self._start("events", self._listen())

    async def close(self) -> None:
        await to_the_end(self._close())

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        session, self._session = self._session, None
        if session is not None:
            if "Mcp-Session-Id" in self._headers:
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with asyncio.timeout(CLOSE_S), session.delete(self._url, headers=self._headers):
                        pass
            await session.close()

    def _start(self, name: int | str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.get_running_loop().create_task(self._reported(work))
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _reported(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._lost(f"cannot be reached: {type(error).__name__}: {error}")

    def _lost(self, problem: str) -> None:
        self.session.lost(problem.replace(self._key, HIDDEN) if self._key else problem)

    def _received(self, content: bytes) -> None:
        self.session.received(content.replace(self._key.encode(), HIDDEN.encode()) if self._key else content)

    async def _post(self, message: bytes, number: int | None) -> None:
        if self._session is None:
            return
        headers = {**self._headers, "Content-Type": JSON}
        request = self._session.post(self._url, data=message, headers=headers, allow_redirects=False)
        async with request as response:
            if session := response.headers.get("Mcp-Session-Id"):
                self._headers["Mcp-Session-Id"] = session
            if response.status == 202:
                return
            if response.content_type == EVENTS and response.status == 200:
                await self._events(response, number)
                if number is not None and self.session.waits_for(number):
                    self._lost("ended a stream without the answer")
                return
            content = await _whole(response)
            if content is None:
                self.session.too_long(MESSAGE_LIMIT_BYTES)
            elif response.content_type == JSON and content.startswith(b"{"):
                self._received(content)  # of status 400 and more as well: the error of a request
            if response.status != 200:
                self._lost(_refusal(response, content or b""))

    async def _listen(self) -> None:
        if self._session is None:
            return
        headers = {**self._headers, "Accept": EVENTS}
        with suppress(aiohttp.ClientError, OSError):  # what is lost are notifications
            async with self._session.get(self._url, headers=headers, allow_redirects=False) as response:
                if response.status == 200 and response.content_type == EVENTS:
                    await self._events(response)

    async def _events(self, response: aiohttp.ClientResponse, number: int | None = None) -> None:
        """Pass on the data of a stream's events, which end with empty lines, up to the answer to a request."""
        event, line, held, dropping = bytearray(), bytearray(), b"", False
        async for read in response.content.iter_any():
            piece = held + read
            held = b"\r" if piece.endswith(b"\r") else b""  # its line feed may be in the next piece
            piece = piece[: len(piece) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            first, *others = piece.split(b"\n")
            line += first
            for following in others:
                if line.startswith(b"data:"):
                    event += b"\n" * bool(event) + line[5:].strip()
                elif not line:
                    if event and not dropping:
                        self._received(bytes(event))
                    event, dropping = bytearray(), False
                    if number is not None and not self.session.waits_for(number):
                        return  # some servers never end a stream
                line = bytearray(following)
            size = len(event) + len(line)
            if dropping:
                self.session.dropped(size)
            elif size > MESSAGE_LIMIT_BYTES:
                dropping = True
                self.session.too_long(size)
            if dropping:
                event.clear()
                line.clear()


async def _whole(response: aiohttp.ClientResponse) -> bytes | None:
    """Return an answer's body; None if it is too long."""
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > MESSAGE_LIMIT_BYTES:
            return None
    return bytes(content)


def _refusal(response: aiohttp.ClientResponse, content: bytes) -> str:
    text = content.decode("utf-8", "replace").strip()[:WORDS]
    where = f", to {response.headers.get('Location', '')}" if response.status // 100 == 3 else ""
    return f"answered with status {response.status}{where}{f': {text}' if text else ''}"
