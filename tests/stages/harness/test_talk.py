"""What programs do in conversations, in all APIs, over HTTP: what the policy sees of it, and what they get back."""

from __future__ import annotations

import asyncio
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from captured import segments_of
from chat_families import FAMILIES, make_tokenizer, save_tokenizer
from harness_talk import (
    APIS,
    CHAT,
    GEMINI,
    MESSAGES,
    RESPONSES,
    TOOLS,
    Talk,
    asking,
    call_ids,
    sent_back,
    text_of,
    tool_answers,
)
from scripted_policy import CHAT as EMBEDDED

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat
from prorl_zmq.stages.harness import call_limits
from prorl_zmq.testing import tool_call
from prorl_zmq.testing.scripted_engine import tokens_of
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import EpisodeLimits

if TYPE_CHECKING:
    from harness_talk import Client
    from numpy.typing import NDArray

pytestmark = pytest.mark.xdist_group("transformers")

IN_ALL = pytest.mark.parametrize("path", APIS)
TWO_CALLS = tool_call("bash", command="cat a") + tool_call("bash", command="cat b")


@cache
def family_chat(name: str) -> TransformersChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        directory = save_tokenizer(FAMILIES[name], Path(folder))
        return TransformersChatFormat.load(ChatSettings("transformers", str(directory)))


@cache
def family_tokenizer(name: str) -> Any:
    return make_tokenizer(FAMILIES[name])


def family_talk(name: str, *turns: str, **options: Any) -> Talk:
    """A talk with a policy of a family's chat template."""

    def encode(text: str) -> NDArray[np.int32]:
        ids = family_tokenizer(name)(text, add_special_tokens=False)["input_ids"]
        return np.array([*ids, family_tokenizer(name).convert_tokens_to_ids(FAMILIES[name].end)], np.int32)

    return Talk(family_chat(name), encode, turns, **options)


def talk(*turns: str, **options: Any) -> Talk:
    """A talk with a policy of the embedded chat format, which shows no ids of calls."""
    return Talk(EMBEDDED, lambda text: np.array(tokens_of(text), np.int32), turns, **options)


def past_calls(path: str) -> dict[str, Any]:
    """A request whose history has a turn of another policy, with two calls, a and b."""
    body = asking(path, "Read both.", tools=TOOLS[path])
    names = ["a", "b"]
    if path == CHAT:
        calls = [
            {"id": name, "type": "function", "function": {"name": "bash", "arguments": f'{{"command": "cat {name}"}}'}}
            for name in names
        ]
        return sent_back(path, body, {"choices": [{"message": {"role": "assistant", "tool_calls": calls}}]})
    if path == RESPONSES:
        items = [
            {"type": "function_call", "call_id": name, "name": "bash", "arguments": f'{{"command": "cat {name}"}}'}
            for name in names
        ]
        return sent_back(path, body, {"output": items})
    if path == MESSAGES:
        blocks = [{"type": "tool_use", "id": n, "name": "bash", "input": {"command": f"cat {n}"}} for n in names]
        return sent_back(path, body, {"content": blocks})
    parts = [{"functionCall": {"id": name, "name": "bash", "args": {"command": f"cat {name}"}}} for name in names]
    return sent_back(path, body, {"candidates": [{"content": {"role": "model", "parts": parts}}]})


@IN_ALL
def test_answers_of_parallel_calls_are_in_the_order_of_the_calls(path: str) -> None:
    rollout = talk(TWO_CALLS, "Done.")

    async def program(client: Client) -> None:
        body = asking(path, "Read both.", tools=TOOLS[path])
        answer = await client.post(path, body)
        a, b = call_ids(path, answer)
        await client.post(path, sent_back(path, body, answer, *tool_answers(path, (b, "I am B."), (a, "I am A."))))

    episode = rollout.run(program)
    assert episode.metrics["main_turns"] == 2
    assert rollout.prompts[1].index("I am A.") < rollout.prompts[1].index("I am B.")


@IN_ALL
@pytest.mark.parametrize("name", ["chatml", "gemma"])
def test_answers_in_a_history_are_in_the_order_of_the_calls(path: str, name: str) -> None:
    rollout = family_talk(name, "Done.")

    async def program(client: Client) -> None:
        body = past_calls(path)
        field = {RESPONSES: "input", GEMINI: "contents"}.get(path, "messages")
        answers = tool_answers(path, ("b", "I am B."), ("a", "I am A."))
        await client.post(path, body | {field: [*body[field], *answers]})

    rollout.run(program)
    assert rollout.prompts[0].index("I am A.") < rollout.prompts[0].index("I am B.")


def own_call(number: int) -> str:
    """A call as programs have policies write it that read calls themselves."""
    return f"Step {number}. {tool_call('bash', command=f'cat {number}')} and so on"


@IN_ALL
@pytest.mark.parametrize("how", ["without tools", "none"])
def test_a_program_that_reads_calls_itself_gets_the_whole_text_and_continues_its_turns(path: str, how: str) -> None:
    rollout = talk(own_call(1), own_call(2), "Done.")
    none: dict[str, Any] = {
        CHAT: {"tool_choice": "none"},
        RESPONSES: {"tool_choice": "none"},
        MESSAGES: {"tool_choice": {"type": "none"}},
        GEMINI: {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
    }[path]

    async def program(client: Client) -> None:
        body = asking(path, "Read all.", **({} if how == "without tools" else none | {"tools": TOOLS[path]}))
        for number in (1, 2):
            answer = await client.post(path, body)
            assert text_of(path, answer) == own_call(number)
            assert not call_ids(path, answer)
            said = {"role": "user", **({"parts": [{"text": "ok"}]} if path == GEMINI else {"content": "ok"})}
            told = {"role": "assistant", "content": own_call(number)}  # as text alone, without an id
            if path == GEMINI:
                told = {"role": "model", "parts": [{"text": own_call(number)}]}
            field = {RESPONSES: "input", GEMINI: "contents"}.get(path, "messages")
            body = body | {field: [*body[field], told, said]}
        await client.post(path, body)

    episode = rollout.run(program)
    assert episode.metrics["main_turns"] == episode.metrics["turns"] == 3
    assert not [name for name in episode.metrics if name.endswith("orphan_turns")]
    assert len(segments_of(episode.trajectory)) == 1


@IN_ALL
def test_a_call_that_is_asked_for_is_refused(path: str) -> None:
    rollout = talk("Done.")
    asked: list[tuple[Any, str]] = {
        CHAT: [
            ({"tool_choice": "required"}, "tool_choice 'required'"),
            ({"tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice 'function'"),
        ],
        RESPONSES: [
            ({"tool_choice": "required"}, "tool_choice 'required'"),
            ({"tool_choice": {"type": "function", "name": "bash"}}, "tool_choice 'function'"),
        ],
        MESSAGES: [
            ({"tool_choice": {"type": "any"}}, "tool_choice 'any'"),
            ({"tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice 'tool'"),
        ],
        GEMINI: [({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "functionCallingConfig.mode 'any'")],
    }[path]

    async def program(client: Client) -> None:
        for more, words in asked:
            status, answer = await client.asked(path, asking(path, "Read.", tools=TOOLS[path], **more))
            assert status == 400
            assert f"{words} is not supported" in answer["error"]["message"]
        auto = {"type": "auto"} if path == MESSAGES else "auto"
        await client.post(path, asking(path, "Read.", tools=TOOLS[path], tool_choice=auto))

    assert rollout.run(program).metrics["turns"] == 1


def stops(path: str, *texts: str) -> dict[str, Any]:
    """What asks for a turn to end at a text."""
    return {
        CHAT: {"stop": list(texts)},
        MESSAGES: {"stop_sequences": list(texts)},
        GEMINI: {"generationConfig": {"stopSequences": list(texts)}},
    }[path]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, GEMINI])
def test_a_stop_text_is_cut_from_the_reply_and_its_tokens_stay(path: str) -> None:
    rollout = talk("I look.\nObservation: what I made up", "Done.")
    reasons = []

    async def program(client: Client) -> None:
        body = asking(path, "Look.", **stops(path, "END", "Observation:"))
        answer = await client.post(path, body)
        assert text_of(path, answer) == "I look.\n"
        more = {"role": "user", **({"parts": [{"text": "go on"}]} if path == GEMINI else {"content": "go on"})}
        last = await client.post(path, sent_back(path, body, answer, more))
        for one in (answer, last):
            choice = one.get("choices", [one])[0] if path == CHAT else one.get("candidates", [one])[0]
            reasons.append([choice.get(name) for name in ("finish_reason", "stop_reason", "stop_sequence")])

    episode = rollout.run(program)
    assert episode.metrics["main_turns"] == 2
    assert (
        reasons
        == {
            CHAT: [["stop", None, None]] * 2,
            MESSAGES: [[None, "stop_sequence", "Observation:"], [None, "end_turn", None]],
            GEMINI: [[None, None, None]] * 2,
        }[path]
    )
    (segment,) = segments_of(episode.trajectory)
    assert "I look.\nObservation:" in EMBEDDED.decode(segment.token_ids[segment.loss_mask])
    assert "made up" not in EMBEDDED.decode(segment.token_ids)


def test_a_streamed_message_names_the_stop_text() -> None:
    rollout = talk("One. STOP Two.")

    async def program(client: Client) -> None:
        body = asking(MESSAGES, "Count.", stream=True, **stops(MESSAGES, "STOP"))
        async with client.session.post(MESSAGES, json=body) as response:
            said = await response.text()
        assert '"stop_reason":"stop_sequence","stop_sequence":"STOP"' in said
        assert '"text":"One. "' in said

    rollout.run(program)


def test_a_stop_text_within_reasoning_ends_the_turn_there() -> None:
    rollout = family_talk("qwen3", "<think>\nI wait. STOP Not so.\n</think>\n\nYes.")

    async def program(client: Client) -> None:
        answer = await client.post(CHAT, asking(CHAT, "Think.", **stops(CHAT, "STOP")))
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("\nI wait. ", "")

    rollout.run(program)


def test_what_is_called_before_a_stop_text_is_called() -> None:
    rollout = talk(f"I look. {tool_call('bash', command='ls')} STOP I made up.")

    async def program(client: Client) -> None:
        answer = await client.post(MESSAGES, asking(MESSAGES, "L", tools=TOOLS[MESSAGES], **stops(MESSAGES, "STOP")))
        assert (answer["stop_reason"], text_of(MESSAGES, answer)) == ("tool_use", "I look. ")
        assert len(call_ids(MESSAGES, answer)) == 1

    rollout.run(program)


COUNTS = {
    MESSAGES: (f"{MESSAGES}/count_tokens", "input_tokens"),
    RESPONSES: (f"{RESPONSES}/input_tokens", "input_tokens"),
    GEMINI: (GEMINI.replace("generateContent", "countTokens"), "totalTokens"),
}


@pytest.mark.parametrize("path", COUNTS)
def test_counting_tokens_ends_nothing_and_uses_up_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "FURTHER_CALLS", 0)
    monkeypatch.setattr(call_limits, "CALLS_PER_TURN", 1)
    monkeypatch.setattr(call_limits, "CALLS_AT_ONCE", 1)
    rollout = talk("Done.", limits=EpisodeLimits(max_turns=2, max_tokens=200))
    count, field = COUNTS[path]

    async def program(client: Client) -> None:
        body = asking(path, "Look.")
        counted = await asyncio.gather(*(client.post(count, body) for _ in range(5)))
        assert {answer[field] for answer in counted} == {
            len(EMBEDDED.opening([ChatMessage(Role.USER, "Look.")], ())[0].token_ids) + 2
        }
        status, answer = await client.asked(count, asking(path, "long " * 4000))
        assert (status, "error" in answer) == (400, True)
        for _ in range(2):
            await client.post(path, body)
        await client.post(count, body)  # all turns are used up, and the rollout is not over

    episode = rollout.run(program)
    assert episode.metrics["turns"] == 2
    assert (episode.stop_reason, rollout.model.limits.too_long, rollout.model.limits.over.is_set()) == (
        None,
        None,
        False,
    )
    assert not episode.metrics["calls_refused_as_too_long"]


def pictured(path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool's answer with an image between texts, and a message with one."""
    (call_id,) = call_ids(path, answer)
    data = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    url = "data:image/png;base64,iVBORw0KGgo="
    image: dict[str, Any]
    if path == MESSAGES:
        image = {"type": "image", "source": data}
        seen = [{"type": "text", "text": "before"}, image, {"type": "text", "text": "after"}]
        result = {"type": "tool_result", "tool_use_id": call_id, "content": seen}
        return [{"role": "user", "content": [result, {"type": "text", "text": "See?"}, image]}]
    if path == GEMINI:
        image = {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}}
        response = {"id": call_id, "name": "bash", "response": {"output": "before"}, "parts": [image]}
        return [{"role": "user", "parts": [{"functionResponse": response}, {"text": "See?"}, image]}]
    if path == RESPONSES:
        image = {"type": "input_image", "image_url": url}
        output = [{"type": "input_text", "text": "before"}, image]
        return [
            {"type": "function_call_output", "call_id": call_id, "output": output},
            {"role": "user", "content": [{"type": "input_text", "text": "See?"}, image]},
        ]
    image = {"type": "image_url", "image_url": {"url": url}}
    return [
        {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": "before"}, image]},
        {"role": "user", "content": [{"type": "text", "text": "See?"}, image]},
    ]


@IN_ALL
def test_an_image_is_a_placeholder_and_counted_once(path: str) -> None:
    rollout = talk(tool_call("bash", command="shot"), tool_call("bash", command="ls"), "Done.")

    async def program(client: Client) -> None:
        body = asking(path, "Look.", tools=TOOLS[path])
        answer = await client.post(path, body)
        body = sent_back(path, body, answer, *pictured(path, answer))
        answer = await client.post(path, body)
        (call_id,) = call_ids(path, answer)
        await client.post(path, sent_back(path, body, answer, *tool_answers(path, (call_id, "a"))))

    episode = rollout.run(program)
    assert episode.metrics["main_turns"] == 3
    assert episode.metrics["contents_left_out"] == 2
    seen = rollout.prompts[1]
    assert seen.index("before") < seen.index("left out: the policy reads text only]") < seen.index("See?")
    assert seen.count("left out: the policy reads text only]") == 2
    assert "iVBOR" not in seen


@pytest.mark.parametrize(
    ("text", "told"),
    [("no such file", "Error: no such file"), ("Error: exit code 1", "Error: exit code 1"), ("", "Error: ")],
)
@pytest.mark.parametrize("path", [MESSAGES, GEMINI])
def test_an_error_of_a_tool_is_told_as_one(path: str, text: str, told: str) -> None:
    rollout = talk(tool_call("bash", command="cat x"), "Done.")

    async def program(client: Client) -> None:
        body = asking(path, "Look.", tools=TOOLS[path])
        answer = await client.post(path, body)
        (call_id,) = call_ids(path, answer)
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call_id, "content": text, "is_error": True}
        said: dict[str, Any] = {"role": "user", "content": [result]}
        if path == GEMINI:
            response = {"id": call_id, "name": "bash", "response": {"error": text}}
            said = {"role": "user", "parts": [{"functionResponse": response}]}
        await client.post(path, sent_back(path, body, answer, said))

    assert rollout.run(program).metrics["main_turns"] == 2
    assert f"<|im_start|>tool\n{told}<|im_end|>" in rollout.prompts[1]


@IN_ALL
def test_rollouts_that_share_an_address_keep_all_their_turns(path: str) -> None:
    """Eight of two turns each, with the same prompt and the same replies; histories as text alone, without ids."""
    rollout = talk("Try ls.")

    async def program(client: Client) -> None:
        async def one() -> None:
            body = asking(path, "List them.")
            await client.post(path, body)
            field = {RESPONSES: "input", GEMINI: "contents"}.get(path, "messages")
            told: list[dict[str, Any]] = [
                {"role": "assistant", "content": "Try ls."},
                {"role": "user", "content": "a b"},
            ]
            if path == GEMINI:
                told = [
                    {"role": role, "parts": [{"text": text}]} for role, text in (("model", "Try ls."), ("user", "a"))
                ]
            await client.post(path, body | {field: [*body[field], *told]})

        await asyncio.gather(*(one() for _ in range(4)))
        for _ in range(4):
            await one()

    episode = rollout.run(program)
    assert episode.metrics["main_turns"] == episode.metrics["turns"] == 16
    assert len(segments_of(episode.trajectory)) == 8


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_arguments_in_a_history_are_never_decoded_if_they_have_too_many_values(path: str) -> None:
    """They are texts in the request, so that what they hold is no value of it."""
    rollout = talk("Done.", limits=EpisodeLimits(max_tokens=400_000))

    async def program(client: Client) -> None:
        text = json.dumps(past_calls(path)).replace(
            '{\\"command\\": \\"cat a\\"}', '{\\"a\\": [' + "[]," * 200_000 + "1]}"
        )
        status, answer = await client.asked(path, json.loads(text))
        assert status == 400
        assert "more than 200000 values" in answer["error"]["message"]
        text = json.dumps(past_calls(path)).replace("cat a", "[]," * 80_000)
        assert (await client.asked(path, json.loads(text)))[0] == 200

    rollout.run(program)
