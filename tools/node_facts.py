"""The facts that a node reports about its machine: host, allocation, version, images, sandboxes, memory, and disk."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.free_memory import free_memory
from ..system.node_name import allocation
from ..wire.messages.nodes import IMAGES_LIMIT, NodeFacts
from .images.image import default_root
from .images.staging import images_in
from .sandbox.sandboxes import sandboxes_in

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_S = 10.0
"""How often to look at the machine."""
TEXT_LIMIT = 128


class NodeFactsReader:
    """Reads the facts of a node when it is made, and at intervals.

    That is done in a thread: a folder may be on a file system that hangs, which must not stop the reports.

    Args:
        run_dir: the node's run folder.
        image: the root filesystem of sandboxes whose task names none; empty: there is none.
        image_folders: folders of images that tasks may name, besides that of `prorl image build`.
    """

    def __init__(self, run_dir: Path, image: str = "", image_folders: Iterable[str | Path] = ()) -> None:
        self._run_dir = run_dir
        self._image = image
        self._image_folders = (default_root(), *map(Path, image_folders))
        self._next = 0.0
        self._reading: threading.Thread | None = None
        self._look()

    def read(self) -> NodeFacts:
        """Return the facts as last read; start reading them again if that is due."""
        if time.monotonic() >= self._next and (self._reading is None or not self._reading.is_alive()):
            self._reading = threading.Thread(target=self._look, name="node-facts", daemon=True)
            self._reading.start()
        return self._facts

    def _look(self) -> None:
        self._facts = self._seen()
        self._next = time.monotonic() + READ_S

    def _seen(self) -> NodeFacts:
        """Read the facts; unreadable ones are omitted."""
        memory_free, memory_total = free_memory()
        disk_free = disk_total = 0
        with suppress(OSError):
            disk = shutil.disk_usage(self._run_dir)
            disk_free, disk_total = disk.free, disk.total
        sandboxes = 0
        with suppress(OSError):
            sandboxes = sandboxes_in(self._run_dir / "sandboxes")
        return NodeFacts(
            host=socket.gethostname()[:TEXT_LIMIT],
            allocation=allocation()[:TEXT_LIMIT],
            version=version("prorl-zmq"),
            images=self._images(),
            sandboxes=sandboxes,
            memory_free_bytes=memory_free,
            memory_total_bytes=memory_total,
            disk_free_bytes=disk_free,
            disk_total_bytes=disk_total,
        )

    def _images(self) -> tuple[str, ...]:
        """Return the names of the images that jobs may name here, and of the default one."""
        names = set[str]()
        if self._image and Path(self._image).exists():
            names.add(Path(self._image).name)
        for folder in self._image_folders:
            with suppress(OSError):
                names.update(images_in(folder))
        return tuple(sorted(name[:TEXT_LIMIT] for name in names)[:IMAGES_LIMIT])
