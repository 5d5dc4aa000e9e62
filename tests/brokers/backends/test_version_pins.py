"""Pins of attempts to versions of adapters: how long each lasts."""

from __future__ import annotations

from prorl_zmq.brokers.backends.version_pins import VersionPins
from prorl_zmq.wire.messages.backends import HeldAssignment


def test_the_newest_attempt_counts() -> None:
    pins = VersionPins()
    pins.add("run", "job/a", 2, 7)
    pins.add("run", "job/a", 1, 6)
    pins.add("run", "job/a", 2, None)
    assert pins.versions("a") == {7}
    pins.add("run", "job/a", 3, None)
    assert pins.versions("a") == set()
    pins.add("run", "job/a", 3, 8)
    pins.drop("job/a", 2)
    assert pins.versions("a") == {8}
    pins.drop("job/a", 3)
    pins.drop("job/a", 3)
    assert (pins.versions("a"), set(pins.owners()), pins.by_job) == (set(), set(), {})


def test_pins_end_with_their_owner_and_what_it_no_longer_names() -> None:
    pins = VersionPins()
    for number in range(3):
        pins.add("run", f"job-{number}/a", 1, 7)
    pins.add("eval", "job-0", 1, 3)
    pins.keep_only("run", {"job-0/a": HeldAssignment(1), "job-1/a": HeldAssignment(2)})
    assert {job: set(holders) for job, holders in pins.by_job.items()} == {"job-0": {"job-0/a", "job-0"}}
    assert (pins.versions("a"), pins.versions("policy")) == ({7}, {3})
    pins.keep_only("run", {})
    assert (pins.versions("a"), set(pins.owners())) == (set(), {"eval"})
