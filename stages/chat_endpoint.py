r"""`ChatEndpoint`: a chat model behind an OpenAI-style server that the environment of the service names.

    POST {PREFIX_URL}/v1/chat/completions, Authorization: Bearer {PREFIX_KEY}
    {"model": PREFIX_MODEL, "messages": […], …}

The prefix is `PRORL_MODEL_NAME` for the model `name` of a job's `models`. Only the environment has the address and the
key, never a job. Requests to a busy or broken server are retried. The client is
written by hand, because importing OpenAI's takes more than a second.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, EngineFailed
from ..system.logs import keep_secret
from ..wire.messages.base import ENDPOINT_PREFIX, POLICY, endpoint_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..inference.http.connections import Connections

CONNECTIONS = 32
TRY_S = 120.0
"""Default limit of one reply, in seconds; a reasoning model needs a minute."""
RETRY_S = 60.0
"""Default time in seconds for which a busy, broken or unreachable server is retried."""
BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
REPLY_LIMIT_BYTES = 2**20
_NAMED = re.compile(rf"{ENDPOINT_PREFIX}([A-Z0-9_]{{1,64}})_URL")


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct, frozen=True):
    function: CalledFunction


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True):
    """The fields of a server's reply that are read."""

    choices: list[_Choice]


class ChatEndpoint:
    """Connects with the first question; `close` it.

    Args:
        model: its name in the service.
        environment: has the variables.
        try_s: limit of one reply.
        retry_s: how long a busy, broken or unreachable server is retried.
    """

    def __init__(
        self,
        model: str,
        environment: Mapping[str, str] = os.environ,
        *,
        try_s: float = TRY_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._prefix, self._what = endpoint_variables(model), f"model {model}"
        self._environment = environment
        self._try_s, self._retry_s = try_s, retry_s
        self._connections: Connections | None = None

    @property
    def model(self) -> str:
        """The name by which the server knows the model."""
        return self._environment.get(f"{self._prefix}_MODEL", "").strip()

    async def complete(self, body: Mapping[str, Any]) -> bytes:
        """Return the server's reply to a body, whose `model` is filled in.

        Raises:
            ConfigError: a variable of the environment is missing or invalid.
            EngineFailed: the server did not answer, or was busy or broken for too long (`unreachable`, `url`), or it
                rejected the request (`refused`, `output`).
        """
        connections = self._opened()
        packed = msgspec.json.encode({"model": self.model, **body})
        loop = asyncio.get_running_loop()
        deadline, attempt = loop.time() + self._retry_s, 0
        while True:
            failed = await self._try(connections, packed)
            if isinstance(failed, bytes):
                return failed
            # From half to full: spreads the retries of many answers that are wanted at the same time.
            backoff_s = random.uniform(0.5, 1) * min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S)  # noqa: S311
            if loop.time() + backoff_s > deadline:
                raise failed
            await asyncio.sleep(backoff_s)
            attempt += 1

    async def close(self) -> None:
        """Close the connections; may be called again."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()

    def unset(self) -> str:
        """Name the variables that are needed and not set; empty: all are set."""
        names = (f"{self._prefix}_URL", f"{self._prefix}_MODEL")
        return " and ".join(name for name in names if not self._environment.get(name, "").strip())

    def _opened(self) -> Connections:
        if self._connections is not None:
            return self._connections
        from ..inference.http.connections import Connections  # with aiohttp

        name, key_name = f"{self._prefix}_URL", f"{self._prefix}_KEY"
        if unset := self.unset():
            raise ConfigError(
                f"no {self._what} is configured: set {unset} (an OpenAI-style server and its model; {key_name}, if it "
                f"needs a key) in the environment of the stage processes",
                key=name,
            )
        url, key = (self._environment.get(one, "").strip() for one in (name, key_name))
        if not (key.isascii() and (key.isprintable() or not key)):
            raise ConfigError(f"{key_name} must be one line of plain ASCII; set it to the server's key", key=key_name)
        keep_secret(key)
        if "@" in url.partition("://")[2].partition("/")[0]:  # errors name the address
            raise ConfigError(f"{name} contains a user or password; remove it, and set {key_name} instead", key=name)
        try:
            # These connections do not retry: one loop decides on all retries.
            base = url.rstrip("/").removesuffix("/v1")
            self._connections = Connections(base, limit=CONNECTIONS, api_key=key or None, retry_s=0.0)
        except ConfigError as error:
            raise ConfigError(f"{name} is wrong: {error.message}", key=name) from error
        return self._connections

    async def _try(self, connections: Connections, body: bytes) -> bytes | EngineFailed:
        """Send the request once; return the reply, or the retryable failure."""
        url = connections.url
        try:
            async with asyncio.timeout(self._try_s):
                answer = await connections.generate("/v1/chat/completions", body, limit_bytes=REPLY_LIMIT_BYTES)
        except TimeoutError:
            problem = f"did not answer within {self._try_s:g} s"
        except EngineFailed as error:
            if not error.fields.get("unreachable"):
                raise EngineFailed(f"the {self._what} cannot be used: {error.message}", refused=True) from error
            problem = f"cannot be reached: {error.message}"
        else:
            if answer.status == 200:
                return answer.body
            if answer.status < 500:
                message = f"the {self._what} at {url} rejects the request: {answer.excerpt()}"
                raise EngineFailed(message, refused=True, output=answer.excerpt())
            problem = f"failed: {answer.excerpt()}"
        return EngineFailed(f"the {self._what} at {url} ({self._prefix}_URL) {problem}", unreachable=True, url=url)


def endpoints(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the models whose endpoints the environment has, in lower case."""
    found = (_NAMED.fullmatch(name) for name, value in environment.items() if value.strip())
    return tuple(sorted({match[1].lower() for match in found if match is not None} - {POLICY}))
