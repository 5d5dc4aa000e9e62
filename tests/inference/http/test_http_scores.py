"""Scores of texts by servers with vLLM's dialects: their lists by id, malformed answers, and new weights meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.http.http_engine import HttpEngine
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEXT = np.array([7, 4, 9], np.int32)
LISTED: list[Any] = [
    None,
    {"4": {"logprob": -0.5, "rank": 2}, "3": {"logprob": -0.4, "rank": 1}},
    {"9": {"logprob": -8, "rank": 40}, "1": {"logprob": -0.1, "rank": 1}, "2": {"logprob": -0.2, "rank": 2}},
]
"""The first token has none; the second is among the two likeliest, the third is not."""


@asynccontextmanager
async def engine_of(server: Any) -> AsyncIterator[HttpEngine]:
    chat = ChatSettings("transformers", "tokenizer")
    engine = await HttpEngine.start(server.url, chat=chat, weight_version=3, retry_s=0.3, start_s=5.0)
    server.requests.clear()
    try:
        yield engine
    finally:
        await engine.close()


def answer(name: str, listed: Any) -> web.Response:
    choice = {"token_ids": [5], "finish_reason": "length"}
    if name == "vllm":
        return web.json_response({"choices": [choice], "prompt_logprobs": listed})
    return web.json_response({"choices": [{**choice, "prompt_logprobs": listed}]})


@pytest.mark.parametrize("name", ["vllm", "completions"])
def test_a_text_is_scored(serving: Any, speeches: Any, name: str) -> None:
    async def main() -> None:
        async with serving(speeches[name]) as server, engine_of(server) as engine:
            assert engine.description.scores
            server.handlers[speeches[name].path] = lambda _: answer(name, LISTED)
            scores = await engine.score(TEXT, 2, "job")
            assert scores.top_ids.tolist() == [[-1, -1], [3, 4], [1, 2]]
            np.testing.assert_allclose(scores.logprobs, [0, -0.5, -8])
            np.testing.assert_allclose(scores.top_logprobs, [[0, 0], [-0.4, -0.5], [-0.1, -0.2]])
            assert scores.weight_version == 3
            (body,) = server.asked(speeches[name].path)
            assert speeches[name].prompt(body) == TEXT.tolist()
            assert speeches[name].max_tokens(body) == 1
            assert (body if name == "completions" else body["sampling_params"])["prompt_logprobs"] == 2

    asyncio.run(main())


@pytest.mark.parametrize("name", ["vllm", "completions"])
@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (None, "no log-probs of the text"),
        ([None, *LISTED[2:]], "1 tokens of a text of 3"),
        ([None, *LISTED[:0:-1]], "another text"),
        ([None, {"x": {"logprob": -1, "rank": 1}}, LISTED[2]], "another text"),
        ([None, {"4": {"rank": 1}}, LISTED[2]], "another form"),
    ],
)
def test_malformed_scores_are_rejected(serving: Any, speeches: Any, name: str, listed: Any, words: str) -> None:
    async def main() -> None:
        async with serving(speeches[name]) as server, engine_of(server) as engine:
            server.handlers[speeches[name].path] = lambda _: answer(name, listed)
            with pytest.raises(EngineFailed, match=words):
                await engine.score(TEXT, 2, "job")
            server.handlers[speeches[name].path] = lambda _: web.json_response({"error": "too many"}, status=400)
            with pytest.raises(EngineFailed, match="too many") as caught:
                await engine.score(TEXT, 2, "job")
            assert caught.value.refused

    asyncio.run(main())


@pytest.mark.parametrize("name", ["sglang", "prorl"])
def test_other_dialects_have_no_scores(serving: Any, speeches: Any, name: str) -> None:
    async def main() -> None:
        async with serving(speeches[name]) as server, engine_of(server) as engine:
            assert not engine.description.scores

    asyncio.run(main())


def test_a_text_is_scored_again_if_weights_change_meanwhile(serving: Any, speeches: Any) -> None:
    """Even if the old weights' answer is an aborted one, without scores."""

    async def main() -> None:
        async with serving(speeches["completions"]) as server, engine_of(server) as engine:
            path = speeches["completions"].path
            changed = asyncio.Event()

            async def handle(_: Any) -> web.Response:
                asked = len(server.asked(path))
                if asked < 3:
                    await changed.wait()
                return answer("completions", None if asked == 1 else LISTED)

            server.handlers[path] = handle
            scoring = asyncio.create_task(engine.score(TEXT, 2, "job"))
            await server.until(lambda: server.asked(path))
            update = asyncio.create_task(engine.begin_update("drain"))
            await asyncio.sleep(0.05)
            changed.set()
            await update
            assert not scoring.done()
            await engine.end_update(8)
            scores = await scoring
            assert scores.weight_version == 8
            assert len(server.asked(path)) == 2

    asyncio.run(main())
