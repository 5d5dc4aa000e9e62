"""A trainer with sharded weights: `sharded_trainer.py FRONT_DOOR MODEL FOLDER`; prints what its ranks were told."""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from prorl_zmq import RolloutClient
from prorl_zmq.errors import ProrlError
from prorl_zmq.weights_publisher import WeightsPublisher


def say(word: str) -> None:
    """Print a line in one piece, since two ranks print."""
    os.write(1, f"{word}\n".encode())


def main(front_door: str, model: str, folder: str) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {"embed.weight": torch.randn(8, 4), "layer.weight": torch.randn(4, 4), "layer.bias": torch.randn(4)}
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    client = RolloutClient(front_door) if rank == 0 else None
    with WeightsPublisher(client, model, folder) as publisher:
        published = publisher.publish(sharded.items(), 3)
        say("wrote" if published is not None else "took part")
        sharded["layer.bias"] = distribute_tensor(torch.randn(6), mesh, [Shard(0)])
        try:
            publisher.publish(sharded.items(), 4)
        except ProrlError as error:
            say(error.code)
    if client is not None:
        client.close()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
