"""Jobs that are given to a client go on with the trace that its program is in."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler

from prorl_zmq import Job
from prorl_zmq.client.batch_progress import BatchProgress
from prorl_zmq.client.current_trace import in_current_trace, submit_span
from prorl_zmq.system.traces import no_fork_hooks
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.batches import BatchOpened, BatchOptions

if TYPE_CHECKING:
    from opentelemetry import trace

JOB = Job(task="shell", instance={})


def named(span: trace.Span, flags: str = "01") -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"


def provider(*sampler: Sampler) -> TracerProvider:
    with no_fork_hooks():  # other tests of this process fork children that join sandboxes
        return TracerProvider(*sampler, shutdown_on_exit=False)


def test_without_a_current_span_nothing_changes() -> None:
    jobs = [JOB]
    assert in_current_trace(jobs) is jobs
    assert isinstance(submit_span(1), nullcontext)


def test_jobs_name_the_span_that_is_current_unless_they_name_another() -> None:
    other = Job(task="shell", instance={}, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    with provider().get_tracer("t").start_as_current_span("step") as step:
        given = in_current_trace([JOB, other])
    assert [job.traceparent for job in given] == [named(step), other.traceparent]


def test_a_span_that_is_not_sampled_says_so() -> None:
    tracer = provider(ALWAYS_OFF).get_tracer("t")
    with tracer.start_as_current_span("step") as step:
        (job,) = in_current_trace([JOB])
    assert job.traceparent == named(step, "00")


def test_a_batch_remembers_the_span_in_which_prompts_were_fed() -> None:
    progress = BatchProgress("s", "b", BatchOptions(target_groups=1, group_size=2), 4096)
    progress.opened(BatchOpened("r", 0, 2))
    tracer = provider().get_tracer("t")
    with tracer.start_as_current_span("one") as one:
        progress.feed(JOB, last=False)
    progress.feed(JOB, last=True)
    with tracer.start_as_current_span("drawing"):
        made = progress.feed_request()
    assert made is not None
    assert [codec.decode(packed, Job).traceparent for packed in made[1]] == [named(one), ""]


def test_what_is_no_job_is_still_refused_by_name() -> None:
    progress = BatchProgress("s", "b", BatchOptions(target_groups=1, group_size=2), 4096)
    progress.opened(BatchOpened("r", 0, 2))
    with provider().get_tracer("t").start_as_current_span("one"):
        progress.feed(["a text"], last=True)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one is a str"):
        progress.feed_request()
