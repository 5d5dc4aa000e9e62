"""The kind of a path's file system, as named in /proc/self/mountinfo."""

from __future__ import annotations

import re
from pathlib import Path

LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "tmpfs", "overlay", "rootfs"}
)
"""Local file systems, on which memory maps and locks work as SQLite needs them; for others this is unknown."""


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """Return the kind, such as `ext4`, `nfs4` or `lustre`; empty if the kernel names none."""
    folder = path.parent.resolve()
    kind, depth = "", -1
    for line in (mounts if mounts is not None else Path("/proc/self/mountinfo").read_text()).splitlines():
        fields, _, source = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4]))
        if folder.is_relative_to(point) and len(point.parts) >= depth:  # of stacked mounts, the last one is visible
            kind, depth = source.split(" ")[0], len(point.parts)
    return kind
