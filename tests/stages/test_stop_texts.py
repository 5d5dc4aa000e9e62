"""Where a text ends a turn: found among the tokens, whatever the engine made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.tokenizer import decode, encode
from prorl_zmq.stages.turn_sampler import cut_at
from prorl_zmq.wire.messages.engines import VersionSpan


def said(text: str) -> Generation:
    ids = encode(text)
    half = len(ids) // 2
    spans = [VersionSpan(4, 0, half), VersionSpan(5, half, len(ids))]
    logprobs = -np.arange(len(ids), dtype=np.float32)
    return Generation(ids, logprobs, tuple(span for span in spans if span.end > span.start), "length", 7)


@pytest.mark.parametrize("texts", [(), ("never",)])
def test_a_turn_without_the_text_is_left_alone(texts: tuple[str, ...]) -> None:
    generation = said("one two three")
    assert cut_at(generation, texts, decode) is generation


@given(st.text(max_size=20), st.text(min_size=1, max_size=5), st.text(max_size=20))
def test_the_cut_is_behind_the_token_that_completes_the_text(before: str, text: str, behind: str) -> None:
    if "\ufffd" in before + text + behind or any(0xD800 <= ord(c) < 0xE000 for c in before + text + behind):
        return  # stands for half a character, too
    generation = said(before + text + behind)
    cut = cut_at(generation, (text,), decode)
    count = len(cut.token_ids)
    assert text in decode(cut.token_ids)
    assert text not in decode(cut.token_ids[:-1])
    assert cut.token_ids.tolist() == generation.token_ids[:count].tolist()
    assert cut.logprobs.tolist() == generation.logprobs[:count].tolist()
    assert [cut.spans[0].start, cut.spans[-1].end] == [0, count]
    assert (cut.finish_reason, cut.cached_tokens) == ("stop", 7)


def test_the_first_of_several_texts_counts() -> None:
    assert decode(cut_at(said("one two three"), ("three", "two"), decode).token_ids) == "one two"
