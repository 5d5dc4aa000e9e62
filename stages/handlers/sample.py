"""The `sample` task: one reply of a model to one request, for the gateway's `/v1/completions` and its like.

Nothing is judged: the reward is always 0.0. The reply's text and tool calls are in the result's notes (see
`prorl_zmq.data.single_reply`), its tokens in the trajectory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase


class SampleInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model continues: exactly one of `chat`, `text` and `token_ids`."""

    chat: dict[str, Any] = {}
    """`messages`, `tools`, `tool_choice` and `stop` of OpenAI's chat completions."""
    text: str = ""
    """A text, tokenized as it is, without the chat template."""
    token_ids: list[int] = []
    """The exact prompt."""
    turn_ends: bool = True
    """Of a text or ids: whether the tokens that end a turn of the model end the reply."""
    echo: bool = False
    """Of a text or ids: whether the reply has the prompt's text too."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.chat, self.text, self.token_ids))) != 1:
            raise ValueError("give one of chat, text and token_ids, which is not empty")


class SampleHandler(AgentHandler[SampleInstance]):
    task = "sample"
    instance_type = SampleInstance

    async def run(self, phase: RunPhase[SampleInstance]) -> PhaseData:
        await phase.reply(phase.instance)
        return {}

    async def eval(self, phase: EvalPhase[SampleInstance]) -> Evaluation:
        del phase
        return Evaluation(0.0)
