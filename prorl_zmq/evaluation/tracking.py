"""What `prorl eval --log` logs: figures of the rollouts as they end, then the summary and some conversations.

The step is the number of rollouts with a result, so an evaluation that continues logs on in the same run. The plan's
settings of model and sampling are logged; URLs and flags, which may contain secrets, are not.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..data.printed import turn_label
from ..errors import ConfigError
from ..trackers.conversation import conversation, reward_rank, spread
from ..trackers.values import rollout_values
from .collection import Collection
from .run_folder import says_nothing

if TYPE_CHECKING:
    from ..trackers import Conversation, Tracker
    from .plan import Plan
    from .run_folder import RunFolder, Sample
    from .summary import Summary

POINTS = 100
"""About how many steps are logged before the end."""
CONFIG = (
    *("engine", "model", "samples", "limit", "seed", "temperature", "top_p", "max_tokens", "max_turns", "context"),
    "template_arguments",
    *("harness", "sandbox", "task", "row_format", "data_sha256"),
)


class EvaluationLog:
    def __init__(self, tracker: Tracker, folder: RunFolder) -> None:
        self._tracker = tracker
        self._folder = folder
        self._step = folder.plan.rollouts - len(folder.missing())
        self._every = max(1, folder.plan.rollouts // POINTS)
        self._recent: list[Sample] = []

    def ended(self, sample: Sample) -> None:
        self._step += not says_nothing(sample.result)
        self._recent.append(sample)
        if len(self._recent) >= self._every:
            self._tracker.log(rollout_values(self._recent), self._step)
            self._recent = []

    def summed_up(self, summary: Summary) -> None:
        if self._recent:
            self._tracker.log(rollout_values(self._recent), self._step)
        self._tracker.log(summary_values(summary), self._step)
        self._tracker.samples(self._conversations(), self._step)

    def _conversations(self) -> list[Conversation]:
        rows = []
        collection = Collection(self._folder.path, [])
        for sample in spread(self._folder.samples, lambda each: reward_rank(each.result)):
            with suppress(ConfigError):  # its file is damaged, which `prorl view` says
                turns = collection.transcript(sample).turns
                rows.append(
                    conversation(
                        sample.result,
                        [(turn_label(turn.role, turn.conversation, turn.reward), turn.text or "") for turn in turns],
                    )
                )
        return rows


def run_config(plan: Plan) -> dict[str, object]:
    """Return the settings of an evaluation for its page in a tracker."""
    return {"problems": plan.problems, "version": plan.version} | {
        name: getattr(plan.settings, name) for name in CONFIG
    }


def summary_values(summary: Summary) -> dict[str, float]:
    """Return the figures of a summary, under `eval/`."""
    values = {
        "ended": summary.ended,
        "infrastructure_errors": summary.infrastructure_errors,
        "counted": summary.counted,
    }
    figures = {f"eval/{name}": float(value) for name, value in values.items()}
    estimates = {f"pass_at_{row.k}": row.estimate for row in summary.passes} | {"reward": summary.reward}
    for name, estimate in estimates.items():
        if estimate is not None:
            figures |= {
                f"eval/{name}": estimate.value,
                f"eval/{name}/low": estimate.low,
                f"eval/{name}/high": estimate.high,
            }
    for kind, rows in (("seconds", summary.times), ("tokens", summary.tokens)):
        for row in rows:
            figures |= {f"eval/{kind}/{row.name}/{name}": getattr(row, name) for name in ("mean", "p50", "p95")}
    if summary.cost is not None:
        figures["eval/cost"] = summary.cost.total
    return figures | {f"eval/failures/{row.reason}": float(row.count) for row in summary.failures}
