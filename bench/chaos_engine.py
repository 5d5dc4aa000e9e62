"""The engine kind of bench/chaos.py: the embedded one, with a sabotaging policy for jobs that ask for sabotage.

Each form of sabotage is an agent that cannot earn its reward, and tries to make its result the infrastructure's fault,
or its check a false one. `chaos_pipeline` installs this file as a package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.engine_kind import EngineKind
from prorl_zmq.inference.policy import Policy, one_blas_thread
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, decode, encode
from prorl_zmq.wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference.engine import Engine
    from prorl_zmq.wire.messages.jobs import Sampling

ASKED = re.compile(r"sabotage ([a-z ]+)\.")
SABOTAGES = {
    "all processes": r"""cat > /tmp/killer <<'END'
while :; do for each in /proc/[1-9]*; do
  each=${each#/proc/}; [ $each = 1 ] || [ $each = $$ ] || kill -9 $each
done; done
END
(setsid bash /tmp/killer </dev/null >/dev/null 2>&1 &)
sleep 5""",
    "the process table": "for each in $(seq 600); do sleep 1000 & done 2>/dev/null >&2",
    "the time": "sleep 1000",
    "the check": "touch slow",
    "the workspace": "rm -rf .placed; mkdir -p a/b; chmod 0 a . /workspace /tmp",
    "the answer": "ln -s /proc/self/cmdline answer.txt; ln -s answer.txt answer",
    "the shell": "kill -9 $$ $PPID 1",
    "the disk": "cat /dev/zero > full; cat /dev/zero > /tmp/full; sleep 2",
}
"""What is sabotaged, and the command that does it."""


class SaboteurKind(EngineKind, frozen=True):
    """The embedded engine with saboteurs."""

    model: str

    async def start(self, weight_version: int) -> Engine:
        """Load the policy."""
        one_blas_thread()
        return SaboteurEngine(Policy.load(Path(self.model)), weight_version, self.model)


class SaboteurEngine(EmbeddedEngine):
    """An embedded engine in all but what it says to saboteurs."""

    async def generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], job_id: str
    ) -> Generation:
        """Say the saboteur's next turn, or what the policy says."""
        conversation = decode(token_ids)
        asked = ASKED.search(conversation)
        if asked is None:
            return await super().generate(token_ids, sampling, stop_token_ids, job_id)
        turn = conversation.count("<|im_start|>assistant\n") - 1
        ids = _turn([SABOTAGES[asked[1]], "echo here"], turn)
        return Generation(ids, np.zeros(len(ids), np.float32), (VersionSpan(self.weight_version, 0, len(ids)),), "stop")


def _turn(commands: Sequence[str], turn: int) -> NDArray[np.int32]:
    if turn >= len(commands):
        return np.array([*encode("The end."), IM_END], np.int32)
    call = json.dumps({"name": "bash", "arguments": {"command": commands[turn]}})
    return np.array([TOOL_CALL, *encode(call), TOOL_CALL_END, IM_END], np.int32)
