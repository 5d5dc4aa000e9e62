"""Key folders of a small cluster, for tests: whose keys they hold, and what the service lets in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from pathlib import Path

LET_IN = {"alice": KeyRole.TRAINER, "gpu-7": KeyRole.STAGE, "olga": KeyRole.OPERATOR}


class KeyFolders:
    """One folder per party below `path`: those that are let in, `service`, and the strangers that a test makes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.service = KeyFolder(path / "service")
        self.service.new("service", KeyRole.SERVICE)
        for name, role in LET_IN.items():
            self.make(name, role)
            self.service.allow(self[name] / f"{name}.pub", role)

    def __getitem__(self, name: str) -> Path:
        return self._path / name

    def make(self, name: str, role: KeyRole, service: Path | None = None) -> Path:
        """Make a party's folder, with the public key of the service (or of another one)."""
        folder = KeyFolder(self[name])
        folder.new(name, role)
        public = service or self.service.path / "service.pub"
        (self[name] / "service.pub").write_bytes(public.read_bytes())
        return self[name]
