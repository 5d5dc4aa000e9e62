from __future__ import annotations

import asyncio

import pytest
from scripted_model import USAGE, ScriptedModel, served, turn

from prorl_zmq.data.trajectory import Role
from prorl_zmq.model_proxy.calls import CallRefused, Problem, RequestCall, RequestMessage
from prorl_zmq.model_proxy.dialects.responses import Responses

EMPTY = {"type": "object", "properties": {}}
BASH = {"type": "function", "name": "bash", "description": "Run.", "parameters": EMPTY, "strict": False}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": {"type": "grammar"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [{**BASH, "name": "spawn"}]}
TOOLS = [BASH, PATCH, AGENTS, {"type": "web_search"}]
QUESTION = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
    {"role": "user", "content": "List the files."},
]
ID = "prt0123456789abcdef"


def read(**body: object) -> object:
    return Responses().read({"input": QUESTION, **body}, {})


def test_tools_become_functions_with_names_of_their_own() -> None:
    functions = [tool["function"] for tool in read(tools=TOOLS).tools]
    assert [function["name"] for function in functions] == ["bash", "apply_patch", "agents__spawn"]
    assert functions[0] == {"name": "bash", "description": "Run.", "parameters": EMPTY}
    assert list(functions[1]["parameters"]["properties"]) == ["input"]


def test_two_tools_of_one_name_are_told_apart() -> None:
    request = read(tools=[{**BASH, "name": "agents__spawn"}, AGENTS])
    assert [tool["function"]["name"] for tool in request.tools] == ["agents__spawn", "agents__spawn_"]
    called = Responses().write(request, turn("", ("agents__spawn_", "{}")), "policy")["output"][0]
    assert (called["name"], called["namespace"]) == ("spawn", "agents")


def test_items_of_one_turn_are_one_message() -> None:
    items = [
        *QUESTION,
        {"type": "reasoning", "id": f"rs_{ID}", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "id": f"msg_{ID}", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "id": f"fc_{ID}_0", "call_id": "a", "namespace": "agents", "name": "spawn",
         "arguments": '{"x": '},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "custom_tool_call", "id": f"ctc_{ID}_1", "call_id": "b", "name": "apply_patch", "input": "*** End"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "patched"},
    ]  # fmt: skip
    request = read(input=items, instructions="Sir.", max_output_tokens=9)
    assert request.max_tokens == 9
    assert request.messages == (
        RequestMessage(Role.SYSTEM, "Sir."),
        RequestMessage(Role.SYSTEM, "Be short."),
        RequestMessage(Role.USER, "List the files."),
        RequestMessage(
            Role.ASSISTANT,
            "I",
            "hm",
            (RequestCall("a", "agents__spawn", '{"x": '), RequestCall("b", "apply_patch", '{"input":"*** End"}')),
            turn_ids=(ID,),
        ),
        RequestMessage(Role.TOOL, "done", call_id="a"),
        RequestMessage(Role.TOOL, "patched", call_id="b"),
    )


def test_a_text_alone_is_the_user() -> None:
    assert read(input="hi").messages == (RequestMessage(Role.USER, "hi"),)
    assert read(previous_response_id=None).messages


def test_a_custom_tools_cut_call_goes_out_as_it_was_written() -> None:
    output = Responses().write(read(tools=TOOLS), turn("", ("apply_patch", '{"input": "*** Be')), "policy")["output"]
    assert (output[0]["type"], output[0]["input"]) == ("custom_tool_call", '{"input": "*** Be')


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"conversation": "c"}, "send the whole conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"input": 5}, r"\$\.input"),
    ],
)
def test_wrong_requests_are_refused_with_the_field(body: dict[str, object], words: str) -> None:
    with pytest.raises(CallRefused, match=words) as caught:
        read(**body)
    assert caught.value.problem == Problem.INVALID


@pytest.mark.xdist_group("SDKs of models")
@pytest.mark.parametrize("streamed", [False, True])
def test_openais_sdk_has_a_conversation(streamed: bool) -> None:
    import openai

    called = turn(
        "I look.",
        ("bash", '{"command": "ls"}'),
        ("apply_patch", '{"input": "*** Begin"}'),
        ("agents__spawn", '{"task": '),
        reasoning="Let me see.",
    )

    async def main() -> None:
        model = ScriptedModel(called, turn("Two files.", finish_reason="length"))
        async with served(model) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:

            async def ask(items: list[object]) -> object:
                asked = {"model": "gpt-9", "input": items, "tools": TOOLS}
                if not streamed:
                    return await client.responses.create(**asked)
                last = None
                async for event in await client.responses.create(**asked, stream=True):
                    last = event
                return last.response

            first = await ask(QUESTION)
            assert (first.status, first.model) == ("completed", "policy")
            assert (first.usage.input_tokens, first.usage.output_tokens) == (USAGE.prompt, USAGE.generated)
            assert [item.type for item in first.output] == [
                "reasoning", "message", "function_call", "custom_tool_call", "function_call"
            ]  # fmt: skip
            assert first.output_text == "I look."
            assert first.output[3].input == "*** Begin"
            assert first.output[4].namespace == "agents"
            calls = first.output[2:]
            results = [
                {"type": f"{call.type}_output", "call_id": call.call_id, "output": f"result {i}"}
                for i, call in enumerate(calls)
            ]
            second = await ask([*QUESTION, *(item.model_dump() for item in first.output), *results])
            assert (second.status, second.output_text) == ("incomplete", "Two files.")
            assert second.incomplete_details.reason == "max_output_tokens"
        assert model.delivered == [True, True]
        arguments = ['{"command": "ls"}', '{"input":"*** Begin"}', '{"task": ']
        assert model.requests[1].messages[2:] == (
            RequestMessage(
                Role.ASSISTANT,
                "I look.",
                "Let me see.",
                tuple(
                    RequestCall(call.call_id, call.name, text)
                    for call, text in zip(called.calls, arguments, strict=True)
                ),
                turn_ids=(called.turn_id,),
            ),
            *(RequestMessage(Role.TOOL, f"result {i}", call_id=call.call_id) for i, call in enumerate(called.calls)),
        )

    asyncio.run(main())


@pytest.mark.xdist_group("SDKs of models")
def test_openais_collector_of_streams_takes_every_event() -> None:
    import openai

    async def main() -> None:
        said = turn("Two files.", ("bash", '{"command": "ls"}'), reasoning="Let me see.")
        model = ScriptedModel(said)
        async with (
            served(model) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client,
            client.responses.stream(model="m", input="hi", tools=[BASH]) as stream,
        ):
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        assert response.output_text == "Two files."
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert "response.function_call_arguments.done" in kinds
        assert kinds[-1] == "response.completed"

    asyncio.run(main())
