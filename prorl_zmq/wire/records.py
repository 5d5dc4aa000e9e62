"""Records: what a job may have recorded beside its tokens, log-probs and weight versions.

A job names them in its `record`, as `top_logprobs:K`, `sampling_mask` and `experts`. An engine offers a record by its
name, without the number. `Job.teacher` adds the record `teacher`, which another model gives when RUN has ended.

    top_logprobs    `top_ids` int32 [G, K], `top_logprobs` float32 [G, K]: of each generated token's distribution the K
                    likeliest tokens, the likeliest first, of the same distribution as the token's own log-prob. Where
                    fewer than K tokens could be drawn, the rest of the row is `NO_TOKEN` and `NO_LOGPROB`.
    sampling_mask   `mask_ids` int32 [M], `mask_counts` int32 [G]: the tokens that top-k, top-p and min-p left, one
                    generated token's after the other; the drawn one is among them.
    experts         `experts` uint8 or uint16 [R, layers, k]: the experts that a mixture's routers chose. Row i is the
                    route of token i as input, that is of the prediction of token i + 1, so the last token has no row.
                    Layers without experts are zero throughout.
    teacher         `teacher_logprobs` float32 [R], `teacher_top_ids` int32 [R, K], `teacher_top_logprobs` float32
                    [R, K]: of each token but a segment's first, at temperature 1, given the tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .messages.jobs import Sampling

TOP_LOGPROBS: Final = "top_logprobs"
SAMPLING_MASK: Final = "sampling_mask"
EXPERTS: Final = "experts"
TEACHER: Final = "teacher"
RECORD_NAMES: Final = (TOP_LOGPROBS, SAMPLING_MASK, EXPERTS)
"""Those of engines, which `Job.record` names."""
RECORD_TOP_LIMIT: Final = 1024
"""Largest K of `top_logprobs:K`; an engine may have a smaller limit."""
NO_TOKEN: Final = -1
NO_LOGPROB: Final = -9999.0
"""A finite number in place of minus infinity, whose exponential is 0."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A parsed `record`."""

    top: int = 0
    """K of `top_logprobs:K`; 0: not recorded."""
    mask: bool = False
    experts: bool = False

    @classmethod
    def parse(cls, record: Sequence[str]) -> Recorded:
        """Parse the `record` of a job or of a generation.

        Raises:
            ValueError: a name is unknown or given twice, or K is missing, unexpected or outside of 1 to
                `RECORD_TOP_LIMIT`.
        """
        numbers: dict[str, str] = {}
        for form in record:
            name, _, number = form.partition(":")
            if name not in RECORD_NAMES:
                raise ValueError(f"unknown record {form!r}; records are top_logprobs:K, sampling_mask and experts")
            if name in numbers:
                raise ValueError(f"the record {name} is named twice: {', '.join(record)}")
            if name != TOP_LOGPROBS and form != name:
                raise ValueError(f"the record {name} has no number, not {form!r}")
            numbers[name] = number
        top = numbers.get(TOP_LOGPROBS, "1")
        if not (top.isascii() and top.isdecimal() and len(top) <= 4 and 0 < int(top) <= RECORD_TOP_LIMIT):
            raise ValueError(
                f"top_logprobs needs a number from 1 to {RECORD_TOP_LIMIT}, such as top_logprobs:20, not {top!r}"
            )
        return cls(int(top) if TOP_LOGPROBS in numbers else 0, SAMPLING_MASK in numbers, EXPERTS in numbers)

    def conflict(self, sampling: Sampling) -> str:
        """Return why a generation with this sampling cannot have these records; empty if it can."""
        narrow = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        if self.mask and (sampling.temperature == 0 or not narrow):
            return (
                "sampling_mask needs top_p, top_k or min_p, and a temperature above 0: otherwise tokens are not drawn "
                "from a part of the distribution"
            )
        return ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that an engine must offer."""
        asked = (self.top > 0, self.mask, self.experts)
        return tuple(name for name, on in zip(RECORD_NAMES, asked, strict=True) if on)


NO_RECORDS: Final = Recorded()


def teacher_of(asked: str) -> tuple[str, int]:
    """Return the model and the number of likeliest tokens of a job's `teacher`, which is not empty."""
    model, _, top = asked.partition(":")
    return model, int(top or 0)
