"""A trainer that publishes by vLLM's weight transfer: `group_trainer.py FRONT_DOOR SERVED`, run by vLLM's Python.

For each line `VERSION MODEL SECONDS [CHUNK]` of its input it publishes the tensors of the folder MODEL. Before the
chunk it prints `chunk` once, and waits for a line. At last it prints `served VERSION`, or `failed CODE MESSAGE`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from socket_transfer import GroupInfo, register

from prorl_zmq import RolloutClient
from prorl_zmq.errors import ProrlError
from prorl_zmq.weights_publisher import WeightsPublisher


class Trainer:
    def __init__(self, front_door: str, served: Path) -> None:
        self._client = RolloutClient(front_door, timeout_s=60)
        self._publisher = WeightsPublisher(self._client, served, None, form="vllm", group=self._group)
        self._stops_at = -1

    def publish(self, version: int, model: Path, limit_s: float, stops_at: int = -1) -> None:
        self._stops_at = stops_at
        tensors = {name: t for file in model.glob("*.safetensors") for name, t in load_file(file).items()}
        try:
            published = self._publisher.publish(tensors.items(), version, timeout_s=limit_s)
        except ProrlError as error:
            print("failed", error.code, error.message, flush=True)
        else:
            assert published is not None
            assert (published.path, published.tensors) == (None, len(tensors))
            print("served", version, flush=True)

    def _group(self, world_size: int) -> GroupInfo:
        return GroupInfo(world_size, partial(self._before, self._stops_at), rank=0)

    def _before(self, stops_at: int, chunk: int) -> None:
        if chunk == stops_at == self._stops_at:
            self._stops_at = -1
            print("chunk", flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    register()
    trainer = Trainer(sys.argv[1], Path(sys.argv[2]))
    for line in sys.stdin:
        version, model, limit_s, *stops_at = line.split()
        trainer.publish(int(version), Path(model), float(limit_s), *map(int, stops_at))
