"""`phase.judge`: a model of the service judges in EVAL, by default the one named `judge`.

The job's `models` map the name, as for a conversation; an unmapped name is a model's name itself, so `judge` is the
backends of that name, or the endpoint of `PRORL_MODEL_JUDGE_URL` (see `other_models`). A reply that `read` cannot parse
is requested once more. A judge that fails raises, and never gives a reward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import numpy as np

from ..data.trajectory import Role
from ..errors import EngineFailed, GraderFailed, JudgeUnreachable, NoBackend, ProrlError
from ..inference.chat import ChatMessage
from ..wire.messages.base import endpoint_variables
from ..wire.messages.jobs import Sampling
from .conversation import checked_messages
from .other_models import OtherModels
from .turn_sampler import TurnSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..wire.messages.jobs import Job
    from .job_backend import JobBackend
    from .other_models import ChatEndpoints

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

JUDGE = "judge"
"""The name of the judge, unless a task gives another one."""
REPLY_TOKENS = 4096
ASKED = 2
CALLS_LIMIT = 256
"""Most questions of one EVAL."""
SHOWN_REPLY = 2_000
_THOUGHT_END = "</think>"
NOTED_CALLS = 4
"""The first questions of an EVAL, whose texts are notes."""


@dataclass(frozen=True, slots=True)
class Judgement(Generic[T_co]):
    """The reply of a judge."""

    value: T_co
    """The value that `read` parsed from the reply."""
    prompt: str
    reply: str
    model: str


@dataclass(slots=True)
class Judge:
    """Asks models to judge; the type of `EvalPhase.judge`. Release its `models`."""

    models: OtherModels
    notes: dict[str, str] = field(default_factory=dict)
    """What the judge was asked and replied, for the result's notes: `judge_model`, `judge_prompt`, `judge_verdict`, and
    for a second question `judge_prompt 2` and so on."""
    unanswered: set[int] = field(default_factory=set)
    """The questions that wait for a reply, or whose wait was cancelled."""
    _calls: int = 0

    async def __call__(
        self,
        question: str | Sequence[ChatMessage],
        /,
        *,
        read: Callable[[str], T | None],
        system: str = "",
        model: str = JUDGE,
        max_tokens: int = REPLY_TOKENS,
    ) -> Judgement[T]:
        """Ask a judge, and return its reply. Its texts become notes of the result. Several calls may run at once.

        Args:
            question: the user message, or messages. Put text of a policy between marks that the policy cannot guess.
            read: parses the reply, without its reasoning: what `choice` or `json_object` return, or a function of your
                own. None or an exception means unreadable, and the judge is asked once more.
            system: the system message; empty: none.
            model: a name that the job maps (`Job.models`), or a model of the service; `policy` judges itself.
            max_tokens: most tokens of the reply, which is sampled at temperature 0, unless the job's `models` have a
                `sampling` of the judge's own.

        Raises:
            JudgeUnreachable: the judge did not answer; the job's EVAL is retried.
            GraderFailed: the judge is not configured or rejected the question, the question has no room in its
                context, no reply could be parsed, or these are more than 256 questions.
            NoBackend: no backend of the model came in the time that the job allows.
        """
        messages = [ChatMessage(Role.SYSTEM, system)] if system else []
        messages += [ChatMessage(Role.USER, question)] if isinstance(question, str) else checked_messages(question)
        self._calls += 1
        number = self._calls
        if number > CALLS_LIMIT:
            raise _no_reward(f"an EVAL asks its judges at most {CALLS_LIMIT} questions")
        prompt = "\n\n".join(message.content for message in messages)
        reply, why = "", ""
        for _ in range(ASKED):
            self.unanswered.add(number)
            try:
                reply, served = await self._reply(model, messages, max_tokens)
            except Exception:
                self.unanswered.discard(number)
                raise
            self.unanswered.discard(number)
            self._note(number, prompt, reply, served)
            try:
                value, why = read(reply), ""
            except Exception as error:  # noqa: BLE001 - the policy is not to blame for the judge's reply
                value, why = None, f" (read raised {type(error).__name__}: {error})"
            if value is not None:
                return Judgement(value, prompt, reply, served)
        message = f"the judge {served} gave no verdict, asked {ASKED} times{why}; its last reply ends: {reply[-300:]!r}"
        raise _no_reward(message, reason="result", output=reply[-SHOWN_REPLY:])

    async def _reply(self, role: str, messages: list[ChatMessage], max_tokens: int) -> tuple[str, str]:
        """Return a reply without its reasoning, and the model that gave it."""
        named = self.models.named(role)
        try:
            policy = await self.models.policy(role)
            served = policy.served or named.name
            pieces = policy.chat.opening(messages, ())
            prompt = np.concatenate([piece.token_ids for piece in pieces])
            room = policy.context_tokens - len(prompt) if policy.context_tokens else max_tokens
            if room < 1:
                raise _no_reward(
                    f"the question has {len(prompt)} tokens, and the judge's context {policy.context_tokens}"
                )
            sampler = TurnSampler(policy, named.sampling or Sampling(temperature=0, max_tokens=max_tokens))
            done = await sampler.sample(prompt, room, 0)
            return policy.chat.read_turn(done.token_ids).text, served
        except EngineFailed as error:
            message = f"the judge {named.name} failed: {error.message}"
            if error.fields.get("refused"):
                output = str(error.fields.get("output", ""))
                raise _no_reward(message, reason="result", output=output) from error
            raise JudgeUnreachable(message, url=str(error.fields.get("url", ""))) from error
        except NoBackend as error:
            variables = endpoint_variables(named.name)
            raise NoBackend(
                f"no judge: {error.message}; or set {variables}_URL and {variables}_MODEL for the EVAL stage processes",
                **error.fields,
            ) from error
        except GraderFailed:
            raise
        except ProrlError as error:  # such as messages that the judge's chat template rejects
            raise _no_reward(f"the judge {named.name} cannot be asked: {error.message}") from error

    def _note(self, number: int, prompt: str, reply: str, served: str) -> None:
        if number <= NOTED_CALLS:
            suffix = f" {number}" if number > 1 else ""
            self.notes |= {f"judge_model{suffix}": served, f"judge_prompt{suffix}": prompt}
            self.notes[f"judge_verdict{suffix}"] = reply


def judge_of_endpoints(job: Job, endpoints: ChatEndpoints) -> Judge:
    """Return a judge outside a service, as in `prorl regrade`: only endpoints of the environment judge."""

    def no_service(model: str) -> JobBackend:
        variables = endpoint_variables(model)
        raise _no_reward(
            f"no service runs here, so the model {model} needs an endpoint: set {variables}_URL and {variables}_MODEL"
        )

    return Judge(OtherModels(job, endpoints, no_service))


def choice(*choices: str, label: str = "VERDICT") -> Callable[[str], str | None]:
    """Return a reader of the last line of a reply, such as `VERDICT: CORRECT`; None: the line is another one.

    Args:
        choices: what may stand behind the label, as it is to be written.
        label: what the line begins with.
    """
    line = re.compile(rf"\W*{re.escape(label)}:\W*({'|'.join(map(re.escape, choices))})\W*")

    def read(reply: str) -> str | None:
        lines = [one for one in _said(reply).splitlines() if one.strip()]
        match = line.fullmatch(lines[-1]) if lines else None
        return match[1] if match else None

    return read


def json_object(kind: type[T]) -> Callable[[str], T | None]:
    """Return a reader of the JSON object in a reply, from its first `{` to its last `}`; None: there is none.

    Args:
        kind: a `msgspec.Struct`, a dataclass or `dict[str, float]`; an object of another form is unreadable.
    """

    def read(reply: str) -> T | None:
        text = _said(reply)
        start, end = text.find("{"), text.rfind("}")
        return msgspec.json.decode(text[start : end + 1], type=kind) if 0 <= start < end else None

    return read


def _said(reply: str) -> str:
    """Return a reply without the reasoning before it."""
    return reply.rpartition(_THOUGHT_END)[2]


def _no_reward(message: str, reason: str = "raised", output: str = "") -> GraderFailed:
    return GraderFailed(message, reason=reason, output=output)
