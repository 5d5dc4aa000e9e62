"""Tables of backends and of their engine hosts, in 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from ..system.logs import one_line
from ..wire.messages.base import POLICY
from .tables import NOTHING, size_text, table, text

if TYPE_CHECKING:
    from rich.table import Table

    from ..wire.messages.backends import BackendList, BackendStatus, EngineStart

NO_BACKENDS = (
    "there are none yet; an engine of `prorl serve` comes once it is ready (its lines say what it waits for), and "
    "`prorl-engine` starts a further one"
)

NO_EVENTS = "its engine publishes no usable KV events, so its prefix cache counts as unknown"


def backend_table(backends: tuple[BackendStatus, ...], starts: tuple[EngineStart, ...] = ()) -> Table:
    """Lay out the backends' activity, and the engines that are not ready, in 80 columns."""
    named = any(one.backend.name != POLICY for one in backends) or any(start.name != POLICY for start in starts)
    cached = any(one.load is not None and one.load.kv_tokens for one in backends)

    rows: list[tuple[object, ...]] = [
        (
            *(one.backend.backend_id, *([one.backend.name] if named else []), one.state),
            *("frozen" if one.backend.frozen else one.backend.weight_version, _in_flight(one)),
            _rate(one),
            f"{one.load.cached_tokens / one.load.prompt_tokens:.0%}"
            if one.load is not None and one.load.cached_tokens
            else NOTHING,
            *([_kv_used(one)] if cached else []),
            one.backend.node,
        )
        for one in backends
    ]
    rows += [
        (start.backend_id, *([start.name] if named else []), start.state, *[NOTHING] * (6 if cached else 5))
        for start in starts
    ]
    problems = [f"{one.backend.backend_id}: {one.problem}{_next_try(one)}" for one in backends if one.problem]
    problems += [f"{one.backend.backend_id}: {one.backend.warning}" for one in backends if one.backend.warning]
    problems += [f"{one.backend.backend_id}: {NO_EVENTS}" for one in backends if one.load and one.load.lacks_events]
    problems += _fetches(backends)
    problems += [f"{start.backend_id}: {start.problem}" for start in starts if start.problem]
    said = problems if rows else [NO_BACKENDS]
    headers = (
        "backend",
        *(["model"] if named else []),
        "=state",
        ">weights",
        ">in\nflight",
        ">tokens/s",
        ">cache\nhits",
        *([">KV\nused"] if cached else []),
        "node",
    )
    return table(*headers, rows=rows, title="backends", caption=text("\n".join(map(one_line, said))) if said else None)


def adapter_tables(listed: BackendList) -> list[Table]:
    """Lay out which backends have loaded which version of each adapter, in 80 columns; empty: there are no adapters."""
    rows = []
    for adapter in listed.adapters:
        of_base = [one for one in listed.backends if one.backend.name == adapter.base and one.backend.adapter_slots]
        where = (
            f"{one.backend.backend_id}: {', '.join(map(str, one.backend.adapters.get(adapter.model, ()))) or NOTHING}"
            for one in of_base
        )
        rows.append((adapter.model, adapter.base, adapter.weight_version, adapter.in_flight, "; ".join(where)))
    problems = [
        f"{one.backend.backend_id}: {model}: {problem}"
        for one in listed.backends
        for model, problem in one.adapter_problems.items()
    ]
    caption = text("\n".join(map(one_line, problems))) if problems else None
    headers = ("adapter", "base", ">version", ">in\nflight", "versions loaded")
    return [table(*headers, rows=rows, title="adapters", caption=caption)] if rows else []


def _rate(one: BackendStatus) -> str:
    """Return the tokens per second of ended turns; nothing while turns run and none has ended."""
    load = one.load
    return NOTHING if load is None or (load.running and not load.tokens_per_s) else f"{load.tokens_per_s:,.0f}"


def _in_flight(status: BackendStatus) -> str:
    """Write the assignments, and from how many on there are no new ones, if the backend has such a number."""
    return f"{status.in_flight}" if status.room is None else f"{status.in_flight}/{status.room}"


def _kv_used(status: BackendStatus) -> str:
    return f"{status.load.kv_used:.0%}" if status.load is not None and status.load.kv_tokens else NOTHING


def _fetches(backends: tuple[BackendStatus, ...]) -> list[str]:
    """Say which hosts fetch weights."""
    return [
        f"{one.backend.backend_id}: its host fetches weights {one.fetching}, and its engine generates meanwhile"
        for one in backends
        if one.fetching is not None
    ]


def _next_try(status: BackendStatus) -> str:
    if status.next_try_s is None:
        return ""
    return f" (tried again in {status.next_try_s:.0f} s)" if status.next_try_s > 0 else " (the next job tries it)"


def detail_tables(backends: tuple[BackendStatus, ...]) -> Group:
    """Lay out the backends' properties and their hosts' state, in 80 columns."""
    return Group(_served(backends), _hosts(backends), *_caches(backends))


def copy_table(backends: tuple[BackendStatus, ...]) -> Table:
    """Lay out the copies of weights that engine hosts keep, and who fed whom, in 80 columns."""
    rows = [
        (
            *(one.backend.backend_id, NOTHING if copy.version is None else copy.version),
            *(size_text(copy.size_bytes), size_text(copy.fetched_bytes), f"{copy.seconds:.1f}"),
            ", ".join(f"{name} {part / max(1, copy.fetched_bytes):.0%}" for name, part in copy.fed_by.items())
            or NOTHING,
            copy.place[:6],
        )
        for one in backends
        if (copy := one.copy) is not None
    ]
    headers = ("backend", ">version", ">on disk", ">fetched", ">seconds", "from", "copy")
    notes = [*([] if rows else ["no engine host keeps a copy of weights"]), *_fetches(backends)]
    caption = text("\n".join(notes)) if notes else None
    return table(*headers, rows=rows, title="copies of weights", caption=caption)


def _served(backends: tuple[BackendStatus, ...]) -> Table:
    rows = (
        (
            *(one.backend_id, f"{one.weight:g}", one.max_in_flight, one.context_tokens or NOTHING),
            *(one.model or NOTHING, one.endpoint),
        )
        for one in (status.backend for status in backends)
    )
    headers = ("backend", ">weight", ">limit", ">context", "model", "endpoint")
    return table(*headers, rows=rows, title="details")


def _caches(backends: tuple[BackendStatus, ...]) -> list[Table]:
    """Lay out the KV caches of the engines that report on them, in 80 columns; empty: none does."""
    rows = [
        (
            *(one.backend.backend_id, f"{load.kv_tokens:,}", f"{load.kv_used:.0%}", load.queued, load.parked),
            load.preempted,
            f"{load.again_tokens / load.prompt_tokens:.0%}" if load.prompt_tokens else NOTHING,
        )
        for one in backends
        if (load := one.load) is not None and load.kv_tokens
    ]
    headers = (
        "backend",
        ">tokens",
        ">used",
        ">requests\nwaiting",
        ">turns\nparked",
        ">pre-\nempted",
        ">computed\nagain",
    )
    return [table(*headers, rows=rows, title="KV caches")] if rows else []


def _hosts(backends: tuple[BackendStatus, ...]) -> Table:
    """Lay out the state of engine hosts; others send no heartbeats."""
    rows = (
        (
            *(one.backend.backend_id, f"{one.silent_s:.1f} s", f"{max(0.0, one.lease_s - one.silent_s):.1f} s"),
            size_text(one.load.memory_bytes) if one.load.memory_bytes else NOTHING,
            one.backend.version or NOTHING,
        )
        for one in backends
        if one.silent_s is not None and one.load is not None
    )
    headers = ("backend", ">last\nheard", ">lease\nleft", ">memory", "version")
    return table(*headers, rows=rows, title="engine hosts")
