"""`say`: turns in order or of a function, exactly as an engine with a model gives them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.waiting import until_async

from prorl_zmq import Role, Sampling
from prorl_zmq.errors import EngineFailed, InvalidWeights
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat, EmbeddedConversation
from prorl_zmq.inference.engine import as_plain, checked
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, encode
from prorl_zmq.inference.tool_calls.call import ToolCall
from prorl_zmq.testing import ScriptedEngine, say, tool_call

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from numpy.typing import NDArray

    from prorl_zmq.inference.engine import Generation

CHAT = EmbeddedChatFormat()


def conversation(question: str = "2 + 2") -> EmbeddedConversation:
    return CHAT.conversation([ChatMessage(Role.USER, question)], [])


def prompt_of(talk: EmbeddedConversation) -> NDArray[np.int32]:
    return np.concatenate([piece.token_ids for piece in talk.prompt().pieces])


def asked(
    engine: ScriptedEngine, prompt: NDArray[np.int32], job_id: str = "a", **sampling: Any
) -> Awaitable[Generation]:
    return engine.generate(prompt, Sampling(**sampling), CHAT.stop_token_ids, job_id)


def text_of(generation: Generation) -> str:
    return CHAT.read_turn(generation.token_ids).text


def test_the_turns_come_in_order_for_each_job() -> None:
    async def main() -> None:
        engine = say("one", "two")
        for job_id in ("a", "b"):
            talk = conversation()
            prompt = prompt_of(talk)
            first = await asked(engine, prompt, job_id)
            talk.add_turn(first.token_ids)
            talk.add_tool_results(["more"])
            second = await asked(engine, np.concatenate([prompt, first.token_ids, prompt_of(talk)]), job_id)
            assert [text_of(first), text_of(second)] == ["one", "two"]

    asyncio.run(main())


def test_a_turn_is_what_an_engine_gives() -> None:
    async def main() -> None:
        engine = say("I count. " + tool_call("bash", command="wc -l < data.txt"))
        prompt = prompt_of(conversation())
        said = await asked(engine, prompt, max_tokens=200)
        assert said.finish_reason == "stop"
        assert said.token_ids[-1] == IM_END
        assert TOOL_CALL in said.token_ids
        assert TOOL_CALL_END in said.token_ids
        assert np.array_equal(said.logprobs, (-(1 + said.token_ids.astype(np.float64)) / 1000).astype(np.float32))
        assert [(span.weight_version, span.start, span.end) for span in said.spans] == [(0, 0, len(said.token_ids))]
        checked(as_plain(said, len(prompt)), 200, engine.description.vocabulary)
        (call,) = CHAT.read_turn(said.token_ids).calls
        assert call == ToolCall("bash", {"command": "wc -l < data.txt"})

    asyncio.run(main())


def test_a_turn_ends_at_its_limit_and_at_a_stop_token() -> None:
    async def main() -> None:
        prompt = prompt_of(conversation())
        short = await asked(say("0123456789"), prompt, max_tokens=4)
        assert (text_of(short), short.finish_reason) == ("0123", "length")
        (five,) = encode("5").tolist()
        stopped = await say("0123456789").generate(prompt, Sampling(), (five,), "a")
        assert (text_of(stopped), stopped.finish_reason) == ("012345", "stop")
        whole = await say("01").generate(prompt, Sampling(), (), "a")
        assert (whole.token_ids[-1], whole.finish_reason) == (IM_END, "stop")
        tight = await asked(say("0123456789", context_tokens=len(prompt) + 3), prompt)
        assert (text_of(tight), tight.finish_reason) == ("012", "length")

    asyncio.run(main())


def test_a_function_gets_the_prompts_text() -> None:
    async def main() -> None:
        seen: list[str] = []

        def answer(prompt: str) -> str:
            seen.append(prompt)
            return "4" if "2 + 2" in prompt else "5"

        engine = say(answer)
        assert text_of(await asked(engine, prompt_of(conversation()), "a")) == "4"
        assert text_of(await asked(engine, prompt_of(conversation("2 + 3")), "b")) == "5"
        assert seen[0] == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"

    asyncio.run(main())


def test_a_script_that_ends_names_the_job_and_its_turns() -> None:
    async def main() -> None:
        engine = say("one")
        await asked(engine, prompt_of(conversation()), "job-7")
        with pytest.raises(EngineFailed, match=r"job job-7 asks for turn 2, and the script has 1") as caught:
            await asked(engine, prompt_of(conversation("and now?")), "job-7")
        assert caught.value.refused

    asyncio.run(main())


def test_a_job_that_begins_again_gets_the_first_turn_again() -> None:
    async def main() -> None:
        engine = say("one", "two")
        prompt = prompt_of(conversation())
        for _ in range(2):
            assert text_of(await asked(engine, prompt)) == "one"
            assert text_of(await asked(engine, prompt_of(conversation("go on")))) == "two"

    asyncio.run(main())


async def until_begun(engine: ScriptedEngine) -> None:
    async def begun() -> bool:
        return bool(engine._running and engine._running[0].logprobs)

    await until_async(begun, "a first token")


@pytest.mark.parametrize("script", ["01234" * 4000, lambda _: "01234" * 4000], ids=["turns", "function"])
def test_a_turn_that_new_weights_interrupt_is_continued(script: Any) -> None:
    async def main() -> None:
        engine = say(script)
        prompt = prompt_of(conversation())
        turn = asyncio.ensure_future(asked(engine, prompt, max_tokens=30_000))
        await until_begun(engine)
        await engine.begin_update("abort")
        part = await turn
        assert part.finish_reason == "abort"
        assert 0 < len(part.token_ids) < 20_000
        await engine.end_update(1)
        rest = await asked(engine, np.concatenate([prompt, part.token_ids]), max_tokens=30_000)
        assert text_of(part) + text_of(rest) == "01234" * 4000
        assert {span.weight_version for span in rest.spans} == {1}

    asyncio.run(main())


def test_a_turn_that_goes_on_with_new_weights_has_the_versions_of_both() -> None:
    async def main() -> None:
        engine = say("01234" * 4000)
        turn = asyncio.ensure_future(asked(engine, prompt_of(conversation()), max_tokens=30_000))
        await until_begun(engine)
        await engine.begin_update("keep")
        await engine.end_update(1)
        assert [span.weight_version for span in (await turn).spans] == [0, 1]

    asyncio.run(main())


def test_weights_are_any_file_that_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        engine = say("one")
        await engine.update_weights(tmp_path, 3, "drain")
        assert engine.weight_version == 3
        with pytest.raises(InvalidWeights, match="no weights at"):
            await engine.update_weights(tmp_path / "none", 4, "drain")
        assert engine.weight_version == 3

    asyncio.run(main())


def raises(_: str) -> str:
    raise KeyError("question")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "function of say.* raised KeyError for job a: 'question'"),
        (lambda _: 4, r"function of say.* returned 4 for job a; it has to return a text"),
    ],
)
def test_a_function_that_fails_refuses_the_prompt(function: Any, message: str) -> None:
    async def main() -> None:
        engine = say(function)
        with pytest.raises(EngineFailed, match=message):
            await asked(engine, prompt_of(conversation()))

    asyncio.run(main())


@pytest.mark.parametrize("turns", [(), (4,), ("one", raises), (raises, raises)])
def test_what_is_no_script_is_refused(turns: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"say\(…\) takes one or more texts, or one function"):
        say(*turns)
