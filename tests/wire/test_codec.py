"""Frames that claim more than they hold, and everything else that is not a message."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.front_door import FrontDoorRequest, Hello
from prorl_zmq.wire.messages.jobs import Job, Phase
from prorl_zmq.wire.messages.stages import PhaseDone


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"not MessagePack",
        codec.pack({}) + b"\x00",
        codec.pack("text")[:-1],
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\x00\x00\x00\x02\xff\xff",
        msgpack.packb(msgpack.ExtType(5, b"data")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb({1: 2}),
        msgpack.packb({None: 2}),
        b"\x81\x80\x01",
        b"\x81\x90\x01",
    ],
    ids=[
        "empty",
        "never used byte",
        "text",
        "trailing byte",
        "cut off",
        "a map that claims 2^32 entries",
        "an array that claims 2^32 elements",
        "a string that claims 2^32 bytes",
        "a binary that claims 2^32 bytes",
        "a string that is not UTF-8",
        "an extension type",
        "a timestamp",
        "an integer key",
        "a null key",
        "a map as key",
        "an array as key",
    ],
)
def test_a_bad_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        codec.decode(frame, FrontDoorRequest)


@pytest.mark.parametrize(
    ("head", "repeated", "times"),
    [
        (b"", b"\x91", 10_000_000),
        (b"", b"\x91", 4_000_000),
        (b"\xdd\x00\x98\x96\x80", b"\x80", 10_000_000),
        (b"\xdd\x00\x3d\x09\x00", b"\x80", 4_000_000),
        (b"\xdc\xff\xff", b"\x80", 4_000_000),
        (b"\xdc\x00\x3f", b"\xdc\xff\xff" + 65_535 * b"\x80", 63),
        (b"\xdf\xff\xff\xff\xff", b"\0", 100),
    ],
    ids=[
        "10 MB of nested arrays",
        "4 MB of nested arrays",
        "10 MB of empty maps",
        "4 MB of empty maps",
        "maps behind the array that they claim to be of",
        "maps in arrays that are each within the limit",
        "a map that claims 2^32 entries",
    ],
)
def test_a_bomb_is_refused_before_it_goes_off(head: bytes, repeated: bytes, times: int) -> None:
    """In little time and memory. Unlimited, 10 MB of empty maps take 700 MB and more than a second."""
    frame = head + times * repeated
    started = time.process_time()
    with pytest.raises(MalformedMessage):
        codec.decode(frame, Job)
    assert time.process_time() - started < 0.5
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            codec.decode(frame, Job)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize(
    "value",
    [{1: 2}, [{"a": {None: 1}}], msgpack.ExtType(5, b"data"), msgpack.Timestamp(1), [msgpack.Timestamp(1)]],
    ids=["an integer key", "a null key", "an extension type", "a timestamp", "a timestamp within"],
)
def test_what_is_not_plain_data_is_refused_where_a_field_may_hold_anything(value: Any) -> None:
    frame = msgpack.packb({"task": "math", "instance": {"value": value}, "job_id": "a"})
    with pytest.raises(MalformedMessage):
        codec.decode(frame, Job)


@pytest.mark.parametrize("depth", [10, 300, 400, 500, 700, 900])
def test_a_small_frame_may_be_deep(depth: int) -> None:
    frame = b"\x83\xa4task\xa1m\xa6job_id\xa1a\xa8instance\x81\xa1v" + depth * b"\x91" + b"\x01"
    with suppress(MalformedMessage):
        job = codec.decode(frame, Job)
        assert msgpack.packb({"v": job.instance["v"]}) == frame[frame.index(b"\x81\xa1v") :]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_a_small_frame_is_read_as_a_large_one_is(instance: dict[str, Any]) -> None:
    job = Job(task="math", instance=instance, job_id="a", group_id="g")
    frame = codec.encode(job)
    assert codec.unpack(codec.encode(job, is_plain=True)) == codec.unpack(frame)
    assert codec.decode(frame, Job) == codec.convert(codec.unpack(frame), Job) == job


def test_a_date_becomes_text_unless_it_is_said_that_there_is_none() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    read = codec.decode(codec.encode(Job(task="math", instance={"at": moment}, job_id="a")), Job)
    assert read.instance == {"at": "2026-01-02T00:00:00Z"}


def test_a_message_is_read_back_as_its_receiver_reads_it() -> None:
    done = PhaseDone(stage_id="s", job_id="a", attempt=1, phase=Phase.INIT, phase_data={"pair": (1, 2)})
    assert codec.read_back(done, PhaseDone, is_plain=False).phase_data == {"pair": [1, 2]}
    bare = msgspec.structs.replace(done, phase_data={})
    assert codec.read_back(bare, PhaseDone, is_plain=True) == bare
    for is_plain in (True, False):
        with pytest.raises(MalformedMessage, match="over the limit of 10"):
            codec.read_back(bare, PhaseDone, 10, is_plain=is_plain)
        with pytest.raises(MalformedMessage) as refused:
            codec.read_back(msgspec.structs.replace(bare, attempt=0), PhaseDone, is_plain=is_plain)
        assert refused.value.fields["field"] == "$.attempt"


def test_limits_are_those_of_honest_use() -> None:
    rows = [{"row": number} for number in range(10_000)]
    assert codec.unpack(codec.pack({"rows": rows})) == {"rows": rows}
    assert codec.unpack(codec.pack([0] * codec.CONTAINER_LIMIT)) == [0] * codec.CONTAINER_LIMIT
    with pytest.raises(MalformedMessage):
        codec.unpack(codec.pack([0] * (codec.CONTAINER_LIMIT + 1)))


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(MalformedMessage, match="a frame of 101 bytes is over the limit of 100"):
        codec.unpack(bytes(101), limit_bytes=100)


def test_a_memoryview_is_as_good_as_bytes() -> None:
    assert codec.decode(memoryview(codec.encode(Hello("r"))), FrontDoorRequest) == Hello("r")


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=20).map(lambda tail: b"\x81\xa4type" + tail)))
def test_no_bytes_raise_anything_else(frame: bytes) -> None:
    for kind in (FrontDoorRequest, Job):
        with suppress(MalformedMessage):
            codec.decode(frame, kind)


@given(st.data())
def test_no_damage_to_a_message_raises_anything_else(data: st.DataObject) -> None:
    job = Job(task="math", instance={"problem": "1 + 1", "hints": ["two"], "more": {"a": 1.5}}, job_id="a")
    frame = bytearray(codec.encode(job))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MalformedMessage):
        codec.decode(bytes(frame), Job)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}.__iter__(), 1j, 2**64, -(2**63) - 1, "\ud800", {"a": object()}, lambda: None],
    ids=["object", "iterator", "complex", "too large", "too small", "surrogate", "inner object", "function"],
)
def test_what_is_not_plain_data_is_not_sent(value: Any) -> None:
    with pytest.raises(MalformedMessage, match="plain data"):
        codec.pack(value)
    with pytest.raises(MalformedMessage, match="plain data"):
        codec.encode(Job(task="math", instance={"value": value}))


def test_a_value_too_deep_is_not_sent() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(MalformedMessage):
        codec.pack(value)
    with pytest.raises(MalformedMessage):
        codec.encode(Job(task="math", instance={"value": value}))
    while value:  # or the interpreter would unwind it recursively
        value = value.pop()


def test_bytes_stay_bytes() -> None:
    job = Job(task="math", instance={"image": b"\x00\xff"})
    assert codec.decode(codec.encode(job), Job).instance == {"image": b"\x00\xff"}


def test_a_wrong_key_is_placed() -> None:
    with pytest.raises(MalformedMessage) as caught:
        codec.decode(msgpack.packb({"task": "math", "instance": {b"x": 1}}), Job)
    assert caught.value.field == "$.instance"


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("teacher", "teacher:65", "the name of a model, or MODEL:K with a number K from 1 to 64"),
        ("record", ["top_logprobs"], "the name of a record: top_logprobs:K with a number K, sampling_mask or experts"),
        ("model", "a@7", "a name of at most 64 letters, digits, `.`, `_` and `-`"),
    ],
)
def test_a_text_of_another_form_is_refused_in_words(field: str, text: str | list[str], words: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        codec.decode(msgpack.packb({"task": "math", "instance": {}, field: text}), Job)
    place = f"$.{field}" + "[0]" * isinstance(text, list)
    assert caught.value.message == f"Expected {words} - at `{place}`"


@pytest.mark.parametrize("content", [None, [], "x", {}, {"request_id": 1}, {"request_id": None}])
def test_the_request_id_of_a_wreck_is_unknown(content: Any) -> None:
    assert codec.request_id(content) == "unknown"


@pytest.mark.parametrize("value", ["", "a\nb", "\x1b[31mred", "a b", "ä", "-x", "x" * 129, 7, None, ["x"]])
def test_a_request_id_that_is_no_identifier_is_neither_answered_to_nor_fit_for_a_log(value: object) -> None:
    assert codec.request_id({"request_id": value}) == "unknown"
    assert codec.request_id({"request_id": "x" * 128}) == "x" * 128
