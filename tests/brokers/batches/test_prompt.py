"""The jobs that are made from a prompt."""

from __future__ import annotations

from prorl_zmq import Job, Sampling
from prorl_zmq.brokers.batches.prompt import Prompt
from prorl_zmq.wire import codec


def seeds(seed: int | None, count: int = 64) -> list[int | None]:
    template = Job(task="math", instance={"problem": "1 + 1"}, job_id="prompt", sampling=Sampling(0.7, seed=seed))
    prompt = Prompt(1, "session", template, 10)
    made = [prompt.make_job("group", f"group.{number}") for number in range(count)]
    for number, (job, packed) in enumerate(made):
        assert (job.job_id, job.group_id, job.task, job.instance) == (
            f"group.{number}",
            "group",
            "math",
            template.instance,
        )
        assert job.sampling.temperature == 0.7
        assert codec.decode(packed, Job) == job
    return [job.sampling.seed for job, _ in made]


def test_seeds_differ_within_a_group_and_are_the_same_in_every_run() -> None:
    assert len(set(seeds(2**62))) == 64
    assert seeds(2**62) == seeds(2**62)
    assert not set(seeds(1)) & set(seeds(2))


def test_without_a_seed_there_is_none() -> None:
    assert set(seeds(None)) == {None}
