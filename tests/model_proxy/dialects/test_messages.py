from __future__ import annotations

import asyncio

import pytest
from scripted_model import USAGE, ScriptedModel, served, turn

from prorl_zmq.data.trajectory import Role
from prorl_zmq.model_proxy.calls import CallRefused, Problem, RequestCall, RequestMessage
from prorl_zmq.model_proxy.dialects.messages import Messages

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [{"name": "Bash", "description": "Run.", "input_schema": SCHEMA}]
QUESTION = [{"role": "user", "content": "List the files."}]
ID = "prt0123456789abcdef"
THINKING = {"type": "enabled", "budget_tokens": 1024}


def read(**body: object) -> object:
    return Messages().read({"messages": QUESTION, "max_tokens": 100, **body}, {})


def test_a_conversation_is_read_in_the_forms_that_claude_code_sends() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "A reminder."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": f"{ID}A"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": f"call_{ID}_0", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": f"call_{ID}_1", "name": "Bash",
             "input": {"__unparsedToolInput": {"raw": '{"comm', "len": 6}}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": f"call_{ID}_0", "content": [
                {"type": "text", "text": "x"}, {"type": "tool_reference", "tool_name": "Grep"}], "is_error": False},
            {"type": "tool_result", "tool_use_id": f"call_{ID}_1"},
            {"type": "text", "text": "Go on.", **cached},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"}, {"type": "text", "text": "Short."}]
    request = read(messages=messages, system=system, stop_sequences=["END"], context_management={"edits": []})
    assert request.messages == (
        RequestMessage(Role.SYSTEM, "Short."),
        RequestMessage(Role.USER, "a\nb"),
        RequestMessage(Role.SYSTEM, "A reminder."),
        RequestMessage(
            Role.ASSISTANT,
            "I look.",
            "hm",
            (
                RequestCall(f"call_{ID}_0", "Bash", '{"command":"ls"}'),
                RequestCall(f"call_{ID}_1", "Bash", '{"comm'),
            ),
            turn_ids=(ID,),
        ),
        RequestMessage(Role.TOOL, "x\nGrep", call_id=f"call_{ID}_0"),
        RequestMessage(Role.TOOL, "", call_id=f"call_{ID}_1"),
        RequestMessage(Role.USER, "Go on."),
    )
    assert (request.max_tokens, request.stop) == (100, ("END",))


def test_anthropics_own_tools_are_not_offered() -> None:
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}, {"name": "L", "input_schema": {},
             "defer_loading": True}]  # fmt: skip
    assert [tool["function"]["name"] for tool in read(tools=tools).tools] == ["Bash", "L"]
    assert read(tools=TOOLS).tools == (
        {"type": "function", "function": {"name": "Bash", "description": "Run.", "parameters": SCHEMA}},
    )


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_who_did_not_enable_thinking_gets_the_text_first(thinking: object) -> None:
    written = Messages().write(read(thinking=thinking), turn("hi", reasoning="hm"), "policy")
    assert written["content"] == [{"type": "text", "text": "hi"}]


def test_a_whole_reply_with_cut_arguments_says_what_they_were() -> None:
    written = Messages().write(read(), turn("", ("Bash", '{"comm')), "policy")
    assert written["content"][0]["input"] == {"__unparsedToolInput": {"raw": '{"comm', "len": 6}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"max_tokens": "many"}, r"\$\.max_tokens"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_with_the_field(body: dict[str, object], words: str) -> None:
    with pytest.raises(CallRefused, match=words) as caught:
        read(**body)
    assert caught.value.problem == Problem.INVALID


@pytest.mark.few(1)
@pytest.mark.xdist_group("SDKs of models")
@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_sdk_has_a_conversation(streamed: bool) -> None:
    import anthropic

    called = turn("I look.", ("Bash", '{"command": "ls"}'), ("Bash", "{}"), reasoning="Let me see.")

    async def main() -> None:
        model = ScriptedModel(called, turn("Two files.", finish_reason="length"))
        async with served(model) as url, anthropic.AsyncAnthropic(base_url=f"{url}/s/x", api_key="any") as client:

            async def ask(messages: list[object]) -> object:
                asked = {"model": "claude-9", "messages": messages, "tools": TOOLS, "max_tokens": 2048}
                if not streamed:
                    return await client.messages.create(**asked, thinking=THINKING)
                async with client.messages.stream(**asked, thinking=THINKING) as stream:
                    return await stream.get_final_message()

            first = await ask(QUESTION)
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert (first.stop_reason, first.model) == ("tool_use", "policy")
            assert first.content[2].input == {"command": "ls"}
            usage = first.usage
            assert usage.input_tokens + usage.cache_read_input_tokens == USAGE.prompt
            assert usage.output_tokens == USAGE.generated
            results = [
                {"type": "tool_result", "tool_use_id": call.call_id, "content": f"result {i}"}
                for i, call in enumerate(called.calls)
            ]
            back = {"role": "assistant", "content": first.content}
            second = await ask([*QUESTION, back, {"role": "user", "content": results}])
            assert (second.content[-1].text, second.stop_reason) == ("Two files.", "max_tokens")
            counted = await client.messages.count_tokens(model="claude-9", messages=QUESTION)
            assert counted.input_tokens == USAGE.prompt
        assert model.delivered == [True, True]
        assert model.requests[1].messages[1:] == (
            RequestMessage(
                Role.ASSISTANT,
                "I look.",
                "Let me see.",
                (
                    RequestCall(called.calls[0].call_id, "Bash", '{"command":"ls"}'),
                    RequestCall(called.calls[1].call_id, "Bash", "{}"),
                ),
                turn_ids=(called.turn_id,),
            ),
            *(RequestMessage(Role.TOOL, f"result {i}", call_id=call.call_id) for i, call in enumerate(called.calls)),
        )

    asyncio.run(main())


@pytest.mark.xdist_group("SDKs of models")
def test_a_stream_tells_the_prompt_first_and_cut_arguments_as_they_are() -> None:
    import anthropic

    async def main() -> None:
        model = ScriptedModel(turn("", ("Bash", '{"comm'), finish_reason="length"))
        async with served(model) as url, anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:
            asked = {"model": "m", "messages": QUESTION, "max_tokens": 9, "stream": True}
            events = [event async for event in await client.messages.create(**asked)]
        assert events[0].message.usage.input_tokens == USAGE.prompt
        assert [event.delta.partial_json for event in events if event.type == "content_block_delta"] == ['{"comm']

    asyncio.run(main())
