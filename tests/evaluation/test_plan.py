"""The jobs that a plan comes to, and what tells two plans apart."""

from __future__ import annotations

import msgspec
import pytest

from prorl_zmq import Job
from prorl_zmq.evaluation.plan import RolloutIndex, differences, index_of, job_id, jobs_of, sample_seed
from prorl_zmq.evaluation.problems import Problem
from prorl_zmq.wire.messages.base import Identifier
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Sampling

from .conftest import made_plan

TEMPLATE = Job(
    task="math",
    instance={"problem": "p"},
    job_id="fixed",
    sampling=Sampling(temperature=0.3, max_tokens=77, seed=5),
    episode=EpisodeLimits(max_turns=9),
)
PROBLEMS = [Problem("a", 1, "math", TEMPLATE), Problem("b", 2, "math", TEMPLATE)]


def test_the_same_plan_gives_the_same_jobs() -> None:
    plan = made_plan(2, 2, temperature=0.6)
    places = [RolloutIndex(problem, sample) for problem in range(2) for sample in range(2)]
    jobs = jobs_of(plan, PROBLEMS, places)
    assert jobs == jobs_of(plan, PROBLEMS, places)
    assert len({job.job_id for job in jobs}) == len({job.sampling.seed for job in jobs}) == 4
    assert [job.group_id for job in jobs] == [f"{plan.run_id}-0"] * 2 + [f"{plan.run_id}-1"] * 2
    assert msgspec.convert(msgspec.to_builtins(jobs[0]), Job) == jobs[0]  # its ids are what the service takes


def test_options_take_the_place_of_what_a_job_says_and_nothing_else_does() -> None:
    plan = made_plan(2, 1, temperature=0.6, max_turns=3)
    (job,) = jobs_of(plan, PROBLEMS, [RolloutIndex(0, 0)])
    assert (job.sampling.temperature, job.sampling.max_tokens) == (0.6, 77)
    assert (job.episode.max_turns, job.episode.max_tokens) == (3, EpisodeLimits().max_tokens)


def test_template_arguments_are_added_to_those_of_a_job() -> None:
    own = msgspec.structs.replace(TEMPLATE, template_arguments={"a": 1, "b": 1})
    plan = made_plan(1, 1, template_arguments={"b": 2})
    (job,) = jobs_of(plan, [Problem("a", 1, "math", own)], [RolloutIndex(0, 0)])
    assert job.template_arguments == {"a": 1, "b": 2}


def test_another_try_is_another_job_with_the_same_seed() -> None:
    plan = made_plan()
    first, second = jobs_of(plan, PROBLEMS, [RolloutIndex(1, 1), RolloutIndex(1, 1, trial=1)])
    assert first.job_id != second.job_id
    assert first.sampling == second.sampling


def test_a_jobs_id_says_where_it_belongs() -> None:
    plan = made_plan(3, 2)
    assert index_of(plan, job_id(plan, RolloutIndex(2, 1, 4))) == RolloutIndex(2, 1, 4)
    for name in ("job", f"{plan.run_id}-3-0.0", f"{plan.run_id}-0-2.0", "000000000000-0-0.0", f"{plan.run_id}-0-0"):
        assert index_of(plan, name) is None


def test_seeds_are_in_range_and_differ() -> None:
    seeds = {sample_seed(seed, problem, sample) for seed in range(3) for problem in range(20) for sample in range(20)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.6}, "--temperature was not given and is 0.6"),
        ({"max_tokens": 5}, "--max-tokens was not given and is 5"),
        ({"urls": ("http://a", "http://b")}, "--url was not given and is http://a http://b"),
        ({"data_sha256": "f" * 64}, "the data file's checksum was 000000000000… and is ffffffffffff…"),
        ({"row_format": "stem"}, "--row-format was not given and is stem"),
        ({"engine_options": {"times": 2}}, "--option was not given and is {'times': 2}"),
        ({"options": {"tools": ["bash"]}}, "--set was not given and is {'tools': ['bash']}"),
    ],
)
def test_differences_are_said_as_options(change: dict[str, object], said: str) -> None:
    before = made_plan()
    now = msgspec.structs.replace(before, settings=msgspec.structs.replace(before.settings, **change))
    assert differences(before, now) == [said]
    assert differences(before, before) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("data/aime-2024.jsonl", "eval-aime-2024-"),
        ("/x/my problems (new).parquet", "eval-my-problems-new-"),
        ("\x1b[2J.jsonl", "eval-2J-"),
        ("问题.jsonl", "eval-"),
        ("a" * 300 + ".jsonl", f"eval-{'a' * 40}-"),
    ],
)
def test_a_session_is_named_after_its_data_file(file: str, name: str) -> None:
    plan = msgspec.structs.replace(made_plan(), file=file)
    assert plan.session == name + plan.run_id
    assert msgspec.convert(plan.session, Identifier) == plan.session
