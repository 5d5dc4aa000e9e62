"""Forms that tag arguments, and do not quote them."""

from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "properties": {"path": {"type": "string"}, "new": {"type": "string"}, "n": {"type": "number"}}
            },
        },
    }
]
EDIT = ToolCall("edit", {"path": "a.py", "new": "  x\n", "n": 3})
QWEN = FORMS["qwen3_coder"].parse


def qwen(*parts: str) -> list[ToolCall | MalformedCall]:
    return QWEN("\n".join(parts), TOOLS)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("parameter", ["</parameter>\n", ""])
def test_marks_may_be_missing(opened: bool, closed: bool, parameter: str) -> None:
    text = "I edit.\n" + "<tool_call>\n" * opened
    text += f"<function=edit>\n<parameter=path>\na.py\n{parameter}<parameter=new>\n  x\n\n{parameter}<parameter=n>\n3\n"
    text += "</parameter>\n</function>" + "\n</tool_call>" * closed
    assert QWEN(text, TOOLS) == [EDIT]


def test_the_last_parameter_may_be_unclosed() -> None:
    assert qwen("<tool_call>", "<function=edit>", "<parameter=n>", "3", "</function>", "</tool_call>") == [
        ToolCall("edit", {"n": 3})
    ]


@pytest.mark.parametrize(
    "new",
    [
        "</parameter> here",
        "a\n<parameter=other>\nb",
        "a </function> </tool_call> b",
        "</parameter></function> is how a call ends",
        "x\n</parameter>\ny",
    ],
)
def test_marks_in_a_value_are_text(new: str) -> None:
    parts = ["<tool_call>", "<function=edit>", "<parameter=new>", new, "</parameter>", "</function>", "</tool_call>"]
    assert qwen(*parts, *parts) == [ToolCall("edit", {"new": new})] * 2


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("qwen3_coder", '<tool_call>{"name": "edit"}</tool_call>', "<function=NAME> does not follow <tool_call>"),
        ("qwen3_coder", "<tool_call><function=edit><parameter=n>3", "parameter n is not closed"),
        ("qwen3_coder", "<tool_call><function=edit>", "not closed with </function>"),
        ("seed_oss", "<seed:tool_call><function=edit>", "not closed with </function>"),
        ("glm", "<tool_call><arg_key>", "no name follows <tool_call>"),
        ("glm", "<tool_call>edit<arg_key>n</arg_key><arg_value>3", "the value of n is not closed"),
        ("glm", "<tool_call>edit<arg_key>n</arg_key><arg_value>3</arg_value>", "not closed with </tool_call>"),
        ("minimax_m2", "<minimax:tool_call>edit", "no call follows <minimax:tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="edit"><parameter name="n">3', "parameter n is not closed"),
        ("dsml", '<｜DSML｜tool_calls><｜DSML｜invoke name="edit">', "is not closed"),
        ("minimax_m3", "]<]minimax[>[<tool_call>edit", "no call follows"),
        ("minimax_m3", ']<]minimax[>[<invoke name="edit">]<]minimax[>[<n>3', "n is not closed"),
        ("kimi_k3", "<|open|>tools<|sep|>edit", "no call follows"),
        ("kimi_k3", '<|open|>call tool="edit" index="1"<|sep|>', "not closed with <|close|>call<|sep|>"),
        ("gemma4", "<|tool_call>edit", "call:NAME{…} does not follow"),
        ("gemma4", '<|tool_call>call:edit{n:<|"|>3', "a string is not closed"),
        ("gemma4", "<|tool_call>call:edit{n:3", "not closed with }"),
        ("gemma4", "<|tool_call>call:edit{n:" + "[" * 1000, "nested too deep"),
        ("gemma4", "<|tool_call>call:edit{n:}", "a value is missing"),
    ],
)
def test_malformed_call_says_what_was_wrong_and_how_to_write_it(form: str, text: str, said: str) -> None:
    (call,) = FORMS[form].parse(text, TOOLS)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert FORMS[form].example in call.feedback


@pytest.mark.parametrize("suffix", ["", ":opensource"])
@pytest.mark.parametrize("line", ["", "\n"])
def test_tags_of_glm_and_hy3(suffix: str, line: str) -> None:
    arguments = line.join(
        f"<arg_key{suffix}>{key}</arg_key{suffix}>{line}<arg_value{suffix}>{value}</arg_value{suffix}>"
        for key, value in EDIT.arguments.items()
    )
    separator = f"<tool_sep{suffix}>" if suffix else ""
    text = f"<tool_call{suffix}>edit{separator}{line}{arguments}{line}</tool_call{suffix}>"
    assert FORMS["glm"].parse(text, TOOLS) == [EDIT]


@pytest.mark.parametrize(
    ("written", "value"),
    [('string="true">3', "3"), ('string="false">3', 3), ('string="false">3 or 4', "3 or 4"), (">3", 3.0)],
)
def test_attributes_of_deepseek_say_what_is_text(written: str, value: Any) -> None:
    text = f'<｜DSML｜invoke name="edit"><｜DSML｜parameter name="n" {written}</｜DSML｜parameter></｜DSML｜invoke>'
    assert FORMS["dsml"].parse(text.replace('" >', '">'), TOOLS) == [ToolCall("edit", {"n": value})]


def test_a_section_of_minicpm_may_hold_its_own_marks() -> None:
    new = '</param></function> and <param name="n">'
    text = f'<function name="edit"><param name="new"><![CDATA[{new}]]></param><param name="n">3</param></function>'
    assert FORMS["minicpm5"].parse(text, TOOLS) == [ToolCall("edit", {"new": new, "n": 3})]


def test_parts_of_minimax_m3_have_types() -> None:
    properties = {"a": {"type": "array", "items": {"type": "integer"}}, "o": {"properties": {"b": {"type": "boolean"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    form = FORMS["minimax_m3"]
    arguments = {"a": [1, 2], "o": {"b": True, "s": "x"}}
    assert form.parse(form.write("f", arguments), tools) == [ToolCall("f", arguments)]


@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [
        ("muse", " to=self<|message|>T<|eom|><|start|>assistant to=user<|message|>S", ("T", "S")),
        (
            "inkling",
            "<|content_thinking|>T<|end_message|><|message_model|><|content_text|>S<|end_message|>",
            ("T", "S"),
        ),
        ("solar_open", "<|think|>T<|end|><|begin|>assistant<|content|>S", ("T", "S")),
        ("kimi_k3", "T<|close|>think<|sep|><|open|>response<|sep|>S<|close|>response<|sep|>", ("T", "S")),
        ("kimi_k3", "S<|close|>response<|sep|>", (None, "S")),
    ],
)
def test_turns_of_several_messages_are_split(form: str, text: str, parts: tuple[str | None, str]) -> None:
    split = FORMS[form].split(text)
    assert split is not None
    assert (split[0], FORMS[form].before_calls(split[1])) == parts


def test_blanks_behind_a_name_are_read_once() -> None:
    parse = FORMS["glm"].parse
    (call,) = parse(f"<tool_call>edit{' ' * 300_000}x", TOOLS)
    assert isinstance(call, MalformedCall)
    text = f"<tool_call>edit{' ' * 300_000}<tool_sep> <arg_key>n</arg_key><arg_value>3</arg_value></tool_call>"
    assert parse(text, TOOLS) == [ToolCall("edit", {"n": 3})]
