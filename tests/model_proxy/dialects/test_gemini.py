from __future__ import annotations

import asyncio

import pytest
from scripted_model import USAGE, ScriptedModel, served, turn

from prorl_zmq.data.trajectory import Role
from prorl_zmq.model_proxy.calls import CallRefused, Problem, RequestCall, RequestMessage
from prorl_zmq.model_proxy.dialects.gemini import Gemini

ID = "prt0123456789abcdef"
QUESTION = [{"role": "user", "parts": [{"text": "List the files."}]}]


def read(**body: object) -> object:
    return Gemini().read({"contents": QUESTION, **body}, {})


def test_a_conversation_is_read_with_ids_or_without() -> None:
    contents = [
        *QUESTION,
        {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "I ", "thoughtSignature": f"{ID}A"}]},
        {"role": "model", "parts": [{"text": "look."}, {"functionCall": {"name": "ls", "args": {"a": 1}}},
                                    {"functionCall": {"name": "ls"}},
                                    {"functionCall": {"name": "cat", "id": "mine"}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "cat", "id": "mine", "response": {"output": "c"}}},
                                   {"functionResponse": {"name": "ls", "response": {"x": 1, "y": 2}}},
                                   {"functionResponse": {"name": "ls", "response": {"error": "no"}}},
                                   {"text": "Go on."}]},
    ]  # fmt: skip
    config = {"maxOutputTokens": 9, "stopSequences": ["END"], "topP": 0.5, "temperature": 1}
    request = read(contents=contents, system_instruction={"parts": [{"text": "Short."}]}, generationConfig=config)
    calls = (
        RequestCall("call_1", "ls", '{"a":1}'),
        RequestCall("call_2", "ls", "{}"),
        RequestCall("mine", "cat", "{}"),
    )
    assert request.messages == (
        RequestMessage(Role.SYSTEM, "Short."),
        RequestMessage(Role.USER, "List the files."),
        RequestMessage(Role.ASSISTANT, "I look.", "hm", calls, turn_ids=(ID,)),
        RequestMessage(Role.TOOL, '{"x":1,"y":2}', call_id="call_1", name="ls"),
        RequestMessage(Role.TOOL, "Error: no", call_id="call_2", name="ls"),
        RequestMessage(Role.TOOL, "c", call_id="mine", name="cat"),
        RequestMessage(Role.USER, "Go on."),
    )
    assert (request.max_tokens, request.stop) == (9, ("END",))
    assert request.sampling == {"top_p": 0.5, "temperature": 1.0}


def test_both_kinds_of_schemas_become_json_schemas() -> None:
    capitals = {"type": "OBJECT", "properties": {"type": {"type": "ARRAY", "items": {"type": "STRING"}}}}
    schema = {"type": "object", "properties": {"type": {"type": "array", "items": {"type": "string"}}}}
    tools = [
        {
            "functionDeclarations": [
                {"name": "a", "parameters": capitals},
                {"name": "b", "parametersJsonSchema": schema},
            ]
        },
        {"googleSearch": {}},
    ]
    assert [tool["function"] for tool in read(tools=tools).tools] == [
        {"name": "a", "parameters": schema},
        {"name": "b", "parameters": schema},
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"contents": [{"role": "king"}]}, "role 'king'"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount must be 1"),
        ({"contents": "hi"}, r"\$\.contents"),
    ],
)
def test_wrong_requests_are_refused_with_the_field(body: dict[str, object], words: str) -> None:
    with pytest.raises(CallRefused, match=words) as caught:
        read(**body)
    assert caught.value.problem == Problem.INVALID


@pytest.mark.few(1)
@pytest.mark.xdist_group("SDKs of models")
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
@pytest.mark.parametrize("streamed", [False, True])
def test_googles_sdk_has_a_conversation(streamed: bool) -> None:
    from google import genai

    called = turn("I look.", ("ls", '{"path": "."}'), ("ls", '{"pa'), reasoning="Let me see.")

    async def main() -> None:
        model = ScriptedModel(called, turn("Two files.", finish_reason="length"))
        async with served(model) as url:
            types = genai.types
            client = genai.Client(api_key="any", http_options=types.HttpOptions(base_url=url))
            declared = types.FunctionDeclaration(name="ls", parameters_json_schema={"type": "object"})
            config = types.GenerateContentConfig(
                system_instruction="Short.",
                tools=[types.Tool(function_declarations=[declared])],
                thinking_config=types.ThinkingConfig(include_thoughts=True),
                automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            )
            chat = client.aio.chats.create(model="gemini-9", config=config)

            async def ask(message: object) -> object:
                if not streamed:
                    return await chat.send_message(message)
                last = None
                async for chunk in await chat.send_message_stream(message):
                    last = chunk
                return last

            first = await ask("List the files.")
            assert [call.args for call in first.function_calls] == [
                {"path": "."}, {"__unparsedToolInput": {"raw": '{"pa', "len": 4}}
            ]  # fmt: skip
            assert first.model_version == "policy"
            usage = first.usage_metadata
            assert usage.prompt_token_count == USAGE.prompt
            assert usage.candidates_token_count + usage.thoughts_token_count == USAGE.generated
            second = await ask(
                [
                    types.Part(
                        function_response=types.FunctionResponse(id=call.id, name="ls", response={"output": "x"})
                    )
                    for call in first.function_calls
                ]
            )
            assert (second.text, second.candidates[0].finish_reason.name) == ("Two files.", "MAX_TOKENS")
            counted = await client.aio.models.count_tokens(model="gemini-9", contents="hi")
            assert counted.total_tokens == USAGE.prompt
            await client.aio.aclose()
            client.close()
        assert model.delivered == [True, True]
        assert model.requests[0].model == "gemini-9"
        assert model.requests[1].messages == (
            RequestMessage(Role.SYSTEM, "Short."),
            RequestMessage(Role.USER, "List the files."),
            RequestMessage(
                Role.ASSISTANT,
                "I look.",
                "Let me see.",
                (
                    RequestCall(called.calls[0].call_id, "ls", '{"path":"."}'),
                    RequestCall(called.calls[1].call_id, "ls", '{"pa'),
                ),
                turn_ids=(called.turn_id,),
            ),
            *(RequestMessage(Role.TOOL, "x", call_id=call.call_id, name="ls") for call in called.calls),
        )

    asyncio.run(main())
