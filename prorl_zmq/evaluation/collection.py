"""`Collection`: the rollouts of a folder of `prorl eval` or `prorl submit --out`, read lazily.

A run folder has its rollouts' texts; `prorl submit` stores arrays only, whose tokens are ids unless a reader is given.
A running evaluation is read as far as it is written. All files are checked as they are read: raises `ConfigError`.
"""

from __future__ import annotations

import itertools
import zipfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..data.conversations import rewards_problem
from ..data.trajectory import Role, TokenArrays, Trajectory
from ..errors import ConfigError
from ..wire.messages.jobs import Result
from .run_folder import ARRAYS, PLAN, RESULTS, TRAJECTORIES, Sample, read_file, read_lines, read_samples
from .transcript import Transcript, make_transcript

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .transcript import TextReader

SUBMITTED = "arrays"
"""The folder of arrays that `prorl submit` leaves."""
PROMPT_ROLLOUTS = 8
"""Most rollouts of a problem that are read for its prompt."""
PROMPT_CHARACTERS = 20_000
DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "weight_versions": np.int32,
    "turns": np.int32,
}
DAMAGES = (
    *(OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)
"""What numpy raises of a file that is not an archive of arrays, or a damaged one."""
ARRAYS_BYTES = 2**30
"""Most bytes of the arrays of one rollout: a small archive may hold zeros without end."""


@dataclass(frozen=True, slots=True)
class Collection:
    path: Path
    rollouts: list[Sample]
    reader: TextReader | None = None

    def transcript(self, rollout: Sample) -> Transcript:
        """Read what a rollout says; an empty one if it ended before its first token."""
        written = self.path / TRAJECTORIES / f"{rollout.job_id}.json"
        if written.exists():
            transcript = _read_transcript(written)
            if transcript.tokens is not None or self.reader is None:
                return transcript
        for folder in (TRAJECTORIES, SUBMITTED):
            arrays = self.path / folder / f"{rollout.job_id}.npz"
            if arrays.exists():
                return make_transcript(rollout.job_id, _with_result(read_arrays(arrays), rollout.result), self.reader)
        if rollout.result.tokens:
            raise ConfigError(f"{self.path} has no trajectory of job {rollout.job_id}", key="folder")
        return Transcript(job_id=rollout.job_id)

    def prompt(self, rollouts: Sequence[Sample]) -> str:
        """Return what the model was asked in the first of some rollouts that has kept its texts, or nothing."""
        for rollout in rollouts[:PROMPT_ROLLOUTS]:
            try:
                turns = self.transcript(rollout).turns
            except ConfigError:
                continue  # damaged or missing: another rollout of the problem has the same prompt
            asked = itertools.takewhile(lambda turn: turn.role != "assistant", turns)
            texts = [turn.text for turn in asked if turn.role == "user" and turn.text]
            if texts:
                return "\n\n".join(texts)[:PROMPT_CHARACTERS]
        return ""

    def find(self, name: str) -> Sample:
        """Return the rollout of a job's id, or of a beginning of one, or of a problem that has only one."""
        exact = [one for one in self.rollouts if one.job_id == name]
        exact = exact or [one for one in self.rollouts if one.problem == name]
        found = exact or [one for one in self.rollouts if one.job_id.startswith(name)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise ConfigError(f"--job {name}: {self.path} has no such job; `prorl view` lists them", key="job")
        several = ", ".join(one.job_id for one in found[:8])
        raise ConfigError(f"--job {name}: {len(found)} jobs are called so: {several}", key="job")


def open_collection(path: Path, reader: TextReader | None = None) -> Collection:
    """Read the list of a folder's rollouts; their trajectories are read when they are asked for."""
    if (path / PLAN).exists():
        rollouts = sorted(read_samples(path / RESULTS), key=lambda one: one.index)
    elif (path / RESULTS).exists():
        rollouts = [Sample.of_job(result) for result in read_lines(path / RESULTS, Result)]
    else:
        raise ConfigError(
            f"{path} is not a folder of `prorl eval` or `prorl submit --out`: it has neither {PLAN} nor {RESULTS}",
            key="folder",
        )
    if not rollouts:
        raise ConfigError(f"{path} has no rollouts yet", key="folder")
    return Collection(path, rollouts, reader)


def _with_result(arrays: TokenArrays, result: Result) -> TokenArrays | Trajectory:
    """Return arrays as the trajectory of a result, which says who spoke, if it is of these arrays."""
    fits = (result.tokens, result.turns) == (len(arrays.token_ids), len(arrays.turns)) and not rewards_problem(result)
    return Trajectory(**arrays._asdict(), result=result) if fits else arrays


def read_arrays(file: Path) -> TokenArrays:
    try:
        with np.load(BytesIO(read_file(file)), allow_pickle=False) as data:
            if sum(one.file_size for one in data.zip.infolist()) > ARRAYS_BYTES:
                raise ValueError(f"its arrays are larger than {ARRAYS_BYTES / 2**20:g} MiB")
            arrays = TokenArrays(**{name: data[name] for name in ARRAYS})
    except DAMAGES as error:
        raise ConfigError(f"{file} is damaged: {error}", key="folder") from error
    tokens = len(arrays.token_ids) if arrays.token_ids.ndim == 1 else -1
    shapes = dict.fromkeys(ARRAYS, (tokens,)) | {"turns": (len(arrays.turns) if arrays.turns.ndim else 0, 3)}
    for name in ARRAYS:
        array = getattr(arrays, name)
        if array.shape != shapes[name] or array.dtype != DTYPES[name]:
            raise ConfigError(f"{file}: {name} is {array.dtype} {array.shape}; no trajectory has such", key="folder")
    start, end, role = arrays.turns.T
    if np.any(start < 0) or np.any(end < start) or np.any(end > tokens) or not set(role.tolist()) <= set(Role):
        raise ConfigError(f"{file}: its turns cannot be", key="folder")
    return arrays


def _read_transcript(file: Path) -> Transcript:
    try:
        transcript = msgspec.json.decode(read_file(file), type=Transcript)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}", key="folder") from error
    tokens = len(transcript.token_ids)
    lengths = {len(transcript.mask), len(transcript.logprobs), len(transcript.versions)}
    if transcript.tokens is not None:
        lengths.add(len(transcript.tokens))
    if lengths != {tokens} or any(not 0 <= turn.start <= turn.end <= tokens for turn in transcript.turns):
        raise ConfigError(f"{file} is damaged: its lists do not fit together", key="folder")
    return transcript
