"""What stands for a job once its bytes are gone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prorl_zmq import Job
from prorl_zmq.brokers.journal.records import job_digest
from prorl_zmq.wire import codec

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.just("traceparent")
INSTANCES = st.dictionaries(
    st.text() | st.just("traceparent"),
    st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8),
)


def digest(job: Job) -> bytes:
    return job_digest(codec.encode(job))


@given(INSTANCES, INSTANCES, st.text(min_size=1), st.text(min_size=1))
def test_the_trace_that_a_job_is_in_makes_no_other_job(
    instance: dict[str, Any], other: dict[str, Any], one: str, two: str
) -> None:
    job = Job(task="shell", instance=instance, job_id="a")
    assert digest(job) == digest(replace(job, traceparent=one)) == digest(replace(job, traceparent=two))
    changed = replace(job, instance=other, traceparent=one)
    assert (digest(changed) == digest(job)) == (codec.encode(replace(changed, traceparent="")) == codec.encode(job))


def test_bytes_that_are_no_job_have_a_digest_too() -> None:
    damaged = (b"", b"\xabtraceparent", b"\xc1traceparent", b"\x91\xabtraceparent")
    assert len({job_digest(packed) for packed in damaged}) == len(damaged)
