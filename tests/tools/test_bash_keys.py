from __future__ import annotations

import pytest

from prorl_zmq.tools.bash import KEYS, typed


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", b""),
        ("yes\n", b"yes\n"),
        ("yes<enter>", b"yes\r"),
        ("<ctrl-c><CTRL-D><Ctrl-z>", b"\x03\x04\x1a"),
        ("<ctrl-\\>", b"\x1c"),
        ("<up><esc>:wq<enter>", b"\x1b[A\x1b:wq\r"),
        ("a < b > c <b> <> << <enter <ctrl-1>", b"a < b > c <b> <> << <enter <ctrl-1>"),
        ("<lt>enter>", b"<enter>"),
        ("ü\udc80", "ü?".encode()),
    ],
)
def test_text_with_keys(text: str, data: bytes) -> None:
    assert typed(text) == data


def test_every_key_by_itself() -> None:
    for name, data in KEYS.items():
        assert typed(f"<{name}>") == data
    assert typed("".join(f"<{name}>" for name in KEYS)) == b"".join(KEYS.values())
