"""`Prompt`: a row of verl's data set that is to be rolled out, and what verl's TransferQueue gets for it.

A prompt's key there is its `uid`; the keys of its rows are `{uid}_{place in the group}_{segment}` (as in verl's
`AgentLoopWorkerTQ`). Its `status` is `running`, then `finished`, or `failure` if it has no rows that can be trained on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.tensordict_utils import get_non_tensor_data, list_of_dict_to_tensordict

from ..session import response_room
from .arrays import agent_loop_outputs

if TYPE_CHECKING:
    from ...data.group import Group
    from ..session import TooLong


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and the columns of its row."""

    uid: str
    partition: str
    """`train` or `val`."""
    columns: dict[str, Any]

    def set_status(self, status: str) -> None:
        """Say how far it is."""
        tq.kv_put(key=self.uid, partition_id=self.partition, tag={"status": status})

    def put(self, group: Group, most_tokens: int | None, too_long: TooLong) -> Rows:
        """Put the rows of its group into the queue, without those that are longer than `most_tokens`.

        None are put if rows of one rollout alone are left of several: it would have no baseline.
        """
        rows = Rows({}, Counter())
        fields = []
        for place, segments in enumerate(agent_loop_outputs([group])):
            for number, segment in enumerate(segments):
                tokens = len(segment["response_ids"])
                most = None if most_tokens is None else most_tokens - len(segment["prompt_ids"])
                room = response_room(tokens, most, too_long)
                rows.counts["truncated" if 0 < room < tokens else "dropped" if not room else "rows"] += 1
                if not room:
                    continue
                for name in ("response_ids", "response_mask", "response_logprobs"):
                    segment[name] = segment[name][:room]
                fields.append({**_fields(segment), **self.columns, "session_id": place})
                rows.tags[f"{self.uid}_{place}_{number}"] = self._tag(segment)
        if len({row["session_id"] for row in fields}) < min(2, len(group)):
            rows.tags.clear()
            rows.counts = Counter(dropped=rows.counts.total())
        if rows.tags:
            tq.kv_batch_put(
                keys=list(rows.tags),
                fields=list_of_dict_to_tensordict(fields),
                tags=list(rows.tags.values()),
                partition_id=self.partition,
            )
        return rows

    def _tag(self, segment: dict[str, Any]) -> dict[str, Any]:
        prompt, response = len(segment["prompt_ids"]), len(segment["response_ids"])
        extra = segment["extra_fields"]
        return {
            "status": "success",
            "prompt_len": prompt,
            "response_len": response,
            "seq_len": prompt + response,
            "global_steps": self.columns["global_steps"],
            "min_global_steps": extra["min_global_steps"],
            "max_global_steps": extra["max_global_steps"],
        }


@dataclass(slots=True)
class Rows:
    """What of a group is in the queue."""

    tags: dict[str, dict[str, Any]]
    """By their keys."""
    counts: Counter[str]
    """`rows` that are whole, `truncated` and `dropped` ones."""


def prompts_of(batch: Any) -> list[Prompt]:
    """Return the prompts of a `TensorDict` as verl's trainer gives them to its agent-loop manager."""
    columns = {name: value for name, value in batch.items() if name != "validate"}
    validate = get_non_tensor_data(batch, "validate", default=False)
    partition = "val" if validate else "train"
    prompts = []
    for index in range(len(batch)):
        row = {name: _value(value, index) for name, value in columns.items()}
        prompts.append(Prompt(row["uid"], partition, row))
    return prompts


def _value(column: Any, index: int) -> Any:
    if isinstance(column, NonTensorStack):
        return column[index].data
    return column.data if isinstance(column, NonTensorData) else column[index]


def _fields(segment: dict[str, Any]) -> dict[str, Any]:
    """Return what verl's own agent loops put for a row of text."""
    fields = AgentLoopOutput(**segment).as_dict()
    input_ids = torch.cat([fields["prompts"], fields["responses"]])
    return {
        **fields,
        "loss_mask": fields["response_mask"],
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "multi_modal_inputs": {},
    }
