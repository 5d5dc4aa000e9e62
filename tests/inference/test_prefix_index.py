"""The index of a prefix cache: with batches recorded from vLLM (`kv_events.json`), and with hostile ones."""

from __future__ import annotations

import json
import random
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prorl_zmq.inference.hosting import prefix_index
from prorl_zmq.inference.hosting.prefix_index import JOB_LIMIT, LACKING_S, PrefixIndex

from .vllm.resident import resident_tokens

SIZE = 4
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "kv_events.json").read_text())
BATCHES = [bytes.fromhex(batch) for _, batch in RECORDED["batches"]]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def stored(first: int, *tokens: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """Describe blocks that are called `first`, `first` + 1, …."""
    names = [first + at for at in range(len(tokens) // SIZE)]
    plain = {"block_hashes": names, "parent_block_hash": parent, "token_ids": list(tokens), "block_size": SIZE}
    return {"type": "BlockStored", **plain, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, **more}


def removed(*names: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0, **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def answered(*batches: bytes, block_tokens: int = SIZE) -> PrefixIndex:
    """Make an index that has asked for the batches that it missed, and got these."""
    index = PrefixIndex(block_tokens)
    for number, one in enumerate(batches):
        index.note_again(number, one)
    assert not index.end_answer()
    return index


def turn(index: PrefixIndex, job: str, *prompt: int, now: float = 0.0) -> None:
    index.note_turn(job, ids(*prompt), now)


def resident(index: PrefixIndex, *tokens: int) -> int:
    return resident_tokens(index, ids(*tokens))


@pytest.mark.parametrize("from_number", [0, 3, 9])
def test_a_recorded_engine_finds_exactly_what_the_index_has(from_number: int) -> None:
    """The first batches come with the answer, the others live."""
    index = PrefixIndex(RECORDED["block_tokens"])
    for number, one in enumerate(BATCHES[:from_number]):
        index.note_again(number, one)
    assert not index.end_answer()
    done, known, seen = from_number, 0, 0
    contexts: dict[str, np.ndarray] = {}
    for one in RECORDED["turns"]:
        context = contexts.get(one.get("job"))
        before = resident_tokens(index, context) if seen >= from_number and context is not None else None
        seen = one["batches"]
        for number in range(done, seen):
            assert not index.note_live(number, BATCHES[number])
        done = max(done, seen)
        if "cleared" in one:
            index.note_weights()
            continue
        if before is not None:
            known += 1
            assert before == one["cached"]
        contexts[one["job"]] = ids(*one["prompt"], *one["generated"])
        index.note_turn(one["job"], ids(*one["prompt"]), 0.0)
        if seen >= from_number:
            assert one["job"] in index.resident_jobs()
    assert known >= 3
    assert resident_tokens(index, contexts["b"]) == 96, (
        "new weights cleared the cache, and `a` begins with the same 100 tokens"
    )


def test_the_recording_has_what_matters() -> None:
    kinds = [event["type"] for one in BATCHES for event in msgspec.msgpack.decode(one)[1]]
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(kinds)
    cached = [one["cached"] for one in RECORDED["turns"] if "cached" in one]
    assert 0 in cached[1:]
    assert any(cached)


def test_only_a_beginning_without_a_hole_counts() -> None:
    index = answered(batch(stored(10, *range(12))))
    turn(index, "a", *range(9))
    assert resident(index, *range(13)) == 12
    index.note_live(1, batch(removed(11)))
    assert resident(index, *range(13)) == 4
    assert index.resident_jobs() == (), "its prompt had two full blocks"
    index.note_live(2, batch(stored(11, *range(4, 8), parent=10)))
    assert resident(index, *range(13)) == 12
    assert index.resident_jobs() == ("a",)


def test_equal_tokens_behind_another_prefix_are_another_block() -> None:
    index = answered(batch(stored(10, 1, 1, 1, 1, 2, 2, 2, 2)))
    assert resident(index, 1, 1, 1, 1, 2, 2, 2, 2, 0) == 8
    assert resident(index, 3, 3, 3, 3, 2, 2, 2, 2, 0) == 0


def test_another_conversation_of_a_job_does_not_hide_its_first() -> None:
    index = answered(batch(stored(10, *range(8))))
    turn(index, "a", *range(9))
    turn(index, "a", 9, 9, 9, 9, 9, 9)
    assert index.resident_jobs() == ("a",)


def test_only_the_first_prompt_of_a_job_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    index, hashed = answered(), []

    def counted(block: bytes, **options: Any) -> Any:
        hashed.append(block)
        return blake2b(block, **options)

    monkeypatch.setattr(prefix_index, "blake2b", counted)
    for length in (9, 30, 50):
        turn(index, "a", *range(length))
    assert len(hashed) == 2
    turn(index, "b", *range(12))
    assert len(hashed) == 5


@pytest.mark.parametrize(
    "event",
    [
        stored(10, *range(4), lora_name="x"),
        stored(10, *range(4), extra_keys=[["salt"]]),
        stored(10, *range(4), group_idx=1),
        stored(10, *range(4), medium="CPU"),
        stored(10, *range(8), block_size=8),
        stored(10, *range(4), parent=77),
    ],
)
def test_other_blocks_are_left_out(event: dict[str, Any]) -> None:
    index = answered(batch(event))
    turn(index, "a", *range(5))
    assert index.lacks_events(LACKING_S), "nothing is known"
    assert not index.note_live(1, batch(stored(20, *range(4))))
    other = [removed(20, group_idx=1), removed(20, medium="CPU"), removed(99)]
    assert not index.note_live(2, batch(*other))
    assert resident(index, *range(5)) == 4


def test_a_late_subscriber_gets_what_it_missed_once() -> None:
    index = PrefixIndex(SIZE)
    batches = [batch(stored(10, *range(4))), batch(removed(10)), batch(stored(30, *range(8)))]
    assert not index.note_live(1, batches[1]), "it has asked already"
    index.note_again(0, batches[0])
    index.note_again(1, batches[1])
    assert not index.note_live(2, batches[2])
    assert index.end_answer(), "a batch came after the answer was made"
    assert index.next == 2
    index.note_again(2, batches[2])
    assert not index.end_answer()
    assert resident(index, *range(13)) == 8
    assert not index.note_live(3, batch(removed(31)))
    assert resident(index, *range(13)) == 4


def test_a_gap_is_asked_for() -> None:
    index = answered(batch(stored(10, *range(4))))
    assert index.note_live(3, batch(stored(12, *range(8, 12), parent=11)))
    assert index.next == 1
    index.note_again(1, batch())
    index.note_again(2, batch(stored(11, *range(4, 8), parent=10)))
    index.note_again(3, batch(stored(12, *range(8, 12), parent=11)))
    assert not index.end_answer()
    assert resident(index, *range(13)) == 12


@pytest.mark.parametrize("answer", ["older are gone", "nothing", "never"])
def test_a_gap_that_stays_starts_empty(answer: str) -> None:
    index = answered(batch(stored(10, *range(4))))
    assert index.note_live(3, batch(stored(20, *range(4))))
    if answer == "older are gone":
        index.note_again(3, batch(stored(20, *range(4))))
    if answer == "never":
        index.give_up()
    else:
        assert not index.end_answer()
    assert resident(index, *range(13)) == (4 if answer == "older are gone" else 0)
    assert not index.note_live(4, batch(stored(30, *range(8))))
    assert resident(index, *range(13)) == 8


@pytest.mark.parametrize("first", [0, 2])
def test_a_restarted_engine_has_nothing_of_before(first: int) -> None:
    index = answered(*[batch(stored(10 * number, *range(number, number + 4))) for number in range(1, 5)])
    index.note_live(4, batch(stored(90, *range(8))))
    assert resident(index, *range(13)) == 8
    assert index.note_live(first, batch()) is (first > 0)
    assert resident(index, *range(13)) == 0
    assert index.next == (0 if first else 1)


def test_an_answer_of_the_life_before_does_not_count() -> None:
    index = answered(batch(stored(10, *range(4))))
    assert index.note_live(5, batch())
    assert not index.note_live(0, batch()), "it has asked"
    for number in range(1, 6):
        index.note_again(number, batch(stored(10, *range(4))))
    assert index.end_answer()
    assert index.next == 0
    index.note_again(0, batch())
    assert not index.end_answer()
    assert resident(index, *range(13)) == 0


def test_everything_cleared() -> None:
    index = answered(batch(stored(10, *range(8)), CLEARED, stored(20, *range(4))))
    turn(index, "a", *range(13))
    assert resident(index, *range(13)) == 4
    index.note_live(1, batch(CLEARED))
    assert resident(index, *range(13)) == 0
    assert index.resident_jobs() == ()


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([0.0]),
        msgspec.msgpack.encode({"events": []}),
        batch({"type": "BlockMoved"}),
        batch(stored(10, *range(4), token_ids=[1, 2, 3])),
        batch(stored(10, *range(4), token_ids=[2**40] * 4)),
        batch(stored(10, *range(4), block_hashes=[1, 2])),
        batch(stored(10, *range(4), block_hashes=[])),
        batch(stored(10, *range(4), block_hashes=["text"])),
    ],
)
def test_a_batch_that_is_not_understood_leaves_nothing(broken: bytes) -> None:
    index = answered(batch(stored(10, *range(8))))
    assert not index.note_live(1, broken)
    assert resident(index, *range(13)) == 0
    assert not index.note_live(2, batch(stored(10, *range(4))))
    assert resident(index, *range(13)) == 4


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_end_nothing(seed: int) -> None:
    rng, index = random.Random(seed), PrefixIndex(RECORDED["block_tokens"])
    assert not index.end_answer()
    for number, one in enumerate(BATCHES * 5):
        flipped = bytearray(one)
        for _ in range(rng.randrange(4)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        assert not index.note_live(number, bytes(flipped))
        index.resident_jobs()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "BLOCK_LIMIT", 10)
    index = answered(batch(stored(0, *range(40))))
    turn(index, "a", *range(41))
    assert resident(index, *range(41)) == 40
    index.note_live(1, batch(stored(50, 7, 7, 7, 7)))
    assert resident(index, *range(41)) == 0
    for number in range(JOB_LIMIT):
        turn(index, f"job-{number}", *range(9))
    index.note_live(2, batch(stored(0, *range(40))))
    assert index.resident_jobs() == tuple(f"job-{number}" for number in range(JOB_LIMIT)), "`a` was first"


def test_events_that_never_come() -> None:
    index = answered()
    assert not index.lacks_events(1e6), "no turn has ended"
    turn(index, "a", 1, 2, 3, now=5.0)
    assert not index.lacks_events(1e6), "its prompt has no full block"
    turn(index, "a", *range(9), now=10.0)
    assert not index.lacks_events(10.0 + LACKING_S - 1)
    assert index.lacks_events(10.0 + LACKING_S)
    assert index.resident_jobs() == ()
    index.note_live(0, batch(stored(10, *range(4), group_idx=1)))
    assert index.lacks_events(10.0 + LACKING_S), "it is of no use"
    index.note_live(1, batch(stored(10, *range(4))))
    assert not index.lacks_events(10.0 + LACKING_S)
