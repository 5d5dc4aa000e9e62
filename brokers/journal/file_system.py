"""What kind of file system a path is on, as the kernel names it in /proc/self/mountinfo."""

from __future__ import annotations

import re
from pathlib import Path

LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "tmpfs", "overlay", "rootfs"}
)
"""Those of this machine alone, so that memory maps and locks work as SQLite needs them; of others it is not known."""


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """Return the kind, such as `ext4`, `nfs4` or `lustre`; empty: the kernel does not say."""
    folder = path.parent.resolve()
    kind, depth = "", -1
    for line in (mounts if mounts is not None else Path("/proc/self/mountinfo").read_text()).splitlines():
        fields, _, source = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4]))
        if folder.is_relative_to(point) and len(point.parts) >= depth:  # the last of those on one another is seen
            kind, depth = source.split(" ")[0], len(point.parts)
    return kind
