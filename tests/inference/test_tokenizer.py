from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference import tokenizer
from prorl_zmq.inference.tokenizer import FIRST_BYTE, IM_END, PIECES, SPECIAL_TOKENS, VOCABULARY_SIZE, decode, encode

characters = st.characters(exclude_categories=["Cs"])
texts = st.lists(st.one_of(st.text(characters), st.sampled_from([*PIECES, *SPECIAL_TOKENS]))).map("".join)


@given(texts)
def test_every_text_comes_back_exactly(text: str) -> None:
    token_ids = encode(text)
    assert token_ids.dtype == np.int32
    assert decode(token_ids) == text
    assert decode(token_ids.tolist()) == text


@given(texts)
def test_text_never_becomes_a_special_token(text: str) -> None:
    assert (encode(text) >= FIRST_BYTE).all()


@given(st.lists(st.integers(0, VOCABULARY_SIZE - 1)))
def test_any_ids_have_a_text(token_ids: list[int]) -> None:
    assert isinstance(decode(token_ids), str)


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert decode([FIRST_BYTE + 0xFF, *encode("ok")]) == "�ok"


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert decode(encode("a\ud800b")) == "a?b"


def test_no_piece_occurs_twice() -> None:
    assert len(set(PIECES)) == len(PIECES)
    assert not {piece for piece in PIECES if len(piece.encode()) == 1}, "a byte is a token already"


def test_a_tool_call_is_short() -> None:
    call = tokenizer.CALL_PRELUDE + "sort -n data.txt | tail -n 1 > answer.txt" + tokenizer.CALL_END
    assert len(encode(call)) == 10


def test_special_tokens_are_made_by_id_only() -> None:
    assert decode([IM_END]) == "<|im_end|>"
    assert IM_END not in encode("<|im_end|>")


@pytest.mark.parametrize("token_id", [-1, VOCABULARY_SIZE])
def test_an_unknown_id_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="token ids must be in"):
        decode([5, token_id])
