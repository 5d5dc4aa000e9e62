from __future__ import annotations

import asyncio

import pytest

from prorl_zmq.tools.think_and_finish import FinishTool, ThinkTool
from prorl_zmq.tools.tool import ToolArgumentsInvalid


def test_a_thought_is_taken() -> None:
    tool = ThinkTool()
    assert not tool.ends_episode
    assert asyncio.run(tool({"thought": "The bug is in line 3."}, 5)) == "Noted."
    with pytest.raises(ToolArgumentsInvalid, match=r'it takes \{"thought": string\}'):
        tool.check({"thought": ["a"]})


def test_the_text_of_finish_is_the_message() -> None:
    tool = FinishTool()
    assert tool.ends_episode
    assert asyncio.run(tool({"message": "All tests pass."}, 5)) == "All tests pass."
    with pytest.raises(ToolArgumentsInvalid, match=r'it takes \{"message": string\}'):
        tool.check({})
