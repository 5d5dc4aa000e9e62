"""Rollouts on one real vLLM whose KV cache holds eight of them: `scheduling_real.py FOLDER SECONDS` writes JSON.

Run by the Python that has vLLM; vLLM computes in this process. 64 rollouts are offered at any time: prompts of 256
tokens, and 16 turns of 4 generated tokens and 96 of a tool's answer; the first ones begin in the middle. The service's
own cores decide who runs: the backend broker's `BackendRequestHandler` and the host's `EngineFigures`, without sockets.
The clock is the process's CPU time, which skips times in which only tools run; the cores' seconds pass `SCALE` times as
fast, since a row lasts seconds and not hours. Each row has its own tokens. Tokens of some turns are compared with those
of the idle engine.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.hosting.engine_figures import EngineFigures
from prorl_zmq.inference.kv_figures import KvMeter
from prorl_zmq.inference.vllm.vllm_kv_logger import kv_logger
from prorl_zmq.wire.messages.backends import AddBackend, Assign, Assigned, Backend, BackendAlive, BackendHeld, Release
from prorl_zmq.wire.messages.engines import VersionSpan

OFFERED = 64
TURNS, PROMPT, GENERATED, ANSWER = 16, 256, 4, 96
FITTING = 8
CONTEXT = 2048
BLOCK, BLOCKS = 32, 440
"""Of the KV cache."""
VOCABULARY = 1000
TOOL_S = 0.4
"""Mean of a tool call: about four turns of an engine that has the prefix."""
SCALE = 8.0
"""Seconds of the cores in one of the bench."""
BEAT_S = 1.0 / SCALE
WARM_UP = 0.4
"""Share of the time that the figures leave out."""
COMPARED = 12
NO_LIMIT, OURS, FIXED = "no limit", "ours", f"{FITTING} in flight"

Figures = dict[str, float]


@dataclass
class Rollout:
    job_id: str
    tokens: list[int]
    turn: int = 0
    began: float = 0.0
    """When it got the engine, in seconds of the cores."""


@dataclass
class Tally:
    """What happened after the warm-up."""

    turns: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    held: float = 0.0
    waiting: float = 0.0
    """Requests in the engine's queue: the mean over heartbeats."""
    beats: int = 0
    parked: int = 0
    """Turns."""
    same: float = 0.0
    """Share of the compared turns whose tokens are those of an idle engine."""


class Clock:
    def __init__(self) -> None:
        self._skipped = -time.process_time()

    def now(self) -> float:
        return time.process_time() + self._skipped

    def skip_to(self, at: float) -> None:
        self._skipped += max(0.0, at - self.now())


class Row:
    """One way to limit the rollouts of an engine."""

    def __init__(self, engine: Any, meter: KvMeter, clock: Clock, way: str, number: int) -> None:
        self._engine = engine
        self._way = way
        self._clock = clock
        self._began = clock.now()
        self._broker = BackendRequestHandler(1e9)
        self._backend = Backend(backend_id="x", endpoint="ipc://x", max_in_flight=256, context_tokens=CONTEXT)
        self._random = np.random.default_rng([number, 1])
        host: Any = SimpleNamespace(description=SimpleNamespace(kv=True), kv_figures=meter.take)
        meter.take(SCALE * self._began)
        self._figures = EngineFigures(host, self._backend, SCALE * self._began)
        self._rollouts: dict[str, Rollout] = {}
        self._tools: list[tuple[float, str]] = []
        """Rollouts whose next turn is ready at a time."""
        self._made = 0
        self._beat = 0.0
        self.tally = Tally()
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompts and answers."""

    @property
    def _room(self) -> int | None:
        return {NO_LIMIT: None, FIXED: FITTING, OURS: self._figures.room}[self._way]

    def run(self, seconds: float) -> Tally:
        now, warm = self._began, self._began + WARM_UP * seconds
        self._figures.measure(SCALE * now)
        self._ask(AddBackend("add", self._backend, heartbeats=True, room=self._room), now)
        for _ in range(OFFERED):
            self._offer(now, int(self._random.integers(TURNS)))
        while (now := self._clock.now()) < self._began + seconds:
            self._heartbeat(now, counts=now > warm)
            while self._tools and self._tools[0][0] <= now:
                self._start_turn(heapq.heappop(self._tools)[1], now, counts=now > warm)
            if not self._engine.has_unfinished_requests():
                self._clock.skip_to(min([self._beat, *(at for at, _ in self._tools[:1])]))
                continue
            for output in self._engine.step():
                if output.finished:
                    self._end_turn(output, self._clock.now(), counts=now > warm)
        self._engine.abort_request(list(self._rollouts))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self.tally.seconds = self._clock.now() - warm
        return self.tally

    def _ask(self, request: Any, now: float) -> Any:
        """Ask the broker; rollouts that get the engine begin their turns."""
        own = None
        for answer in self._broker.handle([request.request_id.encode(), b""], request, SCALE * now):
            if isinstance(answer.reply, Assigned):
                self._rollouts[answer.reply.request_id].began = SCALE * now
                heapq.heappush(self._tools, (now, answer.reply.request_id))
            elif answer.reply.request_id == request.request_id:
                own = answer.reply
        return own

    def _offer(self, now: float, turn: int = 0) -> None:
        job_id = f"{self._way}-{self._made}"
        self._made += 1
        self._rollouts[job_id] = Rollout(job_id, self._text(PROMPT + turn * (GENERATED + ANSWER)), turn)
        self._ask(Assign(job_id, owner="bench", job_id=job_id, attempt=1, wait_s=60.0), now)

    def _text(self, length: int) -> list[int]:
        return [int(one) for one in self._random.integers(7, VOCABULARY, length)]

    def _heartbeat(self, now: float, *, counts: bool) -> None:
        if now < self._beat:
            return
        self._beat = now + BEAT_S
        for job_id in self._figures.measure(SCALE * now):
            self._generate(job_id)
        load = self._figures.load(0, SCALE * now)
        held = self._ask(BackendAlive("beat", "x", 0, load, room=self._room), now)
        if isinstance(held, BackendHeld):
            self._figures.note_held(held)
        if counts:
            self.tally.beats += 1
            self.tally.held += len(self._broker.heap.member("x").jobs)
            self.tally.waiting += load.queued

    def _start_turn(self, job_id: str, now: float, *, counts: bool) -> None:
        rollout, parking = self._rollouts[job_id], self._figures.parking
        turn = job_id, job_id, rollout.began, len(rollout.tokens), SCALE * now
        if self._way != OURS or parking is None or not parking.hold(*turn):
            self._generate(job_id)
        elif counts:
            self.tally.parked += 1

    def _generate(self, job_id: str) -> None:
        self._engine.add_request(job_id, {"prompt_token_ids": list(self._rollouts[job_id].tokens)}, sampling())

    def _end_turn(self, output: Any, now: float, *, counts: bool) -> None:
        rollout = self._rollouts[output.request_id]
        prompt, answer = rollout.tokens, list(output.outputs[0].token_ids)
        spans = (VersionSpan(0, 0, len(answer)),)
        cached = output.num_cached_tokens or 0
        done = Generation(np.array(answer, np.int32), np.zeros(len(answer), np.float32), spans, "length", cached)
        self._figures.note_turn(rollout.job_id, np.array(prompt, np.int32), done, SCALE * now)
        if counts:
            self.tally.turns += 1
            self.tally.prompt_tokens += len(prompt)
            self.tally.cached_tokens += cached
            self.turns.append((prompt, answer))
        rollout.turn += 1
        rollout.tokens = [*prompt, *answer, *self._text(ANSWER)]
        if rollout.turn < TURNS:
            heapq.heappush(self._tools, (now + self._random.exponential(TOOL_S), rollout.job_id))
            return
        del self._rollouts[rollout.job_id]
        self._ask(Release("release", rollout.job_id, 1, TURNS, context_tokens=len(prompt) + len(answer)), now)
        self._offer(now)


def sampling() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=GENERATED,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def same_alone(engine: Any, turns: list[tuple[list[int], list[int]]]) -> float:
    """Return the share of turns that an engine without other requests answers with the same tokens."""
    chosen = turns[:: max(1, len(turns) // COMPARED)][:COMPARED]
    same = 0
    for number, (prompt, answer) in enumerate(chosen):
        engine.add_request(f"alone-{number}", {"prompt_token_ids": prompt}, sampling())
        while engine.has_unfinished_requests():
            outputs = engine.step()
        same += list(outputs[0].outputs[0].token_ids) == answer
    return same / len(chosen)


def make_model(folder: str) -> None:
    """Save a model of 13 million random parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main(folder: str, seconds: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerBase

    make_model(folder)
    meter, clock = KvMeter(), Clock()
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True,
        enable_chunked_prefill=False,
        gpu_memory_utilization=0.2,
        max_num_seqs=OFFERED,
        disable_log_stats=False,
    )
    engine = LLMEngine.from_engine_args(
        arguments, stat_loggers=[kv_logger(meter, StatLoggerBase, lambda: SCALE * clock.now())]
    )
    results: dict[str, Any] = {}
    for number, way in enumerate((NO_LIMIT, OURS, FIXED)):
        row = Row(engine, meter, clock, way, number)
        tally = row.run(float(seconds))
        tally.same = same_alone(engine, row.turns)
        results[way] = asdict(tally)
        print(way, results[way], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
