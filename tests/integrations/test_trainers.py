"""Trainers' rollout functions on a whole service: the default one, with the embedded engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import slime_types

from prorl_zmq import AsyncRolloutClient, EpisodeLimits, Job, RolloutClient, Sampling
from prorl_zmq.errors import InvalidJob, NotTrainable
from prorl_zmq.integrations import slime
from prorl_zmq.integrations.single_jobs import SingleJobs
from prorl_zmq.integrations.skyrl import Generator

if TYPE_CHECKING:
    from support.services import SharedService


@pytest.fixture
def door(served: SharedService) -> str:
    """The front door of a default service."""
    return served.front_door


def problem(text: str) -> Job:
    return Job(task="math", instance={"problem": text, "ground_truth": "1"}, sampling=Sampling(max_tokens=4))


def from_skyrl(prompt: list[dict[str, str]], env_class: str, env_extras: dict[str, Any]) -> Job:
    assert env_class == "gsm8k"
    return Job(task=env_extras.get("task", "math"), instance={"problem": prompt[0]["content"], "ground_truth": "1"})


@dataclass
class TrajectoryID:
    """As SkyRL's."""

    instance_id: str
    repetition_id: int


def generator_input(problems: list[str], size: int, **more: Any) -> dict[str, Any]:
    """Give what SkyRL's `prepare_generator_input` makes of a data set."""
    repeated = [text for text in problems for _ in range(size)]
    return {
        "prompts": [[{"role": "user", "content": text}] for text in repeated],
        "env_classes": ["gsm8k"] * len(repeated),
        "env_extras": [{} for _ in repeated],
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "top_k": -1, "logprobs": 1, "min_tokens": 1},
        "trajectory_ids": [TrajectoryID(f"uid-{text}", index % size) for index, text in enumerate(repeated)],
        "batch_metadata": None,
        **more,
    }


def test_skyrls_generator_answers_in_the_order_of_its_input(door: str) -> None:
    problems = ["1" * length for length in (9, 1, 6, 3)]

    async def main() -> list[dict[str, Any]]:
        generator = Generator(from_skyrl, connect=lambda: RolloutClient(door))
        first, second = generator_input(problems, 3), generator_input(problems[::-1], 1)
        return await asyncio.gather(generator.generate(first), generator.generate(second))

    first, second = asyncio.run(main())
    names = [tid.instance_id for tid in first["trajectory_ids"]]
    assert names == [f"uid-{text}" for text in problems for _ in range(3)]
    prompts = [tuple(ids) for ids in first["prompt_token_ids"]]
    assert [prompts[index] for index in range(0, 12, 3)] == [tuple(ids) for ids in second["prompt_token_ids"]][::-1]
    assert all(prompts[index] == prompts[index - index % 3] for index in range(12))
    assert len(set(prompts)) == 4
    # A turn that calls a tool, by chance, is not the last one.
    turns = [len(list(turn)) for mask in first["loss_masks"] for generated, turn in groupby(mask) if generated]
    assert max(turns) <= 5
    # They are drawn, not copied: each is one of about seven, so that the twelve are never the same.
    assert len({tuple(ids) for ids in first["response_ids"]}) > 1


@pytest.mark.parametrize(
    ("more", "error", "problem"),
    [
        ({"sampling_params": {"repetition_penalty": 2.0}}, InvalidJob, "repetition_penalty"),
        ({"trajectory_ids": [TrajectoryID("a", place) for place in (0, 0, 1, 1)]}, InvalidJob, "2 times"),
    ],
)
def test_what_skyrls_generator_refuses(door: str, more: dict[str, Any], error: type[Exception], problem: str) -> None:
    generator = Generator(from_skyrl, connect=lambda: RolloutClient(door))
    with pytest.raises(error, match=problem):
        asyncio.run(generator.generate(generator_input(["1", "2"], 2, **more)))


def test_a_rollout_that_brings_no_reward_is_no_output(door: str) -> None:
    def failing(prompt: list[dict[str, str]], env_class: str, env_extras: dict[str, Any]) -> Job:
        job = from_skyrl(prompt, env_class, env_extras)
        bad = EpisodeLimits(max_tokens=8)  # the prompt alone is longer
        return msgspec.structs.replace(job, episode=bad) if prompt[0]["content"] == "bad" else job

    generator = Generator(failing, connect=lambda: RolloutClient(door), options={"max_replacements": 1})
    with pytest.raises(NotTrainable, match=r"1 of 2 prompts could not be rolled out.*invalid_job"):
        asyncio.run(generator.generate(generator_input(["1", "bad"], 2)))


def test_a_prompt_that_brings_no_reward_is_replaced_in_training_only(door: str) -> None:
    def failing(prompt: list[dict[str, str]], env_class: str, env_extras: dict[str, Any]) -> Job:
        job = from_skyrl(prompt, env_class, env_extras)
        return msgspec.structs.replace(job, episode=EpisodeLimits(max_tokens=8)) if env_extras["bad"] else job

    spares = [failing([{"content": "spare"}], "gsm8k", {"bad": bad}) for bad in (False, True)]
    generator = Generator(
        failing,
        connect=lambda: RolloutClient(door),
        spare=spares.pop,  # the first of them is no better
        options={"max_replacements": 0},
    )
    asked = generator_input(["1", "bad", "11"], 2)
    asked["env_extras"] = [{"bad": text == "bad"} for text in ("1", "1", "bad", "bad", "11", "11")]
    with pytest.raises(NotTrainable, match=r"1 of 3 prompts could not be rolled out \(invalid_job"):
        asyncio.run(generator.generate({**asked, "batch_metadata": SimpleNamespace(training_phase="eval")}))
    output = asyncio.run(generator.generate({**asked, "batch_metadata": SimpleNamespace(training_phase="train")}))
    assert output["rollout_metrics"]["generate/replaced_prompts"] == 2.0
    assert output["trajectory_ids"] == asked["trajectory_ids"]
    prompts = [tuple(ids) for ids in output["prompt_token_ids"]]
    assert [prompts.index(ids) for ids in prompts] == [0, 0, 2, 2, 4, 4]
    assert not spares


def arguments(door: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        prorl_endpoint=door,
        rollout_batch_size=3,
        n_samples_per_prompt=2,
        rollout_max_response_len=4,
        rollout_temperature=1.0,
        **more,
    )


def metadata(*problems: str) -> list[dict[str, Any]]:
    return [{"task": "math", "instance": {"problem": text, "ground_truth": "1"}} for text in problems]


def test_slimes_rollout_function_fills_whole_groups(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slime_types.install(monkeypatch)
    args, source = arguments(door), slime_types.DataSource(2, metadata("1", "11", "111"))
    seen: list[int] = []
    try:
        for step in range(3):
            output = slime.generate_rollout(args, step, source, evaluation=False)
            slime_types.check_train_output(output, args)
            seen += [group[0].group_index for group in output.samples]
            for group in output.samples:
                assert [sample.index for sample in group] == [2 * group[0].group_index, 2 * group[0].group_index + 1]
                assert group[0].tokens[: -group[0].response_length] == group[1].tokens[: -group[1].response_length]
    finally:
        slime.close()
    assert len(set(seen)) == 9
    assert source.given < 1000  # it has no end: it is drawn from as groups are wanted


def test_slimes_evaluation(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slime_types.install(monkeypatch)
    args = arguments(door, prorl_eval_samples=f"{__name__}.eval_samples")
    data = slime.generate_rollout(args, 0, None, evaluation=True).data
    assert [sample.index for sample in data["small"]["samples"]] == [0, 1, 2, 3, 4]
    assert data["small"]["rewards"] == [sample.reward for sample in data["small"]["samples"]]
    assert [type(value) for value in data["small"]["truncated"]] == [bool] * 5


def eval_samples(_: Any) -> dict[str, list[slime_types.Sample]]:
    source = slime_types.DataSource(1, metadata("1", "11"))
    return {"small": [group[0] for group in source.get_samples(5)]}


def test_a_source_that_ends_is_no_batch(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(slime_types.DataSource):
        def get_samples(self, num_samples: int) -> list[list[slime_types.Sample]]:
            return super().get_samples(num_samples) if self.given < 2 else []

    slime_types.install(monkeypatch)
    try:
        with pytest.raises(NotTrainable, match="ended short with 2 of 3 groups"):
            slime.generate_rollout(arguments(door), 0, Short(2, metadata("1")))
    finally:
        slime.close()


def test_rollouts_are_asked_for_one_by_one(door: str) -> None:
    async def run() -> None:
        jobs = SingleJobs(lambda: AsyncRolloutClient(door))
        asked = [problem(str(number)) for number in range(12)]
        waiting = [asyncio.create_task(jobs.run(job)) for job in asked]
        got = await asyncio.gather(*waiting)
        assert [one.job_id for one in got] == [job.job_id for job in asked]
        assert {one.outcome for one in got} == {"completed"}
        unwanted = asyncio.create_task(jobs.run(problem("nobody waits for this one")))
        await asyncio.sleep(0)
        unwanted.cancel()
        await asyncio.wait([unwanted])
        assert unwanted.cancelled()
        assert (await jobs.run(problem("the next"))).outcome == "completed"
        await jobs.close()

    asyncio.run(run())
