r"""`phase.judge`: a judge model behind an OpenAI-style server, or one of the service's own engines.

    POST {PRORL_JUDGE_URL}/v1/chat/completions, Authorization: Bearer {PRORL_JUDGE_KEY}
    {"model": PRORL_JUDGE_MODEL, "messages": […], "temperature": 0, "max_tokens": …}
    200 {"choices": [{"message": {"content": "…\nVERDICT: CORRECT"}}], …}

The environment of the service names the server, never a job. Requests to a busy or broken server are retried. A reply
without a verdict is requested once more; a second one raises `GraderFailed`, never a reward. The client is written by
hand, because importing OpenAI's takes more than a second.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import msgspec
import numpy as np

from ..data.trajectory import Role
from ..errors import ConfigError, EngineFailed, GraderFailed, JudgeUnreachable
from ..inference.chat import ChatMessage
from ..inference.chat.loading import chat_format
from ..system.logs import keep_secret
from ..wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..inference.http.connections import Connections
    from .job_backend import JobBackend

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

URL, MODEL, KEY = "PRORL_JUDGE_URL", "PRORL_JUDGE_MODEL", "PRORL_JUDGE_KEY"
CONNECTIONS = 32
TRY_S = 120.0
"""Default limit of one reply, in seconds; a reasoning model needs a minute."""
RETRY_S = 60.0
"""Default time in seconds for which a busy, broken or unreachable server is retried."""
BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
REPLY_TOKENS = 4096
REPLY_LIMIT_BYTES = 2**20
ASKED = 2
ENGINE_MOVES = 1
"""How often an engine that fails to judge is replaced."""
SHOWN_REPLY = 2_000

By = Literal["server", "engine"]


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Reply(msgspec.Struct, frozen=True):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Judgement(Generic[T_co]):
    """The reply of a judge."""

    value: T_co
    """The value that `read` parsed from the reply."""
    prompt: str
    reply: str
    model: str

    def notes(self) -> dict[str, str]:
        """Return prompt, reply and model as notes for an `Evaluation`."""
        return {"judge_model": self.model, "judge_prompt": self.prompt, "judge_verdict": self.reply}


class JudgeServer:
    """Asks the OpenAI-style server that the environment names; connects with the first question; `close` it."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, *, try_s: float = TRY_S, retry_s: float = RETRY_S
    ) -> None:
        self._environment = environment
        self._try_s, self._retry_s = try_s, retry_s
        self._connections: Connections | None = None

    async def reply(self, system: str, question: str, max_tokens: int = REPLY_TOKENS) -> tuple[str, str]:
        """Return a reply, and the model that gave it.

        Raises:
            JudgeUnreachable: the server did not answer, or was busy or broken for too long.
            GraderFailed: the environment names no server, or the server rejected the question.
        """
        connections, model = self._opened(), self._environment[MODEL].strip()
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        body = msgspec.json.encode({"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens})
        loop = asyncio.get_running_loop()
        deadline, attempt = loop.time() + self._retry_s, 0
        while True:
            failed = await self._try(connections, body)
            if isinstance(failed, str):
                return failed, model
            # From half to full: spreads the retries of many answers that are judged at the same time.
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

    def _opened(self) -> Connections:
        if self._connections is not None:
            return self._connections
        from ..inference.http.connections import Connections  # with aiohttp

        if unset := unset_settings(self._environment):
            raise _no_reward(
                f"no judge is configured: set {unset} for the EVAL stage processes (an OpenAI-style server and its "
                f"model; {KEY}, if it wants a key)"
            )
        url, key = (self._environment.get(name, "").strip() for name in (URL, KEY))
        if not (key.isascii() and (key.isprintable() or not key)):
            raise _no_reward(f"{KEY} must be plain ASCII")
        keep_secret(key)
        if "@" in url.partition("://")[2].partition("/")[0]:  # errors name the address
            raise _no_reward(f"{URL} has a user or password in it; set {KEY} instead")
        try:
            # These connections do not retry: one loop decides on all retries.
            base = url.rstrip("/").removesuffix("/v1")
            self._connections = Connections(base, limit=CONNECTIONS, api_key=key or None, retry_s=0.0)
        except ConfigError as error:
            raise _no_reward(f"{URL} is wrong: {error.message}") from error
        return self._connections

    async def _try(self, connections: Connections, body: bytes) -> str | JudgeUnreachable:
        """Ask once; return the reply, or the retryable failure."""
        try:
            async with asyncio.timeout(self._try_s):
                answer = await connections.generate("/v1/chat/completions", body, limit_bytes=REPLY_LIMIT_BYTES)
        except TimeoutError:
            problem = f"did not answer within {self._try_s:g} s"
        except EngineFailed as error:
            if not error.fields.get("unreachable"):
                raise _no_reward(f"the judge cannot be used: {error.message}", reason="result") from error
            problem = f"cannot be asked: {error.message}"
        else:
            if answer.status == 200:
                return _content(answer.body)
            if answer.status < 500:
                message = f"the judge at {connections.url} refuses the question: {answer.excerpt()}"
                raise _no_reward(message, reason="result", output=answer.excerpt())
            problem = f"failed: {answer.excerpt()}"
        return JudgeUnreachable(f"the judge at {connections.url} ({URL}) {problem}", url=connections.url)


@dataclass(frozen=True, slots=True)
class EngineJudge:
    """Asks an engine of the service, which counts the job as its own during the call."""

    engine: Callable[[], JobBackend]

    async def reply(self, system: str, question: str, max_tokens: int) -> tuple[str, str]:
        """Return a reply without its reasoning, and the model that gave it."""
        engine = self.engine()
        try:
            backend = await engine.assigned()
            chat = await chat_format(backend.chat)
            messages = [ChatMessage(Role.SYSTEM, system)] if system else []
            pieces = chat.opening([*messages, ChatMessage(Role.USER, question)], ())
            prompt = np.concatenate([piece.token_ids for piece in pieces])
            sampling = Sampling(temperature=0, max_tokens=max_tokens)
            done = await engine.generate(prompt, sampling, chat.stop_token_ids)
            return chat.read_turn(done.token_ids).text, backend.model or backend.backend_id
        except EngineFailed as error:
            backend = await engine.assigned()
            if error.fields.get("refused"):
                message = f"the engine {backend.backend_id} refuses to judge: {error.message}"
                raise _no_reward(message, reason="result") from error
            message = f"the engine {backend.backend_id} could not judge: {error.message}"
            raise JudgeUnreachable(message, url=backend.endpoint) from error
        finally:
            engine.release()


@dataclass(frozen=True, slots=True)
class Judge:
    """Asks a model to judge; the type of `EvalPhase.judge`."""

    server: JudgeServer
    engine: EngineJudge | None = None
    """None: without a service, as in `prorl regrade`."""

    async def __call__(
        self,
        question: str,
        /,
        *,
        read: Callable[[str], T | None],
        system: str = "",
        by: By = "server",
        max_tokens: int = REPLY_TOKENS,
    ) -> Judgement[T]:
        """Ask a judge, and return its reply.

        Args:
            question: the user message. Put text of a policy between marks that the policy cannot guess.
            read: parses the reply; None or an exception means unreadable, and the judge is asked once more.
            system: the system message; empty: none.
            by: `server`: the one that the environment of the EVAL processes names (`PRORL_JUDGE_URL`,
                `PRORL_JUDGE_MODEL`, `PRORL_JUDGE_KEY`); `engine`: an engine of the service, which is the policy itself
                if the service has no other.
            max_tokens: most tokens of the reply.

        Raises:
            JudgeUnreachable: the judge did not answer; the job's EVAL is retried.
            GraderFailed: no judge is configured, it rejected the question, or no reply could be parsed.
            NoBackend: the service has no engine.
        """
        if by not in ("server", "engine"):
            raise ConfigError(f'a judge is asked by="server" or by="engine", not by={by!r}', key="by")
        asked = self.server if by == "server" else self.engine
        if asked is None:
            raise _no_reward("a service's engine is to judge, and no service runs here")
        reply, model, why = "", "", ""
        for _ in range(ASKED):
            reply, model = await asked.reply(system, question, max_tokens)
            try:
                value, why = read(reply), ""
            except Exception as error:  # noqa: BLE001 - the policy is not to blame for the judge's reply
                value, why = None, f" (read raised {type(error).__name__}: {error})"
            if value is not None:
                return Judgement(value, f"{system}\n\n{question}" if system else question, reply, model)
        message = f"the judge {model} gave no verdict, asked {ASKED} times{why}; its last reply ends: {reply[-300:]!r}"
        raise _no_reward(message, reason="result", output=reply[-SHOWN_REPLY:])


def unset_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Name the environment variables that a judge needs and that are not set; empty: all are set."""
    return " and ".join(name for name in (URL, MODEL) if not environment.get(name, "").strip())


def _no_reward(message: str, reason: str = "raised", output: str = "") -> GraderFailed:
    return GraderFailed(message, reason=reason, output=output)


def _content(body: bytes) -> str:
    try:
        reply = msgspec.json.decode(body, type=_Reply)
    except (msgspec.MsgspecError, UnicodeError):
        return ""  # treated like a reply without a verdict: asked again
    return (reply.choices[0].message.content or "") if reply.choices else ""
