from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import slime_types
from finished_groups import chat, group, rewritten, with_tool
from slime_types import NewerSample, RolloutFnTrainOutput, Sample

from prorl_zmq import Job
from prorl_zmq.errors import ConfigError, InvalidJob, NotTrainable
from prorl_zmq.integrations import slime
from prorl_zmq.integrations.slime import fill_samples, generate_rollout

if TYPE_CHECKING:
    from collections.abc import Callable


def samples(*indexes: int, kind: type[Sample] = Sample, **fields: Any) -> list[Sample]:
    return [kind(group_index=indexes[0], index=index, prompt="?", label="1", **fields) for index in indexes]


def test_trajectories_become_slimes_samples() -> None:
    batch = [group("a", with_tool(1.0), chat([1], [2], 0.0, stop_reason="context_length", version=7))]
    given = samples(4, 5)
    [filled] = fill_samples(batch, [given], 2)
    assert filled == given
    first, second = filled
    assert first.tokens == [1, 2, 3, 9, 10, 11, 8, 20, 21, 9, 12]
    assert first.response_length == 7
    assert first.loss_mask == [1, 1, 0, 0, 0, 0, 1]
    assert first.rollout_log_probs == [-0.25, -0.5, 0.0, 0.0, 0.0, 0.0, -1.0]
    assert first.weight_versions == ["4", "5"]
    assert (first.reward, first.status) == (1.0, Sample.Status.COMPLETED)
    assert (second.reward, second.status, second.weight_versions) == (0.0, Sample.Status.TRUNCATED, ["7"])
    assert (first.index, first.group_index, first.prompt, first.label) == (4, 4, "?", "1")
    args = SimpleNamespace(rollout_batch_size=1, n_samples_per_prompt=2)
    slime_types.check_train_output(RolloutFnTrainOutput([filled]), args)


def test_several_segments_share_the_rollout() -> None:
    batch = [group("a", rewritten(1.0, job_id="x"), chat([1], [2], 0.0))]
    [[first, second]] = fill_samples(batch, [samples(4, 5, kind=NewerSample)], 2)
    assert [sample.rollout_id for sample in first] == [4, 4]
    assert [sample.reward for sample in first] == [1.0, 1.0]
    assert [sample.tokens[-sample.response_length :] for sample in first] == [[10, 11], [12]]
    assert second.rollout_id is None
    with pytest.raises(NotTrainable, match=r"job x has several segments.*rollout_id"):
        fill_samples(batch, [samples(4, 5)], 2)


def test_rewards_are_normalized_by_group_and_each_rollout_counts_once() -> None:
    batch = [group("a", rewritten(1.0), chat([1], [2], 0.0)), group("b", chat([1], [2], 5.0), chat([1], [2], 3.0))]
    filled = fill_samples(batch, [samples(4, 5, kind=NewerSample), samples(6, 7, kind=NewerSample)], 2)
    flat = [one for row in filled for each in row for one in (each if isinstance(each, list) else [each])]
    args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True)
    raw, processed = slime.post_process_rewards(args, flat)
    assert raw == [1.0, 1.0, 0.0, 5.0, 3.0]
    assert processed == pytest.approx([0.7071, 0.7071, -0.7071, 0.7071, -0.7071], abs=1e-4)
    args.grpo_std_normalization = False
    assert slime.post_process_rewards(args, flat)[1] == [0.5, 0.5, -0.5, 1.0, -1.0]
    args.advantage_estimator = "ppo"
    assert slime.post_process_rewards(args, flat)[1] == raw
    one = [sample for sample in flat if sample.index == 5]
    args.advantage_estimator = "grpo"
    assert slime.post_process_rewards(args, one)[1] == [0.0]


def test_groups_of_another_size_are_refused() -> None:
    with pytest.raises(NotTrainable, match="group a has 1 trajectories, and slime counts on 2"):
        fill_samples([group("a", chat([1], [2]))], [samples(4, 5)], 2)


def arguments(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(rollout_batch_size=2, n_samples_per_prompt=2, rollout_global_dataset=True, **more)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"rollout_all_samples_process_path": "a.b"}, "rollout_all_samples_process_path"),
        ({"reward_key": "score"}, "reward_key"),
        ({"dynamic_sampling_filter_path": "my.filter"}, "dynamic_sampling_filter_path"),
    ],
)
def test_what_is_not_done_here_is_refused(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], key: str) -> None:
    slime_types.install(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        generate_rollout(arguments(**more), 0, slime_types.DataSource(2, [{}]))
    assert caught.value.key == key


def test_evaluation_needs_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    slime_types.install(monkeypatch)
    with pytest.raises(ConfigError, match="eval-function-path"):
        generate_rollout(arguments(), 0, None, evaluation=True)


def test_a_prompt_is_a_job() -> None:
    args = arguments(rollout_temperature=0.5, rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=64)
    metadata = {"task": "math", "instance": {"problem": "1 + 1", "ground_truth": "2"}}
    job = slime._job(args, samples(0, metadata=metadata)[0])
    assert (job.task, job.instance) == ("math", metadata["instance"])
    assert (job.sampling.temperature, job.sampling.top_k, job.sampling.max_tokens) == (0.5, 0, 64)
    again = slime._job(args, samples(0, metadata=metadata)[0])
    assert again.job_id != job.job_id


@pytest.mark.parametrize("metadata", [{}, {"task": "math"}, {"instance": {}}])
def test_a_prompt_that_makes_no_job(metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"sample 3 has no .* in its metadata"):
        slime._job(arguments(), samples(3, metadata=metadata)[0])


def made(_: Any, sample: Sample) -> Job:
    return Job(task="shell", instance={"instruction": sample.prompt})


@pytest.mark.parametrize(
    ("path", "check"),
    [
        (f"{__name__}.made", lambda job: job.instance == {"instruction": "?"}),
        ("no.such.module.f", None),
        ("json.no_such_name", None),
        ("made", None),
    ],
)
def test_a_function_of_the_users_makes_the_job(path: str, check: Callable[[Job], bool] | None) -> None:
    args = arguments(prorl_make_job=path)
    if check is None:
        with pytest.raises(ConfigError, match=f"there is no {path}"):
            slime._job(args, samples(0)[0])
    else:
        assert check(slime._job(args, samples(0)[0]))


def test_prompts_of_long_ago_are_forgotten() -> None:
    prompts = slime._Prompts(session=None)  # type: ignore[arg-type]
    metadata = {"task": "math", "instance": {}}
    old = next(prompts.draw(arguments(), slime_types.DataSource(2, [metadata])))
    for _ in range(slime.REMEMBERED_ROLLOUTS):
        prompts.next_call()
    new = next(prompts.draw(arguments(), slime_types.DataSource(2, [metadata])))
    assert set(prompts.fed) == {old.job_id, new.job_id}
    prompts.next_call()
    assert set(prompts.fed) == {new.job_id}
    assert [sample.index for sample in prompts.take(new.job_id)] == [0, 1]
