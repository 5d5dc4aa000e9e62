"""The pooled HTTP connections to one server, and their error handling.

There are two pools, so that a pause or a health check never waits behind generations. A generation has no time limit:
cancelling it closes the connection, and servers abort it then. A dead server shows as a closed connection. A request is
repeated once if the server closes the connection before it answers, since that may have been an idle one; generations
have no side effects. 429 and 503 are retried for a while. Not supported: proxies, redirects, cookies.
"""

from __future__ import annotations

import asyncio
import io
import random
from dataclasses import dataclass

import aiohttp

from ...errors import ConfigError, EngineFailed
from ...system.logs import HIDDEN

CONNECTIONS = 512
"""Default of the most connections for generations: below the usual limit of 1,024 open files."""
CONTROL_CONNECTIONS = 4
CONNECT_S = 10.0
KEEP_ALIVE_S = 3.0
"""Closes idle connections before the server does: uvicorn, which these servers use, closes its own after 5 s."""
RETRY_S = 120.0
"""Default time in seconds for which a busy server (429, 503) is retried."""
BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 15.0
ANSWER_LIMIT_BYTES = 16 * 2**20
"""Default of the longest answer."""
LARGE_BYTES = 2**20
EXCERPT = 300
"""Most characters of a server's answer in an error."""

_BUSY = (429, 503)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    retry_after_s: float | None = None
    """The wait that a busy server asks for."""

    def excerpt(self) -> str:
        """Return the status and the beginning of the answer, for an error."""
        text = " ".join(self.body[: 4 * EXCERPT].decode("utf-8", "replace").split())
        if text.startswith("<"):
            return f"{self.status} (a page of HTML)"
        return f"{self.status} {text[:EXCERPT] + ' …' if len(text) > EXCERPT else text}".strip()


class Connections:
    """Sends requests to one server; made and used on a running loop, and closed by its owner.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(
        self, url: str, *, limit: int = CONNECTIONS, api_key: str | None = None, retry_s: float = RETRY_S
    ) -> None:
        if not url.startswith(("http://", "https://")) or len(url.split("/", 3)[2]) == 0:
            raise ConfigError(f"{url!r} is not an HTTP address; write it as http://HOST:PORT", key="url")
        self.url = url.rstrip("/")
        self._retry_s = retry_s
        self._api_key = api_key or ""
        self._closed = False
        # A few compressed bytes may expand to many: compression is neither requested nor unpacked.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._generations = _session(limit, headers)
        self._control = _session(CONTROL_CONNECTIONS, headers)

    async def generate(
        self, path: str, body: bytes, retry_s: float | None = None, *, limit_bytes: int = ANSWER_LIMIT_BYTES
    ) -> Answer:
        """POST a generation and wait for its answer; retry a busy server for `retry_s` (None: the default).

        Raises:
            EngineFailed: it cannot be reached, closes the connection during its answer, or stays busy, all with
                `unreachable=True`; or its answer is longer than `limit_bytes`.
        """
        retry_s = self._retry_s if retry_s is None else retry_s
        loop = asyncio.get_running_loop()
        deadline, attempt = loop.time() + retry_s, 0
        while True:
            answer = await self._post_again(path, body, limit_bytes)
            if answer.status not in _BUSY:
                return answer
            # Full jitter: spreads the retries of many generations that are rejected at the same time.
            backoff_s = random.uniform(0.5, 1) * min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S)  # noqa: S311
            wait_s = backoff_s if answer.retry_after_s is None else max(answer.retry_after_s, BACKOFF_S)
            if loop.time() + wait_s > deadline:
                message = f"{self.url} is too busy to answer within {retry_s:g} s: {answer.excerpt()}"
                raise EngineFailed(message, unreachable=True)
            await asyncio.sleep(wait_s)
            attempt += 1

    async def control(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float,
        limit_bytes: int = ANSWER_LIMIT_BYTES,
    ) -> Answer:
        """Send a request other than a generation, once.

        Raises:
            EngineFailed: it cannot be reached, closes the connection during its answer, or does not answer within
                `timeout_s`, all with `unreachable=True`; or TLS with it fails, which a retry cannot fix; or its answer
                is longer than `limit_bytes`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(self._control, method, path, body, limit_bytes)
        except TimeoutError:
            message = f"{self.url}{path} did not answer within {timeout_s:g} s"
            raise EngineFailed(message, unreachable=True) from None
        except aiohttp.ClientError as error:
            raise self._failed(path, error) from error

    async def close(self) -> None:
        """Close all connections: waiting calls raise `EngineFailed`. May be called again."""
        self._closed = True
        await self._generations.close()
        await self._control.close()

    async def _post_again(self, path: str, body: bytes, limit_bytes: int) -> Answer:
        for last in (False, True):
            try:
                return await self._ask(self._generations, "POST", path, body, limit_bytes)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if last or self._closed or isinstance(error, aiohttp.ClientConnectorError):
                    raise self._failed(path, error) from error
            except aiohttp.ClientError as error:
                raise self._failed(path, error) from error
            except asyncio.CancelledError:
                # aiohttp cancels calls that wait for a connection when the pool closes; their callers did not.
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():
                    raise self._failed(path) from None
                raise
        raise AssertionError("unreachable")

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: bytes | None,
        limit_bytes: int = ANSWER_LIMIT_BYTES,
    ) -> Answer:
        if self._closed:
            raise self._failed(path)
        # aiohttp warns of large bytes; a file it sends in parts.
        data = io.BytesIO(body) if body and len(body) > LARGE_BYTES else body
        async with session.request(method, self.url + path, data=data, allow_redirects=False) as response:
            parts, size = [], 0
            async for part in response.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > limit_bytes:
                    raise EngineFailed(f"{self.url}{path} answers with more than {limit_bytes} bytes")
            content = b"".join(parts)
            if self._api_key and response.status != 200:  # a server may quote the rejected key
                content = content.replace(self._api_key.encode(), HIDDEN.encode())
            return Answer(response.status, content, _seconds(response.headers.get("Retry-After")))

    def _failed(self, path: str, error: Exception | None = None) -> EngineFailed:
        match error:
            case _ if self._closed:
                message = f"the connections to {self.url} were closed"
            case aiohttp.ClientSSLError():
                return EngineFailed(f"no TLS with {self.url}: {error.os_error}")
            case aiohttp.ClientConnectorError():
                message = f"{self.url} cannot be reached: {error.os_error}"
            case aiohttp.ClientPayloadError():
                message = f"{self.url}{path} ended in the middle of its answer"
            case aiohttp.ServerDisconnectedError():
                message = f"{self.url}{path} closed the connection without an answer"
            case _:
                words = str(error)  # aiohttp quotes what is not HTTP
                words = words.replace(self._api_key, HIDDEN) if self._api_key else words
                message = f"{self.url}{path} failed: {type(error).__name__}: {words}"
        return EngineFailed(message, unreachable=True)


def _session(limit: int, headers: dict[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


def _seconds(retry_after: str | None) -> float | None:
    """Parse a Retry-After header in seconds; its other form, a date, is ignored because two clocks differ."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else None
