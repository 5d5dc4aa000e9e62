from __future__ import annotations

import asyncio

import pytest

from prorl_zmq.tools.think import ThinkTool
from prorl_zmq.tools.tool import ToolArgumentsInvalid


def test_a_thought_is_taken() -> None:
    tool = ThinkTool()
    assert not tool.ends_episode
    assert asyncio.run(tool({"thought": "The bug is in line 3."}, 5)) == "Noted."
    with pytest.raises(ToolArgumentsInvalid, match=r'it takes \{"thought": string\}'):
        tool.check({"thought": ["a"]})
