"""A backend of vLLM's weight transfer for CPUs: the trainer sends each tensor's bytes to each engine over TCP.

vLLM finds it by the entry point `register` in its processes; the trainer's script calls `register` itself. A group has
one connection for each of the engines' processes. The name is `socket`.
"""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "socket"
CHUNK = 7
"""Tensors of one `update`."""
WAIT_S = 60.0


def register() -> None:
    with suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(NAME, Receiving)
        WeightTransferTrainerFactory.register_engine(NAME, Sending)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    address: str
    port: int
    rank_offset: int
    world_size: int


@dataclass
class ChunkInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Receiving(WeightTransferEngine[JoinInfo, ChunkInfo]):
    init_info_cls = JoinInfo
    update_info_cls = ChunkInfo
    _connection: socket.socket | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        assert self._connection is None, "there is a group already"
        self._connection = socket.create_connection((init_info.address, init_info.port), WAIT_S)
        self._connection.settimeout(None)
        self._connection.sendall(struct.pack("<II", init_info.rank_offset + self.parallel_config.rank, 0))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base waits for an accelerator

    def receive_weights(self, update_info: ChunkInfo) -> None:
        assert self._connection is not None, "there is no group"
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while rest:
                count = self._connection.recv_into(rest)
                if not count:
                    raise ConnectionError("the trainer has left the group")
                rest = rest[count:]
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass
class GroupInfo(TrainerInitInfo):
    backend: ClassVar[str] = NAME

    world_size: int
    before_chunk: Callable[[int], None] = lambda _: None
    """Called with the number of each chunk before the engines expect it."""
    before_tensor: Callable[[int], None] = lambda _: None
    """Called with the number of each tensor before it is sent; an `OSError` of it is a broken connection."""


class Sending(TrainerWeightTransferEngine[GroupInfo]):
    init_info_cls = GroupInfo

    @classmethod
    def trainer_init(cls, init_info: GroupInfo, *, client: Any, source: Any = None) -> Sending:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.before_chunk, engine.before_tensor = init_info.before_chunk, init_info.before_tensor
        receivers = init_info.world_size - 1
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            server.settimeout(WAIT_S)
            address, port = server.getsockname()
            join = {"address": address, "port": port, "rank_offset": 1, "world_size": init_info.world_size}
            joined = pool.submit(client.init_weight_transfer_engine, join)
            joined.add_done_callback(lambda done: done.exception() and server.close())
            ranks: dict[int, socket.socket] = {}
            try:
                while len(ranks) < receivers:
                    connection, _ = server.accept()
                    rank, _ = struct.unpack("<II", connection.recv(8, socket.MSG_WAITALL))
                    ranks[rank] = connection
            finally:
                joined.result()
        assert sorted(ranks) == list(range(1, receivers + 1))
        engine.connections = list(ranks.values())
        return engine

    def send_weights(self) -> None:
        metadata = self.source.metadata()
        self.client.start_weight_update()
        tensors = iter(self.source)
        with ThreadPoolExecutor(1) as pool:
            for number, first in enumerate(range(0, len(metadata), CHUNK)):
                chunk = metadata[first : first + CHUNK]
                info = {
                    "names": [one.name for one in chunk],
                    "dtype_names": [str(one.dtype).removeprefix("torch.") for one in chunk],
                    "shapes": [list(one.shape) for one in chunk],
                }
                self.before_chunk(number)
                received = pool.submit(self.client.update_weights, info)
                try:
                    for index, one in enumerate(chunk, first):
                        self.before_tensor(index)
                        name, tensor = next(tensors)
                        assert name == one.name
                        for connection in self.connections:
                            connection.sendall(tensor.reshape(-1).view(torch.uint8).numpy())
                except OSError:
                    self.shutdown()  # so that the others see it, too
                received.result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        for connection in self.connections:
            connection.close()
