"""Kills processes that bring a copy to a version, at each of their writes in turn; prints what became of each copy.

    python killed_copies.py FOLDER

A line of JSON for each death: the way, the point, the bytes that the next fetch read, and what was wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from support.weight_versions import KINDS, assert_same, model, publish, read_copy, step, write_checkpoint

from prorl_zmq.inference.weights import local_copy, tensor_delta
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.stored_tensor import StoredTensor
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.inference.weights.version_folder import version_path

if TYPE_CHECKING:
    from collections.abc import Callable

tensor_delta.PIECE_BYTES = 3000


class Way(NamedTuple):
    """From which version a copy is brought to which; None: it is not there yet."""

    start: int | None
    end: int


WAYS = (Way(None, 2), Way(2, 3), Way(3, 2), Way(2, 4))


class Deaths:
    """Ends this process with SIGKILL at its N-th point."""

    def __init__(self, at: int, note: Path) -> None:
        self._left = at
        self._note = note

    def is_now(self, name: str) -> bool:
        self._left -= 1
        if self._left == 0:
            self._note.write_text(name)
        return self._left == 0

    def point(self, name: str) -> None:
        if self.is_now(name):
            die()

    def prepare(self) -> None:
        """Have all functions that write die half-way, before or after."""
        write, aside, reserve = StoredTensor.write, local_copy.write_aside, os.posix_fallocate

        def torn_write(tensor: StoredTensor, start: int, piece: Any) -> None:
            if self.is_now("inside a tensor"):
                write(tensor, start, piece[: len(piece) // 2])
                die()
            write(tensor, start, piece)

        def torn_aside(path: Path, content: bytes) -> None:
            if self.is_now(f"inside {path.name}"):
                path.with_name(f"{path.name}.tmp").write_bytes(content[: len(content) // 2])
                die()
            aside(path, content)
            self.point(f"after {path.name}")

        StoredTensor.write = torn_write  # type: ignore[method-assign]
        local_copy.write_aside = torn_aside
        for change in ("apply_xor", "copy_from"):
            setattr(StoredTensor, change, self._followed(getattr(StoredTensor, change), "between tensors"))
        os.posix_fallocate = self._followed(reserve, "between files")

    def _followed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def followed(*arguments: Any) -> Any:
            done = function(*arguments)
            self.point(name)
            return done

        return followed


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    """Try all points of all ways."""
    root, served = folder / "published", write_checkpoint(folder / "served", model(99))
    weights, contents = {1: model()}, {}
    with PublishedWeights(root, KINDS, threads=1) as published:
        for version in range(1, 5):
            contents[version] = Content(version, publish(published, weights[version], version).weights)
            weights[version + 1] = step(weights[version], version, 0.01)

    def look(copy: LocalCopy, at: Path) -> str:
        had = copy.had
        if had is not None:
            assert had == contents[had.version]
            assert_same(read_copy(at), weights[had.version])
        return "none" if had is None else str(had.version)

    for way in WAYS:
        template = folder / f"from-{way.start}"
        if way.start is not None and not template.exists():
            LocalCopy(template, served, threads=1).fetch(version_path(root, way.start), contents[way.start])
        for point in range(1, 1000):
            at, note = folder / "copy", folder / "point"
            shutil.rmtree(at, ignore_errors=True)
            if way.start is not None:
                shutil.copytree(template, at)
            copy = LocalCopy(at, served, threads=1)
            child = os.fork()
            if child == 0:
                Deaths(point, note).prepare()
                copy.fetch(version_path(root, way.end), contents[way.end])
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            found = look(copy, at)
            # The next one is asked for the same version, for another one, or is an engine host that was started again.
            wanted = (way.end, 4, way.start or 1)[point % 3]
            read_bytes = copy.fetch(version_path(root, wanted), contents[wanted]).read_bytes
            assert look(copy, at) == str(wanted)
            print(
                json.dumps(
                    {"way": way, "point": note.read_text(), "found": found, "wanted": wanted, "read": read_bytes}
                )
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
