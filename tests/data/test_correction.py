from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import finished_groups as made
import msgspec
import numpy as np
import pytest

from prorl_zmq import Sampling, collate
from prorl_zmq.data.correction import LogprobsWarning, check_logprobs
from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.inference.policy import draw
from prorl_zmq.inference.records import mask_arrays
from prorl_zmq.inference.truncation import truncated

if TYPE_CHECKING:
    from prorl_zmq import Group

GROUPS = [made.group("a", made.with_tool(), made.rewritten(0.0)), made.group("b", made.chat([1, 2], [5, 6, 7]))]


def computed(shift: float = 0.0) -> Any:
    """The log-probs of a trainer that gives each token `shift` more than the engine; elsewhere it has no idea."""
    arrays = collate(GROUPS)
    return np.where(arrays["loss_mask"], arrays["logprobs"] + shift, np.nan)


def test_equal_log_probs_have_ratio_1_and_no_problem() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = check_logprobs(GROUPS, computed(), sampling=Sampling())
    assert (found.tokens, found.largest_gap, found.mean_ratio, found.clipped_share) == (9, 0.0, 1.0, 0.0)
    assert found.effective_share == pytest.approx(1.0)
    assert found.problems == ()


def test_the_figures_are_those_of_their_definitions() -> None:
    theirs = computed()
    row, column = np.argwhere(collate(GROUPS)["loss_mask"])[0]
    theirs[row, column] += np.log(4.0)
    found = check_logprobs(GROUPS, theirs, clip=3.0)
    assert found.largest_gap == pytest.approx(np.log(4.0), rel=1e-6)
    assert found.mean_gap == pytest.approx(np.log(4.0) / 9, rel=1e-6)
    assert found.mean_ratio == pytest.approx(12 / 9, rel=1e-6)
    assert found.effective_share == pytest.approx(12**2 / (9 * 24), rel=1e-6)
    assert found.clipped_share == pytest.approx(1 / 9)
    assert check_logprobs(GROUPS, theirs, clip=5.0).clipped_share == 0.0


@pytest.mark.parametrize(
    ("sampling", "temperature", "words"),
    [
        (Sampling(temperature=0.7), 1.0, "drawn at temperature 0.7, and the trainer's log-probs are of 1"),
        (Sampling(), 0.6, "drawn at temperature 1, and the trainer's log-probs are of 0.6"),
        (Sampling(temperature=0.0), 1.0, "temperature 0: the likeliest one"),
        (Sampling(top_p=0.9, min_p=0.1), 1.0, r"a part of the distribution \(top_p, min_p\)"),
        (Sampling(top_k=20), 1.0, r"\(top_k\)"),
    ],
)
def test_sampling_that_no_ratio_corrects_is_warned_of(sampling: Sampling, temperature: float, words: str) -> None:
    with pytest.warns(LogprobsWarning, match=words):
        found = check_logprobs(GROUPS, computed(), sampling=sampling, temperature=temperature)
    assert len(found.problems) == 1


def test_raw_log_probs_are_warned_of_unless_nothing_was_done_to_them() -> None:
    groups = [made.group("a", made.chat([1, 2], [5, 6, 7], logprobs_mode="raw_logprobs"))]
    theirs = collate(groups)["logprobs"]
    assert check_logprobs(groups, theirs, sampling=Sampling()).problems == ()
    with pytest.warns(LogprobsWarning, match="raw log-probs"):
        check_logprobs(groups, theirs, sampling=Sampling(temperature=0.7))
    with pytest.warns(LogprobsWarning, match="raw log-probs"):
        check_logprobs(groups, theirs)


def test_log_probs_of_something_else_are_told() -> None:
    with pytest.warns(LogprobsWarning, match="mean gap is 1 nats"):
        check_logprobs(GROUPS, computed(1.0))
    with pytest.raises(ValueError, match=r"have the shape \(3, 2\), those of the batch"):
        check_logprobs(GROUPS, np.zeros((3, 2)))
    theirs = computed()
    theirs[collate(GROUPS)["loss_mask"]] = np.nan
    with pytest.raises(ValueError, match="row 0 hold values that are not finite numbers"):
        check_logprobs(GROUPS, theirs)


CUT = Sampling(0.8, top_p=0.9, top_k=20)


def drawn_from_a_part(unmasked: int = 0) -> tuple[Group, Any, Any]:
    """Draw a turn of 300 tokens with top-p and top-k.

    Returns its group, and a trainer's log-probs of it, [1, T], renormalised over the masks and not. The first
    `unmasked` tokens have no mask.
    """
    random = np.random.default_rng(3)
    logits = random.normal(0, 2, (300, 60)).astype(np.float32)
    kept = np.stack([truncated(row, CUT) for row in logits])
    tokens, engine = draw(kept.copy(), np.full(300, CUT.temperature), random.random(300))
    builder = TrajectoryBuilder()
    builder.begin_turn(Role.ASSISTANT)
    builder.add_context(np.array([9], np.int32))
    for start, end in ((0, unmasked), (unmasked, 300)):
        builder.add_generated(tokens[start:end], engine[start:end], np.zeros(end - start, np.int32))
        if end == 300:
            builder.add_records(mask_arrays([np.flatnonzero(np.isfinite(row)) for row in kept[start:]]))
    result = made.chat([1], [2]).result
    forms = builder.records
    result = msgspec.structs.replace(result, tokens=builder.tokens, turns=builder.turns, segments=(), records=forms)
    group = made.group("a", Trajectory.from_frame(result, builder.block(forms).tobytes()))
    ids, counts = (group.trajectories[0].records[name] for name in ("mask_ids", "mask_counts"))
    trainers = []
    for support in (None, (np.repeat(np.arange(300 - len(counts), 300), counts), ids)):
        scaled = np.full(logits.shape, -np.inf) if support else logits / CUT.temperature
        if support:
            scaled[:unmasked] = logits[:unmasked] / CUT.temperature
            scaled[support] = logits[support] / CUT.temperature
        logprobs = scaled[np.arange(300), tokens] - np.log(np.exp(scaled).sum(axis=1))
        trainers.append(np.concatenate([[0.0], logprobs])[None])
    return group, trainers[1], trainers[0]


def test_renormalised_over_masks_tokens_of_a_part_of_the_distribution_have_ratio_1() -> None:
    group, renormalised, plain = drawn_from_a_part()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = check_logprobs([group], renormalised, temperature=0.8, sampling=CUT)
        biased = check_logprobs([group], plain, temperature=0.8, sampling=CUT)
    assert found.largest_gap < 1e-4
    assert found.mean_ratio == pytest.approx(1, abs=1e-4)
    assert biased.mean_ratio < 0.97


def test_a_token_without_its_mask_is_warned_of() -> None:
    group, renormalised, _ = drawn_from_a_part(unmasked=1)
    with pytest.warns(LogprobsWarning, match=r"\(top_p, top_k\), and not all of them have a sampling mask"):
        check_logprobs([group], renormalised, temperature=0.8, sampling=CUT)
