from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.tools.processes.output import HeadTail


@given(st.lists(st.binary(max_size=50)), st.integers(2, 60))
def test_head_and_tail_are_kept_whatever_the_pieces(pieces: list[bytes], limit: int) -> None:
    output = HeadTail(limit)
    for piece in pieces:
        output.append(piece)
    whole = b"".join(pieces)
    half = limit // 2
    if len(whole) <= 2 * half:
        assert output.dropped_bytes == 0
        assert output.content() == whole
    else:
        assert output.dropped_bytes == len(whole) - 2 * half
        note = b"\n[... %d bytes left out ...]\n" % output.dropped_bytes
        assert output.content() == whole[:half] + note + whole[-half:]
    output.clear()
    assert output.content() == b""


@given(st.text(max_size=40), st.lists(st.integers(0, 160), max_size=6))
def test_text_that_is_taken_in_pieces_is_whole(text: str, cuts: list[int]) -> None:
    data = text.encode()
    output = HeadTail(1000)
    taken = ""
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        output.append(data[start:end])
        piece, dropped = output.take(more=True)
        taken += piece
        assert dropped == 0
    assert taken + output.take(more=False)[0] == text


def test_bytes_that_are_no_text_are_replaced_and_never_wait() -> None:
    output = HeadTail(1000)
    output.append(b"a\xffb\xe2\x98")
    assert output.take(more=True) == ("a\ufffdb", 0)
    assert output.take(more=True) == ("", 0)
    assert output.take(more=False) == ("\ufffd", 0)
    assert output.take(more=False) == ("", 0)


def test_what_was_left_out_is_counted_once() -> None:
    output = HeadTail(10)
    output.append(b"x" * 100)
    assert output.take(more=True) == ("xxxxx\n[... 90 bytes left out ...]\nxxxxx", 90)
    output.append(b"y")
    assert output.take(more=False) == ("y", 0)
