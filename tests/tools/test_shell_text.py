from __future__ import annotations

import pytest

from prorl_zmq.tools.sessions.shell_text import evaluated

KEPT = b"\n{ __prorl_code=$?; } >/dev/null 2>&1"


@pytest.mark.parametrize(
    "command",
    [b"true", b"echo 'a", b"cat <<E\nx\nE", b"cat <<-'E' > f\n\tx\n\tE\nfalse", b"cat <<<x", b"echo a # b\n", b""],
)
def test_the_status_is_kept_where_a_failure_sets_something_off(command: bytes) -> None:
    assert evaluated(command, minds_status=False) == command
    assert evaluated(command, minds_status=True) == command + KEPT


@pytest.mark.parametrize(
    "command", [b"set -e; false && true", b"trap x ERR; false", b"set -o errexit", b"set -euo pipefail"]
)
def test_the_status_is_kept_where_the_command_itself_sets_it_up(command: bytes) -> None:
    assert evaluated(command, minds_status=False) == command + KEPT


@pytest.mark.parametrize(
    "command",
    [
        *(b"echo a |", b"echo a &&\n", b"echo a || # c\n\n# d", b"echo \\", b"f()", b"f ( )\n", b"function f", b"("),
        *(b"for i in a b", b"for i in a;", b"select x", b"for i", b"cat <<E\nx", b"cat <<E\nx\n E", b"cat << $((1))\n"),
    ],
)
def test_nothing_is_put_where_the_command_would_take_it_in(command: bytes) -> None:
    assert evaluated(command, minds_status=True) == command
