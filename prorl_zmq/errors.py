"""Every error that a caller can meet: one flat family under `ProrlError`, the same on both sides of the wire.

A broker answers with `ErrorInfo(code, message, fields)`, from which `from_info` makes the class that `code` names, with
the fields as attributes. Errors of one process (a shell that died, a sandbox that did not start) are here too, since a
job's outcome carries them to the trainer.
"""

from __future__ import annotations

import re
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
    """Return a field; of a long text its beginning."""
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
    """The stable name on the wire: the class's in snake case."""

    def __init_subclass__(cls) -> None:
        cls.code = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).lower()

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
        """Return the error as plain data."""
        plain = {name: value if isinstance(value, Field) else str(value) for name, value in self.fields.items()}
        return ErrorInfo(self.code, shortened(self.message), {name: shortened(value) for name, value in plain.items()})


# What a request can meet --------------------------------------------------------------------------------------------


class MalformedMessage(ProrlError):
    """A frame is not what the protocol says: not MessagePack, over a limit, a wrong type (`field` names it)."""


class VersionMismatch(ProrlError):
    """The two sides speak different protocol versions (`ours`, `theirs`)."""


class UnknownTask(ProrlError):
    """No stage process has a handler for the task (`task`)."""


class InvalidJob(ProrlError):
    """A job or its instance lacks a field or has one of a wrong type (`job_id`, `field`)."""


class InvalidBatch(ProrlError):
    """No batch can be what was asked for, or another one has its id (`field`)."""


class UnknownBatch(ProrlError):
    """The batch is not open: it was closed, or its lease has expired (`batch_id`).

    No known batch has this id, or several have it as their prefix (`matches`).
    """


class BatchFailed(ProrlError):
    """A batch ended since its keep policy raised (`batch_id`)."""


class JobTooLarge(ProrlError):
    """A job is larger than the service takes (`job_id`, `size_bytes`, `limit_bytes`)."""


class DuplicateJob(ProrlError):
    """Another job already has this id (`job_id`)."""


class Busy(ProrlError):
    """The service is full or not ready; nothing was accepted. Retry after `retry_after_s` seconds."""


class JournalFailed(ProrlError):
    """The service cannot write its journal (`path`), so it takes no new jobs; those that it has are safe.

    Retry after `retry_after_s` seconds, once the disk has room and works.
    """


class JobsLost(ProrlError):
    """Jobs that were accepted are gone with the rollout broker's journal, or a row of it (`count`, `job_ids`).

    `job_ids` holds their ids, separated by spaces. Resubmit those that are still wanted.
    """


class UnknownJob(ProrlError):
    """No job that the service knows has this id, or several ids have it as their prefix (`job_id`, `matches`)."""


class UnknownSession(ProrlError):
    """No session of this name holds anything (`session`)."""


class SessionEnded(ProrlError):
    """The session was ended, with its jobs and results: its client was silent, or an operator wanted it (`session`)."""


class UnknownBackend(ProrlError):
    """No backend has this id (`backend`)."""


class DuplicateBackend(ProrlError):
    """Another live backend is registered under this id (`backend`)."""


class UpdateInProgress(ProrlError):
    """An update to other weights (`weight_version`) was begun; end or cancel it first."""


class WeightsHeld(ProrlError):
    """Another trainer (`session`) announces the weights of this service, and lives."""


class ModelInUse(ProrlError):
    """The model cannot be removed while jobs use it (`model`, `jobs`: how many)."""


class UpdateNotBegun(ProrlError):
    """An update to these weights was never begun, or ended by its time limit (`weight_version`)."""


class NoBackend(ProrlError):
    """No inference backend became available within the wait that the job allows (`job_id`, `waited_s`).

    With `version_gone`, none has the version of an adapter to which the attempt is pinned; another attempt may begin.
    With `final`, no backend can ever take these weights; do not retry.
    """


class RequestTimeout(ProrlError):
    """No reply came within the time allowed (`timeout_s`); the request may or may not have been done."""


class NotAllowed(ProrlError):
    """A key is unlisted, revoked, or lacks the right to the request (`key`); or only one side has keys."""


class Closed(ProrlError):
    """The client, socket or session was closed."""


class InternalError(ProrlError):
    """A fault of the service itself; its log says more."""


# What a trainer can meet with its groups -----------------------------------------------------------------------------


class NotTrainable(ProrlError):
    """Groups that no trainer could learn from (`group_id`, `job_id`): see `rows.rows_of`."""


# What a data file can meet --------------------------------------------------------------------------------------------


class InvalidRecord(ProrlError):
    """A row of a data file has no known format, or is not what its format says (`line`, `field`)."""


# What a start can meet ----------------------------------------------------------------------------------------------


class ConfigError(ProrlError):
    """A topology file, flag or environment value is wrong (`key`)."""


class InvalidEndpoint(ProrlError):
    """An endpoint is malformed, not allowed here, or too long for ipc (`endpoint`)."""


class EndpointInUse(ProrlError):
    """Another process already serves this endpoint (`endpoint`)."""


# What a phase can meet ----------------------------------------------------------------------------------------------


class PhaseTimeout(ProrlError):
    """A phase took longer than its limit, queue time excluded (`phase`, `limit_s`)."""


class Cancelled(ProrlError):
    """The job was cancelled on request."""


class HandlerFailed(ProrlError):
    """The task's own code raised (`exception`: the class's name)."""


class GraderFailed(ProrlError):
    """The grader returned no reward, which says nothing about the answer (`reason`, `output`).

    `reason` is `hung` (it took longer than its limit), `crashed` (its process ended), `raised`, or `result` (what it
    returned is not a reward); `output` is the end of what it printed.
    """


class JudgeUnreachable(ProrlError):
    """The judge model did not answer, or was busy or broken, for too long (`url`)."""


class LeaseLost(ProrlError):
    """The stage process that ran the job is lost (`stage_id`); `attempts` is how many were made.

    `cause` is `died` (its connection ended), `silent` (it hangs, or its link is cut), `left` (it shut down), or
    `unreported` (it lives but does not have the job: the start never arrived).
    """


class NoStage(ProrlError):
    """No live stage process could take the job within the time allowed (`role`, `waited_s`).

    `node` is where its sandbox is; None: any would have done.
    """


class EngineFailed(ProrlError):
    """An inference engine answered with an error, something malformed, or not at all (`backend`)."""


class InvalidWeights(ProrlError):
    """New weights were refused before the engine took them: missing, unreadable, or of another shape (`path`)."""


class SandboxFailed(ProrlError):
    """A sandbox could not be made, reached or closed."""


class SandboxUnavailable(ProrlError):
    """This machine cannot make the kind of sandbox that was asked for (`kind`)."""


class SandboxLimitExceeded(ProrlError):
    """The agent's programs exceeded a limit of their sandbox (`limit`), so it was ended."""


class SandboxBroken(ProrlError):
    """The agent left a sandbox in which nothing can be run any more; a fresh one of its kind works."""


class InvalidToolCall(ProrlError):
    """A tool session was sent something that it cannot take, such as a command with a NUL; nothing was done."""


class SlurmFailed(ProrlError):
    """A Slurm command failed; the message has its output."""


class HarnessFailed(ProrlError):
    """An agent program ended without a call of the model that was answered. Fields: `harness`, `exit_code`."""


class EnvironmentFailed(ProrlError):
    """An environment could not be played, which says nothing about the policy (`environment`, `reason`).

    `reason` is `missing` (it is not installed here), `raised` (or it returned what is not allowed), `hung` or `died`
    (its worker), `cancelled` (the worker was closed), or `masked` (it asks for another try itself).
    """


class EndpointFailed(ProrlError):
    """A program outside cannot lead its rollout: the address is out of reach, or refuses what was asked (`status`)."""


class ToolSessionLost(ProrlError):
    """A tool session (a live bash) ended and could not be restarted."""


BY_CODE: dict[str, type[ProrlError]] = {cls.code: cls for cls in ProrlError.__subclasses__()}


def from_info(info: ErrorInfo) -> ProrlError:
    """Return the error that `info` describes; a code from a newer version becomes a plain `ProrlError`."""
    return BY_CODE.get(info.code, ProrlError)(info.message, **info.fields)
