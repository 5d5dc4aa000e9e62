"""What a node says of its machine, read where it is: host, allocation, version, images, memory, and disk."""

from __future__ import annotations

import shutil
import socket
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.free_memory import free_memory
from ..system.node_name import allocation
from ..tools.images.image import default_root
from ..tools.images.staging import images_in
from ..wire.messages.nodes import IMAGES_LIMIT, NodeFacts

if TYPE_CHECKING:
    from ..config import Topology

TEXT_LIMIT = 128


def node_facts(topology: Topology) -> NodeFacts:
    """Read the facts of this node; what cannot be read is left out."""
    memory_free, memory_total = free_memory()
    disk_free = disk_total = 0
    with suppress(OSError):
        disk = shutil.disk_usage(topology.run_dir)
        disk_free, disk_total = disk.free, disk.total
    return NodeFacts(
        host=socket.gethostname()[:TEXT_LIMIT],
        allocation=allocation()[:TEXT_LIMIT],
        version=version("prorl-zmq"),
        images=_images(topology),
        memory_free_bytes=memory_free,
        memory_total_bytes=memory_total,
        disk_free_bytes=disk_free,
        disk_total_bytes=disk_total,
    )


def _images(topology: Topology) -> tuple[str, ...]:
    """Return the names of the images that jobs may name here, and of the default one."""
    sandbox, names = topology.sandbox, set[str]()
    if sandbox.image and Path(sandbox.image).exists():
        names.add(Path(sandbox.image).name)
    for folder in (default_root(), *map(Path, sandbox.image_folders)):
        with suppress(OSError):
            names.update(images_in(folder))
    return tuple(sorted(name[:TEXT_LIMIT] for name in names)[:IMAGES_LIMIT])
