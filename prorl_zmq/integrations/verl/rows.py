"""Makes the rows of verl's agent loops from groups; does not need verl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...data.rows import rows_of
from ..session import Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...data.group import Group


def agent_loop_outputs(groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
    """Return the fields of an `AgentLoopOutput` for each segment of each trajectory, all with the trajectory's reward.

    `[AgentLoopOutput(**fields) for fields in outputs[i]]` is what an agent loop's `run` returns for rollout i.

    Raises:
        NotTrainable: there are no groups, or one is not trainable.
    """
    outputs: list[list[dict[str, Any]]] = [[] for group in groups for _ in group.trajectories]
    for row in rows_of(groups):
        outputs[row.index].append(output_of(Sample.of(row)))
    return outputs


def output_of(sample: Sample) -> dict[str, Any]:
    """Return the fields of a sample's `AgentLoopOutput`; times are in seconds."""
    row, timings = sample.row, sample.row.trajectory.result.timings
    return {
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
        },
    }
