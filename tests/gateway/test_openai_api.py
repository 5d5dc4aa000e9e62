"""OpenAI's own client on the models of a whole service, through a gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from support.later import Later
from support.waiting import until

from prorl_zmq.gateway.openai_bodies import read_chat, read_completion
from prorl_zmq.inference.tokenizer import IM_END, encode
from prorl_zmq.model_proxy.calls import CallRefused
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.testing.scripted_engine import tokens_of
from prorl_zmq.wire.messages.base import KeyRole

from .conftest import asked, noted_ends, two_models

if TYPE_CHECKING:
    from pathlib import Path

    import openai
else:
    openai = Later("openai")

pytestmark = pytest.mark.xdist_group("SDKs of models")
HI: Any = [{"role": "user", "content": "hi"}]
TOKENS = {"return_token_ids": True}


def test_the_official_client_talks_with_two_models(tmp_path: Path) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        assert [one.id async for one in gpt.models.list()] == ["policy", "teacher"]
        said = await gpt.chat.completions.create(model="policy", messages=HI, logprobs=True, n=2, extra_body=TOKENS)
        assert [(one.index, one.message.content, one.finish_reason) for one in said.choices] == [
            (0, "yes", "stop"),
            (1, "yes", "stop"),
        ]
        yes = tokens_of("yes")
        for choice in said.choices:
            assert choice.token_ids == yes  # type: ignore[attr-defined]
            assert choice.logprobs is not None
            logprobs = [one.logprob for one in choice.logprobs.content or ()]
            assert logprobs == pytest.approx([-(1 + token) / 1000 for token in yes])
        assert said.usage is not None
        prompt = len(said.prompt_token_ids)  # type: ignore[attr-defined]
        assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (prompt, 2 * len(yes))
        assert (said.model, said.system_fingerprint) == ("policy", "policy@0")
        other = await gpt.chat.completions.create(model="teacher", messages=HI)
        assert (other.choices[0].message.content, other.model) == ("no", "teacher")

    with two_models() as service:
        asked(service, tmp_path, body)


def test_one_model_is_shown_as_in_the_list(tmp_path: Path) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        listed = {one.id: one async for one in gpt.models.list()}
        for name in ("policy", "teacher"):
            assert await gpt.models.retrieve(name) == listed[name]
        assert (await gpt.models.retrieve("teacher@0")).id == "teacher@0"
        for name, words in (
            ("nobody", "there are: policy, teacher"),
            ("no/body", "there are: policy, teacher"),
            ("teacher@3", "is not served now; there are: teacher@0"),
        ):
            with pytest.raises(openai.NotFoundError, match=words) as missing:
                await gpt.models.retrieve(name)
            assert missing.value.code == "model_not_found"

    with two_models() as service:
        asked(service, tmp_path, body)


def test_completions_of_texts_and_of_token_ids(tmp_path: Path) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        create, ids = gpt.completions.create, encode("hi").tolist()
        for prompt in ("hi", ids, [ids]):
            one = await create(model="policy", prompt=prompt, logprobs=0, extra_body=TOKENS)
            (choice,) = one.choices
            assert (choice.prompt_token_ids, choice.token_ids) == (ids, tokens_of("yes"))  # type: ignore[attr-defined]
            assert (choice.text, choice.finish_reason) == ("yes", "stop")
            assert choice.logprobs is not None
            assert choice.logprobs.tokens == [f"token_id:{token}" for token in tokens_of("yes")]
        several = await create(model="policy", prompt=["a", "bc"], n=2, max_tokens=2)
        assert [(one.index, one.text, one.finish_reason) for one in several.choices] == [
            (index, "ye", "length") for index in range(4)
        ]
        assert several.usage is not None
        assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (3, 8)
        stopped = (await create(model="policy", prompt="hi", stop=["s", "x"])).choices[0]
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ye", "stop", "s")  # type: ignore[attr-defined]
        by_id = await create(model="policy", prompt="hi", extra_body={"stop_token_ids": tokens_of("e")[:1], **TOKENS})
        assert (by_id.choices[0].text, by_id.choices[0].token_ids) == ("y", tokens_of("ye")[:2])  # type: ignore[attr-defined]

    with two_models() as service:
        asked(service, tmp_path, body)


def test_the_ends_of_turns_end_a_completion_unless_it_ignores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = say(lambda _: "yes")
    ends = noted_ends(engine, monkeypatch)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        for more in ({}, {"ignore_eos": True}, {"ignore_eos": True, "stop_token_ids": [7]}):
            await gpt.completions.create(model="policy", prompt="hi", extra_body=more)

    with LocalService(engine=engine) as service:
        asked(service, tmp_path, body)
    assert ends == [(IM_END,), (), (7,)]


def test_tool_calls_and_reasoning_are_read_by_the_models_format(tmp_path: Path) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}

    async def body(gpt: openai.AsyncOpenAI) -> None:
        tools: Any = [{"type": "function", "function": function}]
        said = await gpt.chat.completions.create(model="policy", messages=HI, tools=tools)
        (call,) = said.choices[0].message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("add", '{"a":1}')  # type: ignore[union-attr]
        assert (said.choices[0].finish_reason, said.choices[0].message.content) == ("tool_calls", None)

    with LocalService(engine=say(lambda _: tool_call("add", a=1))) as service:
        asked(service, tmp_path, body)


def test_streams_have_the_reply_and_the_usage(tmp_path: Path) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        usage: Any = {"include_usage": True}
        chat = await gpt.chat.completions.create(model="policy", messages=HI, stream=True, stream_options=usage)
        chunks = [chunk async for chunk in chat]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "yes"
        assert chunks[-1].usage is not None
        text = await gpt.completions.create(model="teacher", prompt="hi", stream=True, stream_options=usage)
        pieces = [piece async for piece in text]
        assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == "no"
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == len(tokens_of("no"))
        with pytest.raises(openai.NotFoundError):
            await gpt.completions.create(model="nobody", prompt="hi", stream=True)

    with two_models() as service:
        asked(service, tmp_path, body)


def test_what_cannot_be_answered_is_refused_in_openais_form(tmp_path: Path) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        for name in ("nobody", "no/body"):
            with pytest.raises(openai.NotFoundError) as missing:
                await gpt.completions.create(model=name, prompt="hi")
            assert missing.value.code == "model_not_found"
            assert "there are: policy, teacher" in missing.value.message
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"prompt": ""}, "prompt must be"),
            ({"prompt": ["a", 1]}, "prompt must be"),
            ({"prompt": [[]]}, "prompt must be"),
            ({"prompt": "a", "logprobs": 5}, "does not give the record top_logprobs"),
            ({"prompt": "a", "logprobs": 65}, "<= 64 - at .*logprobs"),
            ({"prompt": "a", "logprobs": -1}, ">= 0 - at .*logprobs"),
            ({"prompt": "a", "logprobs": 0, "echo": True}, "do not give log-probs of a prompt"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens = 0 needs echo = true"),
            ({"prompt": ["a", "b"], "stream": True}, "a stream has one prompt, not 2"),
            ({"prompt": "a", "stream": True, "extra_body": {"prompt_logprobs": 0}}, "a stream has no prompt_logprobs"),
            ({"prompt": "a", "temperature": 9}, "temperature"),
            ({"prompt": "a", "n": 0}, "n must be 1 to 128"),
            (
                {"prompt": "a", "extra_body": {"response_format": ["x" * 10**6]}},
                "response_format = .* not supported",
            ),
            ({"prompt": "a", "n": 2, "stream": True}, "n must be 1 in a stream"),
            ({"prompt": ["a"] * 129}, "129 prompts"),
            ({"prompt": [2**40]}, "token id outside"),
            ({"prompt": [2**31 - 1]}, "token id outside"),
            ({"prompt": "a", "extra_body": {"prompt_logprobs": 1}}, "do not give log-probs of a prompt"),
        )
        for request, words in wrong:
            with pytest.raises(openai.BadRequestError, match=words):
                await gpt.completions.create(model="policy", **request)
        with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
            await gpt.chat.completions.create(model="policy", messages=HI, top_logprobs=2)
        long: Any = [{"role": "user", "content": "a" * 500}]
        for asks in (
            gpt.completions.create(model="policy", prompt="a" * 500),
            gpt.chat.completions.create(model="policy", messages=long),
        ):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 64") as too_long:
                await asks
            assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="messages"):
            await gpt.chat.completions.create(model="policy", messages="hi")  # type: ignore[arg-type]

    engine = say(lambda _: "yes", context_tokens=64)
    with LocalService(engine=engine, models={"teacher": say(lambda _: "no")}) as service:
        asked(service, tmp_path, body)


def test_a_prompt_alone_costs_one_token() -> None:
    asks = {"prompt": "a", "echo": True, "max_tokens": 0, "max_completion_tokens": 100_000}
    assert read_completion(asks).asked.sampling.max_tokens == 1


def test_without_a_backend_the_client_is_told_to_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.gateway.samples.BACKEND_WAIT_S", 0.2)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.RateLimitError) as full:
            await gpt.completions.create(model="policy", prompt="hi")
        assert full.value.response.headers["Retry-After"] == "1"

    with LocalService() as service:
        asked(service, tmp_path, body)


def test_a_reply_that_no_result_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.stages.harness.single_reply.NOTE_LIMIT", 2)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="more than 28 characters; ask for fewer tokens"):
            await gpt.completions.create(model="policy", prompt="hi")

    with two_models() as service:
        asked(service, tmp_path, body)


def test_an_endpoint_of_the_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_MODEL_JUDGE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PRORL_MODEL_JUDGE_MODEL", "judge")

    async def body(gpt: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="there are: policy, teacher"):
            await gpt.completions.create(model="judge", prompt="hi")

    with two_models() as service:
        asked(service, tmp_path, body)


def test_200_samples_at_once_over_two_models_each_by_its_own(tmp_path: Path) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        many = [gpt.completions.create(model=("policy", "teacher")[i % 2], prompt=f"{i}") for i in range(200)]
        texts = [one.choices[0].text for one in await asyncio.gather(*many)]
        assert texts == ["yes", "no"] * 100

    with two_models() as service:
        asked(service, tmp_path, body)
        with service.client() as client:
            assert client.status().uncollected == 0


def test_a_client_that_leaves_ends_its_generation(tmp_path: Path) -> None:
    engine = say(lambda _: "e" * 300_000)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        asking = asyncio.create_task(gpt.completions.create(model="policy", prompt="hi", max_tokens=400_000))
        await asyncio.to_thread(until, lambda: bool(engine._running), "a call at the engine")
        asking.cancel()
        await asyncio.to_thread(until, lambda: not engine._running, "the end of the generation")

    with LocalService(engine=engine) as service:
        asked(service, tmp_path, body)


def test_only_trainers_tokens_get_replies(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    alice, olga = folder.new_bearer("alice", KeyRole.TRAINER), folder.new_bearer("olga", KeyRole.OPERATOR)

    def asks(key: str, error: type[Exception] | None) -> None:
        async def body(gpt: openai.AsyncOpenAI) -> None:
            if error is not None:
                with pytest.raises(error):
                    await gpt.completions.create(model="policy", prompt="hi")
            else:
                assert (await gpt.completions.create(model="policy", prompt="hi")).choices[0].text == "yes"

        asked(service, tmp_path, body, key, keys=tmp_path / "keys")

    with two_models() as service:
        asks(alice, None)
        asks(olga, openai.PermissionDeniedError)
        asks("wrong", openai.AuthenticationError)


def test_replies_that_may_be_too_large_are_refused_before_they_are_generated() -> None:
    many: dict[str, Any] = {"model": "policy", "n": 128}
    completion = {**many, "prompt": "a", "logprobs": 5}
    chat = {**many, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5}
    for read, body in ((read_completion, completion), (read_chat, chat)):
        with pytest.raises(CallRefused, match="the replies may have 7680000 log-probs and token ids"):
            read({**body, "max_tokens": 10_000})
        read({**body, "max_tokens": 5_000})
        read(body)
