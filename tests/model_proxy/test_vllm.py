"""Conversations of the vendors' own clients with a real vLLM behind the proxy: what it sampled is captured exactly."""

from __future__ import annotations

import asyncio
import json
import shutil
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from aiohttp import web
from chat_families import QWEN3
from ledger import GENERATE, LIMIT_S, Ledger
from scripted_model import served
from scripted_policy import generated
from vllm_python import START_LIMIT_S

from prorl_zmq import Job, Sampling
from prorl_zmq.data.trajectory import array_views
from prorl_zmq.inference.chat.loading import load_chat_format
from prorl_zmq.inference.http.http_engine import HttpEngine
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.harness.harness_model import HarnessModel
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from vllm_server import VllmServer

    from prorl_zmq.inference.engine import Generation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * START_LIMIT_S)]

CALL = '<tool_call>\\n\\{"name": "bash", "arguments": \\{"command": "[a-z]{1,8}"\\}\\}\\n</tool_call>'
THOUGHT = "<think>\\n[a-z ]{4,12}\\n</think>\\n\\n"
TURNS = (f"{THOUGHT}[A-Z]{{2,8}}\\n{CALL}", f"{CALL}\\n{CALL}", "", f"{THOUGHT}{CALL}", f"{THOUGHT}[a-z]{{1,20}}", "")
"""What vLLM is made to say, as regular expressions; it draws the tokens. Empty: whatever it says, at length."""
CALLS, THOUGHTFUL = {0: 1, 1: 2, 3: 1, 4: 0}, {0: True, 1: False, 3: True, 4: True}
"""What each client is to read of them, by their numbers."""
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class Call(NamedTuple):
    """A call of a tool, as a client tells of it."""

    call_id: str
    name: str


class Told(NamedTuple):
    """What a client tells of a turn."""

    calls: list[Call]
    reasoning: str


class Client(ABC):
    """A vendor's client that holds one conversation, and sends back what it got.

    Args:
        url: of the proxy.
        streamed: how it asks.
    """

    def __init__(self, url: str, *, streamed: bool) -> None:
        self.url = url
        self.streamed = streamed
        self.history: list[Any] = []

    @abstractmethod
    async def say(self, results: Sequence[tuple[Call, str]], text: str) -> Told:
        """Send tools' answers, and then what the user says, if it does."""


class OpenAIChat(Client):
    async def say(self, results: Sequence[tuple[Call, str]], text: str) -> Told:
        import openai

        self.history += [{"role": "tool", "tool_call_id": call.call_id, "content": result} for call, result in results]
        self.history += [{"role": "user", "content": text}] * bool(text)
        tool = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
        asked = {"model": "gpt-9", "messages": self.history, "tools": [tool]}
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0) as client:
            if self.streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    async for _ in stream:
                        pass
                    message = stream.current_completion_snapshot.choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
        back = message.model_dump(exclude_none=True)
        for call in back.get("tool_calls", []):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        self.history.append(back)
        calls = [Call(call.id, call.function.name) for call in message.tool_calls or ()]
        return Told(calls, back.get("reasoning_content", ""))


class OpenAIResponses(Client):
    async def say(self, results: Sequence[tuple[Call, str]], text: str) -> Told:
        import openai

        self.history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": result} for call, result in results
        ]
        self.history += [{"role": "user", "content": text}] * bool(text)
        tool = {"type": "function", "name": "bash", "parameters": SCHEMA}
        asked = {"model": "gpt-9", "input": self.history, "tools": [tool]}
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0) as client:
            if self.streamed:
                *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
                response = last.response
            else:
                response = await client.responses.create(**asked)
        self.history += [item.model_dump() for item in response.output]
        calls = [Call(item.call_id, item.name) for item in response.output if item.type == "function_call"]
        thoughts = [item for item in response.output if item.type == "reasoning"]
        return Told(calls, json.dumps([item.model_dump() for item in thoughts]) if thoughts else "")


class Anthropic(Client):
    async def say(self, results: Sequence[tuple[Call, str]], text: str) -> Told:
        import anthropic

        said = [{"type": "tool_result", "tool_use_id": call.call_id, "content": result} for call, result in results]
        self.history.append({"role": "user", "content": said + [{"type": "text", "text": text}] * bool(text)})
        asked = {
            "model": "claude-9",
            "messages": self.history,
            "tools": [{"name": "bash", "input_schema": SCHEMA}],
            "max_tokens": 2048,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        async with anthropic.AsyncAnthropic(base_url=self.url, api_key="any", max_retries=0) as client:
            if self.streamed:
                async with client.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
        self.history.append({"role": "assistant", "content": message.content})
        calls = [Call(block.id, block.name) for block in message.content if block.type == "tool_use"]
        return Told(calls, "".join(block.thinking for block in message.content if block.type == "thinking"))


class GoogleGenai(Client):
    def __init__(self, url: str, *, streamed: bool) -> None:
        super().__init__(url, streamed=streamed)
        from google import genai

        types = self.types = genai.types
        self.client = genai.Client(api_key="any", http_options=types.HttpOptions(base_url=url))
        declared = types.FunctionDeclaration(name="bash", parameters_json_schema=SCHEMA)
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[declared])],
            thinking_config=types.ThinkingConfig(include_thoughts=True),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )
        self.chat = self.client.aio.chats.create(model="gemini-9", config=config)  # it keeps the history itself

    async def say(self, results: Sequence[tuple[Call, str]], text: str) -> Told:
        answers = [
            self.types.FunctionResponse(id=call.call_id, name=call.name, response={"output": result})
            for call, result in results
        ]
        said = [self.types.Part(function_response=answer) for answer in answers]
        said += [self.types.Part(text=text)] * bool(text)
        if self.streamed:
            chunks = [chunk async for chunk in await self.chat.send_message_stream(said)]
        else:
            chunks = [await self.chat.send_message(said)]
        parts = [part for chunk in chunks for part in (chunk.candidates or [])[0].content.parts or ()]
        calls = [Call(part.function_call.id, part.function_call.name) for part in parts if part.function_call]
        return Told(calls, "".join(part.text for part in parts if part.thought))


class LeadingLedger(Ledger):
    """Has the server say what `TURNS` has, in order, once it leads."""

    turns: Iterator[str] | None = None

    def lead(self) -> None:
        self.turns = iter(TURNS)
        self.entries.clear()

    async def ask(self, method: str, path: str, body: bytes) -> web.Response:
        if path != GENERATE or self.turns is None:
            return await super().ask(method, path, body)
        wanted, asked = next(self.turns), json.loads(body)
        asked["sampling_params"] |= {"structured_outputs": {"regex": wanted}} if wanted else {"min_tokens": 40}
        answer = await super().ask(method, path, json.dumps(asked).encode())
        if not wanted:
            return answer
        answered = json.loads(answer.body)
        (choice,) = answered["choices"]
        # vLLM gives the log-probs among what the expression allows; those among all are a question of their own.
        scores = await self.scores([*asked["token_ids"], *choice["token_ids"]])
        for one, score in zip(choice["logprobs"]["content"], scores[-len(choice["token_ids"]) :], strict=True):
            assert one["logprob"] > score - 1e-4
            one["logprob"] = score
        return web.json_response(answered)

    def rescored(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return `scores`; called in another thread than its own."""
        scoring = asyncio.run_coroutine_threadsafe(self.scores(token_ids.tolist()), self.loop)
        return np.array(scoring.result(LIMIT_S), np.float32)

    async def scores(self, token_ids: list[int]) -> list[float]:
        """Return the log-probs of a sequence but its first token, as vLLM gives them in one pass."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await super().ask("POST", "/v1/completions", json.dumps(body).encode())
        scores = json.loads(answer.body)["choices"][0]["prompt_logprobs"]
        return [score[str(token)]["logprob"] for token, score in zip(token_ids[1:], scores[1:], strict=True)]


@pytest.fixture
def ledger(vllm_server: VllmServer) -> Iterator[LeadingLedger]:
    with LeadingLedger(vllm_server.url) as ledger:
        yield ledger


@pytest.fixture(scope="module")
def qwen3(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the model that is served, with the template of a family that reasons."""
    folder = tmp_path_factory.mktemp("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(vllm_server.models[0] / name, folder)
    (folder / "chat_template.jinja").write_text(QWEN3)
    return folder


async def led(kind: type[Client], *, streamed: bool, ledger: LeadingLedger, qwen3: Path) -> Episode:
    """Lead a conversation with vLLM."""
    settings = ChatSettings("transformers", str(qwen3))
    engine = await HttpEngine.start(ledger.url, chat=settings, start_s=30.0)
    ledger.lead()

    async def generate(token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]) -> Generation:
        return await engine.generate(token_ids, sampling, stop_token_ids, "job")

    job, episode = Job(task="t", instance={}, sampling=Sampling(max_tokens=200, seed=1)), Episode()
    chat, context = load_chat_format(settings), engine.description.context_tokens
    model = HarnessModel(JobPolicy(generate, chat, context, job, episode))
    try:
        async with served(model) as proxy:
            client = kind(proxy, streamed=streamed)
            told: list[Told] = []
            results: list[tuple[Call, str]] = []
            for number in range(len(TURNS)):
                # After a tool's answer comes the policy's turn, or the user's.
                told.append(await client.say(results, "" if len(results) == 1 else f"Go on, {number}."))
                results = [(call, f"result {number}") for call in told[-1].calls]
    finally:
        await engine.close()
    assert {number: len(told[number].calls) for number in CALLS} == CALLS
    assert {number: bool(told[number].reasoning) for number in THOUGHTFUL} == THOUGHTFUL
    await model.finish(["main"])
    return episode


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", [OpenAIChat, OpenAIResponses, Anthropic, GoogleGenai])
def test_what_vllm_sampled_is_captured(kind: type[Client], streamed: bool, ledger: LeadingLedger, qwen3: Path) -> None:
    episode = asyncio.run(led(kind, streamed=streamed, ledger=ledger, qwen3=qwen3))
    made, entries = episode.trajectory, ledger.entries
    assert made.segments == ()
    assert episode.metrics["main_turns"] == episode.metrics["turns"] == len(entries) == len(TURNS)
    arrays = array_views(made.block(), made.tokens, made.turns)
    for (start, end), entry in zip(generated(arrays), entries, strict=True):
        assert arrays.token_ids[:start].tolist() == list(entry.prompt)
        assert arrays.token_ids[start:end].tolist() == list(entry.token_ids)
        assert np.array_equal(arrays.logprobs[start:end], np.array(entry.logprobs, np.float32))
    for before, after in pairwise(entries):
        seen = before.prompt + before.token_ids
        assert after.prompt[: len(seen)] == seen
    gaps = np.abs(ledger.rescored(arrays.token_ids) - arrays.logprobs[1:])[arrays.loss_mask[1:]]
    assert gaps.max() < 1e-4
