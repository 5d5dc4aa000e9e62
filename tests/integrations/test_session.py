from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from finished_groups import group, with_tool

from prorl_zmq import EpisodeLimits, Job, RolloutClient, Sampling
from prorl_zmq.data.rows import rows_of
from prorl_zmq.errors import Closed, ConfigError, NotTrainable, RequestTimeout
from prorl_zmq.integrations import session
from prorl_zmq.integrations.session import Counts, Sample, TrainerSession, check_too_long, load_function
from prorl_zmq.wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.services import SharedService

WHOLE: dict[str, Any] = {"keep": "all", "carry": "nothing", "max_replacements": 0}


def job(name: str) -> Job:
    instance = {"problem": name, "ground_truth": "1"}
    return Job(task="math", instance=instance, job_id=name, sampling=Sampling(max_tokens=4))


def failing(job: Job) -> Job:
    """Make a job whose prompt alone is longer than it may be."""
    return msgspec.structs.replace(job, episode=EpisodeLimits(max_tokens=4))


@pytest.fixture
def trainer(served: SharedService) -> Iterator[TrainerSession]:
    with TrainerSession(lambda: RolloutClient(served.front_door)) as trainer:
        yield trainer


def test_groups_are_in_the_order_of_the_jobs(trainer: TrainerSession) -> None:
    jobs = [job(name) for name in ("a", "b", "c", "d")]
    groups = trainer.fill(jobs, 2, **WHOLE)
    assert [one.prompt_id for one in groups] == ["a", "b", "c", "d"]
    assert [len(one) for one in groups] == [2] * 4
    assert trainer.replaced == 0


def test_another_prompt_takes_the_place_of_one_without_a_group(trainer: TrainerSession) -> None:
    spares = [job("good"), failing(job("no-better"))]
    groups = trainer.fill([job("a"), failing(job("bad")), job("c")], 2, spares.pop, **WHOLE)
    assert [one.prompt_id for one in groups] == ["a", "good", "c"]
    assert trainer.replaced == 2


def test_no_place_is_tried_without_end(trainer: TrainerSession) -> None:
    names = iter("xyz")
    with pytest.raises(NotTrainable, match=r"1 of 2 prompts could not be rolled out \(invalid_job \d times\)") as error:
        trainer.fill([failing(job("a")), job("b")], 2, lambda: failing(job(next(names))), **WHOLE)
    assert error.value.fields["prompts"] == "y"
    assert trainer.replaced == session.ROUNDS - 1


def test_without_a_spare_a_missing_group_is_an_error_at_once(trainer: TrainerSession) -> None:
    with pytest.raises(NotTrainable, match="1 of 1 prompts"):
        trainer.fill([failing(job("a"))], 2, **WHOLE)


def test_the_collection_is_stopped_from_another_thread(trainer: TrainerSession) -> None:
    def prompts() -> Iterator[Job]:
        yield job("a")
        trainer.stop()
        while True:
            yield job(new_id())

    with pytest.raises(Closed):
        list(trainer.groups(lambda: (10_000, prompts()), 2, **WHOLE))


def test_a_service_that_is_away_is_waited_for_until_the_limit(tmp_path: Path) -> None:
    asked: list[int] = []

    def wanted() -> tuple[int, list[Job]]:
        asked.append(1)
        return 1, [job("a")]

    for away_s, batches in ((0.0, 1), (1.2, 2)):
        asked.clear()
        with TrainerSession(lambda: RolloutClient(f"ipc://{tmp_path}/nobody", timeout_s=0.3), away_s) as trainer:
            with pytest.raises(RequestTimeout):
                list(trainer.groups(wanted, 2))
            assert len(asked) >= batches


def test_a_batch_of_no_groups_is_not_opened(tmp_path: Path) -> None:
    with TrainerSession(lambda: RolloutClient(f"ipc://{tmp_path}/nobody", timeout_s=0.3)) as trainer:
        assert list(trainer.groups(lambda: (0, []), 2)) == []


def test_counts_begin_anew_when_they_are_taken() -> None:
    counts = Counts()
    counts.count("dropped")
    counts.count("rows", 3)
    assert counts.take_metrics() == {"rollouts/dropped_total": 1.0, "rollouts/rows_total": 3.0}
    assert counts.take_metrics() == {}


def test_rollouts_that_are_too_long() -> None:
    (row,) = rows_of([group("a", with_tool(1.0))])
    assert [Sample.of(row, most, "drop").length for most in (None, 7, 6)] == [7, 7, 0]
    assert [Sample.of(row, most, "truncate").length for most in (None, 7, 6, -1)] == [7, 7, 6, 0]
    cut = Sample.of(row, 3, "truncate")
    assert cut.is_cut
    assert not Sample.of(row, 7).is_cut
    assert cut.prompt_ids.tolist() == [1, 2, 3, 9]
    assert (cut.response_ids.tolist(), cut.response_mask.tolist()) == ([10, 11, 8], [1, 1, 0])
    assert (cut.response_mask.dtype, cut.logprobs.tolist()) == (np.int64, [-0.25, -0.5, 0.0])
    with pytest.raises(ConfigError, match="not 'cut'"):
        check_too_long("cut")


def test_a_function_that_cannot_be_imported_is_named() -> None:
    assert load_function("json.dumps") is __import__("json").dumps
    for path in ("json.nothing", "nothing.at_all", "nothing"):
        with pytest.raises(ConfigError, match=f"there is no {path}"):
            load_function(path)
