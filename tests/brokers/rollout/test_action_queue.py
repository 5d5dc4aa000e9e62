"""One queue: what follows from an action is performed after it, never inside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_zmq.brokers.batches.batch_records import CancelJobs, StartJobs
from prorl_zmq.brokers.rollout.actions import End
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.batches import BatchOptions, Feed, GroupFilter, OpenBatch
from prorl_zmq.wire.messages.jobs import Job, Outcome, Phase
from prorl_zmq.wire.messages.stages import PhaseFailed, StageReport

from .test_front_door import MATH, Door

if TYPE_CHECKING:
    import pytest


def test_what_follows_from_an_action_is_performed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door()
    performed: list[Any] = []
    depths = [0]

    def watch(owner: Any) -> None:
        perform = owner.perform

        def watched(action: Any, *rest: Any) -> None:
            performed.append(action)
            depths.append(depths[-1] + 1)
            perform(action, *rest)
            depths.append(depths[-1] - 1)

        monkeypatch.setattr(owner, "perform", watched)

    watch(door.batches)
    watch(door.writes)
    report = StageReport(stage_id="i", role=Phase.INIT, node="n", slots=4, endpoint="e", tasks=(MATH,), welcomed=True)
    door.perform(door.table.stage_reported(report, 0.0))
    options = BatchOptions(target_groups=1, group_size=2, keep=GroupFilter("all"), max_replacements=0)
    door.ask(OpenBatch("open", "s", "b", options))
    door.ask(Feed("feed", "s", "b", start=0), codec.encode(Job(task="math", instance={"problem": "1"})))
    door.batches.launch(0.0)
    door.perform([])
    (started,) = [action for action in performed if isinstance(action, StartJobs)]
    first, second = (launch.job_id for launch in started.launches)
    performed.clear()
    # A job that fails is the end of its group; so the other one is cancelled.
    error = ErrorInfo("handler_failed", "no")
    failed = PhaseFailed(
        stage_id="i", job_id=first, attempt=1, phase=Phase.INIT, number=1, outcome=Outcome.FAILED, error=error
    )
    door.perform(door.table.phase_failed(failed, None, 1.0))
    ends = [action.finished.result.job_id for action in performed if isinstance(action, End)]
    assert ends == [first, second]
    kinds = [type(action) for action in performed]
    assert kinds.index(End) < kinds.index(CancelJobs)
    assert max(depths) == 1
    assert not door.jobs.queue
