from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.wire.json_bounds import json_values

VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.characters(), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)


def count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))


@given(VALUES, st.booleans(), st.integers(0, 30))
def test_no_text_has_more_values_than_are_counted(value: Any, ascii_only: bool, limit: int) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    values = json_values(data, limit)
    assert values >= count(value) or values > limit
    assert values <= 2 * count(value) + 1


@given(st.binary(max_size=99))
def test_any_bytes_are_counted(data: bytes) -> None:
    assert json_values(data, 9) >= 1


def test_what_stands_in_texts_is_no_value() -> None:
    assert json_values(json.dumps({"a": '1,2,[3,{"b": \\\\"4"'}).encode(), 9) == 2
    assert json_values(b'"",' * 1000, 9) == 10
