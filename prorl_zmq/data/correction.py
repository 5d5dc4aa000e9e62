"""`check_logprobs`: compare the engine's log-probs with a trainer's, and say if their ratio can correct a loss."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..wire.records import SAMPLING_MASK
from .collation import collate
from .rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..wire.messages.jobs import Sampling
    from .group import Group
    from .trajectory import Segment

CLIP = 2.0
WIDE_GAP = 0.5
"""A mean gap, in nats, that no numerics explain."""


class LogprobsWarning(UserWarning):
    """Importance ratios of engine and trainer would not correct the loss, or would make it worse."""


@dataclass(frozen=True, slots=True)
class LogprobsCheck:
    """What `check_logprobs` found. A token's ratio is exp(trainer's log-prob - engine's)."""

    tokens: int
    """Generated ones."""
    largest_gap: float
    """Of |trainer's - engine's|, in nats."""
    mean_gap: float
    mean_ratio: float
    """1 if both know the same distribution."""
    effective_share: float
    """Effective sample size by tokens, (Σ ratio)² / Σ ratio², as a share of the tokens: 1 if all ratios are equal."""
    clipped_share: float
    """Of the tokens, those whose ratio truncated importance sampling (TIS) would cut."""
    problems: tuple[str, ...]
    """Why the ratios should not be used; each was a `LogprobsWarning` too."""


def check_logprobs(
    groups: Sequence[Group],
    trainer_logprobs: NDArray[Any],
    *,
    temperature: float = 1.0,
    sampling: Sampling | None = None,
    clip: float = CLIP,
) -> LogprobsCheck:
    """Compare the engine's log-probs of generated tokens with those that a trainer computed for them.

    Truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025) multiplies a token's loss by min(ratio, clip). That is right only if both sides mean the distribution that was
    drawn from: what stands against it is warned of, as `LogprobsWarning`.

    With top-p, top-k or min-p, the trainer's log-probs must be renormalised: its logits divided by the temperature,
    all but the ids of a token's sampling mask set to minus infinity, and then the softmax. Rows must have the masks:
    ask for them with `record=("sampling_mask",)`.

    Args:
        groups: as a batch gave them.
        trainer_logprobs: float [B, T], rows and columns as `collate(groups)` has them: at a token's own place, not at
            that of the one before it. Only places where `loss_mask` is true are read.
        temperature: by which the trainer divided its logits.
        sampling: of the jobs; None: not known, so it is not looked at.
        clip: the greatest ratio that TIS leaves.

    Raises:
        NotTrainable: as `collate`.
        ValueError: the shape is another, or a log-prob of a generated token is NaN or infinite.
    """
    arrays = collate(groups)
    mask = arrays["loss_mask"]
    theirs = np.asarray(trainer_logprobs)
    if theirs.shape != mask.shape:
        raise ValueError(f"the trainer's log-probs have the shape {theirs.shape}, those of the batch {mask.shape}")
    gaps = theirs[mask].astype(np.float64) - arrays["logprobs"][mask]
    if not np.isfinite(gaps).all():
        row = int(np.argwhere(mask & ~np.isfinite(theirs))[0][0])
        raise ValueError(f"the trainer's log-probs of row {row} hold values that are not finite numbers")
    ratios = np.exp(np.clip(gaps, -50.0, 50.0))
    mode = next(trajectory.logprobs_mode for group in groups for trajectory in group.trajectories)
    masked = all(_has_masks(row.arrays) for row in rows_of(groups))
    problems = tuple(_problems(mode, temperature, sampling, float(np.abs(gaps).mean()), masked=masked))
    for problem in problems:
        warnings.warn(problem, LogprobsWarning, stacklevel=2)
    return LogprobsCheck(
        tokens=len(gaps),
        largest_gap=float(np.abs(gaps).max()),
        mean_gap=float(np.abs(gaps).mean()),
        mean_ratio=float(ratios.mean()),
        effective_share=float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
        clipped_share=float((ratios > clip).mean()),
        problems=problems,
    )


def _has_masks(segment: Segment) -> bool:
    """Return whether each generated token of a segment has a sampling mask."""
    return segment.records.unknown(SAMPLING_MASK, np.flatnonzero(segment.loss_mask)) is None


def _problems(mode: str, temperature: float, sampling: Sampling | None, mean_gap: float, *, masked: bool) -> list[str]:
    found = []
    if mode == "raw_logprobs" and (sampling is None or sampling.temperature != 1.0):
        found.append(
            "the engine gives raw log-probs, those before temperature and truncation: start it with "
            "--logprobs-mode processed_logprobs, or draw at temperature 1"
        )
    if sampling is not None:
        drawn = 1.0 if sampling.temperature == 0 else sampling.temperature  # see `Sampling.temperature`
        if drawn != temperature and mode != "raw_logprobs":
            found.append(
                f"tokens were drawn at temperature {drawn:g}, and the trainer's log-probs are of {temperature:g}"
            )
        if sampling.temperature == 0:
            found.append("tokens were drawn at temperature 0: the likeliest one always, which no ratio corrects")
        cut = {"top_p": sampling.top_p != 1.0, "top_k": sampling.top_k != 0, "min_p": sampling.min_p != 0.0}
        names = [name for name, on in cut.items() if on and sampling.temperature > 0 and not masked]
        if names:
            found.append(
                f"tokens were drawn from a part of the distribution ({', '.join(names)}), and not all of them have a "
                'sampling mask: ratios are too small throughout. Record masks, record=("sampling_mask",), and '
                "renormalise the trainer's log-probs over them, or leave these parameters off"
            )
    if mean_gap > WIDE_GAP and not found:
        found.append(
            f"the mean gap is {mean_gap:.2g} nats: are these the log-probs of the same tokens, at their own places, "
            "with the weights of `weight_versions`?"
        )
    return found
