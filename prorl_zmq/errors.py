"""Every error that a caller can meet, named for what can be done about it.

One flat family under `ProrlError`. The same classes live on both sides of the wire: a broker answers with
`ErrorInfo(code, message, fields)`, and `from_info` gives the client back the class it names, with the fields as
attributes. Errors that belong to one process only (a shell that died, a sandbox that did not start) are here too, since
a job's outcome carries them to the trainer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

Field = str | int | float | bool | None


TEXT_LIMIT = 4000
"""Most characters of one text in an error that crosses the wire, but for a note of how many more there were."""
FIELDS_LIMIT = 16
"""Most fields of an error that crosses the wire."""
NAME_LIMIT = 128
"""Most characters of a code, and of a field's name."""
Name = Annotated[str, Meta(max_length=NAME_LIMIT)]
Text = Annotated[str, Meta(max_length=TEXT_LIMIT + 96)]


def shortened(value: Field) -> Any:
    """Give a field as it is, or a long text's beginning."""
    if isinstance(value, str) and len(value) > TEXT_LIMIT:
        return f"{value[:TEXT_LIMIT]} … ({len(value) - TEXT_LIMIT} more characters)"
    return value


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as plain data: what a reply or a job's outcome carries."""

    code: Name
    """The stable name of the error, such as `unknown_task`."""
    message: Text
    """One or two sentences for a person: what was wrong, and what to do."""
    fields: Annotated[dict[Name, Text | int | float | bool | None], Meta(max_length=FIELDS_LIMIT)] = {}
    """What a program needs: `job_id`, `field`, `retry_after_s`, …"""


class ProrlError(Exception):
    """Base of all errors of this package.

    Args:
        message: what was wrong and what to do, for a person.
        fields: values for a program; each is also an attribute of the error.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, /, **fields: Field) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def info(self) -> ErrorInfo:
        """Give the error as plain data."""
        plain = {name: value if isinstance(value, Field) else str(value) for name, value in self.fields.items()}
        return ErrorInfo(self.code, shortened(self.message), {name: shortened(value) for name, value in plain.items()})


# What a request can meet --------------------------------------------------------------------------------------------


class MalformedMessage(ProrlError):
    """A frame is not what the protocol says: not MessagePack, over a limit, a wrong type (`field` names it)."""

    code = "malformed_message"


class VersionMismatch(ProrlError):
    """The two sides speak different protocol versions (`ours`, `theirs`)."""

    code = "version_mismatch"


class UnknownTask(ProrlError):
    """No stage process has a handler for the task (`task`)."""

    code = "unknown_task"


class InvalidJob(ProrlError):
    """A job or its instance lacks a field or has one of a wrong type (`job_id`, `field`)."""

    code = "invalid_job"


class InvalidBatch(ProrlError):
    """No batch can be what was asked for, or another one has its id (`field`)."""

    code = "invalid_batch"


class UnknownBatch(ProrlError):
    """The batch is not open: it was closed, or its client was silent for too long."""

    code = "unknown_batch"


class BatchFailed(ProrlError):
    """A batch ended since its keep policy raised (`batch_id`)."""

    code = "batch_failed"


class JobTooLarge(ProrlError):
    """A job is larger than the service takes (`job_id`, `size_bytes`, `limit_bytes`)."""

    code = "job_too_large"


class DuplicateJob(ProrlError):
    """Another job already has this id (`job_id`)."""

    code = "duplicate_job"


class Busy(ProrlError):
    """The service is full or not ready; nothing was accepted. Try again after `retry_after_s` seconds."""

    code = "busy"


class JournalFailed(ProrlError):
    """The service cannot write its journal (`path`), so it takes no new jobs; what it has is safe.

    Try again after `retry_after_s` seconds, once there is room or the disk is well.
    """

    code = "journal_failed"


class JobsLost(ProrlError):
    """Jobs that were accepted are gone with the rollout broker's journal, or a row of it (`count`, `job_ids`).

    `job_ids` holds their ids, separated by spaces. Submit them again if they are still wanted.
    """

    code = "jobs_lost"


class UnknownJob(ProrlError):
    """No job that the service knows has this id, or more than one has an id that begins so (`job_id`, `matches`)."""

    code = "unknown_job"


class UnknownBackend(ProrlError):
    """No backend has this id (`backend`)."""

    code = "unknown_backend"


class DuplicateBackend(ProrlError):
    """Another live backend is registered under this id (`backend`)."""

    code = "duplicate_backend"


class UpdateInProgress(ProrlError):
    """New weights (`weight_version`) are on their way already; end or cancel their update first."""

    code = "update_in_progress"


class UpdateNotBegun(ProrlError):
    """An update to these weights was never begun, or was given up since its end did not come (`weight_version`)."""

    code = "update_not_begun"


class NoBackend(ProrlError):
    """No inference backend became available within the wait that the job allows (`job_id`, `waited_s`)."""

    code = "no_backend"


class RequestTimeout(ProrlError):
    """No reply came within the time allowed (`timeout_s`); the request may or may not have been done."""

    code = "request_timeout"


class NotAllowed(ProrlError):
    """A key is not let in, was revoked, or has no right to what it asked for (`key`); or one side has keys only."""

    code = "not_allowed"


class Closed(ProrlError):
    """The client, socket or session was closed."""

    code = "closed"


class InternalError(ProrlError):
    """A fault of ours: the service met something that it should not have; its log says more."""

    code = "internal_error"


# What a trainer can meet with what it got -----------------------------------------------------------------------------


class NotTrainable(ProrlError):
    """Groups that no trainer could learn from as they are (`group_id`, `job_id`): see `rows.rows_of`."""

    code = "not_trainable"


# What a data file can meet --------------------------------------------------------------------------------------------


class InvalidRecord(ProrlError):
    """A row of a data file is in no known form, or not what its form says (`line`, `field`, `form`)."""

    code = "invalid_record"


# What a start can meet ----------------------------------------------------------------------------------------------


class ConfigError(ProrlError):
    """A topology file, flag or environment value is wrong (`key`)."""

    code = "config_error"


class InvalidEndpoint(ProrlError):
    """An endpoint is malformed, not allowed here, or too long for ipc (`endpoint`)."""

    code = "invalid_endpoint"


class EndpointInUse(ProrlError):
    """Another process already serves this endpoint (`endpoint`)."""

    code = "endpoint_in_use"


# What a phase can meet ----------------------------------------------------------------------------------------------


class PhaseTimeout(ProrlError):
    """A phase took longer than its limit, queue time excluded (`phase`, `limit_s`)."""

    code = "phase_timeout"


class Cancelled(ProrlError):
    """The job was cancelled on request."""

    code = "cancelled"


class HandlerFailed(ProrlError):
    """The task's own code raised (`exception`: the class's name)."""

    code = "handler_failed"


class GraderFailed(ProrlError):
    """What judges an answer gave no reward: it says nothing about the answer (`reason`, `output`).

    `reason` is `hung` (it took longer than its limit), `crashed` (its process ended), `raised`, or `result` (what it
    gave is no reward); `output` is the end of what it printed.
    """

    code = "grader_failed"


class JudgeUnreachable(ProrlError):
    """The judge model that is to decide on an answer did not answer, or was busy or broken, for too long (`url`)."""

    code = "judge_unreachable"


class LeaseLost(ProrlError):
    """The stage process that held the job does so no longer (`stage_id`); `attempts` is how many were made.

    `cause` is `died` (its connection ended), `silent` (it hangs, or its link is cut), `left` (in good order), or
    `unreported` (it lives and does not have the job: the start never arrived).
    """

    code = "lease_lost"


class NoStage(ProrlError):
    """No live stage process could take the job within the time allowed (`role`, `waited_s`)."""

    code = "no_stage"


class EngineFailed(ProrlError):
    """An inference engine answered with an error, something malformed, or not at all (`backend`)."""

    code = "engine_failed"


class InvalidWeights(ProrlError):
    """New weights were refused before the engine took them: missing, unreadable, or of another shape (`path`)."""

    code = "invalid_weights"


class SandboxFailed(ProrlError):
    """A sandbox could not be made, reached or closed."""

    code = "sandbox_failed"


class SandboxUnavailable(ProrlError):
    """This machine cannot make the kind of sandbox that was asked for (`kind`)."""

    code = "sandbox_unavailable"


class SandboxLimitExceeded(ProrlError):
    """What the agent ran used more than its sandbox may (`limit` names which), so the sandbox was ended."""

    code = "sandbox_limit_exceeded"


class InvalidToolCall(ProrlError):
    """A tool session was asked for what it does not take, such as a command with a NUL; nothing was done."""

    code = "invalid_tool_call"


class ToolSessionLost(ProrlError):
    """A tool session (a live bash) ended and could not be started again."""

    code = "tool_session_lost"


BY_CODE: dict[str, type[ProrlError]] = {cls.code: cls for cls in ProrlError.__subclasses__()}


def from_info(info: ErrorInfo) -> ProrlError:
    """Give the error that `info` describes; a code from a newer version becomes a plain `ProrlError`."""
    return BY_CODE.get(info.code, ProrlError)(info.message, **info.fields)
