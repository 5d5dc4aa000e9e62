"""The record of a job's conversations."""

from __future__ import annotations

import time

from prorl_zmq.stages.episode import OTHER_TOOLS, Episode
from prorl_zmq.wire.messages.base import TIMINGS_LIMIT


def test_timings_of_very_many_tools_fit_into_a_result() -> None:
    episode = Episode()
    for number in range(200):
        episode.spent(f"tool.t{number}", time.monotonic() - 1)
    episode.spent("tool.t0", time.monotonic() - 1)
    assert len(episode.timings) < TIMINGS_LIMIT
    assert episode.timings["tool.t0"] >= 2
    assert sum(episode.timings.values()) >= 201
    assert episode.timings[OTHER_TOOLS] > 100
