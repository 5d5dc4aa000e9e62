"""An engine host that also times its engine without a socket: `inference_host.py MODEL ENDPOINT CONTROL [FLAG …]`.

Run by the Python that has vLLM. At ENDPOINT it is `prorl-engine --engine vllm`. On the Unix socket CONTROL each line
requests a `Round` in JSON, which runs directly against the same `AsyncLLM` in this process; its `Timing` also reports
the time inside the engine of calls that came through the host. It also has the shared parts of a comparison: the
prompts, and the loop that keeps a number of calls under way.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from prorl_zmq.inference.engine import EngineDescription
from prorl_zmq.inference.hosting.host import HostOptions
from prorl_zmq.inference.hosting.host_process import run_engine_host
from prorl_zmq.inference.kv_figures import KvMeter
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from numpy.typing import NDArray

VOCABULARY = 1000
"""Ids that prompts are made of."""
BLOCK = 128
"""Tokens that vLLM caches together on CPUs."""
OWN_TOKENS = 8
"""At a prompt's end, which differ from those of others of the same length and are computed each time."""
PROMPTS = 64
"""Prompts of each length."""


class Round(msgspec.Struct, frozen=True):
    """Calls to make: so many at a time, so many one after the other."""

    blocks: int
    """Length of the prompts, which are `OWN_TOKENS` longer."""
    concurrent: int
    calls: int
    new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of each prompt."""
        return self.blocks * BLOCK + OWN_TOKENS

    @property
    def generated(self) -> int:
        """Tokens that all calls generate together."""
        return self.concurrent * self.calls * self.new_tokens


class Timing(msgspec.Struct, frozen=True):
    """How long a round took."""

    seconds: float
    """From the first call's begin to the last one's end."""
    calls_s: list[float]
    """Each call."""
    inside_s: list[float] = []
    """From the engine alone: how long each call since the round before that came through the host was in `AsyncLLM`."""


class Prompts:
    """Prompts of each length that differ in their last tokens only, so that all before is in the prefix cache."""

    def __init__(self) -> None:
        self._made: dict[int, list[NDArray[np.int32]]] = {}
        self._taken = 0

    def next(self, one_of: Round) -> NDArray[np.int32]:
        """Give the next prompt for a round, int32 [P]."""
        made = self._made.get(one_of.blocks)
        if made is None:
            generator = np.random.default_rng(one_of.blocks)
            shared = generator.integers(0, VOCABULARY, one_of.blocks * BLOCK, np.int32)
            own = generator.integers(0, VOCABULARY, (PROMPTS, OWN_TOKENS), np.int32)
            made = self._made[one_of.blocks] = [np.concatenate([shared, last]) for last in own]
        self._taken += 1
        return made[self._taken % PROMPTS]


async def run_round(one: Round, prompts: Prompts, call: Callable[[NDArray[np.int32]], Awaitable[int]]) -> Timing:
    """Run a round.

    Args:
        one: what to run.
        prompts: for its calls.
        call: has a prompt continued, and gives the number of new tokens.
    """
    calls_s: list[float] = []

    async def caller() -> None:
        for _ in range(one.calls):
            prompt = prompts.next(one)
            begun = time.perf_counter()
            count = await call(prompt)
            calls_s.append(time.perf_counter() - begun)
            assert count == one.new_tokens

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(one.concurrent)))
    return Timing(time.perf_counter() - begun, calls_s)


@dataclass
class _Bare:
    """The engine without a host."""

    generate: Callable[..., AsyncIterator[Any]]
    """Of `AsyncLLM`."""
    prompts: Prompts = field(default_factory=Prompts)
    lists: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """By length of the prompts and by prompt."""
    calls: int = 0
    inside_s: list[float] = field(default_factory=list)
    server: asyncio.Server | None = None

    async def hosted(self, *arguments: Any) -> AsyncIterator[Any]:
        """Stand for `AsyncLLM.generate` in our engine."""
        begun = time.perf_counter()
        async for output in self.generate(*arguments):
            self.inside_s.append(time.perf_counter() - begun)  # the only output
            yield output

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer rounds."""
        while line := await reader.readline():
            timing = await self._run(msgspec.json.decode(line, type=Round))
            answer = msgspec.structs.replace(timing, inside_s=self.inside_s)
            self.inside_s = []
            writer.write(msgspec.json.encode(answer) + b"\n")
        writer.close()

    async def _run(self, one: Round) -> Timing:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # vLLM takes lists; making one of what was received is part of our path.
        lists = self.lists.get(one.blocks)
        if lists is None:
            prompts = [self.prompts.next(one) for _ in range(PROMPTS)]
            lists = self.lists[one.blocks] = {id(prompt): prompt.tolist() for prompt in prompts}
        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=one.new_tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def call(prompt: NDArray[np.int32]) -> int:
            self.calls += 1
            tokens = {"type": "token", "prompt_token_ids": lists[id(prompt)]}
            async for output in self.generate(tokens, parameters, f"bare-{self.calls}"):
                final = output
            return len(final.outputs[0].token_ids)

        return await run_round(one, self.prompts, call)


def main(model: str, endpoint: str, control: str, *flags: str) -> None:
    from prorl_zmq.inference.vllm.vllm_engine import VllmEngine
    from prorl_zmq.inference.vllm.vllm_processes import set_environment
    from prorl_zmq.inference.vllm.vllm_start import start_async_llm

    async def start() -> VllmEngine:
        set_environment(offline=True)
        llm = start_async_llm(model, flags)
        await llm.update_weight_version("0")
        config = llm.vllm_config
        description = EngineDescription(
            model=model,
            chat=ChatSettings("transformers", model),
            context_tokens=config.model_config.max_model_len,
            vocabulary=config.model_config.get_vocab_size(),
            max_in_flight=config.scheduler_config.max_num_seqs,
            logprobs_mode=config.model_config.logprobs_mode,
        )
        bare = _Bare(llm.generate)
        llm.generate = bare.hosted
        bare.server = await asyncio.start_unix_server(bare.serve, control)
        print(f"serves at {endpoint}", flush=True)
        return VllmEngine(llm, Path(model), description, 0, None, KvMeter())

    run_engine_host(start, HostOptions(endpoint=endpoint, backend_broker=f"{endpoint}-nobody", backend_id="bench"))


if __name__ == "__main__":
    main(*sys.argv[1:])
