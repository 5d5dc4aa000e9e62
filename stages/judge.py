r"""`phase.judge`: a judge model behind an OpenAI-style server, or one of the service's own engines.

    {"model": PRORL_JUDGE_MODEL, "messages": […], "temperature": 0, "max_tokens": …}
    200 {"choices": [{"message": {"content": "…\nVERDICT: CORRECT"}}], …}

The environment of the service names the server, never a job (see `chat_endpoint`). A reply without a verdict is
requested once more; a second one raises `GraderFailed`, never a reward.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import msgspec
import numpy as np

from ..data.trajectory import Role
from ..errors import ConfigError, EngineFailed, GraderFailed, JudgeUnreachable
from ..inference.chat import ChatMessage
from ..inference.chat.loading import chat_format
from ..wire.messages.jobs import Sampling
from .chat_endpoint import RETRY_S, TRY_S, ChatEndpoint, Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .job_backend import JobBackend

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PREFIX = "PRORL_JUDGE"
REPLY_TOKENS = 4096
ASKED = 2
ENGINE_MOVES = 1
"""How often an engine that fails to judge is replaced."""
SHOWN_REPLY = 2_000

By = Literal["server", "engine"]


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
    """Asks the OpenAI-style server that the environment names (see `chat_endpoint`); `close` it."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, *, try_s: float = TRY_S, retry_s: float = RETRY_S
    ) -> None:
        self._endpoint = ChatEndpoint(PREFIX, "judge", "EVAL", environment, try_s=try_s, retry_s=retry_s)

    async def reply(self, system: str, question: str, max_tokens: int = REPLY_TOKENS) -> tuple[str, str]:
        """Return a reply, and the model that gave it.

        Raises:
            JudgeUnreachable: the server did not answer, or was busy or broken for too long.
            GraderFailed: the environment names no server, or the server rejected the question.
        """
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
        try:
            return _content(await self._endpoint.complete(body)), self._endpoint.model
        except ConfigError as error:
            raise _no_reward(error.message) from error
        except EngineFailed as error:
            if error.fields.get("refused"):
                output = str(error.fields.get("output", ""))
                raise _no_reward(error.message, reason="result", output=output) from error
            raise JudgeUnreachable(error.message, url=str(error.fields["url"])) from error

    async def close(self) -> None:
        """Close the connections; may be called again."""
        await self._endpoint.close()


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
    return ChatEndpoint(PREFIX, "judge", "EVAL", environment).unset()


def _no_reward(message: str, reason: str = "raised", output: str = "") -> GraderFailed:
    return GraderFailed(message, reason=reason, output=output)


def _content(body: bytes) -> str:
    try:
        reply = msgspec.json.decode(body, type=Completion)
    except (msgspec.MsgspecError, UnicodeError):
        return ""  # treated like a reply without a verdict: asked again
    return (reply.choices[0].message.content or "") if reply.choices else ""
