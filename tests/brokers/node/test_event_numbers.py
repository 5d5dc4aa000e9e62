"""The node's numbers of its stage processes' events."""

from __future__ import annotations

from prorl_zmq.brokers.node.event_numbers import EventNumbers
from prorl_zmq.wire.messages.jobs import Phase


def numbered() -> EventNumbers:
    numbers = EventNumbers()
    assert numbers.number("run-1", 1, Phase.RUN, "a", 1) == 1
    assert numbers.number("run-2", 1, Phase.RUN, "b", 2) == 2
    assert numbers.number("eval-1", 1, Phase.EVAL, "c", 1) == 3
    return numbers


def test_an_event_that_comes_again_keeps_its_number() -> None:
    numbers = numbered()
    assert numbers.number("run-2", 1, Phase.RUN, "b", 2) == 2
    assert numbers.number("run-2", 2, Phase.RUN, "d", 1) == 4


def test_each_process_is_told_of_its_own_events() -> None:
    numbers = numbered()
    assert numbers.noted([1, 3, 99]) == {"run-1": (1,), "eval-1": (1,)}
    assert numbers.noted([1]) == {}


def test_what_is_not_noted_is_said_to_have_ended() -> None:
    numbers = numbered()
    assert numbers.ended(Phase.RUN) == {"a": 1, "b": 2}
    numbers.noted([2])
    assert numbers.ended(Phase.RUN) == {"a": 1}


def test_events_of_a_process_that_is_gone_are_not_waited_for() -> None:
    numbers = numbered()
    numbers.forget("run-1")
    assert numbers.ended(Phase.RUN) == {"b": 2}
    assert numbers.noted([1]) == {}
