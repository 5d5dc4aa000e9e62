"""The paths to an engine that `inference.py` compares: functions that run a `Round` and return its `Timing`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import numpy as np
import zmq
from inference_host import Prompts, Round, Timing, run_round

from prorl_zmq.inference.client import EngineClient
from prorl_zmq.wire.messages.backends import Backend
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from numpy.typing import NDArray

START_S = 30.0
"""Longest time until a host that has started can be talked to."""
ANSWER_S = 600.0

Way = Callable[[Round], Awaitable[Timing]]
"""Runs a round."""


@asynccontextmanager
async def our_way(endpoint: str) -> AsyncIterator[Way]:
    """Give the way through our client."""
    prompts = Prompts()
    backend = Backend(backend_id="bench", endpoint=endpoint)
    with zmq.Context() as context:
        client = EngineClient(context, reconnect_s=START_S)

        async def run(one: Round) -> Timing:
            sampling = Sampling(max_tokens=one.new_tokens)

            async def call(prompt: NDArray[np.int32]) -> int:
                done = await client.generate(backend, "job", prompt, sampling, ())
                return len(done.token_ids)

            return await run_round(one, prompts, call)

        try:
            await client.health(endpoint, START_S)
            yield run
        finally:
            client.close()


@asynccontextmanager
async def bare_way(control: Path) -> AsyncIterator[Way]:
    """Give the engine itself, in our host's process."""
    reader, writer = await asyncio.open_unix_connection(control)

    async def run(one: Round) -> Timing:
        writer.write(msgspec.json.encode(one) + b"\n")
        return msgspec.json.decode(await reader.readline(), type=Timing)

    try:
        yield run
    finally:
        writer.close()


class _SamplingParams(msgspec.Struct):
    max_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = True
    logprobs: int = 0
    detokenize: bool = False


class _GenerateBody(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _SamplingParams


class _CompletionBody(msgspec.Struct):
    prompt: list[int]
    max_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = True
    logprobs: int = 0
    return_token_ids: bool = True


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] = []
    """Of the token API."""
    token_logprobs: list[float] = []
    """Of completions."""


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _LogProbs
    finish_reason: str


class _Answer(msgspec.Struct):
    choices: list[_Choice]


@asynccontextmanager
async def http_ways(url: str) -> AsyncIterator[tuple[Way, Way]]:
    """Give the token API and the completions of vLLM's server."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # the server closes after 5 s
    session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(ANSWER_S))
    headers = {"Content-Type": "application/json"}

    def way(path: str, body: Callable[[list[int], int], msgspec.Struct]) -> Way:
        prompts = Prompts()

        async def run(one: Round) -> Timing:
            async def call(prompt: NDArray[np.int32]) -> int:
                content = msgspec.json.encode(body(prompt.tolist(), one.new_tokens))
                async with session.post(f"{url}{path}", data=content, headers=headers) as response:
                    answer = await response.read()
                assert response.status == 200, answer
                choice = msgspec.json.decode(answer, type=_Answer).choices[0]
                token_ids = np.array(choice.token_ids, np.int32)
                logprobs = choice.logprobs.token_logprobs or [entry.logprob for entry in choice.logprobs.content]
                assert len(np.array(logprobs, np.float32)) == len(token_ids)
                return len(token_ids)

            return await run_round(one, prompts, call)

        return run

    async with session:
        yield (
            way("/inference/v1/generate", lambda ids, limit: _GenerateBody(ids, _SamplingParams(limit))),
            way("/v1/completions", _CompletionBody),
        )
