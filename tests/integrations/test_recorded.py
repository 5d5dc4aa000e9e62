"""Records in the forms of the trainers, by their own code: each row at its token, and nothing made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional

import msgspec
import numpy as np
import pydantic
import pytest
import slime_types
from finished_groups import chat, group
from framework_source import lifted

from prorl_zmq import Job
from prorl_zmq.data.records import with_record
from prorl_zmq.data.rows import rows_of
from prorl_zmq.data.scores import Scores, scores_record
from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import ConfigError, InvalidJob, NotTrainable
from prorl_zmq.integrations.recorded import Asked, routes, supports, teacher_scores
from prorl_zmq.integrations.session import Sample
from prorl_zmq.integrations.skyrl import generator_output
from prorl_zmq.integrations.slime import fill_samples
from prorl_zmq.integrations.verl import agent_loop_outputs
from prorl_zmq.wire.messages.jobs import Outcome, Result

if TYPE_CHECKING:
    from prorl_zmq import Group

LAYERS, CHOSEN, TOP, TOP_K = 2, 3, 4, 5
ALL = Asked(record=("experts", "sampling_mask"), teacher=f"teacher:{TOP}")
IDS = [1, 2, 3, 10, 11, 8, 20, 21, 12, 7]
"""A prompt of three tokens, two of the policy, three of a tool, one of the policy, one of the environment."""
GENERATED = [3, 4, 8]
SIZE = len(IDS)


def route(place: int) -> np.ndarray:
    """The experts of the token at a place as input; no two places have the same."""
    return (place * 7 + np.arange(LAYERS)[:, None] * 3 + np.arange(CHOSEN)).astype(np.uint8) % 32 + 1


def support(place: int) -> list[int]:
    """What sampling left at a place: the drawn token is in it."""
    return [IDS[place], *range(100 + place, 100 + place + place % 3)]


def scores() -> Scores:
    """The teacher's of the whole text; its own token is among the likeliest at even places only."""
    places = np.arange(SIZE)
    top_ids = (places[:, None] * 10 + np.arange(TOP) + 200).astype(np.int32)
    top_ids[::2, 1] = np.array(IDS)[::2]
    top_logprobs = -(places[:, None] + np.arange(1, TOP + 1) / 8).astype(np.float32)
    logprobs = np.where(places % 2, -(places + 2.5), top_logprobs[:, 1]).astype(np.float32)
    return Scores(logprobs, top_ids, top_logprobs)


def rolled_out(known: int = SIZE - 1, missing: tuple[str, ...] = (), shifted: str = "", **result: Any) -> Trajectory:
    """A rollout with records; the experts of its first `known` tokens are known, and one record may be a row late."""
    builder, taught = TrajectoryBuilder(), None
    for place in range(SIZE):
        if place in (0, 3, 5, 8, 9):
            builder.begin_turn(Role.ASSISTANT if place in GENERATED else Role.USER)
        if place not in GENERATED:
            builder.add_context(np.array(IDS[place : place + 1], np.int32))
            continue
        builder.add_generated(np.array(IDS[place : place + 1], np.int32), np.array([-0.5], "f4"), np.zeros(1, "i4"))
        if "sampling_mask" not in missing:
            kept = np.array(support(place + (shifted == "sampling_mask")), np.int32)
            builder.add_records({"mask_counts": np.array([len(kept)], np.int32), "mask_ids": kept})
    if "experts" not in missing:
        builder.add_records({"experts": np.array([route(place + (shifted == "experts")) for place in range(known)])})
    if "teacher" not in missing:
        given = scores()
        columns = (given.logprobs, given.top_ids, given.top_logprobs)
        taught = Scores(*(np.roll(column, int(shifted == "teacher"), 0) for column in columns))
    fields = {"job_id": "x", "task": "math", "outcome": Outcome.COMPLETED, "reward": 1.0, "stop_reason": "done"}
    whole = Result(
        **{**fields, **result},
        logprobs_mode="processed_logprobs",
        tokens=builder.tokens,
        turns=builder.turns,
        records=builder.checked(builder.records, [(0, SIZE)]),
    )
    block = builder.block(builder.records).data
    return Trajectory.from_frame(*(with_scores(whole, block, taught) if taught is not None else (whole, block)))


def with_scores(result: Result, block: memoryview, taught: Scores) -> tuple[Result, memoryview]:
    """Add a teacher's scores of a rollout of one segment, as SCORE and the broker do."""
    forms, record = scores_record([(0, result.tokens)], taught)
    return msgspec.structs.replace(result, records=(*result.records, *forms)), with_record(block, record)


def batch(**options: Any) -> list[Group]:
    return [group("a", rolled_out(**options))]


def sample_of(trajectory: Trajectory, most: int | None = None) -> Sample:
    (row,) = rows_of([group("a", trajectory)])
    return Sample.of(row, most, "truncate")


def verls(torch: Any) -> Any:
    known = {
        "BaseModel": pydantic.BaseModel,
        "Optional": Optional,
        "Any": Any,
        "torch": torch,
        "__name__": "agent_loop",
    }
    path = "verl/experimental/agent_loop/agent_loop.py"
    space = lifted("verl", "0.9.1", path, ("AgentLoopMetrics", "AgentLoopOutput"), known)
    space["AgentLoopOutput"].model_rebuild(_types_namespace=space)
    return space["AgentLoopOutput"]


def check_verl(torch: Any, groups: list[Group], known: int = SIZE - 1) -> None:
    """Compare with what verl makes of the answers of its own vLLM."""
    [[fields]] = agent_loop_outputs(groups, ALL)
    columns = verls(torch)(**fields).as_dict()
    routed = columns["routed_experts"]
    assert (routed.dtype, tuple(routed.shape)) == (torch.int16, (SIZE, LAYERS, CHOSEN))
    np.testing.assert_array_equal(routed[:known], [route(place) for place in range(known)])
    assert not routed[known:].any(), "verl's own padding"
    path = "verl/workers/rollout/vllm_rollout/utils.py"
    extract = lifted("verl", "0.9.1", path, ("extract_prompt_logprobs",), {"RequestOutput": Any, "Optional": Optional})
    given, theirs = scores(), {}
    answer = [None]
    for place in range(1, SIZE):
        own = {IDS[place]: SimpleNamespace(logprob=given.logprobs[place], rank=TOP + 3)}
        pairs = zip(given.top_ids[place].tolist(), given.top_logprobs[place], strict=True)
        answer.append(
            own | {token: SimpleNamespace(logprob=one, rank=rank) for rank, (token, one) in enumerate(pairs, 1)}
        )
    extract["extract_prompt_logprobs"](SimpleNamespace(prompt_logprobs=answer), TOP, theirs)
    assert (columns["teacher_ids"].dtype, columns["teacher_logprobs"].dtype) == (torch.int32, torch.float32)
    np.testing.assert_array_equal(columns["teacher_ids"], theirs["prompt_ids"])
    np.testing.assert_array_equal(columns["teacher_logprobs"], np.array(theirs["prompt_logprobs"], np.float32))


def check_skyrl(torch: Any, groups: list[Group], known: int = SIZE - 1) -> None:
    """Pass the lists to SkyRL 0.3's own collation, and the arrays to the validators of 0.4."""
    output = generator_output(groups, asked=ALL, top_k=TOP_K)
    shaped = type("Shaped", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
    hints = dict.fromkeys(("Float", "Integer", "List", "Tuple", "Optional", "AutoTokenizer"), shaped)
    names = ("convert_prompts_responses_to_batch_tensors", "_verify_inputs")
    space = lifted("skyrl", "0.3.0", "skyrl/train/dataset/preprocess.py", names, {"torch": torch, **hints})
    keys = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "rollout_expert_indices")
    given = {**output, "rewards": [[0.0] * len(output["response_ids"][0])]}
    tensor = space[names[0]](SimpleNamespace(pad_token_id=0), *(given[key] for key in keys))[-1]
    np.testing.assert_array_equal(tensor[0, :known], [route(place) for place in range(known)])
    (array,) = generator_output(groups, asked=ALL, top_k=TOP_K, as_arrays=True)["rollout_expert_indices"]
    folder, known_names = "skyrl/backends/skyrl_train/utils", {"np": np, "RoutedExpertIndices": np.ndarray}
    newer = lifted("skyrl", "0.4.0", f"{folder}/routed_experts.py", ("compact_routed_expert_indices",), known_names)
    compact = newer["compact_routed_expert_indices"](array)
    assert (compact.dtype, compact.shape) == (np.uint8, (known, LAYERS, CHOSEN))
    np.testing.assert_array_equal(compact, [route(place) for place in range(known)])
    known_names = {"np": np, "SampleSupport": np.ndarray, "SAMPLE_SUPPORT_PADDING": -1}
    path = f"{folder}/sample_support.py"
    checks = lifted("skyrl", "0.4.0", path, ("validate_sample_support",), known_names)["validate_sample_support"]
    (table,) = output["rollout_sample_support"]
    assert checks(table).dtype == np.int32
    assert table.shape == (SIZE - 3, TOP_K), "of each batch, however wide its masks are"
    rows = [support(3 + index) if 3 + index in GENERATED else [] for index in range(SIZE - 3)]
    assert [[token for token in row if token != -1] for row in table.tolist()] == rows


def check_slime(_: Any, groups: list[Group], known: int = SIZE - 1) -> None:
    kind = slime_types.RecordingSample
    [[sample]] = fill_samples(groups, [[kind(group_index=0, index=0)]], 1, ALL)
    slime_types.check_records(sample, LAYERS, CHOSEN)
    np.testing.assert_array_equal(sample.rollout_routed_experts[:known], [route(place) for place in range(known)])
    assert (sample.rollout_routed_experts[known:] == np.arange(CHOSEN)).all(), "slime's own padding"
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    for index in range(sample.response_length):
        there = support(3 + index) if 3 + index in GENERATED else []
        assert ids[offsets[index] : offsets[index + 1]] == there
    assert sample.teacher_log_probs == scores().logprobs[3:].tolist()


def check_trl(torch: Any, groups: list[Group], known: int = 0) -> None:
    """Pack the sample with TRL's own collator, and let its loss find the log-prob of the token itself."""
    del known
    trainer = pytest.importorskip("trl.experimental.async_distillation.async_distillation_trainer")
    from prorl_zmq.integrations.trl.distillation import teacher_candidates

    sample = sample_of(groups[0].trajectories[0])
    ids, logprobs = teacher_candidates(sample)
    example = {
        "input_ids": sample.row.arrays.token_ids.astype(np.int64),
        "completion_mask": sample.row.arrays.loss_mask.astype(np.int64),
        "teacher_topk_ids": ids,
        "teacher_topk_logprobs": logprobs,
        "prompt_id": 0,
        "metrics": {},
    }
    packed = trainer.DataCollatorForRollout(pad_token_id=0)([[[example]]])
    given, actual = scores(), packed["input_ids"][:, 1:]
    candidates, found = packed["teacher_topk_ids"][:, 1:], packed["teacher_topk_logprobs"][:, 1:]
    narrow, kept, valid = trainer._narrow_top1_actual_support(candidates, found, actual, candidates != -1, 1.0)
    mask = packed["completion_mask"][0, 1:].bool()
    assert torch.equal(valid[0, :, 0], mask), "only trained tokens have a signal"
    np.testing.assert_array_equal(narrow[0, mask, 0], np.array(IDS)[GENERATED])
    np.testing.assert_array_equal(kept[0, mask, 0], given.logprobs[GENERATED])
    first, top1, _ = trainer._narrow_top1_actual_support(candidates, found, actual, candidates != -1, 0.5)
    np.testing.assert_array_equal(first[0, mask, 0], given.top_ids[GENERATED, 0])
    np.testing.assert_array_equal(top1[0, mask, 0], given.top_logprobs[GENERATED, 0])


CHECKS = {
    check_verl: ("experts", "teacher"),
    check_skyrl: ("experts", "sampling_mask"),
    check_slime: ("experts", "sampling_mask", "teacher"),
    check_trl: ("teacher",),
}
"""The records that each trainer takes."""


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="the tensors need torch: install the extra `train`")


@pytest.mark.proof
@pytest.mark.parametrize("check", CHECKS)
def test_each_trainer_gets_its_own_form(torch: Any, check: Any) -> None:
    check(torch, batch())
    for name in CHECKS[check]:
        with pytest.raises(AssertionError):
            check(torch, batch(shifted=name))


@pytest.mark.proof
@pytest.mark.parametrize("check", [*CHECKS][:3])
def test_unknown_rows_at_the_end_are_no_routes(torch: Any, check: Any) -> None:
    """The last token that needs a route is the one before the last generated token."""
    check(torch, batch(known=GENERATED[-1]), GENERATED[-1])


@pytest.mark.parametrize("known", [0, 1, GENERATED[-1] - 1])
def test_a_trained_token_without_a_route_is_refused(known: int) -> None:
    words = r"job x has no (experts for the prediction of its token|record experts)"
    for make in (
        lambda: agent_loop_outputs(batch(known=known), ALL),
        lambda: generator_output(batch(known=known), asked=ALL),
        lambda: fill_samples(batch(known=known), [[slime_types.RecordingSample(index=0)]], 1, ALL),
    ):
        with pytest.raises(NotTrainable, match=words):
            make()


@pytest.mark.parametrize("known", [GENERATED[-1] - 1, GENERATED[-1]])
def test_the_service_says_of_each_record_whether_no_trainer_refuses_it(known: int) -> None:
    whole = rolled_out(known=known)
    complete = {form.name: form.complete for form in whole.result.records}
    assert complete == {"teacher": True, "sampling_mask": True, "experts": known == GENERATED[-1]}
    for name, is_complete in complete.items():
        asked = Asked(teacher="teacher") if name == "teacher" else Asked(record=(name,))
        if is_complete:
            asked.check(sample_of(whole))
        else:
            with pytest.raises(NotTrainable, match="has no experts for the prediction of its token 8"):
                asked.check(sample_of(whole))
            asked.check(sample_of(whole, 3))  # whose trained tokens have all rows


@pytest.mark.parametrize("name", ["experts", "sampling_mask", "teacher"])
def test_a_missing_record_is_refused_with_its_reason(name: str) -> None:
    lost = batch(missing=(name,), records_dropped={name: "the disk was full"})
    asked = Asked(record=() if name == "teacher" else (name,), teacher="teacher" if name == "teacher" else "")
    for make in (
        lambda: agent_loop_outputs(lost, asked),
        lambda: generator_output(lost, asked=asked),
        lambda: fill_samples(lost, [[slime_types.RecordingSample(index=0)]], 1, asked),
    ):
        with pytest.raises(NotTrainable, match=rf"job x has no record {name}: the disk was full"):
            make()


def test_skyrls_sample_support_has_a_column_for_each_of_top_k() -> None:
    for top_k, columns in ((TOP_K, TOP_K), (2, 3)):
        (table,) = generator_output(batch(), asked=ALL, top_k=top_k)["rollout_sample_support"]
        assert table.shape == (SIZE - 3, columns), "three where equally likely tokens were kept beyond two"
    with pytest.raises(ConfigError, match="draw with a top_k above 1, not 0"):
        generator_output(batch(), asked=ALL)


def test_a_sample_that_is_cut_has_the_rows_of_its_tokens() -> None:
    cut = sample_of(rolled_out(), 3)
    assert routes(cut).tolist() == [route(place).tolist() for place in range(6)]
    ids, offsets = supports(cut)
    assert (ids.tolist(), offsets.tolist()) == ([*support(3), *support(4)], [0, 1, 3, 3])
    logprobs, top_ids, _ = teacher_scores(cut)
    assert (logprobs.tolist(), top_ids.tolist()) == (scores().logprobs[1:6].tolist(), scores().top_ids[1:6].tolist())


def test_without_likeliest_tokens_verl_gets_the_texts_own(torch: Any) -> None:
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.USER)
    builder.add_context(np.array([5, 6], np.int32))
    builder.begin_turn(Role.ASSISTANT)
    builder.add_generated(np.array([7], np.int32), np.array([-0.5], "f4"), np.zeros(1, "i4"))
    none = np.zeros((3, 0))
    taught = Scores(np.array([0, -1, -2], "f4"), none.astype("i4"), none.astype("f4"))
    whole = Result(
        job_id="y",
        task="math",
        outcome=Outcome.COMPLETED,
        reward=1.0,
        logprobs_mode="processed_logprobs",
        tokens=3,
        turns=2,
    )
    made = Trajectory.from_frame(*with_scores(whole, builder.block().data, taught))
    [[fields]] = agent_loop_outputs([group("a", made)], Asked(teacher="teacher"))
    assert fields["extra_fields"]["teacher_ids"].tolist() == [[6], [7], [0]]
    assert fields["extra_fields"]["teacher_logprobs"].tolist() == [[-1.0], [-2.0], [0.0]]
    assert torch.int32 == fields["extra_fields"]["teacher_ids"].dtype


def test_adapters_ask_for_their_model_records_and_teacher() -> None:
    asked = Asked.of("slime", ("experts",), "b", ["experts"], "teacher:4")
    job = asked.job(Job(task="math", instance={}))
    assert (job.model, job.record, job.teacher) == ("b", ("experts",), "teacher:4")
    assert asked.names == ("experts", "teacher")
    own = Asked.of("slime", (), None, None).job(Job(task="math", instance={}, record=("experts",), teacher="t"))
    assert (own.model, own.record, own.teacher) == ("policy", ("experts",), "t")
    with pytest.raises(InvalidJob, match="a batch of the model 'policy' has a job of 'c'"):
        Asked().job(Job(task="math", instance={}, model="c"))
    with pytest.raises(ConfigError, match="verl takes the records experts, not sampling_mask"):
        Asked.of("verl", ("experts",), None, ["sampling_mask"])


def test_rollouts_without_records_are_as_before() -> None:
    plain = [group("a", chat([1], [2]))]
    assert "routed_experts" not in agent_loop_outputs(plain)[0][0]
    assert generator_output(plain)["rollout_expert_indices"] is None
