"""An engine host that says what a file tells it to: `python knowing_engine.py BACKEND_BROKER ENDPOINT SPEECHES`.

SPEECHES is JSON: for each text that a problem has in it, the turns of the policy, each a text or [tool,
arguments]; the last one is said for ever.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.system.processes import stop_signals
from prorl_zmq.testing import say, tool_call


def turn(speeches: dict[str, list[Any]], conversation: str) -> str:
    known = [turns for text, turns in speeches.items() if text in conversation]
    if not known:
        raise LookupError("the conversation is about nothing that is known here")
    said = known[0][min(conversation.count("<|im_start|>assistant\n"), len(known[0])) - 1]
    return said if isinstance(said, str) else tool_call(said[0], **said[1])


async def main(speeches: dict[str, list[Any]]) -> None:
    backend_broker, endpoint, _ = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id="knowing")
        await EngineHost(context, say(partial(turn, speeches)), options).run(stop)


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[3]).read_text())))
