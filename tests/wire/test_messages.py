"""Every message survives the wire, and what is not one is refused."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_zmq.errors import FIELDS_LIMIT, TEXT_LIMIT, ErrorInfo, InternalError, MalformedMessage
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import AnyBackendReply, AnyBackendRequest, HeldAssignment
from prorl_zmq.wire.messages.base import (
    ATTEMPT_LIMIT,
    METRICS_LIMIT,
    SEGMENTS_LIMIT,
    TASK_LIMIT,
    TIMINGS_LIMIT,
    JobIdentifier,
    new_id,
)
from prorl_zmq.wire.messages.engines import AnyEngineReply, AnyEngineRequest
from prorl_zmq.wire.messages.front_door import Collected, FrontDoorReply, FrontDoorRequest, Span
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Job, McpServer, Outcome, Phase, PhaseLimits, Result, Sampling
from prorl_zmq.wire.messages.stages import PhaseDone, PhaseFailed, StageCommand, StageEvent

UNIONS = [
    FrontDoorRequest,
    FrontDoorReply,
    StageEvent,
    StageCommand,
    AnyBackendRequest,
    AnyBackendReply,
    AnyEngineRequest,
    AnyEngineReply,
]
REPORT: dict[str, Any] = {
    "type": "stage_report",
    "stage_id": "i",
    "role": "init",
    "node": "n",
    "slots": 1,
    "endpoint": "e",
    "tasks": [],
}
MESSAGES = [(union, kind) for union in UNIONS for kind in get_args(union)]
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)


@cache
def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type, bounds and patterns included."""
    return _values(msgspec.inspect.type_info(annotation))


def _structs(info: Any) -> st.SearchStrategy[Any]:
    fields = {field.name: _values(field.type) for field in info.fields}
    return st.fixed_dictionaries(fields).map(lambda values: info.cls(**values))


def _mcp_servers() -> st.SearchStrategy[McpServer]:
    words = st.from_regex(r"[^\x00]{1,20}", fullmatch=True)
    name = st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True)
    program = st.fixed_dictionaries({"name": name, "command": st.lists(words, min_size=1, max_size=3).map(tuple)})
    address = st.fixed_dictionaries({"name": name, "url": words})
    return st.one_of(program, address).map(lambda values: McpServer(**values))


def _values(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.StructType():
            return _mcp_servers() if info.cls is McpServer else _structs(info)
        case msgspec.inspect.StrType():
            return (
                st.from_regex(info.pattern, fullmatch=True)
                if info.pattern
                else st.text(min_size=info.min_length or 0, max_size=20)
            )
        case msgspec.inspect.IntType():
            low = info.ge if info.ge is not None else -(2**63)
            return st.integers(low, info.le if info.le is not None else 2**63 - 1)
        case msgspec.inspect.FloatType():
            low, exclusive = (info.gt, True) if info.gt is not None else (info.ge, False)
            return st.floats(low, info.le, exclude_min=exclusive, allow_nan=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.AnyType():
            return PLAIN
        case msgspec.inspect.EnumType():
            return st.sampled_from(list(info.cls))
        case msgspec.inspect.LiteralType():
            return st.sampled_from(info.values)
        case msgspec.inspect.UnionType():
            return st.one_of([_values(member) for member in info.types])
        case msgspec.inspect.DictType():
            return st.dictionaries(_values(info.key_type), _values(info.value_type), max_size=3)
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            items = st.lists(_values(info.item_type), min_size=info.min_length or 0, max_size=3)
            return items.map(tuple) if isinstance(info, msgspec.inspect.VarTupleType) else items
        case msgspec.inspect.TupleType():
            return st.tuples(*map(_values, info.item_types))
    raise AssertionError(f"no strategy for {info}")


@pytest.mark.parametrize(("union", "kind"), MESSAGES, ids=[kind.__name__ for _, kind in MESSAGES])
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_message_survives_the_wire(union: Any, kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    assert codec.decode(codec.encode(message), union) == message


@given(values_of(Job))
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_job_survives_the_wire(job: Job) -> None:
    assert codec.decode(codec.encode(job), Job) == job


@pytest.mark.parametrize("union", UNIONS)
def test_the_members_of_a_union_are_told_apart_by_their_tags(union: Any) -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(union)]
    assert len(set(tags)) == len(tags)
    assert "phase_done" in tags or PhaseDone not in get_args(union)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a" * 65, "a b", "a\n", "ä"])
def test_an_id_that_could_not_be_the_name_of_a_file_is_refused(name: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        codec.convert({"task": "math", "instance": {}, "job_id": name}, Job)
    assert caught.value.field == "$.job_id"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e9])
@pytest.mark.parametrize(
    ("kind", "field"),
    [(Sampling, "temperature"), (PhaseLimits, "run_s"), (EpisodeLimits, "tool_call_s")],
)
def test_no_limit_lets_a_wild_number_through(kind: Any, field: str, value: float) -> None:
    with pytest.raises(MalformedMessage) as caught:
        codec.decode(codec.pack({field: value}), kind)
    assert caught.value.field == f"$.{field}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 61.0])
def test_a_poll_cannot_be_held_forever(value: float) -> None:
    poll = {"type": "collect", "request_id": "r", "session": "s", "client_id": "c", "wait_s": value}
    with pytest.raises(MalformedMessage):
        codec.decode(codec.pack(poll), FrontDoorRequest)


def test_a_measure_without_bounds_may_be_anything_a_float_is() -> None:
    result = Result(job_id="a", task="math", outcome=Outcome.COMPLETED, reward=math.inf, metrics={"loss": math.nan})
    got = codec.decode(codec.encode(result), Result)
    assert got.reward == math.inf
    assert math.isnan(got.metrics["loss"])


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "task"),
        ({"task": "math"}, "instance"),
        ({"task": "math", "instance": []}, "$.instance"),
        ({"task": "math", "instance": {}, "max_attempts": True}, "$.max_attempts"),
        ({"task": "math", "instance": {}, "limits": {"run_s": "1"}}, "$.limits.run_s"),
        ({"task": "math", "instance": {}, "colour": 1}, "colour"),
        ("a string", "$"),
    ],
)
def test_an_error_names_the_field(content: Any, field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        codec.convert(content, Job)
    assert caught.value.field == field


def is_by_job(field: Any) -> bool:
    """Tell the fields of `StageReport` from others of these names."""
    return getattr(getattr(field.type, "key_type", None), "pattern", None) is not None


def test_every_attempt_that_crosses_is_bounded() -> None:
    """One beyond what a client can decode would block its session, and one beyond 2**63 the journal."""
    kinds = [*(kind for _, kind in MESSAGES), HeldAssignment, Result, Span]
    fields = [field for kind in kinds for field in msgspec.inspect.type_info(kind).fields]  # type: ignore[attr-defined]
    attempts = [field.type for field in fields if field.name == "attempt"]
    attempts += [field.type.value_type for field in fields if field.name in ("running", "ended") and is_by_job(field)]
    assert len(attempts) >= 11
    assert {(one.ge, one.le) for one in attempts} == {(1, ATTEMPT_LIMIT)}


@pytest.mark.parametrize("field", ["running", "ended"])
@pytest.mark.parametrize("attempt", [0, -1, ATTEMPT_LIMIT + 1, 2**31 - 1, 2**63])
def test_a_report_with_a_wild_attempt_is_refused(field: str, attempt: int) -> None:
    report = {**REPORT, field: {"a": attempt}}
    with pytest.raises(MalformedMessage):
        codec.decode(codec.pack(report), StageEvent)


@pytest.mark.parametrize(
    "tasks",
    [
        [{"name": f"task-{number}"} for number in range(TASK_LIMIT + 1)],
        [{"name": "task", "fields": {f"f{number}": "str" for number in range(TASK_LIMIT + 1)}}],
        [{"name": "task", "optional": ["x"] * (TASK_LIMIT + 1)}],
        [{"name": "task", "fields": {"x": "y" * 200}}],
    ],
)
def test_a_report_with_too_many_tasks_is_refused(tasks: list[Any]) -> None:
    assert codec.decode(codec.pack(REPORT), StageEvent).tasks == ()
    with pytest.raises(MalformedMessage):
        codec.decode(codec.pack({**REPORT, "tasks": tasks}), StageEvent)


def test_the_largest_result_fits_into_a_header_with_room_to_spare() -> None:
    """Its metrics and timings are those of three phases; one that did not fit would block its session."""
    letter = "\U0001f600"  # four bytes
    text = letter * (TEXT_LIMIT + 96)
    name = {number: f"{number:03d}".ljust(128, letter) for number in range(METRICS_LIMIT)}
    error = ErrorInfo(name[0], text, {name[number]: text for number in range(FIELDS_LIMIT)})
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}
    for phase in Phase:
        failed = PhaseFailed(
            stage_id="s",
            job_id="j",
            attempt=ATTEMPT_LIMIT,
            phase=phase,
            outcome=Outcome.FAILED,
            error=error,
            stop_reason=name[0],
            backend="b" * 128,
            metrics={phase[0] + one[1:]: 1.5 for one in name.values()},
            timings={phase[0] + name[number][1:]: 1.5 for number in range(TIMINGS_LIMIT)},
            segments=(2**31 - 1,) * SEGMENTS_LIMIT,
        )
        assert codec.decode(codec.encode(failed), StageEvent) == failed
        metrics |= failed.metrics
        timings |= failed.timings
    result = Result(
        job_id="j",
        task="t",
        outcome=failed.outcome,
        error=error,
        stop_reason=failed.stop_reason,
        metrics=metrics,
        timings=timings,
        segments=failed.segments,
    )
    collected = Collected("r", (result,))
    frame = codec.encode(collected)
    assert len(frame) < 1.5 * 2**20
    assert codec.decode(frame, FrontDoorReply) == collected


def test_an_error_of_any_length_crosses_in_short() -> None:
    info = InternalError("x" * 10**6, what="y" * 10**6).info()
    assert codec.decode(codec.encode(info), ErrorInfo) == info


def test_limits_are_found_by_phase() -> None:
    limits = PhaseLimits(1.0, 2.0, 3.0, 4.0)
    assert [limits.of(phase) for phase in Phase] == [1.0, 2.0, 3.0, 4.0]


def test_messages_cannot_be_changed() -> None:
    info = ErrorInfo("busy", "full")
    with pytest.raises(AttributeError):
        info.code = "other"  # type: ignore[misc]


def test_new_ids_are_job_ids() -> None:
    assert codec.convert(new_id(), JobIdentifier)
    assert new_id() != new_id()
