from __future__ import annotations

from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FENCED

PARSE = FENCED.parse


def test_blocks_between_words() -> None:
    text = 'First\n```tool_call\n{"name": "a", "arguments": {"x": "```"}}\n```\nthen\n```tool_call\n{"name": "b"}\n```'
    assert PARSE(text) == [ToolCall("a", {"x": "```"}), ToolCall("b")]
    assert FENCED.before_calls(text) == "First"


def test_blocks_of_other_languages_and_fences_within_a_line_are_no_calls() -> None:
    assert PARSE('```json\n{"name": "a"}\n```\nWrite ```tool_call to call.') == []


def test_a_broken_block_beside_a_good_one() -> None:
    broken, good, open_ = PARSE('```tool_call\nls\n```\n```tool_call\n{"name": "b"}\n```\n```tool_call\n{"name": "c"}')
    assert isinstance(broken, MalformedCall)
    assert "could not be read" in broken.feedback
    assert '```tool_call\n{"name": "NAME", "arguments": {…}}\n```' in broken.feedback
    assert good == ToolCall("b")
    assert isinstance(open_, MalformedCall)
    assert "not closed" in open_.feedback
