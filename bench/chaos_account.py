"""The account of a run of bench/chaos.py: each accepted job has ended, is lost or is hung; and the recovery times.

- **lost**: accepted, and the service reports it as gone, or reports that nothing is left without having returned it.
- **hung**: the service still had it when no result had come for `HANG_S`.
- **duplicate**: returned twice to one living trainer, or with another outcome the second time. Results that a killed
  trainer had not acknowledged go to its successor by contract, and are counted separately.
- **fabricated**: a reward that the job cannot have earned, a reward with an outcome other than `completed`, or a
  trajectory of another job (see chaos_jobs.py).
- **escape**: a saboteur's job that ended with another reward than 0, or with none.
- **outdated**: tokens of older weights than those that all engines had taken before the job was submitted.
- **recovery**: from a strike to the first job that ends from when on jobs end at half the usual rate, over the next
  `WINDOW_S` seconds; usual is the median of such windows without a strike. Half, since a cut leaves the service one of
  its two nodes. For a paused component without substitute (a broker, the trainer, the disk), from the end of the pause.
  For a restarted job: from the first strike in its life to its end.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chaos_plan import Strike

WINDOW_S = 4.0
STEP_S = 0.1
RECOVERED = 1 / 2
"""Of the usual rate."""


@dataclass
class Account:
    """The ledger, read."""

    accepted: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    hung: set[int] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of jobs that are no saboteurs'."""
    sabotages: Counter[str] = field(default_factory=Counter)
    """Outcomes of those that are."""
    infrastructure: Counter[str] = field(default_factory=Counter)
    """Codes of infrastructure errors."""
    duplicates: list[int] = field(default_factory=list)
    given_again: int = 0
    fabricated: dict[int, str] = field(default_factory=dict)
    escapes: dict[int, str] = field(default_factory=dict)
    outdated: dict[int, str] = field(default_factory=dict)
    updates: int = 0
    """Versions that all engines took."""
    refused_updates: Counter[str] = field(default_factory=Counter)
    ended_at: list[float] = field(default_factory=list)
    """When each job's first result came, in order, on the monotonic clock."""
    restarted: list[tuple[float, float]] = field(default_factory=list)
    """Of each job that needed more than one attempt: when it was accepted, when it ended."""
    errors: Counter[str] = field(default_factory=Counter)
    """Codes of the errors that the trainers got while they waited."""


def read_account(path: Path, *, service_still_has: bool) -> Account:
    """Read a ledger.

    Args:
        path: of the ledger.
        service_still_has: the last trainer gave up waiting; what has not ended is hung, else lost.
    """
    account = Account()
    first: dict[int, dict[str, Any]] = {}
    accepted_at: dict[int, float] = {}
    announced = 0
    wanted: dict[int, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        event = read_event(line)
        if event is None:
            continue
        match event["event"]:
            case "intent":
                wanted.setdefault(event["number"], announced)
            case "weights":
                announced = max(announced, event["version"])
                account.updates += 1
            case "no update":
                account.refused_updates[event["code"]] += 1
            case "accepted":
                accepted_at.setdefault(event["number"], event["at"])
            case "lost":
                account.lost.add(event["number"])
            case "error":
                account.errors[event["code"]] += 1
            case "result":
                _take(account, first, event)
    account.accepted = {*accepted_at, *first}
    for number, event in first.items():
        version, least = event["version"], wanted.get(number, 0)
        if version is not None and version < least:
            account.outdated[number] = f"tokens of weights {version}, when all engines had {least}"
        if event["attempt"] > 1:
            account.restarted.append((accepted_at.get(number, event["at"]), event["at"]))
    left = account.accepted - {*first} - account.lost
    (account.hung if service_still_has else account.lost).update(left)
    account.lost -= {*first}
    account.ended_at.sort()
    return account


def read_event(line: str) -> dict[str, Any] | None:
    """Read a line of a ledger; None if its writer was killed meanwhile."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _take(account: Account, first: dict[int, dict[str, Any]], event: dict[str, Any]) -> None:
    number = event["number"]
    if event["odd"]:
        account.fabricated[number] = event["odd"]
    before = first.get(number)
    if before is None:
        first[number] = event
        (account.sabotages if event["saboteurs"] else account.outcomes)[event["outcome"]] += 1
        if event["saboteurs"] and event["reward"] != 0.0:
            account.escapes[number] = f"{event['outcome']} ({event['code']}) with reward {event['reward']}"
        account.ended_at.append(event["at"])
        if event["outcome"] == "infrastructure_error":
            account.infrastructure[event["code"]] += 1
    elif before["pid"] == event["pid"] or before["outcome"] != event["outcome"]:
        account.duplicates.append(number)
    else:
        account.given_again += 1


def usual_count(ended_at: Sequence[float], start: float, end: float, strikes: Sequence[Strike]) -> float:
    """Give how many jobs end in a usual window: the median over the windows without a strike, or over all of them."""
    windows = np.arange(start, max(start + STEP_S, end - WINDOW_S), 1.0)
    calm = [at for at in windows if not any(at - WINDOW_S < strike.began < at + WINDOW_S for strike in strikes)]
    return float(np.median([_count(ended_at, at) for at in (calm or windows)]))


def recoveries(ended_at: Sequence[float], strikes: Sequence[Strike], usual: float, end: float) -> list[float]:
    """Give the seconds of recovery of each strike that had a victim; until `end` at most."""
    found = []
    for strike in strikes:
        at = strike.over
        while at < end - WINDOW_S and _count(ended_at, at) < RECOVERED * usual:
            at += STEP_S
        next_job = bisect.bisect_left(ended_at, at)
        found.append((ended_at[next_job] if next_job < len(ended_at) else end) - strike.over)
    return found


def delays(restarted: Sequence[tuple[float, float]], strikes: Sequence[Strike]) -> list[float]:
    """Give, of each job that was started again, the seconds from the first strike in its life to its end."""
    began = sorted(strike.began for strike in strikes)
    found = []
    for accepted, ended in restarted:
        index = bisect.bisect_left(began, accepted)
        if index < len(began) and began[index] < ended:
            found.append(ended - began[index])
    return found


def _count(ended_at: Sequence[float], at: float) -> int:
    return bisect.bisect_left(ended_at, at + WINDOW_S) - bisect.bisect_left(ended_at, at)
