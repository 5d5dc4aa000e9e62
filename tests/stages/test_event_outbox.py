"""Ends of phases are kept until the broker has noted them."""

from __future__ import annotations

import msgspec

from prorl_zmq.stages.event_outbox import FIRST_RESEND_S, MAX_RESEND_S, EventOutbox
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import PhaseDone


def done(job_id: str, attempt: int = 1) -> PhaseDone:
    return PhaseDone(stage_id="run-1", job_id=job_id, attempt=attempt, phase=Phase.RUN)


def test_each_event_has_a_number_and_is_forgotten_by_it() -> None:
    outbox = EventOutbox()
    frames = [outbox.add(done(job_id), None, 0.0) for job_id in "ab"]
    assert [codec.decode(bytes(one[0]), PhaseDone).number for one in frames] == [1, 2]
    assert outbox.ended == {"a": 1, "b": 1}
    outbox.noted([1, 1, 77])
    assert outbox.ended == {"b": 1}
    outbox.noted([2])
    assert len(outbox) == 0


def test_all_are_sent_again_to_a_broker_that_has_not_seen_them_with_their_trajectories() -> None:
    outbox = EventOutbox()
    block = memoryview(b"trajectory")
    frames = [outbox.add(done("a"), block, 0.0), outbox.add(done("b"), None, 1.0)]
    assert outbox.all(3.0) == frames
    assert frames[0][1] is block
    assert outbox.due(3.0 + FIRST_RESEND_S - 0.1) == []
    assert outbox.due(3.0 + FIRST_RESEND_S) == frames


def test_the_pause_between_two_sendings_doubles_up_to_a_limit() -> None:
    outbox = EventOutbox()
    outbox.add(done("a"), None, 0.0)
    now, pauses = 0.0, []
    for _ in range(7):
        pause = next(step for step in range(1, 100) if outbox.due(now + step))
        now += pause
        pauses.append(float(pause))
    assert pauses == [FIRST_RESEND_S, 10.0, 20.0, 40.0, MAX_RESEND_S, MAX_RESEND_S, MAX_RESEND_S]


def test_event_of_an_earlier_job_of_the_same_id_is_not_sent_again() -> None:
    """To the broker it would look like the new job's."""
    outbox = EventOutbox()
    outbox.add(done("a", attempt=2), None, 0.0)
    outbox.started("a", attempt=3)  # the same job: its old end is stale, and the broker says so
    assert outbox.ended == {"a": 2}
    outbox.started("a", attempt=1)
    assert outbox.ended == {}


def test_it_is_known_for_whom_each_job_was_done() -> None:
    """A node's broker that was restarted learns it from the reports."""
    outbox = EventOutbox()
    outbox.add(msgspec.structs.replace(done("a"), origin="rollout-1"), None, 0.0)
    outbox.add(done("b"), None, 0.0)
    assert outbox.origins == {"a": "rollout-1"}
    outbox.noted([1])
    assert outbox.origins == {}
