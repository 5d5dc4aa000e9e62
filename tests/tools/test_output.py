from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.tools.output import HeadTail


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
