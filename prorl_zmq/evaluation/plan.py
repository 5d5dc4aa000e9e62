"""`Plan`: what is evaluated and how, and the jobs that follow from it.

A run folder continues only with its own plan, or with more samples or problems, since results of two models or of two
versions of a file cannot be combined. Settings that change no result (slots, reported k, prices) are not part of it.
Job ids follow from the plan, so a service that still has some of the jobs does not run them twice.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from ..wire.messages.base import new_id
from ..wire.messages.jobs import Job  # noqa: TC001 - msgspec reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .problems import Problem

FORMAT = 1
"""The run folder's format; raised with every incompatible change."""
RUN_ID_DIGITS = 12
NAME_DIGITS = 40
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._]+")
_JOB_ID = re.compile(r"(?P<run>[0-9a-f]+)-(?P<problem>[0-9]{1,9})-(?P<sample>[0-9]{1,9})\.(?P<trial>[0-9]{1,9})\Z")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that results depend on. None: the data file or the default decides."""

    data_sha256: str
    row_format: str = ""
    task: str = ""
    options: dict[str, Any] = {}
    """Fields of all instances."""
    task_modules: tuple[str, ...] = ()
    """The user's task files, each as its name and the beginning of its checksum."""
    limit: int = 0
    samples: int = 1
    seed: int = 0
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_turns: int | None = None
    context: int | None = None
    template_arguments: dict[str, Any] = {}
    """For all jobs, in addition to those of the data file."""
    engine: str = ""
    """Empty: the service that `connect` names."""
    model: str = ""
    model_sha256: str = ""
    """The checksum of a model that is one file."""
    urls: tuple[str, ...] = ()
    api: str = ""
    tokenizer: str = ""
    tool_calls: str = ""
    arguments: tuple[str, ...] = ()
    engine_options: dict[str, Any] = {}
    """Of an engine kind of another package."""
    connect: str = ""
    sandbox: str = ""
    image: str = ""
    harness: str = ""
    """NAME or NAME==VERSION of the agent program that leads the rollouts; empty: each job's own."""
    model_name: str = ""
    """The service's model that takes the rollouts' turns; empty: each job's own."""
    models: dict[str, str] = {}
    """For all jobs, in addition to those of the data file (`Job.models`)."""


OPTIONS = {
    "data_sha256": "the data file's checksum",
    "model_sha256": "the model file's checksum",
    "options": "--set",
    "urls": "--url",
    "task_modules": "--task-module",
    "arguments": "the flags behind --",
    "engine_options": "--option",
    "template_arguments": "--template-argument",
    "connect": "the service (--connect, --config)",
}
"""The names of fields in errors, if they differ from their options."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan of a run folder: `plan.json`."""

    settings: Settings
    file: str
    """The data file's path as given; only its checksum is compared."""
    problems: int
    format: int = FORMAT
    run_id: str = msgspec.field(default_factory=lambda: new_id()[:RUN_ID_DIGITS])
    """The prefix of its jobs' ids."""
    version: str = ""
    created: str = ""

    @property
    def session(self) -> str:
        """The session of its jobs, and the run's name in trackers; it contains the data file's name."""
        data = _UNNAMEABLE.sub("-", PurePath(self.file).stem)[:NAME_DIGITS].strip("-")
        return "-".join(part for part in ("eval", data, self.run_id) if part)

    @property
    def rollouts(self) -> int:
        return self.problems * self.settings.samples


class RolloutIndex(msgspec.Struct, frozen=True, order=True):
    problem: int
    """Its index among the problems, from 0."""
    sample: int
    """From 0."""
    trial: int = 0
    """How many infrastructure errors came before it."""


def option_of(name: str) -> str:
    """Return the name of a field of `Settings` in errors and reports."""
    return OPTIONS.get(name, f"--{name.replace('_', '-')}")


def differing_settings(first: Settings, second: Settings) -> list[tuple[str, str, str]]:
    """Return each setting that differs: its option, and both values in words."""
    return [
        (option_of(name), _shown(one), _shown(other))
        for name in Settings.__struct_fields__
        if (one := getattr(first, name)) != (other := getattr(second, name))
    ]


def differences(before: Plan, now: Plan) -> list[str]:
    """Return the reasons why a plan cannot continue an earlier one; none if it is the same or has more."""
    may_grow = {
        option_of("samples"): now.settings.samples > before.settings.samples,
        option_of("limit"): now.problems >= before.problems,
    }
    lines = [
        f"{option} was {there} and is {here}"
        for option, there, here in differing_settings(before.settings, now.settings)
        if not may_grow.get(option)
    ]
    if now.problems < before.problems:
        lines.append(f"the problems were {before.problems} and are {now.problems}")
    return lines


def job_id(plan: Plan, index: RolloutIndex) -> str:
    return f"{plan.run_id}-{index.problem}-{index.sample}.{index.trial}"


def index_of(plan: Plan, name: str) -> RolloutIndex | None:
    """Return the rollout that a job's id names; None if the job is not of this plan."""
    match = _JOB_ID.match(name)
    if match is None or match["run"] != plan.run_id:
        return None
    index = RolloutIndex(int(match["problem"]), int(match["sample"]), int(match["trial"]))
    return index if index.problem < plan.problems and index.sample < plan.settings.samples else None


def jobs_of(plan: Plan, problems: Sequence[Problem], indices: Iterable[RolloutIndex]) -> list[Job]:
    return [_job(plan, problems[index.problem].job, index) for index in indices]


def _job(plan: Plan, template: Job, index: RolloutIndex) -> Job:
    settings = plan.settings
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "max_tokens": settings.max_tokens}
    episode = {"max_turns": settings.max_turns, "max_tokens": settings.context}
    return msgspec.structs.replace(
        template,
        job_id=job_id(plan, index),
        group_id=f"{plan.run_id}-{index.problem}",
        sampling=msgspec.structs.replace(
            template.sampling, **_given(sampling), seed=sample_seed(settings.seed, index.problem, index.sample)
        ),
        episode=msgspec.structs.replace(template.episode, **_given(episode)),
        template_arguments={**template.template_arguments, **settings.template_arguments},
        harness=settings.harness or template.harness,
    )


def sample_seed(seed: int, problem: int, sample: int) -> int:
    """Return the random seed of a sample, 0 to 2**63 - 1; the seeds of two samples are independent."""
    digest = hashlib.sha256(f"{seed} {problem} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _given(options: Mapping[str, float | int | None]) -> dict[str, float | int]:
    return {name: value for name, value in options.items() if value is not None}


def _shown(value: object) -> str:
    if value in (None, "", (), {}):
        return "not given"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text
