"""Memory that this process may still use: the machine's, within the limits of its control groups.

All groups above the process count, and file caches count as free. `psutil` reads no control groups.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
NAMES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A group's limit, use, and idle file cache in its use; for both versions of control groups."""


def free_memory() -> tuple[int, int]:
    """Return the free and the total bytes; zeros where unknown."""
    try:
        machine = _fields(PROC / "meminfo")
        free, total = 1024 * machine["MemAvailable:"], 1024 * machine["MemTotal:"]
    except (OSError, KeyError):
        return 0, 0
    for group in _groups():
        for limit_name, use_name, idle_name in NAMES:
            with suppress(OSError, ValueError):  # no such file, or no limit (`max`)
                limit = int((group / limit_name).read_text("ascii"))
                idle = _fields(group / "memory.stat").get(idle_name, 0)
                used = int((group / use_name).read_text("ascii")) - idle
                free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's memory group and of its ancestors."""
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                top = GROUPS / "memory" if controllers else GROUPS
                own = top / path.lstrip("/")
                yield own
                yield from (above for above in own.parents if above.is_relative_to(top))


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text("ascii").splitlines())
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1 and fields[1].isdecimal()}
