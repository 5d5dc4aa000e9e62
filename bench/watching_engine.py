"""An engine host for pictures of the dashboard: `watching_engine.py BACKEND_BROKER ENDPOINT NAME SKILL TURN_S`.

It plays an agent on the demo's questions about a file of numbers, with real tool calls: it looks, answers, checks, and
stops. SKILL is the probability of the right command, lower for harder questions. A turn takes about TURN_S.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from typing import TYPE_CHECKING

import numpy as np
import uvloop
import zmq

from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, decode, encode
from prorl_zmq.system.processes import stop_signals
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import Sampling

ANSWERS = {
    "How many lines": ("wc -l < data.txt", "wc -c < data.txt", 0.3),
    "Add up": ("awk '{s+=$1} END {print s}' data.txt", "paste data.txt", -0.25),
    "the largest": ("sort -n data.txt | tail -n 1", "sort data.txt | tail -n 1", -0.1),
    "first line": ("head -n 1 data.txt", "tail -n 1 data.txt", 0.2),
    "last number": ("tail -n 1 data.txt", "sort -n data.txt | tail -n 1", 0.0),
}
"""By a part of the question: the right command, a wrong one, and how much more often than SKILL it is known."""
SPREAD = 0.5
"""Of the log-normal turns."""


class AgentEngine(EmbeddedEngine):
    def __init__(self, skill: float, turn_s: float) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._skill = skill
        self._turn_s = turn_s

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: tuple[int, ...], job_id: str
    ) -> Generation:
        """Say what comes next in the conversation."""
        del sampling, stop_token_ids
        conversation = decode(token_ids)
        turn = conversation.count("<|im_start|>assistant\n") - 1
        draw = np.random.default_rng([zlib.crc32(job_id.encode()), turn])
        knows = np.random.default_rng(zlib.crc32(job_id.encode())).random()
        await asyncio.sleep(self._turn_s * float(draw.lognormal(sigma=SPREAD)))
        ids = self._said(conversation, turn, knows)
        logprobs = -(draw.exponential(0.35, len(ids)) ** 2).astype(np.float32)
        return Generation(ids, logprobs, (VersionSpan(self.weight_version, 0, len(ids)),), "stop")

    def _said(self, conversation: str, turn: int, knows: float) -> NDArray[np.int32]:
        right, wrong, easier = next(answer for part, answer in ANSWERS.items() if part in conversation)
        command = right if knows < self._skill + easier else wrong
        turns = (
            ("I look at the file before I choose a command.", "ls -l; head -n 3 data.txt"),
            ("It has one number in each line.", f"{command} > answer.txt"),
            ("I check what was written.", "cat answer.txt"),
        )
        if turn >= len(turns):
            return np.array([*encode("The answer is in answer.txt."), IM_END], np.int32)
        text, call = turns[turn]
        arguments = encode(json.dumps({"name": "bash", "arguments": {"command": call}}))
        return np.array([*encode(text), TOOL_CALL, *arguments, TOOL_CALL_END, IM_END], np.int32)


async def main() -> None:
    backend_broker, endpoint, name, skill, turn_s = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id=name)
        await EngineHost(context, AgentEngine(float(skill), float(turn_s)), options).run(stop)


if __name__ == "__main__":
    uvloop.run(main())
