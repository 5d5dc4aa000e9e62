from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.tools.bash import BashTool, render
from prorl_zmq.tools.bash_session import BashResult, BashSession
from prorl_zmq.tools.tool import ToolArgumentsInvalid

if TYPE_CHECKING:
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


RESTARTED = "[the shell was restarted; variables, functions and jobs are lost, directory and files are kept]"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (BashResult("a\n", 0), "a\n"),
        (BashResult("", 0), "[no output]"),
        (BashResult("", 2), "[exit code 2]"),
        (BashResult("a", 2), "a\n[exit code 2]"),
        (BashResult("a\n", 130, timed_out=True), "a\n[timed out after 1.5 s; the command was stopped]"),
        (
            BashResult("", 3, restarted=True),
            "[exit code 3]\n" + RESTARTED,
        ),
    ],
)
def test_what_the_model_reads(result: BashResult, text: str) -> None:
    assert render(result, 1.5) == text


def test_a_tool_call(sandboxes: Sandboxes) -> None:
    async def main() -> None:
        sandbox = await sandboxes.create("one")
        tool = BashTool(BashSession(sandbox))
        assert await tool({"command": "echo 1 > file; cat file; (exit 4)"}, 20) == "1\n[exit code 4]"
        for arguments, message in (
            ({}, 'missing required field `command`; it takes {"command": string}'),
            ({"command": 1}, "Expected `str`, got `int` - at `$.command`"),
            ({"command": "true", "cwd": "/"}, "unknown field `cwd`"),
            ({"command": "a\0"}, "NUL"),
        ):
            with pytest.raises(ToolArgumentsInvalid, match="wrong arguments for bash") as caught:
                await tool(arguments, 20)
            assert message in str(caught.value)
        await tool.close()
        await sandbox.close()

    asyncio.run(main())
