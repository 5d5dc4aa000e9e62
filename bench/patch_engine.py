"""An engine host that has the answers: `patch_engine.py BACKEND_BROKER ENDPOINT DATA POLICY TURN_S`.

It plays an agent that reads, patches, looks and finishes, on instances of a swe data file, identified by their
statements. POLICY selects the patch: `gold` resolves the issue, `wrong` adds an error that ends all tests of that file,
`empty` is no patch. A turn takes as long as a language model's would: log-normal about TURN_S seconds, the same in
every run for the same rollout of an instance and the same turn.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop
import zmq
from tasks_swe import rows_of

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, decode, encode
from prorl_zmq.system.processes import stop_signals
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import Sampling

SPREAD = 0.5
"""Of the log-normal turns."""


class PatchEngine(EmbeddedEngine):
    """An embedded engine in all but what it says.

    Args:
        instances: rows of the data file.
        policy: `gold`, `wrong` or `empty`.
        turn_s: the median turn.
    """

    def __init__(self, instances: list[dict[str, Any]], policy: str, turn_s: float) -> None:
        super().__init__(Policy.initial(PolicyShape(), seed=0))
        self._turns = {row["problem_statement"]: turns_of(row, policy) for row in instances}
        self._turn_s = turn_s

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        """Say what comes next in the conversation."""
        del sampling, stop_token_ids
        conversation = decode(token_ids)
        statement = conversation.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        if statement not in self._turns:
            raise EngineFailed("the conversation is about no instance of the data file")
        turn = conversation.count("<|im_start|>assistant\n") - 1
        draw = np.random.default_rng([zlib.crc32(job_id.rpartition("-")[0].encode()), turn])
        await asyncio.sleep(self._turn_s * float(draw.lognormal(sigma=SPREAD)))
        ids = self._turns[statement][turn]
        span = VersionSpan(self.weight_version, 0, len(ids))
        return Generation(ids, np.zeros(len(ids), np.float32), (span,), "stop")


def turns_of(row: dict[str, Any], policy: str) -> list[NDArray[np.int32]]:
    """Give what the agent says in an episode on one instance."""
    (file, *_) = re.findall(r"^\+\+\+ b/(.*)$", row["patch"], re.MULTILINE)
    test, _, _ = row["FAIL_TO_PASS"][0].partition("::")
    gold = f"git apply <<'END_OF_PATCH'\n{row['patch'].rstrip(chr(10))}\nEND_OF_PATCH"
    patches = {"gold": gold, "wrong": f"{gold}\necho 'raise RuntimeError' >> {file}", "empty": "true"}
    commands = ["git log --oneline | head; ls", f"head -c 4000 {file}", patches[policy]]
    commands += [f"git diff --stat; ls {test}"]
    calls = [("bash", {"command": command}) for command in commands] + [("finish", {"message": "done"})]
    return [_call(name, arguments) for name, arguments in calls]


def _call(name: str, arguments: dict[str, str]) -> NDArray[np.int32]:
    text = encode(json.dumps({"name": name, "arguments": arguments}))
    return np.concatenate([[TOOL_CALL], text, [TOOL_CALL_END, IM_END]]).astype(np.int32)


async def main(rows: list[dict[str, Any]]) -> None:
    backend_broker, endpoint, _, policy, turn_s = sys.argv[1:]
    stop = asyncio.Event()
    with stop_signals(stop.set), zmq.Context() as context:
        options = HostOptions(endpoint=endpoint, backend_broker=backend_broker, backend_id="patch")
        await EngineHost(context, PatchEngine(rows, policy, float(turn_s)), options).run(stop)


if __name__ == "__main__":
    uvloop.run(main(rows_of(Path(sys.argv[3]))))
