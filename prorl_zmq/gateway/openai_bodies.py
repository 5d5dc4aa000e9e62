"""Requests of OpenAI's completions and chat completions, checked, and their answers with all choices.

A field that the engines cannot honour is refused unless it has the value that changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..model_proxy.dialects.chat_completions import ChatCompletions
from ..model_proxy.dialects.common import DONE, converted, error_object, event, invalid, texts, token_limit
from .samples import CHOICES_LIMIT, LONGEST, checked_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model_proxy.calls import CallRefused, ModelRequest
    from ..wire.messages.jobs import Sampling
    from .samples import Sample

COMPLETION_TOKENS = 16
"""Of a completion that asks for no number, as in OpenAI's API."""
NAMED_TOKEN = "token_id:{}"  # noqa: S105 - no password
"""How vLLM names a token in log-probs where texts would not be unique."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Fields that are not supported, with the values that change nothing; None never does."""
CHAT_FIELDS = ("messages", "tools", "tool_choice", "stop")
_CHAT = ChatCompletions()


class _Common(msgspec.Struct):
    model: str = "policy"
    n: int = 1
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False


class _Completion(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    stream_options: dict[str, Any] = msgspec.field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for replies, several of which may share a prompt."""

    model: str
    instances: tuple[dict[str, Any], ...]
    """Of each prompt, the fields of a `SampleInstance`."""
    n: int
    """Replies to each prompt."""
    sampling: Sampling
    stream: bool
    chat: ModelRequest | None
    """None: a completion."""
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    """Whether a stream ends with the usage."""


def read_chat(body: dict[str, Any]) -> Asked:
    """Read the body of a chat completion.

    Raises:
        CallRefused: a field is wrong, or not supported.
    """
    common = _common(body, _Common)
    if common.ignore_eos:
        raise invalid("ignore_eos is not supported in chat completions; use completions")
    request = _CHAT.read({**body, "n": None}, {})
    instance = {"chat": {name: body[name] for name in CHAT_FIELDS if body.get(name) is not None}}
    sampling = _sampling(common, LONGEST, stop=())
    return Asked(common.model, (instance,), common.n, sampling, request.stream, request)


def read_completion(body: dict[str, Any]) -> Asked:
    """Read the body of a completion.

    Raises:
        CallRefused: a field is wrong, or not supported.
    """
    common = _common(body, _Completion)
    if (common.logprobs or 0) > 1:
        raise invalid("logprobs must be 0 or 1: only the log-prob of the generated token is known")
    prompts = _prompts(common.prompt)
    ends = {"turn_ends": False} if common.ignore_eos else {}
    instances = tuple({"text" if isinstance(one, str) else "token_ids": one, **ends} for one in prompts)
    if len(instances) * common.n > CHOICES_LIMIT:
        raise invalid(f"there are {len(instances)} prompts; a request gets at most {CHOICES_LIMIT} replies")
    return Asked(
        common.model,
        instances,
        common.n,
        _sampling(common, COMPLETION_TOKENS, texts(common.stop)),
        common.stream,
        None,
        logprobs=common.logprobs is not None,
        token_ids=common.return_token_ids,
        usage=bool(common.stream_options.get("include_usage")),
    )


def chat_answer(asked: Asked, samples: Sequence[Sample], turn_ids: Sequence[str]) -> dict[str, Any]:
    """Return a chat completion with a choice for each sample."""
    assert asked.chat is not None
    written = [
        _CHAT.write(asked.chat, sample.as_turn(turn_id), asked.model)
        for sample, turn_id in zip(samples, turn_ids, strict=True)
    ]
    choices = [{**one["choices"][0], "index": index} for index, one in enumerate(written)]
    usage = {**written[0]["usage"], **_usage(samples, asked.n)}
    return {**written[0], "choices": choices, "usage": usage, "system_fingerprint": _fingerprint(asked, samples)}


def completion_answer(asked: Asked, samples: Sequence[Sample], answer_id: str) -> dict[str, Any]:
    """Return a completion with a choice for each sample, those of a prompt side by side."""
    return {
        **_head(asked, answer_id, samples),
        "choices": [_choice(asked, index, sample) for index, sample in enumerate(samples)],
        "usage": _usage(samples, asked.n),
    }


class CompletionEvents:
    """The stream of one completion, as a `model_proxy.dialect.EventStream` for chats is."""

    def __init__(self, asked: Asked, answer_id: str) -> None:
        self._asked = asked
        self._id = answer_id

    def waiting(self) -> bytes:
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return event({**_head(self._asked, self._id, ()), "choices": [choice]})

    def end(self, sample: Sample) -> bytes:
        head = _head(self._asked, self._id, (sample,))
        chunks = [event({**head, "choices": [_choice(self._asked, 0, sample)]})]
        if self._asked.usage:
            chunks.append(event({**head, "choices": [], "usage": _usage((sample,), 1)}))
        return b"".join([*chunks, DONE])


def error_body(error: CallRefused) -> dict[str, Any]:
    """Return the body of an error, which is also a stream's last event."""
    told = error_object(error)
    if told["code"] == "not_found":
        told |= {"code": "model_not_found", "param": "model"}
    return {"error": told}


def _prompts(given: str | list[str | int | list[int]]) -> list[Any]:
    prompts = [given] if isinstance(given, str) or all(isinstance(one, int) for one in given) else given
    if any(isinstance(one, int) for one in prompts) or not all(prompts):
        raise invalid("prompt must be a text, a list of token ids, or a list of those; none of them empty")
    return prompts


def _common(body: dict[str, Any], kind: type[Any]) -> Any:
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise invalid(f"{name} = {value!r:.100} is not supported; leave it out")
    asked = converted({name: value for name, value in body.items() if value is not None}, kind)
    if not 1 <= asked.n <= CHOICES_LIMIT:
        raise invalid(f"n must be 1 to {CHOICES_LIMIT}, not {asked.n}")
    if asked.stream and asked.n > 1:
        raise invalid(f"n must be 1 in a stream, not {asked.n}")
    return asked


def _sampling(asked: Any, max_tokens: int, stop: Sequence[str]) -> Sampling:
    return checked_sampling(
        max_tokens=token_limit(asked.max_completion_tokens, asked.max_tokens) or max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=None if asked.top_k == -1 else asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        stop=tuple(stop),
    )


def _head(asked: Asked, answer_id: str, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "system_fingerprint": _fingerprint(asked, samples),
    }


def _fingerprint(asked: Asked, samples: Sequence[Sample]) -> str | None:
    """Return the model and the version of its weights, such as `policy@7`."""
    return f"{asked.model}@{samples[-1].weight_version}" if samples else None


def _choice(asked: Asked, index: int, sample: Sample) -> dict[str, Any]:
    reply, ids = sample.reply, sample.token_ids.tolist()
    choice: dict[str, Any] = {
        "index": index,
        "text": reply.text,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stopped_by or None,
    }
    if asked.logprobs:
        names = [NAMED_TOKEN.format(token) for token in ids]
        values = sample.logprobs.tolist()
        choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": None}
    if asked.token_ids:
        choice |= {"prompt_token_ids": sample.prompt_token_ids.tolist(), "token_ids": ids}
    return choice


def _usage(samples: Sequence[Sample], n: int) -> dict[str, int]:
    prompt = sum(len(sample.prompt_token_ids) for sample in samples[::n])
    generated = sum(len(sample.token_ids) for sample in samples)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
