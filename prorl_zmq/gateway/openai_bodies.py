"""Requests of OpenAI's completions and chat completions, checked, and their answers with all choices.

A field that the engines cannot honour is refused unless it has the value that changes nothing.
"""

from __future__ import annotations

import reprlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ..data.scores import SCORES_TOP_LIMIT
from ..model_proxy.dialects.chat_completions import ChatCompletions
from ..model_proxy.dialects.common import DONE, converted, error_object, event, invalid, texts, token_limit
from .openai_logprobs import completion_logprobs, prompt_logprobs
from .samples import CHOICES_LIMIT, LONGEST, Asked, checked_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model_proxy.calls import CallRefused, ModelRequest
    from ..wire.messages.jobs import Sampling
    from .samples import Sample

COMPLETION_TOKENS = 16
"""Of a completion that asks for no number, as in OpenAI's API."""
ENTRIES_LIMIT = 4_000_000
"""Most log-probs and token ids of an answer: each is a Python object of about 100 bytes until it is sent."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Fields that are not supported, and their neutral values; None is always neutral."""
NEUTRAL_IN_CHATS: dict[str, tuple[Any, ...]] = {**NEUTRAL, "echo": (False,), "ignore_eos": (False,)}
CHAT_FIELDS = ("messages", "tools", "tool_choice", "stop")
_CHAT = ChatCompletions()
_Top = Annotated[int, Meta(ge=0, le=SCORES_TOP_LIMIT)]


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
    return_token_ids: bool = False
    prompt_logprobs: _Top | None = None


class _Chat(_Common, kw_only=True):
    logprobs: bool = False
    top_logprobs: _Top = 0


class _Completion(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    stream_options: dict[str, Any] = msgspec.field(default_factory=dict)
    ignore_eos: bool = False
    logprobs: _Top | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request for replies (several may share a prompt), and which fields the answer contains."""

    asked: Asked
    stream: bool
    chat: ModelRequest | None
    """None: a completion."""
    logprobs: int | None = None
    """Of a completion: how many likely tokens to list for each token, with its own log-prob; None: no log-probs."""
    prompt_logprobs: int | None = None
    """How many to list for each token of the prompt, in vLLM's form; None: not even its own."""
    token_ids: bool = False
    usage: bool = False
    """Whether a stream ends with the usage."""
    echo: bool = False
    """Whether the answer repeats the prompt."""
    replies: bool = True
    """False: the answer is the prompt only."""
    prompt_entries: int = 0
    """Log-probs and token ids that each choice has for a token of its prompt."""
    reply_entries: int = 0
    """Log-probs and token ids that each choice has for a token of its reply."""


def read_chat(body: dict[str, Any]) -> Request:
    """Read the body of a chat completion.

    Raises:
        CallRefused: a field is wrong, or not supported.
    """
    common = _common(body, _Chat, NEUTRAL_IN_CHATS)
    if common.top_logprobs and not common.logprobs:
        raise invalid("top_logprobs needs logprobs = true")
    chat = _CHAT.read({**body, "n": None}, {})
    instance = {"chat": {name: body[name] for name in CHAT_FIELDS if body.get(name) is not None}}
    prompt_entries = _entries(common.return_token_ids, common.prompt_logprobs)
    asked = Asked(
        model=common.model,
        instances=(instance,),
        count=common.n,
        sampling=_sampling(common, LONGEST, stop=()),
        top=common.top_logprobs,
        prompt_top=common.prompt_logprobs,
        scored_tokens=_scored_tokens(common.n, prompt_entries),
    )
    reply_entries = _entries(common.return_token_ids, common.top_logprobs if common.logprobs else None)
    _check_replies(asked, reply_entries)
    return Request(
        asked,
        common.stream,
        chat,
        prompt_logprobs=common.prompt_logprobs,
        prompt_entries=prompt_entries,
        reply_entries=reply_entries,
    )


def read_completion(body: dict[str, Any]) -> Request:
    """Read the body of a completion.

    Raises:
        CallRefused: a field is wrong, or not supported.
    """
    common = _common(body, _Completion, NEUTRAL)
    prompts, replies = _prompts(common.prompt), common.max_tokens != 0
    if not replies and not common.echo:
        raise invalid("max_tokens = 0 needs echo = true: otherwise the answer is empty")
    more = {"turn_ends": not common.ignore_eos, "echo": common.echo}
    instances = tuple({"text" if isinstance(one, str) else "token_ids": one, **more} for one in prompts)
    if len(instances) * common.n > CHOICES_LIMIT:
        raise invalid(f"there are {len(instances)} prompts; a request gets at most {CHOICES_LIMIT} replies")
    if common.stream and len(instances) > 1:
        raise invalid(f"a stream has one prompt, not {len(instances)}")
    tops = [common.prompt_logprobs, common.logprobs if common.echo else None]
    prompt_entries = _entries(common.return_token_ids, *tops)
    asked = Asked(
        model=common.model,
        instances=instances,
        count=common.n,
        sampling=_sampling(common if replies else _without_reply(common), COMPLETION_TOKENS, texts(common.stop)),
        top=common.logprobs or 0 if replies else 0,
        prompt_top=max((top for top in tops if top is not None), default=None),
        scored_tokens=_scored_tokens(common.n, prompt_entries),
    )
    reply_entries = _entries(common.return_token_ids, common.logprobs) if replies else 0
    _check_replies(asked, reply_entries)
    return Request(
        asked,
        common.stream,
        None,
        logprobs=common.logprobs,
        prompt_logprobs=common.prompt_logprobs,
        token_ids=common.return_token_ids,
        usage=bool(common.stream_options.get("include_usage")),
        echo=common.echo,
        replies=replies,
        prompt_entries=prompt_entries,
        reply_entries=reply_entries,
    )


def _entries(ids: bool, *tops: int | None) -> int:
    """Return how many entries a token has: its id, and for each list of log-probs its own and the likely ones."""
    return ids + sum(1 + top for top in tops if top is not None)


def _scored_tokens(count: int, entries: int) -> int:
    return ENTRIES_LIMIT // (count * entries) if entries else LONGEST


def _check_replies(asked: Asked, entries: int) -> None:
    """Refuse a request whose replies may be too large before they are generated, if it limits their tokens."""
    tokens = asked.sampling.max_tokens
    most = len(asked.instances) * asked.count * tokens * entries
    if tokens < LONGEST and most > ENTRIES_LIMIT:
        words = f"the replies may have {most} log-probs and token ids, more than {ENTRIES_LIMIT}"
        raise invalid(f"{words}: ask for fewer replies, tokens or likely tokens")


def checked_entries(request: Request, samples: Sequence[Sample]) -> int:
    """Return how many log-probs and token ids the answer has.

    Raises:
        CallRefused: more than the limit.
    """
    entries = request.prompt_entries * sum(len(sample.prompt_token_ids) for sample in samples)
    entries += request.reply_entries * sum(len(sample.token_ids) for sample in samples)
    if entries > ENTRIES_LIMIT:
        words = f"the answer would have {entries} log-probs and token ids, more than {ENTRIES_LIMIT}"
        raise invalid(f"{words}: ask for fewer replies, tokens or likely tokens")
    return entries


def chat_answer(request: Request, samples: Sequence[Sample], turn_ids: Sequence[str]) -> dict[str, Any]:
    """Return a chat completion with a choice for each sample."""
    assert request.chat is not None
    written = [
        _CHAT.write(request.chat, sample.as_turn(turn_id), request.asked.model)
        for sample, turn_id in zip(samples, turn_ids, strict=True)
    ]
    choices = [{**one["choices"][0], "index": index} for index, one in enumerate(written)]
    return {
        **written[0],
        "choices": choices,
        "usage": {**written[0]["usage"], **_usage(request, samples)},
        "system_fingerprint": _fingerprint(request, samples),
        **_prompt_logprobs(request, samples[0]),
    }


def completion_answer(request: Request, samples: Sequence[Sample], answer_id: str) -> dict[str, Any]:
    """Return a completion with a choice for each sample, those of a prompt side by side."""
    return {
        **_head(request, answer_id, samples),
        "choices": [_choice(request, index, sample) for index, sample in enumerate(samples)],
        "usage": _usage(request, samples),
    }


class CompletionEvents:
    """The stream of one completion, as a `model_proxy.dialect.EventStream` for chats is."""

    def __init__(self, request: Request, answer_id: str) -> None:
        self._request = request
        self._id = answer_id

    def waiting(self) -> bytes:
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return event({**_head(self._request, self._id, ()), "choices": [choice]})

    def end(self, sample: Sample) -> bytes:
        head = _head(self._request, self._id, (sample,))
        chunks = [event({**head, "choices": [_choice(self._request, 0, sample)]})]
        if self._request.usage:
            chunks.append(event({**head, "choices": [], "usage": _usage(self._request, (sample,))}))
        return b"".join([*chunks, DONE])


def error_body(error: CallRefused) -> dict[str, Any]:
    """Return the body of an error, which is also a stream's last event."""
    body = error_object(error)
    if body["code"] == "not_found":
        body |= {"code": "model_not_found", "param": "model"}
    return {"error": body}


def _prompts(given: str | list[str | int | list[int]]) -> list[Any]:
    prompts = [given] if isinstance(given, str) or all(isinstance(one, int) for one in given) else given
    if any(isinstance(one, int) for one in prompts) or not all(prompts):
        raise invalid("prompt must be a text, a list of token ids, or a list of those, and must not be empty")
    return prompts


def _without_reply(common: _Completion) -> _Completion:
    """Return a request for the one token that a reply has at least."""
    return msgspec.structs.replace(common, max_tokens=1, max_completion_tokens=None)


def _common(body: dict[str, Any], kind: type[Any], neutrals: dict[str, tuple[Any, ...]]) -> Any:
    for name, neutral in neutrals.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise invalid(f"{name} = {reprlib.repr(value):.100} is not supported; leave it out")
    common = converted({name: value for name, value in body.items() if value is not None}, kind)
    if not 1 <= common.n <= CHOICES_LIMIT:
        raise invalid(f"n must be 1 to {CHOICES_LIMIT}, not {common.n}")
    if common.stream and common.n > 1:
        raise invalid(f"n must be 1 in a stream, not {common.n}")
    if common.stream and common.prompt_logprobs is not None:
        raise invalid("a stream has no prompt_logprobs")
    return common


def _sampling(common: Any, max_tokens: int, stop: Sequence[str]) -> Sampling:
    return checked_sampling(
        max_tokens=token_limit(common.max_completion_tokens, common.max_tokens) or max_tokens,
        temperature=common.temperature,
        top_p=common.top_p,
        top_k=None if common.top_k == -1 else common.top_k,
        min_p=common.min_p,
        seed=common.seed,
        stop_token_ids=tuple(common.stop_token_ids or ()),
        stop=tuple(stop),
    )


def _head(request: Request, answer_id: str, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.asked.model,
        "system_fingerprint": _fingerprint(request, samples),
    }


def _fingerprint(request: Request, samples: Sequence[Sample]) -> str | None:
    """Return the model and the version of its weights, such as `policy@7`; None if several versions answered."""
    versions = {one.prompt_scores.weight_version for one in samples if one.prompt_scores is not None}
    if request.replies:
        versions.update(version for one in samples for version in np.unique(one.weight_versions).tolist())
    return f"{request.asked.name}@{versions.pop()}" if len(versions) == 1 else None


def _choice(request: Request, index: int, sample: Sample) -> dict[str, Any]:
    reply, ids = sample.reply, sample.token_ids.tolist() if request.replies else []
    choice: dict[str, Any] = {
        "index": index,
        "text": reply.prompt_text + (reply.text if request.replies else ""),
        "logprobs": None,
        "finish_reason": reply.finish_reason if request.replies else "length",
        "stop_reason": reply.stopped_by or None if request.replies else None,
    }
    if request.logprobs is not None:
        parts = {"echo": request.echo, "replies": request.replies}
        choice["logprobs"] = completion_logprobs(sample, request.logprobs, **parts)
    if request.token_ids:
        choice |= {"prompt_token_ids": sample.prompt_token_ids.tolist(), "token_ids": ids}
    return choice | _prompt_logprobs(request, sample)


def _prompt_logprobs(request: Request, sample: Sample) -> dict[str, Any]:
    top = request.prompt_logprobs
    return {} if top is None else {"prompt_logprobs": prompt_logprobs(sample, top)}


def _usage(request: Request, samples: Sequence[Sample]) -> dict[str, int]:
    prompt = sum(len(sample.prompt_token_ids) for sample in samples[:: request.asked.count])
    generated = sum(len(sample.token_ids) for sample in samples) if request.replies else 0
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
