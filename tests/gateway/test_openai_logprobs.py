"""Log-probs of prompts and likely tokens by OpenAI's own client, rescored in float64; and versions of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.later import Later
from support.rescoring import exact_logprobs, teacher_policy

from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.tokenizer import decode, encode
from prorl_zmq.testing import LocalService

from .conftest import asked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import openai
    from numpy.typing import NDArray

    from prorl_zmq.inference.policy import Policy
else:
    openai = Later("openai")

pytestmark = pytest.mark.xdist_group("SDKs of models")
CLOSE = 1e-4
TEXT = "1 + 1 = 2, and 2 + 2"
HI: Any = [{"role": "user", "content": "1 + 1?"}]
TOP = 4


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    models = {"teacher": EmbeddedEngine(teacher_policy(), 5)}
    with LocalService(engine=EmbeddedEngine(base_policy()), models=models) as started:
        yield started


def token_of(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def check_row(row: dict[int, float], own: int, exact: NDArray[np.float64], top: int = TOP) -> None:
    """Check the token's own log-prob, and those of the likeliest tokens; nothing else may be there."""
    assert len(row) in (top, top + 1)
    for token, logprob in row.items():
        assert logprob == pytest.approx(exact[token], abs=CLOSE)
    assert own in row
    likeliest = sorted((value for token, value in row.items() if token != own or len(row) == top), reverse=True)
    np.testing.assert_allclose(likeliest, -np.sort(-exact)[:top], atol=CLOSE)


def check_completion(choice: Any, prompt: list[int], policy: Policy, *, replied: int) -> None:
    """Check the log-probs of a choice that has its prompt and so many tokens of a reply."""
    named = choice.logprobs
    tokens = [token_of(name) for name in named.tokens]
    assert (tokens[: len(prompt)], len(tokens)) == (prompt, len(prompt) + replied)
    assert len(named.token_logprobs) == len(named.top_logprobs) == len(tokens)
    assert (named.token_logprobs[0], named.top_logprobs[0]) == (None, None)
    exact = exact_logprobs(policy, np.array(tokens, np.int32))
    for at in range(1, len(tokens)):
        row = {token_of(name): logprob for name, logprob in named.top_logprobs[at].items()}
        assert named.token_logprobs[at] == row[tokens[at]]
        check_row(row, tokens[at], exact[at - 1])


def test_an_echoed_prompt_has_log_probs(service: LocalService, tmp_path: Path) -> None:
    ids = encode(TEXT).tolist()

    async def body(gpt: openai.AsyncOpenAI) -> None:
        for model, policy in (("policy", base_policy()), ("teacher", teacher_policy())):
            for prompt, tokens in ((TEXT, 0), (ids, 1), ([ids], 3)):
                said = await gpt.completions.create(
                    model=model, prompt=prompt, max_tokens=tokens, logprobs=TOP, echo=True, seed=1
                )
                check_completion(said.choices[0], ids, policy, replied=tokens)
                assert said.choices[0].text.startswith(TEXT)
                if not tokens:
                    assert (said.choices[0].text, said.choices[0].finish_reason) == (TEXT, "length")
                assert said.usage is not None
                assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (len(ids), tokens)
        several = await gpt.completions.create(
            model="policy", prompt=["ab", TEXT], n=2, max_tokens=2, logprobs=TOP, echo=True
        )
        for choice, text in zip(several.choices, ("ab", "ab", TEXT, TEXT), strict=True):
            check_completion(choice, encode(text).tolist(), base_policy(), replied=2)
        plain = await gpt.completions.create(model="policy", prompt=ids, max_tokens=2, echo=True)
        assert plain.choices[0].text.startswith(decode(np.array(ids)))
        assert plain.choices[0].logprobs is None

    asked(service, tmp_path, body)


def test_an_answer_has_a_limited_number_of_log_probs(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = encode(TEXT).tolist()
    limit = 2 * len(ids) * (1 + TOP)
    monkeypatch.setattr("prorl_zmq.gateway.openai_bodies.ENTRIES_LIMIT", limit)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        asks: dict[str, Any] = {"model": "policy", "max_tokens": 0, "logprobs": TOP, "echo": True}
        said = await gpt.completions.create(prompt=ids, n=2, **asks)
        assert len(said.choices) == 2
        for prompt in (ids, TEXT):
            with pytest.raises(openai.BadRequestError, match=f"the prompts have {len(ids)} tokens; .* at most"):
                await gpt.completions.create(prompt=prompt, n=3, **asks)
        long: dict[str, Any] = {"max_tokens": limit // (1 + TOP) + 1, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.BadRequestError, match=f"log-probs and token ids, more than {limit}"):
            await gpt.completions.create(model="policy", prompt="a", logprobs=TOP, **long)

    asked(service, tmp_path, body)


def test_an_evaluation_tool_gets_the_likelihood_of_answers(service: LocalService, tmp_path: Path) -> None:
    """The request and the reading of lm-evaluation-harness's `local-completions`."""
    context, answers = encode("1 + 1 = ").tolist(), [encode(text).tolist() for text in ("2", "3", "17")]

    async def body(gpt: openai.AsyncOpenAI) -> None:
        prompts = [context + answer for answer in answers]
        said = await gpt.completions.create(
            model="policy", prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234, temperature=0
        )
        for choice, answer in zip(said.choices, answers, strict=True):
            exact = exact_logprobs(base_policy(), np.array(context + answer, np.int32))[-len(answer) :]
            own = exact[np.arange(len(answer)), answer]
            assert choice.logprobs is not None
            found = choice.logprobs.token_logprobs[len(context) : -1]  # type: ignore[index]
            assert sum(found) == pytest.approx(own.sum(), abs=CLOSE)
            tops = choice.logprobs.top_logprobs[len(context) : -1]  # type: ignore[index]
            greedy = all(one == max(top.values()) for one, top in zip(found, tops, strict=True))
            assert greedy == bool(np.all(exact.argmax(1) == answer))

    asked(service, tmp_path, body)


def test_prompts_are_scored_in_vllms_form(service: LocalService, tmp_path: Path) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        more = {"prompt_logprobs": TOP, "return_token_ids": True}
        text = await gpt.completions.create(model="teacher", prompt=TEXT, max_tokens=1, extra_body=more)
        chat = await gpt.chat.completions.create(model="teacher", messages=HI, max_tokens=1, extra_body=more)
        both: list[tuple[Any, Any]] = [(text.choices[0], text.choices[0]), (chat, chat)]
        for holder, ids_of in both:
            prompt, found = ids_of.prompt_token_ids, holder.prompt_logprobs
            assert (found[0], len(found)) == (None, len(prompt))
            exact = exact_logprobs(teacher_policy(), np.array(prompt, np.int32))
            for token, row, each in zip(prompt[1:], found[1:], exact, strict=True):
                check_row({int(name): one["logprob"] for name, one in row.items()}, token, each)
                ranks = {int(name): one["rank"] for name, one in row.items()}
                order = np.argsort(-each, kind="stable")
                assert all(rank is None or order[rank - 1] == name for name, rank in ranks.items())
                assert sum(rank is not None for rank in ranks.values()) == TOP
        fewer = {"prompt_logprobs": 0}
        both_kinds = await gpt.completions.create(
            model="teacher", prompt=TEXT, max_tokens=1, echo=True, logprobs=TOP, extra_body=fewer
        )
        assert {len(row or ()) for row in both_kinds.choices[0].prompt_logprobs[1:]} == {1}  # type: ignore[attr-defined]

    asked(service, tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_list_likely_tokens(service: LocalService, tmp_path: Path, stream: bool) -> None:
    async def body(gpt: openai.AsyncOpenAI) -> None:
        more = {"return_token_ids": True}
        asks = {"messages": HI, "logprobs": True, "top_logprobs": TOP, "max_tokens": 5, "temperature": 1.0}
        said: Any = await gpt.chat.completions.create(model="policy", stream=stream, extra_body=more, **asks)  # type: ignore[call-overload]
        if stream:
            chunks = [chunk async for chunk in said]
            (last,) = (one for one in chunks if one.choices and one.choices[0].logprobs is not None)
            prompt, choice = last.prompt_token_ids, last.choices[0]
        else:
            prompt, choice = said.prompt_token_ids, said.choices[0]
        exact = exact_logprobs(base_policy(), np.array([*prompt, *choice.token_ids], np.int32))[len(prompt) - 1 :]
        assert len(choice.logprobs.content) == len(exact) > 0
        for token, one, each in zip(choice.token_ids, choice.logprobs.content, exact, strict=True):
            assert (token_of(one.token), len(one.top_logprobs)) == (token, TOP)
            row = {token_of(other.token): other.logprob for other in one.top_logprobs}
            check_row({**row, token: one.logprob}, token, each)

    asked(service, tmp_path, body)


def test_a_version_is_served_while_it_is_current(tmp_path: Path) -> None:
    learned = tmp_path / "learned.npz"
    teacher_policy().save(learned)
    engine = EmbeddedEngine(base_policy(), 3)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        said = await gpt.completions.create(model="policy@3", prompt=TEXT, max_tokens=4, logprobs=1, echo=True)
        assert (said.model, said.system_fingerprint) == ("policy@3", "policy@3")
        for other in ("policy@2", "policy@4", "policy@03", "policy@x", "policy@3@3"):
            with pytest.raises(openai.NotFoundError, match="is not served now; there are: policy@3") as refused:
                await gpt.completions.create(model=other, prompt=TEXT)
            assert refused.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="does not exist; there are: policy"):
            await gpt.chat.completions.create(model="other@3", messages=HI)
        async with service.async_client() as client:
            await client.update_weights(learned, 4)
        with pytest.raises(openai.NotFoundError, match="is not served now; there are: policy@4"):
            await gpt.chat.completions.create(model="policy@3", messages=HI)
        new = await gpt.completions.create(model="policy@4", prompt=TEXT, max_tokens=0, logprobs=TOP, echo=True)
        check_completion(new.choices[0], encode(TEXT).tolist(), teacher_policy(), replied=0)

    with LocalService(engine=engine) as service:
        asked(service, tmp_path, body)


def test_an_answer_of_two_versions_has_no_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(base_policy(), 3)
    score = engine.score

    async def updated_first(*args: Any, **more: Any) -> Any:
        engine._weight_version = 4  # between the reply and its prompt's scores
        return await score(*args, **more)

    monkeypatch.setattr(engine, "score", updated_first)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        asks: dict[str, Any] = {"model": "policy", "prompt": TEXT, "logprobs": 1, "echo": True}
        assert (await gpt.completions.create(max_tokens=2, **asks)).system_fingerprint is None
        assert (await gpt.completions.create(max_tokens=2, **asks)).system_fingerprint == "policy@4"
        assert (await gpt.completions.create(max_tokens=0, **asks)).system_fingerprint == "policy@4"

    with LocalService(engine=engine) as service:
        asked(service, tmp_path, body)


def test_a_reply_of_other_weights_than_the_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EmbeddedEngine(base_policy(), 3)
    generate = engine.generate

    async def updated_first(*args: Any, **more: Any) -> Any:
        engine._weight_version = 4  # between the check and the reply
        return await generate(*args, **more)

    monkeypatch.setattr(engine, "generate", updated_first)

    async def body(gpt: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="`policy@3` is not served now; there are: policy@4"):
            await gpt.completions.create(model="policy@3", prompt=TEXT)

    with LocalService(engine=engine) as service:
        asked(service, tmp_path, body)
