"""Blocks from a node's server: by descriptor on one machine, and by messages."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import zlib
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import zmq

from prorl_zmq.brokers.loop import Loop
from prorl_zmq.brokers.node import block_server
from prorl_zmq.brokers.node.block_server import FOUND, LOST, BlockServer
from prorl_zmq.brokers.node.block_store import BlockStore
from prorl_zmq.client.block_fetcher import BlockFetcher
from prorl_zmq.security.zap_authenticator import ZapAuthenticator
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.blocks import FetchBlock
from prorl_zmq.wire.messages.jobs import BlockHandle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = memoryview(b"tokens" * 10_000)
WAIT_S = 10.0
NOBODY = 65534


class Served(NamedTuple):
    path: Path
    """Of the Unix socket."""
    handle: BlockHandle
    """Of a block that is there."""
    blocks: Path
    """The folder of the store."""


def handle(block_id: str, endpoint: str, path: str = "") -> BlockHandle:
    checksum = zlib.crc32(BLOCK)
    return BlockHandle(node="n", block_id=block_id, checksum=checksum, endpoint=endpoint, socket=path)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    loop, store = Loop(), BlockStore(folder / "blocks")
    block_id = store.keep("rollout-0", 1, BLOCK)
    assert block_id is not None
    path = folder / "blocks.socket"
    authenticator = ZapAuthenticator(loop.context, None)
    server = BlockServer(loop, store, authenticator, "tcp://127.0.0.1:*", path)
    server.register()
    authenticator.register(loop.register)
    thread = threading.Thread(target=loop.run, args=(lambda: 60.0, lambda: None))
    thread.start()
    try:
        yield Served(path, handle(block_id, server.endpoint, server.path), folder / "blocks")
    finally:
        loop.stop()
        thread.join(WAIT_S)
        server.close()
        authenticator.close()
        loop.close()
    assert not thread.is_alive()


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(WAIT_S)
    client.connect(str(path))
    return client


def asked(client: socket.socket, block_id: bytes) -> tuple[bytes, list[int]]:
    client.send(block_id)
    answer, files, _, _ = socket.recv_fds(client, 1, 1)
    return answer, list(files)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_client_gets_what_is_there_and_not_what_is_lost(served: Served, mapped: bool) -> None:
    here = served.handle if mapped else handle(served.handle.block_id, served.handle.endpoint)
    gone = handle("gone", here.endpoint, here.socket)
    fetcher = BlockFetcher(None)
    try:
        many = {f"job-{number}": here for number in range(20)}
        found = fetcher.fetch({**many, "lost": gone})
        assert found.keys() == many.keys()
        assert all(bytes(block.buffer) == BLOCK for block in found.values() if not isinstance(block, bytes))
    finally:
        fetcher.close()


def test_a_descriptor_can_only_be_read(served: Served) -> None:
    with connected(served.path) as client:
        answer, (file,) = asked(client, served.handle.block_id.encode())
        assert answer == FOUND
        try:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(file, b"other tokens")
        finally:
            os.close(file)


@pytest.mark.parametrize("block_id", [b"unknown", b"../../topology.toml", b"\xff\xfe", b"x" * 1000])
def test_other_names_are_answered_and_open_nothing(served: Served, block_id: bytes) -> None:
    with connected(served.path) as client:
        assert asked(client, block_id) == (LOST, [])
        assert asked(client, served.handle.block_id.encode())[0] == FOUND


def test_garbage_over_tcp_fills_no_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger, client.rcvtimeo = 0, int(1000 * WAIT_S)
        client.connect(served.handle.endpoint)
        for frames in ([b"", b"garbage"], [b"", b""], [b"no envelope"], [b""] * 30):
            client.send_multipart(frames)
        client.send_multipart([b"", codec.encode(FetchBlock("request", served.handle.block_id))])
        assert client.recv_multipart()[2] == BLOCK
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_one_client_too_many_is_turned_away_and_the_others_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "LOCAL_CLIENTS", 1)
    with connected(served.path) as first:
        assert asked(first, b"unknown") == (LOST, [])
        with connected(served.path) as second:
            assert second.recv(1) == b""
        assert asked(first, b"unknown") == (LOST, [])


def test_a_server_that_was_short_of_descriptors_serves_by_them_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, has_failed = socket.socket.accept, threading.Event()

    def accept_later(listener: socket.socket) -> Any:
        if not has_failed.is_set():
            has_failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with connected(served.path) as client:
        assert has_failed.wait(10)
        fetcher = BlockFetcher(None)
        try:
            assert fetcher.fetch({"a": handle(served.handle.block_id, served.handle.endpoint)})
        finally:
            fetcher.close()
        assert asked(client, b"unknown") == (LOST, [])


def test_what_is_no_request_is_dropped_and_the_next_one_is_answered(served: Served) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(served.handle.endpoint)
        for frames in ([b""], [b"", b"no header"], [b"x"], [b"", b"\x80"]):
            client.send_multipart(frames)
        fetcher = BlockFetcher(None)
        try:
            assert fetcher.fetch({"a": handle(served.handle.block_id, served.handle.endpoint)})
        finally:
            fetcher.close()
        assert not client.poll(0)


def test_a_client_of_another_version_is_refused_with_both_numbers(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prorl_zmq.client.block_fetcher.FetchBlock", partial(FetchBlock, protocol=PROTOCOL_VERSION + 1))
    fetcher = BlockFetcher(None)
    try:
        assert fetcher.fetch({"a": handle(served.handle.block_id, served.handle.endpoint)}) == {}
    finally:
        fetcher.close()
    said = f"the other side speaks protocol {PROTOCOL_VERSION + 1}, and a node's broker speaks {PROTOCOL_VERSION}"
    assert said in caplog.text


def test_a_node_that_is_not_there_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.client.block_fetcher.STALL_S", 0.3)
    fetcher = BlockFetcher(None)
    try:
        assert fetcher.fetch({"a": handle("b", "tcp://127.0.0.1:9", str(tmp_path / "no.socket"))}) == {}
    finally:
        fetcher.close()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("content", [b"", b"tokens", bytes(len(BLOCK))], ids=["empty", "cut off", "changed"])
def test_a_block_that_is_not_what_was_kept_is_left_out(
    served: Served, mapped: bool, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = served.blocks.glob("*/*/*")
    file.write_bytes(content)
    monkeypatch.setattr(BlockStore, "open", lambda *_: os.open(file, os.O_RDONLY))  # it looks at the length itself
    there = served.handle if mapped else handle(served.handle.block_id, served.handle.endpoint)
    fetcher = BlockFetcher(None)
    try:
        assert fetcher.fetch({"a": there}) == {}
    finally:
        fetcher.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another account")
def test_nothing_is_taken_from_another_account(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It listens where the node did, and the block comes over TCP."""
    served.path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(str(served.path))
        os.seteuid(NOBODY)
        try:
            squatter.listen()  # the kernel notes who that was
        finally:
            os.seteuid(0)
        squatter.setblocking(False)
        fetcher = BlockFetcher(None)
        try:
            (found,) = fetcher.fetch({"a": served.handle}).values()
            assert found.bytes == BLOCK
        finally:
            fetcher.close()
        connection, _ = squatter.accept()
        with connection:
            assert connection.recv(100) == b""  # it was not even asked
    assert f"another user's (uid {NOBODY})" in caplog.text
