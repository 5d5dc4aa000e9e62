"""The specification of a sandbox: plain data that INIT chooses and the execution server applies."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..processes.output import OUTPUT_LIMIT_BYTES

Path = Annotated[str, Meta(pattern=r"^/[^\x00]*\Z")]
"""Absolute."""
Word = Annotated[str, Meta(pattern=r"^[^=\x00]+\Z")]
Text = Annotated[str, Meta(pattern=r"^[^\x00]*\Z")]
OUTPUT_LIMITS_BYTES = (1024, 16 * 2**20)
OutputLimit = Annotated[int, Meta(ge=OUTPUT_LIMITS_BYTES[0], le=OUTPUT_LIMITS_BYTES[1])]
Amount = Annotated[int, Meta(ge=1, le=2**62)]
User = Annotated[str, Meta(pattern=r"^([a-z_][a-z0-9_-]{0,31}\$?|[0-9]{1,10})?\Z")]
"""A user's name in the image, or a number."""


class Bind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path of the host that is seen inside."""

    source: Path
    """On the host; absolute."""
    target: Path
    """Inside; absolute."""
    writable: bool = False


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox's commands may use. They do not apply to sandboxes of kind `process`."""

    memory_bytes: Amount = 4 * 2**30
    """Address space of one process (the kernel refuses more), and memory of all together: beyond that the sandbox is
    ended and the job fails."""
    address_space_bytes: Amount | None = None
    """Of one process, where it is not `memory_bytes`: JavaScript engines reserve far more than they use."""
    processes: Amount = 512
    """Processes and threads at one time. The kernel refuses more, or, where the service runs as root, the sandbox is
    ended."""
    file_bytes: Amount = 2**30
    """Largest file that may be written."""
    cpus: Annotated[float, Meta(gt=0, le=4096)] | None = None
    """Processor time of all together, in processors. Where the service cannot make cgroups, commands start on that many
    processors, rounded up, and may choose others. None: no limit, only a low priority."""


SPEC = "spec.json"
"""The file in a sandbox's folder that has its `SandboxSpec`."""


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to make a sandbox."""

    image: Text = ""
    """The root filesystem, as `prorl image list` names it, or the path of a directory or a SIF file (kind `apptainer`)
    below one of the service's `image_folders`. Empty: the default of the service; without one, kind `bubblewrap` shows
    the host's /usr, and kind `process` takes no image in any case."""
    binds: tuple[Bind, ...] = ()
    environment: dict[Word, Text] = {}
    """Variables of all commands, in addition to those of the image and the standard ones."""
    directory: Annotated[str, Meta(pattern=r"^(/[^\x00]*)?\Z")] = ""
    """Where commands start; empty: the workspace."""
    user: User = ""
    """The user that runs commands; empty: the sandbox's own, which makes all file calls. Other users need kind
    `apptainer` with `fakeroot`, and a service that runs as root or has subordinate ids."""
    limits: Limits = Limits()
    network: bool = False
    """Share the host's network. Without it there is none."""
    fakeroot: bool = False
    """Be root inside, without being it outside (kind `apptainer`), for package managers and the like: over files,
    owners and users, but with no right to mount, trace, or change networks. Where the service itself runs as root there
    is no user namespace, and this root has no capabilities: it may change root's files, but neither other users' nor
    owners."""
    writable: Literal["disk", "no"] = "no"
    """Where changes to the image's own files go (kind `apptainer`): a folder of the sandbox, or nowhere: it is
    read-only, and only the workspace and /tmp can be written. Files of a directory image that a user may not change
    outside, such as root's, no command may change inside, `fakeroot` or not."""
    output_limit_bytes: OutputLimit = OUTPUT_LIMIT_BYTES
    """How much of the output of one bash command or one IPython or kernel cell is kept, 1 KiB to 16 MiB. Of a longer
    one the agent sees the first and the last half, and between them how many bytes were left out."""

    def __post_init__(self) -> None:
        least, most = OUTPUT_LIMITS_BYTES
        if not least <= self.output_limit_bytes <= most:
            raise ValueError(
                f"output_limit_bytes is {self.output_limit_bytes}; it must be at least {least} and at most {most}"
            )


RESERVED_BYTES = 2**40
"""The address space that a sandbox must allow a process of a JavaScript engine, which reserves it and uses little."""


def with_address_space(spec: SandboxSpec) -> SandboxSpec:
    """Return a specification that allows JavaScript engines."""
    limits = msgspec.structs.replace(spec.limits, address_space_bytes=RESERVED_BYTES)
    return msgspec.structs.replace(spec, limits=limits)
