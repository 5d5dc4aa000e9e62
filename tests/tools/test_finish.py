from __future__ import annotations

import asyncio

import pytest

from prorl_zmq.tools.finish import FinishTool
from prorl_zmq.tools.tool import ToolArgumentsInvalid


def test_its_text_is_the_message() -> None:
    tool = FinishTool()
    assert tool.ends_episode
    assert asyncio.run(tool({"message": "All tests pass."}, 5)) == "All tests pass."
    with pytest.raises(ToolArgumentsInvalid, match=r'it takes \{"message": string\}'):
        tool.check({})
