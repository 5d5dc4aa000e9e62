"""The recording of a run folder for `prorl explain`: results, and traces of the sitting that ended most."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..client.trace_log import TRACES, TraceLine
from ..errors import ConfigError
from ..explain.recording import Recording, slots_of_status
from ..explain.rollout import rollout_of
from .collection import open_collection
from .run_folder import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from ..wire.messages.front_door import JobTrace, ServiceStatus
    from ..wire.messages.jobs import Result

ROLLOUTS_LIMIT = 20_000
"""The most rollouts that are explained; of more, the last ones."""


class Recorded(NamedTuple):
    recording: Recording | None
    """None: there are no traces."""
    notes: tuple[str, ...]
    results: list[Result]


class _Sitting:
    def __init__(self) -> None:
        self.traces: dict[str, JobTrace] = {}
        self.statuses: list[ServiceStatus] = []


def read_recorded(folder: Path) -> Recorded:
    """Read a folder of `prorl eval` or `prorl submit --out`.

    Raises:
        ConfigError: it is none, or damaged.
    """
    results = {one.job_id: one.result for one in open_collection(folder).rollouts}
    sittings, damaged = _read_traces(folder / TRACES)
    sitting = max(sittings, key=lambda one: len(one.traces), default=_Sitting())
    notes = [f"{damaged} lines of {TRACES} are damaged and left out"] if damaged else []
    if not sitting.traces:
        return Recorded(None, tuple(notes), list(results.values()))
    traces = list(sitting.traces.values())[-ROLLOUTS_LIMIT:]
    known = sum(job_id in results for job_id in sitting.traces)
    if sum(bool(one.traces) for one in sittings) > 1:
        notes.append(f"the run was continued; explained is its largest part, {known} of {len(results)} rollouts")
    elif len(traces) < len(results):
        notes.append(f"of {len(results)} rollouts, {len(traces)} are explained: of the others there are no traces")
    rollouts = sorted((rollout_of(one, results.get(one.job_id)) for one in traces), key=lambda one: one.accepted)
    return Recorded(Recording(tuple(rollouts), slots_of_status(sitting.statuses)), tuple(notes), list(results.values()))


def mean_seconds(results: list[Result]) -> dict[str, float]:
    """Return the mean seconds of a rollout, by the name of the timing."""
    totals: Counter[str] = Counter()
    for result in results:
        totals.update(result.timings)
    return {name: seconds / len(results) for name, seconds in totals.most_common()}


def _read_traces(file: Path) -> tuple[list[_Sitting], int]:
    if not file.exists():
        return [], 0
    try:
        lines = read_file(file, sys.maxsize).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", key="folder") from error
    decoder = msgspec.json.Decoder(TraceLine)
    sittings, damaged = [_Sitting()], 0
    for line in filter(None, lines):
        try:
            read = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            damaged += 1  # torn by a kill; the run went on behind it
            continue
        if read.trace is not None:
            sittings[-1].traces[read.trace.job_id] = read.trace
        elif read.status is not None:
            sittings[-1].statuses.append(read.status)
        else:
            sittings.append(_Sitting())
    return sittings, damaged
