"""What a sandbox is made of: plain data that INIT chooses and the execution server carries out."""

from __future__ import annotations

from typing import Literal

import msgspec


class Bind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path of the host that is seen inside."""

    source: str
    """On the host; absolute."""
    target: str
    """Inside; absolute."""
    writable: bool = False


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox's commands may use. A sandbox of kind `process` has none of these limits."""

    memory_bytes: int = 4 * 2**30
    """Address space of one process (the kernel refuses more), and memory of all together: beyond that the sandbox is
    ended and the job fails."""
    processes: int = 512
    """Processes and threads at one time. The kernel refuses more, or, where the service runs as root, the sandbox is
    ended."""
    file_bytes: int = 2**30
    """Largest file that may be written."""


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to make a sandbox."""

    image: str = ""
    """The root filesystem: a directory, or a SIF file (kind `apptainer`). Empty: the default of the service; without
    one, kind `bubblewrap` shows the host's /usr, and kind `process` takes no image in any case."""
    binds: tuple[Bind, ...] = ()
    environment: dict[str, str] = {}
    """Variables of all commands, beside those of the image and the standard ones."""
    directory: str = ""
    """Where commands start; empty: the workspace."""
    limits: Limits = Limits()
    network: bool = False
    """Share the host's network. Without it there is none."""
    fakeroot: bool = False
    """Be root inside, without being it outside (kind `apptainer`), for package managers and the like."""
    writable: Literal["disk", "memory", "no"] = "no"
    """What changes to the image's own files (kind `apptainer`) go to: a folder of the sandbox, memory (64 MiB unless
    the administrator allows more), or nowhere: it is read-only, and only the workspace and /tmp can be written. What a
    user may not change of a directory image outside, such as root's files, nobody may inside, `fakeroot` or not."""
