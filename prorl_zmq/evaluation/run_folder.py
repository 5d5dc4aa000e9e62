"""`RunFolder`: the folder of an evaluation, with its plan and all results, from which the same command continues.

    plan.json                what is evaluated (see `plan`)
    results.jsonl            one `Sample` per ended rollout, in the order in which they ended
    traces.jsonl             traces of the jobs (see `client.trace_log`), for `prorl explain`
    trajectories/JOB.npz     its arrays (see `TokenArrays`); JOB.json its `Transcript`
    summary.json, report.md, report.html
    service/                 topology and logs of the evaluation's own service
    trackers/                files of `--log`
    earlier/RUN/             what `--fresh` moved away

A rollout's line is written after its other files, so a rollout with a line is complete. A last line torn by a kill is
cut off when the folder is opened, and its rollout is run again. One process at a time holds the lock on `lock`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import sys
from itertools import chain, count, product
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
import numpy as np

from ..client.trace_log import TRACES
from ..errors import ConfigError
from ..trackers.adapter import TRACKERS
from ..wire.messages.jobs import Outcome, Phase, Result
from .plan import FORMAT, Plan, RolloutIndex, differences, index_of
from .service import sweep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from ..data.trajectory import Trajectory
    from .problems import Problem
    from .transcript import Transcript

PLAN, RESULTS, TRAJECTORIES = "plan.json", "results.jsonl", "trajectories"
SERVICE, LOCK, EARLIER = "service", "lock", "earlier"
SUMMARY, REPORT_MD, REPORT_HTML, CHARTS = "summary.json", "report.md", "report.html", "charts"
WRITTEN = (RESULTS, TRACES, TRAJECTORIES, SUMMARY, REPORT_MD, REPORT_HTML, CHARTS, SERVICE, TRACKERS)
"""What `--fresh` moves away, with the plan."""
ARRAYS = ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns")
NO_OUTCOMES = frozenset({Outcome.INFRASTRUCTURE_ERROR, Outcome.CANCELLED})
TASKS_FAULTS = frozenset({"handler_failed", "invalid_job", "sandbox_failed", "unknown_task"})
"""Errors of `failed` rollouts caused by the task's code, instance or image, not by the model."""
Line = TypeVar("Line")
FILE_BYTES = 2**28
ROUNDING = 1e-9
"""Tolerance below the threshold: a sum of fractions may be a little less than 1."""


def says_nothing(result: Result) -> bool:
    """Return whether a result says nothing about the model; such a rollout is repeated when the run continues."""
    error = result.error
    faulty = result.outcome == Outcome.FAILED and error is not None and error.code in TASKS_FAULTS
    unbegun = result.outcome == Outcome.TIMEOUT and error is not None and error.fields.get("phase") == Phase.INIT
    return faulty or unbegun or result.outcome in NO_OUTCOMES


def is_solved(result: Result, threshold: float = 1.0) -> bool:
    """Return whether a rollout solved its problem: it completed with at least this reward."""
    return result.outcome == Outcome.COMPLETED and result.reward is not None and result.reward >= threshold - ROUNDING


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of one rollout: a line of `results.jsonl`."""

    problem: str
    """The problem's name; of a job of `prorl submit`, its group. Text of the data file: clean it before it is shown."""
    line: int
    row_format: str
    index: RolloutIndex
    result: Result
    model: str = ""
    """The model that the engine reported; empty: no engine was asked."""
    versions: tuple[int, ...] = ()
    """The weight versions that generated its tokens."""

    @property
    def job_id(self) -> str:
        return self.result.job_id

    @classmethod
    def of_job(cls, result: Result) -> Self:
        """Return the sample of a job that is not part of an evaluation."""
        return cls(problem=result.group_id, line=0, row_format="", index=RolloutIndex(0, 0), result=result)

    @property
    def name(self) -> str:
        """Which of the problem's samples it is, from 0, and behind a dot how often it was run before."""
        return f"{self.index.sample}.{self.index.trial}" if self.index.trial else str(self.index.sample)

    @property
    def solved(self) -> bool:
        return is_solved(self.result)


class RunFolder:
    """The folder of one evaluation; `with` holds its lock."""

    def __init__(self, path: Path, plan: Plan, *, fresh: bool = False) -> None:
        self.path = path
        self.plan = plan
        self.earlier: Path | None = None
        """Where an earlier evaluation was moved."""
        self._fresh = fresh
        self._latest: dict[tuple[int, int], Sample] = {}
        """The newest result of each rollout, by problem and sample."""
        self._job_ids: set[str] = set()
        self._lock: int | None = None
        self._results: int | None = None

    @property
    def samples(self) -> list[Sample]:
        return [self._latest[key] for key in sorted(self._latest)]

    def missing(self) -> list[RolloutIndex]:
        """Return the rollouts to run: those without a result, and those that an infrastructure error ended.

        The first samples of all problems come first, so an evaluation that is stopped early has seen all problems.
        """
        missing = []
        for sample, problem in product(range(self.plan.settings.samples), range(self.plan.problems)):
            found = self._latest.get((problem, sample))
            if found is None:
                missing.append(RolloutIndex(problem, sample))
            elif says_nothing(found.result):
                missing.append(RolloutIndex(problem, sample, found.index.trial + 1))
        return missing

    def has(self, job_id: str) -> bool:
        return job_id in self._job_ids

    def add(self, sample: Sample, trajectory: Trajectory, transcript: Transcript) -> None:
        folder = self.path / TRAJECTORIES
        with self._writing():
            np.savez(folder / f"{sample.job_id}.npz", **{name: getattr(trajectory, name) for name in ARRAYS})
            (folder / f"{sample.job_id}.json").write_bytes(msgspec.json.encode(transcript))
            self._append(sample)

    def add_copy(self, sample: Sample, source: Path) -> None:
        """Add a result with its trajectory from another run folder, if there is one."""
        with self._writing():
            for name in (f"{sample.job_id}.npz", f"{sample.job_id}.json"):
                place = source / TRAJECTORIES / name
                if place.is_file() and not place.is_symlink():  # a link may lead to what is not part of a run
                    shutil.copyfile(place, self.path / TRAJECTORIES / name)
            self._append(sample)

    def _append(self, sample: Sample) -> None:
        """Write a whole line or nothing: a full disk may take a part of it."""
        assert self._results is not None, "the folder is not open"
        before = os.fstat(self._results).st_size
        view = memoryview(msgspec.json.encode(sample) + b"\n")
        try:
            while view:
                view = view[os.write(self._results, view) :]
        except OSError:
            os.ftruncate(self._results, before)
            raise
        self._note(sample)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}", key="out") from error

    def write(self, name: str, content: str) -> None:
        """Write a file of the folder atomically."""
        new = self.path / f"{name}.new"
        try:
            new.write_text(content, encoding="utf-8")
            new.replace(self.path / name)
        except OSError as error:
            raise ConfigError(f"{self.path / name}: {error.strerror}", key="out") from error

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_contents()
            self._take_lock()
            try:
                self._open()
            except BaseException:
                self.__exit__(None, None, None)
                raise
        except OSError as error:
            reason = "it is not a folder" if self.path.exists() and not self.path.is_dir() else error.strerror
            raise ConfigError(f"--out {self.path}: {reason}", key="out") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in (self._results, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._results = self._lock = None

    def _check_contents(self) -> None:
        names = {each.name for each in self.path.iterdir()}
        if PLAN not in names and names - {LOCK, EARLIER, f"{PLAN}.new"}:
            raise ConfigError(
                f"--out {self.path} has other things in it and is not an evaluation's folder; name a new one", key="out"
            )

    def _take_lock(self) -> None:
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__(None, None, None)
            raise ConfigError(f"another `prorl eval` is at work in {self.path}", key="out") from None

    def _open(self) -> None:
        file = self.path / PLAN
        if file.exists():
            if self._fresh:
                self._put_aside()
            else:
                self._continue(read_plan(self.path))
        if not file.exists():
            self._write_plan()
        for name in (TRAJECTORIES, CHARTS, SERVICE):
            (self.path / name).mkdir(exist_ok=True)
        repair(self.path / RESULTS)
        for sample in read_samples(self.path / RESULTS):
            self._note(sample)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._results = os.open(self.path / RESULTS, flags, 0o644)

    def _continue(self, before: Plan) -> None:
        """Continue the folder's plan; this one may only add to it."""
        differing = differences(before, self.plan)
        if differing and not ((self.path / RESULTS).exists() and (self.path / RESULTS).stat().st_size):
            self._write_plan()  # nothing has come of the other
            return
        if differing and all(says_nothing(each.result) for each in read_samples(self.path / RESULTS)):
            self._put_aside()  # such as those of a task's file that was mended since
            return
        if differing:
            raise ConfigError(
                f"{self.path} has results of another plan: {'; '.join(differing)}. Name another --out, or give --fresh "
                "to put them aside and start from nothing",
                key="out",
            )
        self.plan = msgspec.structs.replace(before, settings=self.plan.settings, problems=self.plan.problems)
        if self.plan != before:
            self._write_plan()

    def _write_plan(self) -> None:
        self.write(PLAN, msgspec.json.format(msgspec.json.encode(self.plan), indent=2).decode() + "\n")

    def _put_aside(self) -> None:
        """Move an earlier evaluation away; a plan that cannot be read is moved too."""
        try:
            name = read_plan(self.path).run_id
        except ConfigError:
            name = "unknown"
        folders = chain([self.path / EARLIER / name], (self.path / EARLIER / f"{name}-{n}" for n in count(2)))
        folder = next(each for each in folders if not each.exists())
        folder.mkdir(parents=True)
        sweep(self.path / SERVICE)  # of an evaluation that was killed
        for name in (*WRITTEN, PLAN):  # the plan last
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).rename(folder / name)
        self.earlier = folder

    def _note(self, sample: Sample) -> None:
        self._job_ids.add(sample.job_id)
        key = sample.index.problem, sample.index.sample
        before = self._latest.get(key)
        if before is None or before.index.trial < sample.index.trial:
            self._latest[key] = sample


def read_file(file: Path, limit_bytes: int = FILE_BYTES) -> bytes:
    """Read a regular file whole, without waiting; a folder from elsewhere may have devices, pipes and endless files.

    Raises:
        OSError: it is not a regular file, or larger than the limit.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else opening a pipe waits
    with os.fdopen(descriptor, "rb") as opened:
        state = os.fstat(opened.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if state.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {limit_bytes / 2**20:g} MiB")
        return opened.read(state.st_size)


def read_plan(folder: Path) -> Plan:
    file = folder / PLAN
    try:
        plan = msgspec.json.decode(read_file(file), type=Plan)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", key="out") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a plan of an evaluation: {error}", key="out") from error
    if plan.format != FORMAT:
        raise ConfigError(f"{file} is of format {plan.format}; this version of prorl reads {FORMAT}", key="out")
    return plan


def read_samples(file: Path) -> list[Sample]:
    """Read the results of a run folder; none if there is no file."""
    return read_lines(file, Sample) if file.exists() else []


def read_lines(file: Path, kind: type[Line]) -> list[Line]:
    """Read a file of one JSON value per line; a last line without its end is left out."""
    decoder = msgspec.json.Decoder(kind)
    values = []
    try:
        lines = read_file(file, sys.maxsize).split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", key="out") from error
    for number, line in enumerate(lines, start=1):
        try:
            values.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number}: {error}", key="out") from error
    return values


def repair(file: Path) -> int:
    """Cut off what follows the last complete line of a file, if the file exists; return the number of bytes.

    A complete last line that is not JSON is cut off too: after a power failure, blocks may be zeros.
    """
    if not file.exists():
        return 0
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    last = content[content.rfind(b"\n", 0, max(0, end - 1)) + 1 : end]
    try:
        msgspec.json.decode(last or b"null")
    except (msgspec.MsgspecError, UnicodeError):
        end -= len(last)
    if end < len(content):
        os.truncate(file, end)
    return len(content) - end


def sample_of(plan: Plan, problems: Sequence[Problem], trajectory: Trajectory, model: str) -> Sample | None:
    """Return the sample of a job; None if the job is not of the plan."""
    index = index_of(plan, trajectory.job_id)
    if index is None:
        return None
    problem = problems[index.problem]
    return Sample(
        problem=problem.name,
        line=problem.line,
        row_format=problem.row_format,
        index=index,
        result=trajectory.result,
        model=model,
        versions=trajectory.versions,
    )
