"""`AgentHandler`: what a task is. One class per task, found by name through the entry points `prorl_zmq.handlers`.

A handler keeps no state between phases: INIT, RUN and EVAL run in different processes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from inspect import formatannotation, iscoroutinefunction, unwrap
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from ..errors import (
    ConfigError,
    EngineFailed,
    EnvironmentFailed,
    ErrorInfo,
    GraderFailed,
    HandlerFailed,
    HarnessFailed,
    InternalError,
    InvalidJob,
    JudgeUnreachable,
    MalformedMessage,
    NoBackend,
    PhaseTimeout,
    ProrlError,
    SandboxBroken,
    SandboxFailed,
    SandboxLimitExceeded,
    SandboxUnavailable,
    ToolSessionLost,
)
from ..system.plugins import load_plugin, offered
from ..wire import codec
from ..wire.messages.jobs import Harness, Outcome, Phase
from ..wire.messages.stages import Task
from .chat_endpoint import endpoints
from .harness.adapter import known_harnesses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from ..data.scores import Scores
    from ..inference.chat import ChatMessage
    from ..tasks.row_format import RowFormat
    from ..tools.containers.specification import SandboxSpec
    from ..tools.sandbox.sandbox import Sandbox
    from ..tools.tool import AnyTool
    from ..wire.messages.jobs import Job, McpServer
    from .conversation import Conversation
    from .episode import Episode
    from .judge import Judge

log = logging.getLogger("prorl.stage")

ENTRY_POINT_GROUP = "prorl_zmq.handlers"
NAMED_TYPES = (str, int, float, bool, list[str], dict[str, str])
"""Field types that the front door checks by name."""

Instance = TypeVar("Instance", bound=msgspec.Struct)
PhaseData = dict[str, Any]
"""The data that one phase returns for the next: plain data with string keys."""


def _no_conversation(*_: object, **__: object) -> Conversation:
    raise HandlerFailed("this RUN holds no conversations turn by turn")


async def _no_program(_: object) -> PhaseData:
    raise HandlerFailed("this RUN serves no model to programs")


async def _no_reply(_: object) -> None:
    raise HandlerFailed("this RUN replies to no single requests")


async def _no_scores(*_: object) -> Scores:
    raise HandlerFailed("this RUN scores no texts")


async def _no_sandbox(_: SandboxSpec) -> Sandbox:
    raise HandlerFailed("this RUN has no fresh sandboxes")


@dataclass(frozen=True, slots=True)
class InitPhase(Generic[Instance]):
    """The input of INIT."""

    job: Job
    instance: Instance
    create_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]]
    """Makes the job's sandbox; the service closes it when the job no longer needs it."""


@dataclass(frozen=True, slots=True)
class RunPhase(Generic[Instance]):
    """The input of RUN."""

    job: Job
    instance: Instance
    data: PhaseData
    """The data that INIT returned."""
    sandbox: Sandbox | None
    """The sandbox that INIT made."""
    converse: Callable[[Sequence[ChatMessage], Sequence[AnyTool]], Awaitable[Episode]]
    """Holds one conversation from the opening messages until a turn without a tool call, and returns the episode: a
    `conversation` and one `say`. The chat template describes the tools to the model. A harness that leads the rollout
    gets the user's messages as its task, and has tools of its own."""
    conversation: Callable[..., Conversation] = _no_conversation
    """`conversation(opening, tools=(), *, name="main", model="policy", trained=None)` begins a conversation that the
    task leads turn by turn (see `Conversation`); several may run at once, under names of their own. `model` is a name
    that the job maps (`Job.models`), or a model of the service. By default conversations with the job's own model are
    trained on; `trained=True` trains another model of the service too, unless it is frozen. Others are context: their
    text is kept as a note, their tokens are not. Raises `HandlerFailed` if the name is taken, or if a harness or a
    program outside leads the rollout."""
    serve: Callable[
        [Callable[[str, str, Sequence[str]], Awaitable[tuple[PhaseData, Sequence[tuple[int, float]]]]]],
        Awaitable[PhaseData],
    ] = _no_program
    """`serve(play)` serves the job's model over HTTP while `play(url, key, models)` runs, in place of conversations.
    All calls at the address are turns of this rollout. `play` returns data, which `serve` returns, and rewards of the
    policy's turns: index from 0, reward."""
    create_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]] = _no_sandbox
    """Makes a fresh sandbox without any process of the agent, to judge a part of the rollout before its end; the
    service closes it when the phase ends."""
    reply: Callable[[Any], Awaitable[None]] = _no_reply
    """Has the model reply to a `SampleInstance`, in place of conversations; the reply is in the result's notes."""
    score: Callable[..., Awaitable[Scores]] = _no_scores
    """`score(model, token_ids, segments, top, chat)` scores a text in place of conversations, and records its scores in
    the trajectory's arrays (`data.scores`). See `JobBackend.score`, whose errors it raises."""


@dataclass(frozen=True, slots=True)
class EvalPhase(Generic[Instance]):
    """The input of EVAL."""

    job: Job
    instance: Instance
    data: PhaseData
    """The data that RUN returned."""
    sandbox: Sandbox | None
    """The job's sandbox as RUN left it, if `eval_in_sandbox`."""
    create_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]]
    """Makes a fresh sandbox without any process of the agent; the service closes it when the phase ends."""
    grade: Callable[..., Awaitable[Any]]
    """Calls a function in a grader process, isolated from hangs and crashes (see `GraderPool.call`)."""
    judge: Judge
    """Asks a judge model (see `Judge`). A failed judge is an infrastructure error, never a reward."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of EVAL."""

    reward: float
    """Any finite number. Batches decide by this one which groups they keep."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Added to the trajectory's metrics."""
    notes: dict[str, str] = field(default_factory=dict)
    """Notes for people, in the trajectory's `result.notes`; a note over `NOTE_LIMIT` characters loses its middle."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of single conversations, by their names; the others have `reward`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The outcome of a job that could not be completed."""

    outcome: Outcome
    error: ErrorInfo
    retry: bool = False
    """Retry from a fresh sandbox while attempts are left, because this attempt does not reflect on the agent."""
    reward: float | None = None
    """The reward if the agent itself is the cause. None: no reward, and in a batch another job replaces this one. It
    counts only once the agent has acted: in RUN from its first turn, and in EVAL."""


INFRASTRUCTURE_ERRORS: dict[type[ProrlError], bool] = {
    EngineFailed: True,
    SandboxFailed: True,
    ToolSessionLost: True,
    HarnessFailed: True,
    EnvironmentFailed: True,
    InternalError: True,
    JudgeUnreachable: True,
    GraderFailed: False,
    NoBackend: False,
    SandboxUnavailable: False,
}
"""The errors of the infrastructure around the agent and the task, and whether a retry may help."""
AGENTS_OWN = (SandboxLimitExceeded, SandboxBroken)
"""Errors that the agent itself causes. They earn 0.0, so that failing on purpose never avoids a penalty."""
TASKS_OWN_REASONS = frozenset({"image", "path", "specification"})
"""The reasons of a `SandboxFailed` that a retry cannot fix: the task names something that does not exist."""


class AgentHandler(ABC, Generic[Instance]):
    """A task: prepares the sandbox, runs the agent, judges the result. Made without arguments, once per process."""

    task: ClassVar[str]
    """The task's name, as in jobs and in the entry point."""
    instance_type: type[Instance]
    """The Struct that a job's `instance` must fit; unknown fields are rejected."""
    row_formats: ClassVar[tuple[RowFormat, ...]] = ()
    """The published data sets whose rows convert to instances of the task. Rows that are instances need no format."""
    grades: ClassVar[bool] = True
    """False: EVAL cannot judge, and a program outside reports the reward."""
    eval_in_sandbox: ClassVar[bool] = False
    """Keep the sandbox after RUN, and run EVAL on its node."""
    model_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of an instance that name models (see `Task.model_fields`): the front door refuses unknown ones."""
    file_tasks: Mapping[str, AgentHandler[Any]] = MappingProxyType({})
    """The tasks of Python files (`--task-module`) in this process, for a task that uses another one."""

    def harness(self, job: Job, instance: Instance) -> Harness | None:
        """Return the harness that leads the rollout; None: the service's own agent loop, in `RunPhase.converse`."""
        del instance
        return Harness.of(job.harness) if job.harness is not None else None

    def mcp_servers(self, job: Job, instance: Instance) -> Sequence[McpServer]:
        """Return the MCP servers whose tools the policy gets: those that the job names, unless the task adds some."""
        del instance
        return job.mcp

    def ends_processes(self, instance: Instance) -> bool:
        """Return whether RUN ends the agent's processes; False: EVAL, in the sandbox, judges these too."""
        del instance
        return True

    def lacks(self, job: Job, instance: Instance) -> str:
        """Describe what the instance needs, and neither the job nor this process's environment has; empty: nothing."""
        del job, instance
        return ""

    async def init(self, phase: InitPhase[Instance]) -> PhaseData:
        """Make the sandbox and place files, if the task needs any. Return the data for RUN."""
        del phase
        return {}

    @abstractmethod
    async def run(self, phase: RunPhase[Instance]) -> PhaseData:
        """Run the agent. Return the data for EVAL."""

    @abstractmethod
    async def eval(self, phase: EvalPhase[Instance]) -> Evaluation:
        """Judge the result. Called again for the same result if the process was lost."""

    def stored_data(self, instance: Instance, notes: Mapping[str, str]) -> PhaseData | None:
        """Return EVAL's data from the notes of a stored result, for `prorl regrade`; None: the notes lack it."""
        del instance, notes
        return None

    def init_exception(self, job: Job, error: Exception) -> Failure:
        """Return the outcome of a job whose INIT raised."""
        del job
        return failure_of(error)

    def run_exception(self, job: Job, error: Exception) -> Failure:
        """Return the outcome of a job whose RUN raised."""
        del job
        return failure_of(error)

    def eval_exception(self, job: Job, error: Exception) -> Failure:
        """Return the outcome of a job whose EVAL raised."""
        del job
        return failure_of(error)

    def final_result(self, job: Job, evaluation: Evaluation) -> Evaluation:
        """Return the reward and metrics for the trainer, with shaping and penalties."""
        del job
        return evaluation

    async def close(self) -> None:
        """Free the handler's resources in this process, within a few seconds."""

    def describe(self) -> Task:
        """Return the task with its instance fields and its harnesses, for the check at the front door."""
        hints = get_type_hints(self.instance_type)
        fields = msgspec.structs.fields(self.instance_type)
        return Task(
            self.task,
            fields={one.encode_name: _type_name(hints[one.name]) for one in fields},
            optional=tuple(one.encode_name for one in fields if not one.required),
            harnesses=tuple(known_harnesses()),
            models=endpoints(),
            model_fields=self.model_fields,
        )

    def parse_instance(self, job: Job) -> Instance:
        """Check a job's instance.

        Raises:
            InvalidJob: a field is missing, unknown or of the wrong type.
        """
        try:
            return codec.convert(job.instance, self.instance_type)
        except MalformedMessage as error:
            raise InvalidJob(f"the instance is wrong: {error.message}", job_id=job.job_id, field=error.field) from error


def failure_of(error: Exception) -> Failure:
    """Return the default outcome: `infrastructure_error` if neither the agent nor the task is the cause, else `failed`.

    Failures that the agent itself causes (`AGENTS_OWN`) have the reward 0.0.
    """
    if isinstance(error, PhaseTimeout):
        return Failure(Outcome.TIMEOUT, error.info())
    if isinstance(error, AGENTS_OWN):
        return Failure(Outcome.FAILED, error.info(), reward=0.0)
    if isinstance(error, SandboxFailed) and error.fields.get("reason") in TASKS_OWN_REASONS:
        return Failure(Outcome.FAILED, error.info())
    if isinstance(error, ProrlError):
        retry = INFRASTRUCTURE_ERRORS.get(type(error))
        outcome = Outcome.FAILED if retry is None else Outcome.INFRASTRUCTURE_ERROR
        retry = retry or (isinstance(error, NoBackend) and bool(error.fields.get("version_gone")))
        return Failure(outcome, error.info(), retry=bool(retry))
    name = type(error).__name__
    return Failure(Outcome.FAILED, HandlerFailed(f"{name}: {error}", exception=name).info())


def load_handlers(names: Iterable[str] = (), warn: Callable[[str], None] = log.warning) -> dict[str, AgentHandler[Any]]:
    """Make the handlers that installed packages offer, by task; only `names`, if any are given.

    A broken handler outside `names` is skipped with a warning.

    Raises:
        ConfigError: a name has no handler, or its handler does not work.
    """
    known = offered(ENTRY_POINT_GROUP)
    wanted = set(names)
    if missing := wanted - set(known):
        named = ", ".join(sorted(missing))
        raise ConfigError(f"no installed package offers task {named}; offered: {', '.join(known)}", key="task")
    handlers: dict[str, AgentHandler[Any]] = {}
    for name in sorted(wanted or known):
        try:
            handlers[name] = _handler(name)
        except ConfigError as error:
            if wanted:
                raise
            warn(f"{error.message}; the task {name} is left out")
    return handlers


def _handler(task: str) -> AgentHandler[Any]:
    base = f"{AgentHandler.__module__}:{AgentHandler.__qualname__}"
    return make_handler(task, load_plugin(ENTRY_POINT_GROUP, task, "task", key="task", base=base))


def make_handler(task: str, given: AgentHandler[Any] | type[AgentHandler[Any]]) -> AgentHandler[Any]:
    """Return the handler of a task from its class, or check a handler that exists already.

    Raises:
        ConfigError: it is not an `AgentHandler`, a phase is not a coroutine, the class raises, its instances cannot be
            described, it belongs to another task, or the task or its fields have names that no message can carry.
    """
    kind = given if isinstance(given, type) else type(given)
    what = f"the handler of task {task} ({kind.__module__}:{kind.__qualname__})"
    if not issubclass(kind, AgentHandler):
        raise ConfigError(f"{what} is not a subclass of {AgentHandler.__module__}:AgentHandler", key="task")
    struct = getattr(kind, "instance_type", None)
    if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
        raise ConfigError(f"{what}: instance_type must be a msgspec.Struct class, and not {struct!r}", key="task")
    for phase in (Phase.INIT, Phase.RUN, Phase.EVAL):
        if not iscoroutinefunction(unwrap(getattr(kind, phase))):
            raise ConfigError(f"{what}: {phase} must be a coroutine; write `async def {phase}`", key="task")
    try:
        handler: AgentHandler[Any] = kind() if isinstance(given, type) else given
        described = handler.describe()
    except Exception as error:
        raise ConfigError(f"{what} does not work: {type(error).__name__}: {error}", key="task") from error
    if described.name != task:
        raise ConfigError(f"the handler of task {task} has task = {described.name!r}; write {task!r}", key="task")
    try:
        codec.convert(msgspec.to_builtins(described), Task)
    except MalformedMessage as error:  # otherwise the broker would drop each report of its stage processes
        raise ConfigError(f"{what} cannot be used: {error.message}", key="task") from error
    return handler


def _type_name(hint: Any) -> str:
    if get_origin(hint) is tuple and get_origin(get_args(hint)[0]) is Literal:
        hint = list[str]
    return formatannotation(hint) if hint in NAMED_TYPES else "any"
