from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.brokers.node import block_store
from prorl_zmq.brokers.node.block_store import BlockStore
from prorl_zmq.system import node_name, stored_block

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = memoryview(b"tokens" * 1000)


def kept(store: BlockStore, number: int = 1, broker: str = "rollout-0") -> str:
    block_id = store.keep(broker, number, BLOCK)
    assert block_id is not None
    return block_id


def file_of(folder: Path, block_id: str) -> Path:
    return next(folder.glob(f"*/*/{block_id}"))


def test_a_block_is_kept_until_its_broker_forgets_it(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    block_id = kept(store)
    assert store.read(block_id) == BLOCK
    store.noted("rollout-0", [1])
    store.forget("rollout-1", [block_id])  # it is not that broker's
    assert store.ids("rollout-0") == (block_id,)
    store.forget("rollout-0", [block_id, "unknown"])
    assert store.read(block_id) is None
    assert not list(tmp_path.glob("*/*/*"))


def test_an_event_that_comes_again_brings_no_second_block(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    block_id = kept(store)
    assert kept(store) == block_id
    store.forget("rollout-0", [block_id])  # said before the broker knew of it
    assert store.ids("rollout-0") == (block_id,)


def test_the_next_process_has_all_blocks(tmp_path: Path) -> None:
    block_id = kept(BlockStore(tmp_path))
    store = BlockStore(tmp_path)
    assert store.ids("rollout-0") == (block_id,)
    assert store.read(block_id) == BLOCK


def test_after_a_restart_of_the_machine_all_blocks_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_id = kept(BlockStore(tmp_path))
    os.truncate(file_of(tmp_path, block_id), 0)  # ext4, when the power goes before it has written
    another = tmp_path.with_suffix(".boot")
    another.write_text("another")
    monkeypatch.setattr(node_name, "BOOT_ID", another)
    store = BlockStore(tmp_path)
    assert store.ids("rollout-0") == ()
    assert not list(tmp_path.glob("*/*/*"))


def test_files_that_are_no_blocks_are_not_reported(tmp_path: Path) -> None:
    block_id = kept(BlockStore(tmp_path))
    file = file_of(tmp_path, block_id)
    file.with_name(".nfs000000000123").write_bytes(BLOCK)  # of a block that a client still mapped
    file.with_name("0" * 32).symlink_to("/nowhere")
    file.with_name("1" * 32).mkdir()
    assert BlockStore(tmp_path).ids("rollout-0") == (block_id,)


def test_a_block_that_was_cut_off_is_not_here(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    block_id = kept(store)
    file_of(tmp_path, block_id).write_bytes(b"tok")
    assert store.read(block_id) is None
    assert store.open(block_id) is None


def test_a_block_is_not_lost_where_descriptors_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(tmp_path)
    block_id = kept(store)

    def no_descriptor(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(block_store.os, "open", no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            store.read(block_id)
    assert store.read(block_id) == BLOCK


@pytest.mark.parametrize(("kind", "mapped"), [("ext4", True), ("nfs4", False), ("", False)])
def test_blocks_are_mapped_on_local_file_systems_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mapped: bool
) -> None:
    monkeypatch.setattr(stored_block, "file_system_of", lambda _: kind)
    monkeypatch.setattr(stored_block, "MAPPED_FROM_BYTES", 1)
    store = BlockStore(tmp_path)
    block = store.read(kept(store))
    assert block == BLOCK
    assert isinstance(block, memoryview) == mapped


def test_without_room_the_broker_gets_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(tmp_path)
    monkeypatch.setattr(block_store, "FREE_BYTES", 2**60)
    assert store.keep("rollout-0", 1, BLOCK) is None
    monkeypatch.setattr(block_store, "FREE_BYTES", 0)
    monkeypatch.setattr(block_store, "BLOCKS_LIMIT", 1)
    kept(store, 2)
    assert store.keep("rollout-0", 3, BLOCK) is None
    assert store.keep("rollout-1", 3, BLOCK) is not None


def test_where_nothing_can_be_written_the_broker_gets_the_block(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "blocks")
    (next((tmp_path / "blocks").iterdir()) / "rollout-0").write_bytes(b"no folder")
    assert store.keep("rollout-0", 1, BLOCK) is None
