"""The batches' notes in the journal, with which a restarted broker continues them.

    session:NAME     the lease, and the last replies to requests that closed its batches
    batch:ID         options, state and stats
    group:ID         its rollouts, running jobs and failures
    prompt:NUMBER    the prompt as fed; prompts without a group wait, in order
    weights          the current weight version of the policy
    weights:MODEL    that of another model

A damaged note affects only its subject: without its note, a group's running jobs are cancelled and its prompt runs
again.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import ProrlError
from ...wire.messages.base import POLICY, BatchIdentifier, GroupIdentifier, Identifier, JobIdentifier
from ...wire.messages.batches import BatchClosed, BatchOptions, BatchState  # noqa: TC001 - msgspec reads the annotations at run time
from ..job_frame import read_job
from .batch_records import BatchRecord, SessionRecord
from .batch_stats import BatchStats  # noqa: TC001 - as above
from .group_filters import keep_policy
from .prompt import Prompt
from .rollout_group import Rollout, RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .batch_records import Changes

WEIGHTS = "weights"
JOB_BYTES = 2**31 - 1
"""Prompts in the journal have passed their limit already."""

log = logging.getLogger("prorl.rollout_broker")


class _Session(msgspec.Struct, array_like=True):
    session: Identifier
    lease_s: float
    closed: tuple[BatchClosed, ...] = ()


class _Batch(msgspec.Struct, array_like=True):
    batch_id: BatchIdentifier
    session: Identifier
    options: BatchOptions
    state: BatchState
    problem: str
    fed: int
    stream_ended: bool
    key: BatchIdentifier
    opened: int
    stats: BatchStats


class _Group(msgspec.Struct, array_like=True):
    group_id: GroupIdentifier
    session: Identifier
    batch_id: str
    prompt: int
    size: Annotated[int, Meta(ge=1)]
    number: int
    rollouts: dict[int, Rollout]
    running: dict[JobIdentifier, int]
    failures: dict[str, int]
    started: int
    given_to: str


class _Prompt(msgspec.Struct, array_like=True):
    session: Identifier
    batch_id: str
    """The batch that was fed the prompt."""
    packed: bytes


_encode = msgspec.msgpack.Encoder().encode


def session_note(record: SessionRecord) -> tuple[str, bytes]:
    return f"session:{record.session}", _encode(_Session(record.session, record.lease_s, tuple(record.closed.values())))


def batch_note(batch: BatchRecord) -> tuple[str, bytes]:
    state = (batch.state, batch.problem, batch.fed, batch.stream_ended, batch.key, batch.opened, batch.stats)
    return f"batch:{batch.batch_id}", _encode(_Batch(batch.batch_id, batch.session, batch.options, *state))


def group_note(group: RolloutGroup) -> tuple[str, bytes]:
    note = _Group(
        group.group_id,
        group.session,
        group.batch_id,
        group.prompt.number,
        group.size,
        group.number,
        group.rollouts,
        group.running,
        dict(group.failures),
        group.started,
        group.given_to,
    )
    return f"group:{group.group_id}", _encode(note)


def weights_note(model: str, version: int) -> tuple[str, bytes]:
    return WEIGHTS if model == POLICY else f"{WEIGHTS}:{model}", _encode(version)


def prompt_note(prompt: Prompt, batch_id: str, packed: bytes) -> tuple[str, bytes]:
    return f"prompt:{prompt.number}", _encode(_Prompt(prompt.session, batch_id, packed))


def notes_of(changes: Changes) -> dict[str, bytes | None]:
    """Return the notes to write for changes, None to delete; prompts are written when they are fed."""
    notes: dict[str, bytes | None] = {}
    notes.update((f"session:{name}", None) for name in changes.gone_sessions)
    notes.update((f"batch:{name}", None) for name in changes.gone_batches)
    notes.update((f"group:{name}", None) for name in changes.gone_groups)
    notes.update((f"prompt:{prompt.number}", None) for prompt in changes.gone_prompts)
    notes.update(session_note(record) for record in changes.sessions.values())
    notes.update(batch_note(batch) for batch in changes.batches.values())
    notes.update(group_note(group) for group in changes.groups.values())
    return notes


@dataclass
class Restored:
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    batches: list[BatchRecord] = field(default_factory=list)
    groups: list[RolloutGroup] = field(default_factory=list)
    prompts: dict[int, Prompt] = field(default_factory=dict)
    fed_to: dict[int, str] = field(default_factory=dict)
    """Batch id by prompt number."""
    versions: dict[str, int] = field(default_factory=dict)
    """The current weight versions, by model."""


def read_notes(notes: Mapping[str, bytes], is_there: Callable[[str], bool], now: float) -> Restored:
    restored = Restored()
    by_kind: dict[str, list[Any]] = {"session": [], "batch": [], "group": [], "prompt": []}
    kinds = {"session": _Session, "batch": _Batch, "group": _Group, "prompt": _Prompt}
    for name, note in notes.items():
        kind, _, rest = name.partition(":")
        try:
            if kind == WEIGHTS:
                restored.versions[rest or POLICY] = msgspec.msgpack.decode(note, type=int)
            elif kind == "prompt":
                by_kind[kind].append((int(rest), msgspec.msgpack.decode(note, type=_Prompt)))
            else:
                by_kind[kind].append(msgspec.msgpack.decode(note, type=kinds[kind]))
        except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
            log.error("the journal's note %s is damaged, and what it was of is given up: %s", name, error)  # noqa: TRY400
    for one in by_kind["session"]:
        record = restored.sessions[one.session] = SessionRecord(one.session, now, one.lease_s)
        record.closed.update((reply.request_id, reply) for reply in one.closed)
    _read_batches(by_kind["batch"], restored)
    _read_prompts(by_kind["prompt"], restored)
    _read_groups(by_kind["group"], restored, is_there, now)
    _read_waiting(restored)
    return restored


def _read_batches(notes: list[_Batch], restored: Restored) -> None:
    for one in notes:
        try:
            group_filter = keep_policy(one.options.keep)
        except ProrlError as error:
            log.error("batch %s cannot continue: %s", one.batch_id, error.message)  # noqa: TRY400 - it says it all
            continue
        if one.session in restored.sessions:
            batch = BatchRecord(one.batch_id, one.session, one.options, group_filter, one.key)
            batch.state, batch.problem, batch.fed, batch.opened = one.state, one.problem, one.fed, one.opened
            batch.stream_ended = one.stream_ended
            batch.stats = one.stats
            restored.batches.append(batch)


def _read_prompts(notes: list[tuple[int, _Prompt]], restored: Restored) -> None:
    for number, one in sorted(notes, key=lambda note: note[0]):
        try:
            job = read_job(one.packed, JOB_BYTES)
        except ProrlError as error:
            log.error("prompt %d in the journal is damaged: %s", number, error.message)  # noqa: TRY400 - it says it all
            continue
        restored.prompts[number] = Prompt(number, one.session, job, len(one.packed))
        restored.fed_to[number] = one.batch_id


def _read_groups(notes: list[_Group], restored: Restored, is_there: Callable[[str], bool], now: float) -> None:
    open_ids = {batch.batch_id for batch in restored.batches}
    for one in notes:
        if one.session not in restored.sessions or one.prompt not in restored.prompts:
            log.error("group %s has lost its session or its prompt, and is given up", one.group_id)
            continue
        batch_id = one.batch_id if one.batch_id in open_ids else ""
        prompt = restored.prompts[one.prompt]
        group = RolloutGroup(one.group_id, prompt, one.size, one.number, one.session, batch_id, prompt.job.model)
        group.rollouts = {index: rollout for index, rollout in one.rollouts.items() if is_there(rollout.job_id)}
        group.running = {job_id: place for job_id, place in one.running.items() if is_there(job_id)}
        group.failures = Counter(one.failures)
        group.started, group.given_to, group.given_at = one.started, one.given_to, now
        restored.groups.append(group)


def _read_waiting(restored: Restored) -> None:
    taken = {group.prompt.number for group in restored.groups}
    batches = {batch.batch_id: batch for batch in restored.batches if batch.state == "open"}
    for number, prompt in restored.prompts.items():
        if number not in taken and prompt.session in restored.sessions:
            batch = batches.get(restored.fed_to[number])
            left = restored.sessions[prompt.session].prompts
            (batch.prompts if batch is not None else left[prompt.job.model]).append(prompt)
