from __future__ import annotations

import asyncio

import pytest
from scripted_model import PROMPT_IDS, TOKEN_IDS, USAGE, ScriptedModel, served, turn

from prorl_zmq.data.trajectory import Role
from prorl_zmq.model_proxy.calls import CallRefused, Problem, RequestCall, RequestMessage
from prorl_zmq.model_proxy.dialects.chat_completions import ChatCompletions

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "List the files."}]


def read(**body: object) -> object:
    return ChatCompletions().read({"messages": QUESTION, **body}, {})


def test_a_conversation_is_read_in_the_forms_that_harnesses_send() -> None:
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "call_prt0123456789abcdef_0", "function": {"name": "bash", "arguments": '{"a": '}}
        ]},
        {"role": "tool", "tool_call_id": "call_prt0123456789abcdef_0", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "x": {}}, {"type": "text", "text": "b"}]},
    ]  # fmt: skip
    request = read(messages=messages, max_tokens=5, max_completion_tokens=6, stop="END", temperature=1, top_p=None)
    assert request.messages == (
        RequestMessage(Role.SYSTEM, "Be short."),
        RequestMessage(Role.USER, "List the files."),
        RequestMessage(
            Role.ASSISTANT,
            reasoning="hm",
            calls=(RequestCall("call_prt0123456789abcdef_0", "bash", '{"a": '),),
            turn_ids=("prt0123456789abcdef",),
        ),
        RequestMessage(Role.TOOL, "x", call_id="call_prt0123456789abcdef_0"),
        RequestMessage(Role.USER, "a\nb"),
    )
    assert (request.max_tokens, request.stop, request.sampling) == (6, ("END",), {"temperature": 1.0})


def test_tools_stay_whatever_the_choice_is() -> None:
    assert read(tools=[*TOOLS, {"type": "web_search"}], tool_choice="none").tools == tuple(TOOLS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 2}, "n must be 1"),
        ({"max_tokens": 0}, "1 or more"),
        ({"messages": "hi"}, r"messages"),
        ({"messages": [{"role": "king"}]}, r"messages\[0\] has the role 'king'"),
        ({"stop": 3}, r"\$\.stop"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\]\.function .*`name`"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, r"tools\[0\]\.function has no name"),
        ({"tools": [{"function": {"name": "a", "parameters": []}}]}, r"\$\.parameters"),
    ],
)
def test_wrong_requests_are_refused_with_the_field(body: dict[str, object], words: str) -> None:
    with pytest.raises(CallRefused, match=words) as caught:
        read(**body)
    assert caught.value.problem == Problem.INVALID


def test_the_exact_tokens_come_in_vllms_form() -> None:
    reply = turn("hi")
    dialect = ChatCompletions()
    written = dialect.write(read(logprobs=True, return_token_ids=True), reply, "policy")
    assert written["prompt_token_ids"] == PROMPT_IDS.tolist()
    choice = written["choices"][0]
    assert choice["token_ids"] == TOKEN_IDS.tolist()
    assert choice["logprobs"]["content"][0] == {
        "token": "token_id:7",
        "logprob": -0.5,
        "bytes": None,
        "top_logprobs": [],
    }
    assert "token_ids" not in dialect.write(read(), reply, "policy")["choices"][0]


def test_the_usage_is_that_of_the_engine() -> None:
    assert ChatCompletions().write(read(), turn("hi"), "policy")["usage"] == {
        "prompt_tokens": USAGE.prompt,
        "completion_tokens": USAGE.generated,
        "total_tokens": USAGE.prompt + USAGE.generated,
        "prompt_tokens_details": {"cached_tokens": USAGE.cached},
        "completion_tokens_details": {"reasoning_tokens": USAGE.reasoning},
    }


@pytest.mark.xdist_group("SDKs of models")
@pytest.mark.parametrize("streamed", [False, True])
def test_openais_sdk_has_a_conversation(streamed: bool) -> None:
    import openai

    called = turn("I look.", ("bash", '{"command": "ls"}'), ("bash", '{"command": '), reasoning="Let me see.")

    async def main() -> None:
        model = ScriptedModel(called, turn("Two files.", finish_reason="length"))
        async with served(model) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:

            async def ask(messages: list[object]) -> object:
                asked = {"model": "gpt-9", "messages": messages, "tools": TOOLS}
                if not streamed:
                    return await client.chat.completions.create(**asked)
                async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                    async for _ in stream:
                        pass
                    return stream.current_completion_snapshot

            first = await ask(QUESTION)
            message = first.choices[0].message
            assert first.model == "policy"
            assert first.choices[0].finish_reason == "tool_calls"
            assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (USAGE.prompt, USAGE.generated)
            back = message.model_dump(exclude_none=True)
            for call in back["tool_calls"]:
                call.pop("index", None)
                call["function"].pop("parsed_arguments", None)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
                for i, call in enumerate(message.tool_calls)
            ]
            second = await ask([*QUESTION, back, *results])
            assert second.choices[0].message.content == "Two files."
            assert second.choices[0].finish_reason == "length"
        assert model.delivered == [True, True]
        ids = [call.call_id for call in called.calls]
        assert model.requests[1].messages[2:] == (
            RequestMessage(
                Role.ASSISTANT,
                "I look.",
                "Let me see.",
                tuple(RequestCall(call.call_id, call.name, call.arguments) for call in called.calls),
                turn_ids=(called.turn_id,),
            ),
            RequestMessage(Role.TOOL, "result 0", call_id=ids[0]),
            RequestMessage(Role.TOOL, "result 1", call_id=ids[1]),
        )

    asyncio.run(main())
