"""Makes the rows of verl's agent loops from groups; does not need verl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.rows import rows_of
from ...wire.records import EXPERTS
from ..recorded import NOTHING_ASKED, routes, teacher_scores
from ..session import Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...data.group import Group
    from ..recorded import Asked


def agent_loop_outputs(groups: Sequence[Group], asked: Asked = NOTHING_ASKED) -> list[list[dict[str, Any]]]:
    """Return the fields of an `AgentLoopOutput` for each segment of each trajectory, all with the trajectory's reward.

    `[AgentLoopOutput(**fields) for fields in outputs[i]]` is what an agent loop's `run` returns for rollout i.

    Args:
        groups: what to train on.
        asked: the records that the rows need; see `output_of`.

    Raises:
        NotTrainable: there are no groups, one is not trainable, or a record is missing.
    """
    outputs: list[list[dict[str, Any]]] = [[] for group in groups for _ in group.trajectories]
    for row in rows_of(groups):
        outputs[row.index].append(output_of(Sample.of(row), asked))
    return outputs


def output_of(sample: Sample, asked: Asked = NOTHING_ASKED) -> dict[str, Any]:
    """Return the fields of a sample's `AgentLoopOutput`; times are in seconds.

    Of records, verl has `routed_experts`, of the first tokens of prompt and response (verl adds rows of zeros, which it
    does not replay), and in `extra_fields` tensors of the teacher's scores, `teacher_ids` int32 and `teacher_logprobs`
    float32 [prompt + response, K]: row i scores token i + 1, and the last row is 0. Without likeliest tokens, K is 1
    and the token is the text's own.

    Raises:
        NotTrainable: a record that is asked for is missing, or a trained token needs a row that is unknown.
    """
    row, timings = sample.row, sample.row.trajectory.result.timings
    asked.check(sample)
    return {
        **({"routed_experts": routes(sample)} if EXPERTS in asked.names else {}),
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "response_mask": sample.response_mask.tolist(),
        "response_logprobs": sample.logprobs.tolist(),
        "reward_score": row.reward,
        "num_turns": len(row.arrays.turns),
        "metrics": {
            "generate_sequences": timings.get("engine", 0.0),
            "tool_calls": sum(seconds for name, seconds in timings.items() if name.startswith("tool.")),
            "compute_score": timings.get("eval", 0.0),
            "num_preempted": -1,
        },
        "extra_fields": {
            "reward_extra_info": {},
            "min_global_steps": row.versions[0],
            "max_global_steps": row.versions[-1],
            **(_teacher_fields(sample) if asked.teacher else {}),
        },
    }


def _teacher_fields(sample: Sample) -> dict[str, Any]:
    import torch

    logprobs, ids, top_logprobs = teacher_scores(sample)
    if not ids.shape[1]:
        ids, top_logprobs = sample.row.arrays.token_ids[1 : len(logprobs) + 1, None], logprobs[:, None]
    last = ((0, 1), (0, 0))
    return {
        "teacher_ids": torch.from_numpy(np.pad(ids, last).astype(np.int32)),
        "teacher_logprobs": torch.from_numpy(np.pad(top_logprobs, last)),
    }
