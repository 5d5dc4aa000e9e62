"""The sessions under which batches' jobs are filed: apart from the jobs that their client submits by itself.

A client's session `x` has its batches' jobs and results in `x/batches`, which no client can name, so that `Collect`
never gives what belongs to a group, and neither counts the other's jobs.
"""

from __future__ import annotations

SUFFIX = "/batches"


def stream_of(session: str) -> str:
    """Give the session of a client's batches."""
    return session + SUFFIX


def is_stream(session: str) -> bool:
    """Tell whether a session is that of a client's batches."""
    return session.endswith(SUFFIX)
