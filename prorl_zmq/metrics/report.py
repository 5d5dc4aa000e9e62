"""`MetricsReport`: the message of a process to the collector, once a second, in datagrams on a Unix socket.

Only this account can read or write in the run folder. No file is written, so a full disk has no effect, and a killed
process leaves nothing behind.
"""

from __future__ import annotations

import msgspec

INBOX = "metrics.in"
"""The collector's socket in the run folder, for reports."""
OUTLET = "metrics.out"
"""The collector's socket for readers, with all metrics in Prometheus' text form."""
FLUSH_S = 1.0
LEASE_S = 10.0
"""How long gauges count without a new report."""
CHUNK = 200
"""Rows of one datagram, which the kernel limits to some 200 kB."""


class MetricsReport(msgspec.Struct, frozen=True, array_like=True):
    life: str
    """Identifies one life of a process."""
    pid: int
    number: int
    """Of the report: gauges of earlier reports of this life are void."""
    rows: list[tuple[str, tuple[str, ...], list[float]]]
