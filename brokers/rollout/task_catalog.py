"""`TaskCatalog`: the tasks and models that a service has, and the check of a job against them. Pure.

Known models are those of the topology, the endpoints that stage processes announce, and the backend broker's list. A
job with another name is answered `busy` until the broker's list is a new one (`wants_models`, `list_models`). A listed
name is accepted from an old list too, which is then renewed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import Busy, InvalidJob, UnknownTask
from ...wire.messages.base import POLICY, endpoint_variables
from ...wire.messages.jobs import Harness, NamedModel, Phase
from ...wire.records import TEACHER, TOP_LOGPROBS, Recorded, teacher_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ...wire.messages.backends import LackedRecord
    from ...wire.messages.jobs import Job
    from ...wire.messages.stages import Task

FIELD_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "list[str]": list[str],
    "dict[str, str]": dict[str, str],
    "any": Any,
}
"""Types that a task may declare for its instances' fields."""


KNOWN_LIMIT = 4096
"""Most known tasks; the one announced longest ago is evicted."""
NEW_TICKS = 3
"""Ticks for which the backend broker's list of models counts as new."""
REMOVED_TICKS = 10
"""Ticks for which a removed model is refused although the backend broker still lists it."""


class TaskCatalog:
    """The known tasks; a task stays known when its processes leave, since they may restart.

    Args:
        models: the names of `[[backends]]` in the topology.
        roles: those of its stage processes.
    """

    def __init__(self, models: Iterable[str] = (), roles: Iterable[Phase] = ()) -> None:
        self._scores = Phase.SCORE in roles
        """Whether the topology has, or has had, stage processes for teachers."""
        self._tasks: dict[str, Task] = {}
        """In order of the last announcement."""
        self._instances: dict[str, type[msgspec.Struct]] = {}
        """Types of instances, created with a task's first job."""
        self._harnesses: set[str] = set()
        """Union over all stage processes: nodes may have different ones."""
        self._models = {*models} or {POLICY}
        """Those of the topology; if that has none, engines are expected to register for the policy."""
        self._endpoints: dict[str, str] = {}
        """The models that stage processes reach by endpoints, by their variables (`endpoint_variables`)."""
        self._listed: frozenset[str] = frozenset()
        """The backend broker's."""
        self._removed: dict[str, int] = {}
        """The ticks left for the removal of each model that is being removed."""
        self._lacking: dict[tuple[str, str], LackedRecord] | None = None
        """The records that not all of a model's backends give; None: not known yet."""
        self._ticks_left = 0
        """How long its list counts as new."""
        self.wants_models = False
        """Whether a job waits for the backend broker's list."""

    def add(self, tasks: Iterable[Task], role: Phase = Phase.RUN) -> None:
        self._scores |= role == Phase.SCORE
        for task in tasks:
            if self._tasks.pop(task.name, None) != task:
                self._instances.pop(task.name, None)
            self._tasks[task.name] = task
            if len(self._harnesses) < KNOWN_LIMIT:
                self._harnesses.update(task.harnesses)
            if task.models and len(self._endpoints) < KNOWN_LIMIT:
                self._endpoints |= {endpoint_variables(model): model for model in task.models}
        while len(self._tasks) > KNOWN_LIMIT:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            self._instances.pop(oldest, None)

    def list_models(self, models: Sequence[str], lacking: Sequence[LackedRecord] = ()) -> None:
        """Store the backend broker's list of models, and of the records that their backends do not give."""
        self._listed, self._ticks_left = frozenset(models) - self._removed.keys(), NEW_TICKS
        self._lacking = {(one.model, one.record): one for one in lacking}

    def note_model(self, model: str) -> None:
        """Request a new list if a model that has weights is unknown, and end its removal."""
        self._removed.pop(model, None)
        if model not in self._models and model not in self._listed:
            self._ticks_left = 0

    def keep_model(self, model: str) -> bool:
        """As `note_model`, for a model whose removal was refused; return whether a removal was pending."""
        is_pending = model in self._removed
        self.note_model(model)
        return is_pending

    def remove_model(self, model: str) -> None:
        """Refuse jobs of a model that is being removed, until it is published again or `REMOVED_TICKS` have passed."""
        self._listed -= {model}
        self._removed[model] = REMOVED_TICKS

    def tick(self) -> None:
        """Let the backend broker's list grow old."""
        self._ticks_left = max(0, self._ticks_left - 1)
        self._removed = {model: left - 1 for model, left in self._removed.items() if left > 1}

    def names(self, job: Job, model: str) -> bool:
        """Return whether a job or its instance names a model."""
        if model == job.model or model in _named(job).values():
            return True
        fields = self._tasks[job.task].model_fields if job.task in self._tasks else ()
        return any(model == found for path in fields for _, found in _values(job.instance, path.split(".")))

    def check(self, job: Job) -> None:
        """Check a job before it is accepted.

        Raises:
            Busy: no stage process has announced any task yet, or the backend broker's list of models is needed.
            UnknownTask: no stage process has announced this task.
            InvalidJob: a field of the instance is missing, unknown or of a wrong type, the harness or a
                model is unknown, or backends do not give a record or cannot score; `field` names it.
        """
        if not self._tasks:
            raise Busy("no stage process has reported yet; the service is starting", retry_after_s=0.2)
        if job.task not in self._tasks:
            served = ", ".join(sorted(self._tasks))
            message = f"no stage process serves task {job.task!r}; served: {served}"
            raise UnknownTask(message, task=job.task, job_id=job.job_id)
        self._check_harness(job)
        named = _named(job) if job.models else {}
        if fields := self._tasks[job.task].model_fields:
            found = (each for path in fields for each in _values(job.instance, path.split(".")))
            named |= {path: model for path, model in found if model != POLICY and model not in job.models}
        if named or job.model not in self._models:
            self._check_models(job, named)
        if job.record:
            self._check_records(job)
        if job.teacher:
            self._check_teacher(job)
        if job.task not in self._instances:
            self._instances[job.task] = _instance_type(self._tasks[job.task])
        try:
            msgspec.convert(job.instance, self._instances[job.task])
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            field = where.rstrip("`") or what.partition("field `")[2].rstrip("`")
            if "unknown field" in what:
                what += f"; its fields are {', '.join(self._tasks[job.task].fields) or 'none'}"
            raise InvalidJob(
                f"job {job.job_id}: the instance of task {job.task} is wrong: {what}"
                + (f" in {field}" if where else ""),
                job_id=job.job_id,
                field=field,
            ) from error

    def _check_harness(self, job: Job) -> None:
        name = Harness.of(job.harness).name if job.harness is not None else ""
        if name and self._harnesses and name not in self._harnesses:
            raise InvalidJob(
                f"job {job.job_id}: there is no harness {name!r}; the service has {', '.join(sorted(self._harnesses))}",
                job_id=job.job_id,
                field="harness",
            )

    def _check_models(self, job: Job, named: Mapping[str, str]) -> None:
        self._check_backends(job, job.model, "model")
        for field, name in named.items():
            variables = endpoint_variables(name)
            if variables not in self._endpoints and not self._has_backends(name):
                there_are = ", ".join(sorted({*self._models, *self._endpoints.values(), *self._listed}))
                raise InvalidJob(
                    f"job {job.job_id}: no backend and no endpoint serves the model {name!r} ({field}); the "
                    f"service has {there_are}; an endpoint of that name needs {variables}_URL and {variables}_MODEL in "
                    "the environment of the RUN stage processes",
                    job_id=job.job_id,
                    field=field,
                )

    def _check_teacher(self, job: Job) -> None:
        model, _ = teacher_of(job.teacher)
        self._check_backends(job, model, "teacher")
        if not self._scores:
            raise InvalidJob(
                f"job {job.job_id}: no stage process is for teachers; list init, run, eval and score as [[stage]] "
                'tables, which replace the default stages; that of teachers has role = "score" and slots = 64',
                job_id=job.job_id,
                field="teacher",
            )
        lacked = self._lacked(model, (TEACHER,))
        if lacked:
            one = lacked[0]
            raise InvalidJob(
                f"job {job.job_id}: the teacher {model!r} cannot score texts: backend {one.backend_id} ({one.engine})"
                + (f": {one.reason}" if one.reason else ""),
                job_id=job.job_id,
                field="teacher",
            )

    def _check_backends(self, job: Job, model: str, field: str) -> None:
        if not self._has_backends(model):
            raise InvalidJob(
                f"job {job.job_id}: no backend serves the model {model!r} ({field}); the service has "
                f"{', '.join(sorted({*self._models, *self._listed}))}",
                job_id=job.job_id,
                field=field,
            )

    def _has_backends(self, model: str) -> bool:
        if model in self._models:
            return True
        if not self._ticks_left:
            self.wants_models = True
            if model not in self._listed:
                raise Busy("the service is listing its models", retry_after_s=0.2)
        return model in self._listed

    def _check_records(self, job: Job) -> None:
        """Check a job's records; what jobs were accepted for is not listed anew, since RUN checks it as well."""
        try:
            asked = Recorded.parse(job.record)
        except ValueError as error:
            problem = str(error)
        else:
            problem = asked.conflict(job.sampling)
            if not problem:
                problem = "; ".join(map(_refusal, self._lacked(job.model, asked.names, asked.top)))
        if problem:
            raise InvalidJob(f"job {job.job_id}: {problem}", job_id=job.job_id, field="record")

    def _lacked(self, model: str, names: Sequence[str], top: int = 0) -> list[LackedRecord]:
        """Return the records that a model's backends do not give, by a new list of models if there are some."""
        lacking = self._lacking
        found = [lacking.get((model, name)) for name in names] if lacking else []
        lacked = [one for one in found if one and (one.record != TOP_LOGPROBS or one.top_limit < top)]
        if not self._ticks_left and (lacked or lacking is None):
            self.wants_models = True
            raise Busy("the service is listing what its engines record", retry_after_s=0.2)
        return lacked


def _named(job: Job) -> dict[str, str]:
    return {f"models.{role}": NamedModel.of(model).name for role, model in job.models.items()}


def _values(content: Any, path: Sequence[str], so_far: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts at a path in which `*` is any name, each behind its own path."""
    if not path:
        if isinstance(content, str):
            yield so_far, content
    elif isinstance(content, dict):
        for name in content if path[0] == "*" else content.keys() & {path[0]}:
            yield from _values(content[name], path[1:], f"{so_far}.{name}" if so_far else str(name))


def _refusal(lacked: LackedRecord) -> str:
    engine = f"backend {lacked.backend_id} ({lacked.engine}) as it was started"
    if lacked.top_limit:
        return f"{engine} gives at most {TOP_LOGPROBS}:{lacked.top_limit}"
    return f"{engine} does not give the record {lacked.record}" + (f": {lacked.reason}" if lacked.reason else "")


def _instance_type(task: Task) -> type[msgspec.Struct]:
    names = {f"field_{index}": name for index, name in enumerate(task.fields)}  # a name need not be a Python identifier
    fields = [
        (attribute, FIELD_TYPES.get(task.fields[name], Any), *((None,) if name in task.optional else ()))
        for attribute, name in names.items()
    ]
    return msgspec.defstruct(f"Instance_{task.name}", fields, kw_only=True, forbid_unknown_fields=True, rename=names)
