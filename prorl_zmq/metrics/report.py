"""What a process tells the collector of its run folder once a second: one datagram, or a few, on a Unix socket.

The run folder is private to its account, so no other account can write or read there. No file is written, so a full
disk stops nothing, and a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import msgspec

INBOX = "metrics.in"
"""The collector's socket in the run folder, for reports."""
OUTLET = "metrics.out"
"""And the one at which it tells all that it has, in Prometheus' text form."""
FLUSH_S = 1.0
LEASE_S = 10.0
"""How long the gauges of a process count that has fallen silent."""
CHUNK = 200
"""Most rows of one datagram: the kernel takes some 200 kB."""


class MetricsReport(msgspec.Struct, frozen=True, array_like=True):
    life: str
    """Names one life of a process."""
    pid: int
    number: int
    """Gauges of an earlier report of this life no longer hold."""
    rows: list[tuple[str, tuple[str, ...], list[float]]]
