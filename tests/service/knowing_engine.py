"""An engine host that says what a file tells it to: `python knowing_engine.py BACKEND_BROKER ENDPOINT SPEECHES`.

SPEECHES is JSON: for each text that a problem has in it, the turns of the policy, each a text or [tool,
arguments]; the last one is said for ever.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, decode, encode
from prorl_zmq.system.processes import stop_signals
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import Sampling


CONTEXT_TOKENS = 200_000
"""Of the embedded tokenizer, which makes many of a large prompt."""


class KnowingEngine(EmbeddedEngine):
    def __init__(self, speeches: dict[str, list[Any]]) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._description = replace(self._description, context_tokens=CONTEXT_TOKENS)
        self._speeches = speeches

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        conversation = decode(token_ids)
        known = [turns for text, turns in self._speeches.items() if text in conversation]
        if not known:
            raise EngineFailed("the conversation is about nothing that is known here", refused=True)
        turns = known[0]
        ids = tokens(turns[min(conversation.count("<|im_start|>assistant\n"), len(turns)) - 1])
        return Generation(ids, np.zeros(len(ids), np.float32), (VersionSpan(0, 0, len(ids)),), "stop")


def tokens(turn: str | list[Any]) -> NDArray[np.int32]:
    if isinstance(turn, str):
        return np.array([*encode(turn), IM_END], np.int32)
    name, arguments = turn
    call = encode(json.dumps({"name": name, "arguments": arguments}))
    return np.array([TOOL_CALL, *call, TOOL_CALL_END, IM_END], np.int32)


async def main(speeches: dict[str, list[Any]]) -> None:
    backend_broker, endpoint, _ = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id="knowing")
        await EngineHost(context, KnowingEngine(speeches), options).run(stop)


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[3]).read_text())))
