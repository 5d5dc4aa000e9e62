"""The end of SCORE on a node that keeps the trajectory."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.loop import Loop
from prorl_zmq.brokers.node.block_server import BlockServer
from prorl_zmq.brokers.node.block_store import BlockStore
from prorl_zmq.data.records import padded
from prorl_zmq.data.trajectory import block_bytes
from prorl_zmq.security.zap_authenticator import ZapAuthenticator
from prorl_zmq.wire.messages.blocks import is_block
from prorl_zmq.wire.messages.jobs import ArrayForm, Phase, RecordForm
from prorl_zmq.wire.messages.stages import PhaseDone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prorl_zmq.wire.messages.jobs import BlockHandle

TOKENS = 5
BLOCK = np.zeros(block_bytes(TOKENS, 1), np.uint8).data
SCORES = RecordForm(
    "teacher",
    1,
    (
        ArrayForm("teacher_logprobs", "float32", (1,)),
        ArrayForm("teacher_top_ids", "int32", (1, 0)),
        ArrayForm("teacher_top_logprobs", "float32", (1, 0)),
    ),
)
SCORE_BLOCK = np.array([0, 1], "<i4").tobytes().ljust(64, b"\0") + bytes(range(64))
"""Of the first token."""
RAN = PhaseDone(stage_id="run", job_id="a", attempt=1, phase=Phase.RUN, number=1, tokens=TOKENS, turns=1)


class Link:
    """A link to a rollout broker that has its nodes keep blocks."""

    broker, keep = "rollout-0", "node"

    def number(self, event: PhaseDone) -> int:
        return event.number


class Node:
    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.store = BlockStore(folder / "blocks")
        self.authenticator = ZapAuthenticator(self.loop.context, None)
        path = folder / "blocks.socket"
        self.server = BlockServer(self.loop, self.store, self.authenticator, "tcp://127.0.0.1:*", path)

    def take(self, end: Any, *frames: Any) -> tuple[Any, BlockHandle]:
        found, _, handle = self.server.take_end("n", Link(), end, frames)  # type: ignore[arg-type]
        assert handle is not None
        return found, handle

    def ran(self) -> BlockHandle:
        return self.take(RAN, BLOCK)[1]

    def close(self) -> None:
        self.server.close()
        self.authenticator.close()
        self.loop.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def scored(kept: BlockHandle, **more: Any) -> PhaseDone:
    return PhaseDone(
        stage_id="score", job_id="a", attempt=1, phase=Phase.SCORE, number=2, records=(SCORES,), kept=kept, **more
    )


def test_scores_lie_behind_the_trajectory_in_a_block_of_their_own(node: Node) -> None:
    kept = node.ran()
    end, both = node.take(scored(kept), SCORE_BLOCK)
    assert end.records == (SCORES,)
    assert both.block_id != kept.block_id
    joined = node.store.read(both.block_id)
    assert joined is not None
    assert bytes(joined) == bytes(BLOCK).ljust(padded(len(BLOCK)), b"\0") + SCORE_BLOCK
    assert is_block(joined, both)


def test_scores_wait_while_the_trajectory_cannot_be_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = node.ran()

    def no_descriptor(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(node.store, "read", no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            node.take(scored(kept), SCORE_BLOCK)
        with pytest.raises(OSError, match="Too many open files"):
            node.server.token_ids(kept, TOKENS)
    end, both = node.take(scored(kept), SCORE_BLOCK)  # it was sent again
    assert (end.records, end.records_dropped) == ((SCORES,), {})
    assert both != kept


@pytest.mark.parametrize("changes", [{"block_id": "0" * 32}, {"checksum": 1}], ids=["missing", "changed"])
def test_a_lost_trajectory_costs_its_scores(node: Node, changes: dict[str, Any]) -> None:
    lost = replace(node.ran(), **changes)
    assert bool(node.server.token_ids(lost, TOKENS)) == ("checksum" in changes)
    end, handle = node.take(scored(lost), SCORE_BLOCK)
    assert (end.records, end.records_dropped) == ((), {"teacher": "the node lost the trajectory"})
    assert handle == lost


@pytest.mark.parametrize(
    ("records", "frames", "said"),
    [
        ((SCORES,), (SCORE_BLOCK[:-1],), "got 127 bytes; the header announces 128"),
        ((SCORES,), (), "expected 1 block frame, got 0"),
        ((), (SCORE_BLOCK,), "expected the record teacher, got no record"),
        ((replace(SCORES, name="experts"),), (SCORE_BLOCK,), "expected the record teacher, got experts"),
        ((SCORES,), (bytes(128),), "the record teacher has 1 rows of teacher_logprobs, not 0"),
    ],
)
def test_scores_that_are_not_what_they_claim_are_dropped_and_their_job_ends(
    node: Node, records: tuple[RecordForm, ...], frames: tuple[bytes, ...], said: str
) -> None:
    """As a malformed message, the end was sent again for as long as its process lived."""
    kept = node.ran()
    end, handle = node.take(replace(scored(kept), records=records), *frames)
    assert (end.records, end.records_dropped, handle) == ((), {"teacher": said}, kept)
    assert node.store.ids("rollout-0") == (kept.block_id,)


def test_scores_that_come_again_are_stored_once(node: Node) -> None:
    kept = node.ran()
    first = node.take(scored(kept), SCORE_BLOCK)
    node.store.noted("rollout-0", [1])
    node.store.forget("rollout-0", [kept.block_id])  # the broker has the first end, and its note was lost
    assert node.take(scored(kept), SCORE_BLOCK) == first
    assert node.store.ids("rollout-0") == (first[1].block_id,)


def test_a_trajectory_whose_records_cannot_be_read_goes_to_its_broker_as_it_is(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    ran = replace(RAN, records=(replace(SCORES, name="experts"),))
    block = bytes(block_bytes(TOKENS, 1, ran.records))
    assert node.server.take_end("n", Link(), ran, (block,)) == (ran, (block,), None)  # type: ignore[arg-type]
    assert "a malformed end of job a goes to its broker as it is: the record experts has the arrays" in caplog.text
    assert node.store.ids("rollout-0") == ()
