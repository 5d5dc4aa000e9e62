from __future__ import annotations

import pytest
from live_bash import LiveContainer, use

from prorl_zmq.tools.bash import BashTool, render
from prorl_zmq.tools.sessions.bash_session import BashResult, BashSession
from prorl_zmq.tools.tool import ToolArgumentsInvalid

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


RUNNING = "[still running; give it input with `input`, wait on with an empty `input`, or end it with <ctrl-c>]"
RESTARTED = "[the shell was restarted; variables, functions and jobs are lost, directory and files are kept]"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (BashResult("a\n", 0), "a\n"),
        (BashResult("", 0), "[no output]"),
        (BashResult("", 2), "[exit code 2]"),
        (BashResult("a", 2), "a\n[exit code 2]"),
        (BashResult("a", 0, running=True), "a\n" + RUNNING),
        (BashResult("", 0, not_sent=True), "[the command had ended before this input, which was not typed]"),
        (BashResult("a\n", 0, background="b\n"), "a\n[before this command, jobs in the background wrote:]\nb\n"),
        (
            BashResult("a\n", 130, timed_out=True),
            "a\n[timed out after 1.5 s; the command and all it started were stopped]",
        ),
        (
            BashResult("", 3, restarted=True),
            "[exit code 3]\n" + RESTARTED,
        ),
    ],
)
def test_what_the_model_reads(result: BashResult, text: str) -> None:
    assert render(result, 1.5) == text


def test_a_tool_call(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        tool = BashTool(session)
        assert await tool({"command": "echo 1 > file; cat file; (exit 4)"}, 20) == "1\n[exit code 4]"
        for arguments, message in (
            ({}, "give either `command`, or `input`"),
            ({"wait_s": 1}, "give either `command`, or `input`"),
            ({"command": "true", "input": "a"}, "not both"),
            ({"command": "true", "wait_s": -1}, "Expected `float` >= 0.0 - at `$.wait_s`"),
            ({"command": 1}, "Expected `str | null`, got `int` - at `$.command`"),
            ({"command": "true", "cwd": "/"}, "unknown field `cwd`; it takes"),
            ({"command": "a\0"}, "NUL"),
            ({"input": "a"}, "no command is running"),
        ):
            with pytest.raises(ToolArgumentsInvalid, match="wrong arguments for bash") as caught:
                await tool(arguments, 20)
            assert message in str(caught.value)
        await tool.close()

    use(live_container, body)


def test_a_conversation(live_container: LiveContainer) -> None:
    async def body(session: BashSession) -> None:
        tool = BashTool(session)
        assert await tool({"command": "read a; echo got $a; cat", "wait_s": 0.05}, 20) == RUNNING
        with pytest.raises(ToolArgumentsInvalid, match="still runs"):
            await tool({"command": "true"}, 20)
        assert await tool({"input": "x<enter>"}, 20) == f"got x\n{RUNNING}"
        assert await tool({"command": "", "input": "", "wait_s": 0}, 20) == RUNNING
        assert await tool({"input": "<ctrl-c>", "wait_s": 20}, 20) == "\n[exit code 130]"

    use(live_container, body)
