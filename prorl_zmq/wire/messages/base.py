"""What all messages share: limits, field types, and base classes."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from ...errors import ErrorInfo

PROTOCOL_VERSION = 9
"""Incremented with every incompatible change; requests and reports of another version are refused."""
UNSAID_PROTOCOL = 7
"""The version of a peer whose messages have no `protocol`."""
JOB_LIMIT_BYTES = 4 * 2**20
"""Default limit on one packed job."""
MAX_FRAMES = 4096
"""Most frames of one message."""
ATTEMPT_LIMIT = 2**20
"""Largest attempt; every attempt is sent and journaled."""
TASK_LIMIT = 256
"""Most tasks of one stage process, and most fields of one task."""
METRICS_LIMIT = 512
"""Most metrics of one phase: a result has those of three phases, and must fit into one header with its error."""
NOTES_LIMIT = 16
"""Most notes of one job."""
NOTE_LIMIT = 16_000
"""Most characters of one note, without the text that says how many were cut."""
TIMINGS_LIMIT = 64
"""Most timings of one phase."""
SEGMENTS_LIMIT = 16_384
"""Most segments of one trajectory."""
CONVERSATIONS_LIMIT = 64
"""Most conversations of one rollout."""
TURN_REWARDS_LIMIT = 8192
"""Most turns of one rollout that have a reward of their own."""
GROUP_LIMIT = 1024
"""Most rollouts of a group, which is one message with two frames per rollout."""
SESSIONS_LIMIT = 1000
"""Most sessions of one reply."""
UNUSED_LIMIT = 4096
"""Most unused prompts in a report: as many as may wait for a batch."""
GIVEN_UP_LIMIT = 32
"""Most given-up groups in a report."""


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the components of messages."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=_snake):
    """Base of all messages."""


FORMS: dict[str, str] = {}
"""What a text of a pattern is, by the pattern's `repr`, which msgspec's errors have."""


def in_form(pattern: str, words: str) -> Meta:
    """Return the pattern of a text; errors show `words` instead of the pattern."""
    FORMS[repr(pattern)] = words
    return Meta(pattern=pattern)


Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}\Z")]
"""The name of a job, group, session, stage process or backend; safe as part of a file name."""
JobIdentifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")]
ModelName = Annotated[
    str, in_form(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z", "a name of at most 64 letters, digits, `.`, `_` and `-`")
]
"""The name of a model that the service serves: of a group of backends, or of an endpoint of its environment."""
ENDPOINT_PREFIX = "PRORL_MODEL_"
POLICY = "policy"
"""The name of the model that generates what is trained on."""
HolderIdentifier = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,63})?\Z")
]
"""The holder of an assignment: the job; for a model other than the policy, the job, `/`, and the model's name."""
BatchIdentifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,39}\Z")]
"""The ids of its groups and jobs begin with it."""
GroupIdentifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,51}\Z")]
Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""A SHA-256 in hexadecimal; empty: not known."""
FieldName = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\"\\]{1,256}\Z")]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Attempt = Annotated[int, Meta(ge=1, le=ATTEMPT_LIMIT)]
MeasureName = Annotated[str, Meta(max_length=128)]
Metrics = Annotated[dict[MeasureName, float], Meta(max_length=METRICS_LIMIT)]
Note = Annotated[str, Meta(max_length=NOTE_LIMIT + 96)]
Notes = Annotated[dict[MeasureName, Note], Meta(max_length=NOTES_LIMIT)]
Timings = Annotated[dict[MeasureName, float], Meta(max_length=TIMINGS_LIMIT)]
Segments = Annotated[tuple[Count, ...], Meta(max_length=SEGMENTS_LIMIT)]
ShortText = Annotated[str, Meta(max_length=128)]
PathText = Annotated[str, Meta(max_length=4096)]
Argument = Annotated[str, Meta(max_length=16_384, pattern=r"^[^\x00]*\Z")]
"""A word of a command line, or the value of an environment variable."""
WeightVersion = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
CurveKey = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]
"""32 bytes in ZeroMQ's key encoding (Z85), without quotes or backslashes."""
AnnouncedKey = Annotated[str, Meta(pattern=r"^(?:[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40})?\Z")]
"""The public key of a socket; empty: plaintext."""


def endpoint_variables(model: str) -> str:
    """Return how the environment variables of a model's endpoint begin: `PRORL_MODEL_GPT_4_1` for `gpt-4.1`.

    Models whose names differ only in case, or in `-`, `.` and `_`, have one endpoint.
    """
    return ENDPOINT_PREFIX + re.sub(r"[^A-Z0-9]", "_", model.upper())


def holder(job_id: str, model: str) -> str:
    """Return the `HolderIdentifier` of a job's assignment to a backend of a model."""
    return job_id if model == POLICY else f"{job_id}/{model}"


def new_id() -> str:
    """Return a new random identifier: 32 hexadecimal digits."""
    return os.urandom(16).hex()


class KeyRole(StrEnum):
    """What a key may do (see `security.rights`)."""

    TRAINER = "trainer"
    """Submits jobs, collects trajectories, updates engines' weights."""
    STAGE = "stage"
    """A node's stage processes and engine hosts."""
    OPERATOR = "operator"
    """Inspects the service and its jobs' results, cancels jobs, manages backends; cannot submit or collect."""
    SERVICE = "service"
    """The brokers themselves."""


Roles = frozenset[KeyRole]
FOR_TRAINERS: Roles = frozenset({KeyRole.TRAINER})
FOR_OPERATORS: Roles = frozenset({KeyRole.OPERATOR})
FOR_STAGES: Roles = frozenset({KeyRole.STAGE})
FOR_ALL: Roles = FOR_TRAINERS | FOR_OPERATORS | FOR_STAGES


class _SaysProtocol(Message, frozen=True, kw_only=True):
    # A factory, since fields with their default value are not sent.
    protocol: int = msgspec.field(default_factory=lambda: PROTOCOL_VERSION)
    """The sender's protocol version, in every request."""


class Request(_SaysProtocol, frozen=True):
    """Base of requests, on every link; the reply repeats `request_id`."""

    roles: ClassVar[Roles] = frozenset()
    """The key roles that may send it; the service's own keys may send all."""

    request_id: Identifier


class Reply(Message, frozen=True):
    """Base of the replies to requests."""

    request_id: Identifier


class Done(Reply, frozen=True):
    """The request succeeded; there is no data."""


class Refused(Reply, frozen=True):
    """The request failed and changed nothing.

    For a `WeightUpdate`, at least one engine failed its step: the error's field `backend` names it.
    """

    error: ErrorInfo
