"""What `prorl view` opens, and what it refuses."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.evaluation.collection import open_collection, read_arrays
from prorl_zmq.evaluation.run_folder import ARRAYS
from prorl_zmq.evaluation.transcript import TextReader
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Outcome

from .conftest import made_plan, made_sample, made_trajectory, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.data.trajectory import Trajectory


def submitted(folder: Path) -> Trajectory:
    """What `prorl submit --out` leaves."""
    trajectory = made_trajectory(made_sample(made_plan(), 0).result)
    (folder / "arrays").mkdir(parents=True)
    (folder / "results.jsonl").write_bytes(msgspec.json.encode(trajectory.result) + b"\n")
    arrays = {name: getattr(trajectory, name) for name in ARRAYS}
    np.savez(folder / "arrays" / f"{trajectory.job_id}.npz", **arrays)
    return trajectory


def test_a_run_folder_has_texts(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=2)
    collection = open_collection(tmp_path)
    assert [(one.problem, one.name) for one in collection.rollouts] == [
        ("problem-0", "0"), ("problem-0", "1"), ("problem-1", "0"), ("problem-1", "1"),
    ]  # fmt: skip
    transcript = collection.transcript(collection.rollouts[0])
    assert transcript.turns[-1].text == "The answer is 4<|im_end|>"


def test_what_submit_left_has_ids_and_texts_with_a_tokenizer(tmp_path: Path) -> None:
    trajectory = submitted(tmp_path / "out")
    collection = open_collection(tmp_path / "out")
    transcript = collection.transcript(collection.rollouts[0])
    assert transcript.tokens is None
    assert transcript.token_ids == tuple(trajectory.token_ids.tolist())
    reader = TextReader(EmbeddedChatFormat(), ChatSettings())
    read = open_collection(tmp_path / "out", reader)
    assert read.transcript(read.rollouts[0]).turns[-1].text == "The answer is 4<|im_end|>"


def test_jobs_are_found_by_id_beginning_or_problem(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=1)
    collection = open_collection(tmp_path)
    first = collection.rollouts[0]
    assert collection.find(first.job_id) is first
    assert collection.find(first.job_id[:-2]) is first
    assert collection.find("problem-0") is first
    with pytest.raises(ConfigError, match="has no such job"):
        collection.find("nobody")
    with pytest.raises(ConfigError, match="2 jobs are called so"):
        collection.find(first.job_id.split("-")[0])


def test_a_rollout_without_tokens_is_empty_and_one_without_files_is_said(tmp_path: Path) -> None:
    plan = write_run(tmp_path, problems=1, samples=1)
    nothing = made_sample(plan, 0, outcome=Outcome.INFRASTRUCTURE_ERROR, trial=1)
    lost = msgspec.structs.replace(nothing, result=msgspec.structs.replace(nothing.result, job_id="lost", tokens=5))
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(one) + b"\n" for one in (nothing, lost))
    collection = open_collection(tmp_path)
    assert collection.transcript(collection.find(nothing.job_id)).turns == ()
    with pytest.raises(ConfigError, match="has no trajectory of job lost"):
        collection.transcript(collection.find("lost"))


def test_an_evaluation_at_work_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, problems=2, samples=1)
    whole = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole[:-5])
    assert len(open_collection(tmp_path).rollouts) == 1


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder of `prorl eval`"):
        open_collection(tmp_path)
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no rollouts yet"):
        open_collection(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"job_id": "../../etc/passwd", "task": "t", "outcome": "completed"}\n')
    with pytest.raises(ConfigError, match=r"results\.jsonl, line 1: .*job_id"):
        open_collection(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"job_id": "j", "token_ids": [1]}',
        b'{"job_id": "j", "turns": [{"role": "judge", "start": 0, "end": 1}]}',
        b'{"job_id": "j", "turns": [{"role": "tool", "start": 0, "end": 1}]}',
    ],
)
def test_damaged_transcripts_are_said(tmp_path: Path, content: bytes) -> None:
    write_run(tmp_path, problems=1, samples=1)
    collection = open_collection(tmp_path)
    (tmp_path / "trajectories" / f"{collection.rollouts[0].job_id}.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        collection.transcript(collection.rollouts[0])


def test_damaged_arrays_are_said(tmp_path: Path) -> None:
    trajectory = submitted(tmp_path / "out")
    file = tmp_path / "out" / "arrays" / f"{trajectory.job_id}.npz"
    good = {name: getattr(trajectory, name) for name in ARRAYS}
    assert len(read_arrays(file).turns) == 3
    backwards = good["turns"].copy()
    backwards[0] = (5, 2, 0)
    judge = good["turns"].copy()
    judge[0, 2] = 9
    for wrong in (
        {**good, "logprobs": good["logprobs"][1:]},
        {**good, "token_ids": good["token_ids"].astype(np.float64)},
        {**good, "turns": good["turns"][:, :2]},
        {**good, "turns": backwards},
        {**good, "turns": judge},
        {**good, "token_ids": np.array([object()])},  # a pickle, which is never read
        {name: good[name] for name in ARRAYS[1:]},
    ):
        np.savez(file, **wrong)
        with pytest.raises(ConfigError):
            read_arrays(file)
    np.savez_compressed(file, **good)
    flipped = bytearray(file.read_bytes())
    flipped[60:70] = bytes(10)
    single = io.BytesIO()
    np.save(single, good["token_ids"])
    for content in (b"PK\x03\x04 torn", b"", bytes(flipped), single.getvalue()):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is damaged"):
            read_arrays(file)


def test_a_small_archive_of_endless_zeros_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "one", problems=1, samples=1)
    (file,) = (tmp_path / "one" / "trajectories").glob("*.npz")
    monkeypatch.setattr("prorl_zmq.evaluation.collection.ARRAYS_BYTES", 1000)
    with pytest.raises(ConfigError, match="its arrays are larger"):
        read_arrays(file)
