"""How a job names its records."""

from __future__ import annotations

import pytest

from prorl_zmq.wire.messages.jobs import Sampling
from prorl_zmq.wire.records import Recorded


def test_a_record_is_named_with_its_number() -> None:
    assert Recorded.parse(()) == Recorded()
    assert Recorded.parse(("experts", "top_logprobs:20")) == Recorded(top=20, experts=True)
    assert Recorded.parse(("sampling_mask",)).names == ("sampling_mask",)
    assert Recorded(3, mask=True, experts=True).names == ("top_logprobs", "sampling_mask", "experts")


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (("routes",), "unknown record 'routes'"),
        (("experts", "experts"), "named twice"),
        (("top_logprobs:2", "top_logprobs:3"), "named twice"),
        (("experts:3",), "experts has no number"),
        (("experts:",), "experts has no number"),
        (("top_logprobs",), "from 1 to 1024"),
        (("top_logprobs:0",), "from 1 to 1024"),
        (("top_logprobs:1025",), "from 1 to 1024"),
        (("top_logprobs:-1",), "from 1 to 1024"),
        (("top_logprobs:٣",), "from 1 to 1024"),
    ],
)
def test_a_wrong_form_says_what_is_wrong(record: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Recorded.parse(record)


def test_a_mask_needs_sampling_from_a_part_of_the_distribution() -> None:
    masked = Recorded(mask=True)
    for narrow in (Sampling(top_p=0.9), Sampling(top_k=5), Sampling(min_p=0.1)):
        assert not masked.conflict(narrow)
    for whole in (Sampling(), Sampling(0.0, top_p=0.9)):
        assert "sampling_mask needs top_p, top_k or min_p" in masked.conflict(whole)
        assert not Recorded(top=5, experts=True).conflict(whole)
