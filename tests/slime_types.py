"""Stand-ins for slime's types, written from its contract: slime is not on the package index, and its own need GPUs.

After THUDM/slime, `slime/utils/types.py` and `slime/rollout/base_types.py`: the fields that a rollout function meets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


@dataclass
class Sample:
    """One rollout of a prompt."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class NewerSample(Sample):
    """With the number that the samples of one rollout share."""

    rollout_id: int | None = None


@dataclass
class RecordingSample(NewerSample):
    """With the fields for records."""

    rollout_routed_experts: Any = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    teacher_log_probs: list[float] | None = None


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class DataSource:
    """Endless, as slime's is: numbers groups and samples through all that it ever gave."""

    def __init__(self, size: int, metadata: list[dict[str, Any]]) -> None:
        self.size = size
        self.metadata = metadata
        self.given = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [self._next() for _ in range(num_samples)]

    def _next(self) -> list[Sample]:
        number, self.given = self.given, self.given + 1
        metadata = self.metadata[number % len(self.metadata)]
        return [
            Sample(group_index=number, index=number * self.size + place, metadata=dict(metadata))
            for place in range(self.size)
        ]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `slime.rollout.base_types` be imported."""
    module = ModuleType("slime.rollout.base_types")
    module.RolloutFnTrainOutput = RolloutFnTrainOutput  # type: ignore[attr-defined]
    module.RolloutFnEvalOutput = RolloutFnEvalOutput  # type: ignore[attr-defined]
    for name, value in (("slime", ModuleType("slime")), ("slime.rollout", ModuleType("slime.rollout"))):
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def check_train_output(output: Any, args: Any) -> None:
    """Refuse what slime's `RolloutManager` would refuse or take for something else."""
    assert isinstance(output, RolloutFnTrainOutput)
    assert len(output.samples) == args.rollout_batch_size
    for group in output.samples:
        assert len(group) == args.n_samples_per_prompt
        members = [sample[0] if isinstance(sample, list) else sample for sample in group]
        assert len({sample.group_index for sample in members}) == 1
        for sample in (each for member in group for each in (member if isinstance(member, list) else [member])):
            assert isinstance(sample.reward, float)
            assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
            assert 0 < sample.response_length < len(sample.tokens)
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
            assert set(sample.loss_mask) <= {0, 1}
            assert sample.loss_mask[0] == 1
            assert all(isinstance(version, str) for version in sample.weight_versions)
    order = [(group[0][0] if isinstance(group[0], list) else group[0]).index for group in output.samples]
    assert order == sorted(order)


def check_records(sample: RecordingSample, layers: int, chosen: int) -> None:
    """Check what slime asserts of a sample's records before it replays them."""
    experts, offsets = sample.rollout_routed_experts, sample.rollout_top_p_token_offsets
    assert experts.shape == (len(sample.tokens) - 1, layers, chosen)
    assert experts.any(axis=(0, 2)).all(), "a layer that is all zero has lost its routes"
    assert offsets is not None
    assert sample.rollout_top_p_token_ids is not None
    assert len(offsets) == sample.response_length + 1
    assert (offsets[0], offsets[-1]) == (0, len(sample.rollout_top_p_token_ids))
    assert sample.teacher_log_probs is not None
    assert len(sample.teacher_log_probs) == sample.response_length
