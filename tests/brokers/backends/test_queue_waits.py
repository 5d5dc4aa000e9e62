from __future__ import annotations

import math
import time
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.backends.queue_waits import Wait, WaitLimits
from prorl_zmq.brokers.backends.request_handler import BackendRequestHandler
from prorl_zmq.wire.messages.backends import Assign

JOBS = 10_000


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("wait"), st.integers(0, 5), st.sampled_from([1.0, 5.0, 30.0])),
            st.tuples(st.just("leave"), st.integers(0, 5), st.just(0.0)),
            st.tuples(st.just("coming"), st.just(0), st.just(0.0)),
            st.tuples(st.just("take"), st.just(0), st.just(0.0)),
        ),
        max_size=40,
    )
)
def test_it_says_what_a_look_at_each_wait_would(steps: list[tuple[str, int, float]]) -> None:
    waits: dict[str, Wait] = {}
    limits = WaitLimits(waits.get)
    last = -math.inf

    def until(wait: Wait) -> float:
        return max(wait.since, last) + wait.wait_s

    for now, (what, job, wait_s) in zip(count(0.0, 1.5), steps, strict=False):
        if what == "wait":
            waits[str(job)] = Wait(now, wait_s)
            limits.add(str(job), waits[str(job)])
        elif what == "leave":
            waits.pop(str(job), None)
        elif what == "coming":
            last = now
        else:
            expired = {name for name, wait in waits.items() if until(wait) <= now}
            taken = limits.take_expired(last, now)
            assert (set(taken), len(taken)) == (expired, len(expired))
            for name in taken:
                del waits[name]
        assert limits.next_expiry(last) == min(map(until, waits.values()), default=None)


def test_waits_that_ended_behind_a_long_one_are_forgotten() -> None:
    waits = {"first": Wait(0.0, 600.0)}
    limits = WaitLimits(waits.get)
    limits.add("first", waits["first"])
    began = time.perf_counter()
    for number in range(JOBS):
        job_id, wait = f"job-{number}", Wait(number / 100, 600.0)
        waits[job_id] = wait
        limits.add(job_id, wait)
        if number % 100:
            del waits[job_id]
    assert len(limits._by_duration[600.0]) < 4 * len(waits)
    assert time.perf_counter() - began < 2.0, "it looks at all entries for each one"
    assert limits.next_expiry(-math.inf) == 600.0
    assert sorted(limits.take_expired(-math.inf, 1000.0)) == sorted(waits)
    assert limits.next_expiry(-math.inf) is None
    assert not limits._by_duration
    assert not limits._most


def test_the_next_deadline_costs_as_little_with_many_jobs_as_with_one() -> None:
    def seconds(jobs: int) -> float:
        handler = BackendRequestHandler(10.0)
        for number in range(jobs):
            name = f"job-{number}"
            handler.handle([b"run", b""], Assign(name, owner="run", job_id=name, attempt=1, wait_s=60.0), 0.0)
        assert (handler.waiting, handler.next_deadline()) == (jobs, 60.0)
        began = time.perf_counter()
        for _ in range(200):
            handler.next_deadline()
        return (time.perf_counter() - began) / 200

    assert seconds(JOBS) < 10 * seconds(1) + 1e-4, "it took 6.7 ms, as it looked at each wait"
