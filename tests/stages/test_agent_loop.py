"""The agent loop: what it sends to the engine, what it records, where it stops. The engine alone is scripted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from prorl_zmq.data.trajectory import Role, Trajectory, array_views
from prorl_zmq.errors import EngineFailed, InvalidJob
from prorl_zmq.inference import tokenizer
from prorl_zmq.inference.chat import ChatMessage, Prompt
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.inference.engine import Generation
from prorl_zmq.stages.agent_loop import AgentLoop
from prorl_zmq.stages.episode import Episode, JobPolicy, StopReason
from prorl_zmq.tools.think_and_finish import FinishTool
from prorl_zmq.tools.tool import Arguments, Tool
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Job, Outcome, Result, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference.chat import ChatFormat, Conversation, PolicyTurn
    from prorl_zmq.wire.messages.engines import FinishReason

CHAT = EmbeddedChatFormat()
OPENING = [ChatMessage(Role.SYSTEM, "Work in bash."), ChatMessage(Role.USER, "Count to three.")]
CALL = '<tool_call>{"name": "echo", "arguments": {"text": "hello"}}</tool_call>'


class EchoArguments(Arguments, frozen=True):
    text: Annotated[str, Meta(description="What to say.")]


class Echo(Tool[EchoArguments]):
    name = "echo"
    description = "Says it."
    takes = EchoArguments

    async def call(self, arguments: EchoArguments, timeout_s: float) -> str:
        del timeout_s
        return f"echo says {arguments.text}"

    async def close(self) -> None:
        pass


class ScriptedEngine:
    """Answers each prompt with the next text of a script, ended by a stop token unless the text was cut."""

    def __init__(self, *turns: str, cut: bool = False, reasons: Sequence[FinishReason] = ()) -> None:
        self.turns = list(turns)
        self.cut = cut
        self.reasons = list(reasons)
        """How its turns end, where it is not as the limits say."""
        self.prompts: list[NDArray[np.int32]] = []
        self.samplings: list[Sampling] = []
        self.answers: list[Generation] = []

    async def __call__(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
    ) -> Generation:
        self.prompts.append(token_ids.copy())
        self.samplings.append(sampling)
        ids = tokenizer.encode(self.turns.pop(0))
        reason: FinishReason = "length" if self.cut or len(ids) + 1 > sampling.max_tokens else "stop"
        reason = self.reasons.pop(0) if self.reasons else reason
        ids = np.append(ids, np.int32(stop_token_ids[0])) if reason == "stop" else ids[: sampling.max_tokens]
        version = len(self.prompts)
        half = len(ids) // 2
        spans = tuple(
            VersionSpan(number, start, end)
            for number, start, end in ((version - 1, 0, half), (version, half, len(ids)))
            if end > start
        )
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        self.answers.append(Generation(ids.astype(np.int32), logprobs, spans, reason, len(token_ids) // 2))
        return self.answers[-1]


def run(
    engine: ScriptedEngine,
    limits: EpisodeLimits | None = None,
    sampling: Sampling | None = None,
    *,
    context_tokens: int = 0,
    chat: ChatFormat = CHAT,
) -> Episode:
    episode = Episode()
    tools = [Echo(), FinishTool()]
    job = Job(task="t", instance={}, sampling=sampling or Sampling(), episode=limits or EpisodeLimits())
    loop = AgentLoop(JobPolicy(engine, chat, context_tokens, job, episode), tools)
    asyncio.run(loop.run(OPENING))
    return episode


def arrays_of(episode: Episode):  # type: ignore[no-untyped-def]
    trajectory = episode.trajectory
    return array_views(trajectory.block(), trajectory.tokens, trajectory.turns)


def test_turn_without_a_tool_call_ends_the_episode() -> None:
    episode = run(ScriptedEngine("one two three"))
    assert episode.stop_reason == StopReason.DONE
    assert episode.last_text == "one two three"
    assert {
        name: count for name, count in episode.metrics.items() if "prompt" not in name and "cached" not in name
    } == {
        "turns": 1,
        "generated_tokens": len(tokenizer.encode("one two three")) + 1,
    }


def test_arrays_say_exactly_what_the_engine_saw_and_produced() -> None:
    engine = ScriptedEngine(CALL, "done")
    arrays = arrays_of(run(engine))
    for prompt, answer in zip(engine.prompts, engine.answers, strict=True):
        start, end = len(prompt), len(prompt) + len(answer.token_ids)
        assert (arrays.token_ids[:start] == prompt).all()
        assert (arrays.token_ids[start:end] == answer.token_ids).all()
        assert (arrays.logprobs[start:end] == answer.logprobs).all()
        assert arrays.loss_mask[start:end].all()
        assert sorted(set(arrays.weight_versions[start:end])) == [span.weight_version for span in answer.spans]
    generated = sum(len(answer.token_ids) for answer in engine.answers)
    assert arrays.loss_mask.sum() == generated
    assert (arrays.logprobs[~arrays.loss_mask] == 0).all()
    assert (arrays.weight_versions[~arrays.loss_mask] == -1).all()


def test_turns_cover_the_conversation_in_order() -> None:
    arrays = arrays_of(run(ScriptedEngine(CALL, "done")))
    assert [Role(code) for code in arrays.turns[:, 2]] == [
        Role.SYSTEM,
        Role.USER,
        Role.ASSISTANT,
        Role.TOOL,
        Role.ASSISTANT,
    ]
    assert arrays.turns[0, 0] == 0
    assert (arrays.turns[1:, 0] == arrays.turns[:-1, 1]).all()
    assert arrays.turns[-1, 1] == len(arrays.token_ids)
    start, end, _ = arrays.turns[3]
    assert "echo says hello" in CHAT.decode(arrays.token_ids[start:end])


@given(st.lists(st.sampled_from([CALL, CALL + CALL, "<tool_call>{", "<tool_call>x</tool_call>"]), max_size=5))
def test_each_prompt_begins_with_all_that_went_before(turns: list[str]) -> None:
    engine = ScriptedEngine(*turns, "done")
    run(engine)
    for (before, answer), after in zip(
        zip(engine.prompts, engine.answers, strict=True), engine.prompts[1:], strict=False
    ):
        seen = np.concatenate([before, answer.token_ids])
        assert (after[: len(seen)] == seen).all()


@pytest.mark.parametrize(
    ("text", "said", "counted"),
    [
        ("<tool_call>{</tool_call>", "could not be read", "malformed_tool_calls"),
        (
            '<tool_call>{"name": "ls"}</tool_call>',
            "There is no tool 'ls'. The tools are: echo, finish.",
            "malformed_tool_calls",
        ),
        ('<tool_call>{"name": "echo", "arguments": {"txt": "a"}}</tool_call>', "text", "invalid_tool_arguments"),
        ('<tool_call>{"name": "echo", "arguments": {"text": 7}}</tool_call>', "text", "invalid_tool_arguments"),
        ('<tool_call>{"name": "finish", "arguments": {}}</tool_call>', "message", "invalid_tool_arguments"),
    ],
)
def test_wrong_call_is_answered_with_what_was_wrong(text: str, said: str, counted: str) -> None:
    engine = ScriptedEngine(text, "done")
    episode = run(engine)
    assert said in CHAT.decode(engine.prompts[1][len(engine.prompts[0]) :])
    wrong = {name: episode.metrics[name] for name in ("malformed_tool_calls", "invalid_tool_arguments")}
    assert wrong == {"malformed_tool_calls": 0, "invalid_tool_arguments": 0, counted: 1}
    assert episode.stop_reason == StopReason.DONE
    assert episode.final_message is None


def test_finish_ends_the_episode_and_what_comes_after_it_is_not_done() -> None:
    finish = '<tool_call>{"name": "finish", "arguments": {"message": "It is 3."}}</tool_call>'
    engine = ScriptedEngine(CALL, CALL + finish + CALL + finish, "never asked for")
    episode = run(engine)
    assert episode.stop_reason == StopReason.FINISHED
    assert episode.final_message == "It is 3."
    assert episode.metrics["tool_calls"] == 3
    assert len(engine.prompts) == 2
    assert [Role(code) for code in arrays_of(episode).turns[-2:, 2]] == [Role.TOOL, Role.ASSISTANT]


def test_empty_message_ends_the_episode_too() -> None:
    episode = run(ScriptedEngine('<tool_call>{"name": "finish", "arguments": {"message": ""}}</tool_call>'))
    assert episode.stop_reason == StopReason.FINISHED
    assert episode.final_message == ""


def test_most_turns() -> None:
    engine = ScriptedEngine(*[CALL] * 5)
    episode = run(engine, EpisodeLimits(max_turns=3))
    assert episode.stop_reason == StopReason.MAX_TURNS
    assert len(engine.prompts) == 3
    assert episode.metrics["tool_calls"] == 3


def test_turn_that_does_not_end() -> None:
    episode = run(ScriptedEngine("one two three four"), sampling=Sampling(max_tokens=3))
    assert episode.stop_reason == StopReason.TURN_LENGTH


@pytest.mark.parametrize("most", range(60, 140, 5))
def test_conversation_never_grows_beyond_its_limit(most: int) -> None:
    engine = ScriptedEngine(*[CALL] * 50)
    episode = run(engine, EpisodeLimits(max_tokens=most, max_turns=50))
    assert episode.stop_reason == StopReason.MAX_TOKENS
    assert episode.trajectory.tokens <= most


@pytest.mark.parametrize("context", range(60, 140, 5))
def test_conversation_never_grows_beyond_the_engines_context(context: int) -> None:
    engine = ScriptedEngine(*[CALL] * 50)
    episode = run(engine, EpisodeLimits(max_turns=50), context_tokens=context)
    assert episode.stop_reason == StopReason.CONTEXT_LENGTH
    assert episode.trajectory.tokens <= context


def test_a_tool_result_that_overflows_the_context_is_not_added_in_part() -> None:
    long = '<tool_call>{"name": "echo", "arguments": {"text": "' + "a b " * 200 + '"}}</tool_call>'
    engine = ScriptedEngine(long, "never asked for")
    episode = run(engine, context_tokens=1000)
    assert episode.stop_reason == StopReason.CONTEXT_LENGTH
    assert episode.metrics["tool_calls"] == 1
    assert Role(arrays_of(episode).turns[-1, 2]) == Role.ASSISTANT
    assert arrays_of(episode).loss_mask[-1]


def test_an_engine_that_ends_a_turn_early_had_a_smaller_context() -> None:
    episode = run(ScriptedEngine("one two", cut=True), sampling=Sampling(max_tokens=100))
    assert episode.stop_reason == StopReason.CONTEXT_LENGTH


def test_opening_that_does_not_fit_the_engine_is_said_so() -> None:
    with pytest.raises(InvalidJob, match="the engine's context"):
        run(ScriptedEngine("x"), context_tokens=5)


def test_a_turn_that_new_weights_interrupted_goes_on_with_them() -> None:
    engine = ScriptedEngine("one two", "", " three", reasons=["abort", "abort", "stop"])
    episode = run(engine, sampling=Sampling(seed=3))
    arrays = arrays_of(episode)
    assert (episode.last_text, episode.stop_reason) == ("one two three", StopReason.DONE)
    assert engine.prompts[1].tolist() == [*engine.prompts[0], *engine.answers[0].token_ids]
    assert sorted(set(arrays.weight_versions[arrays.loss_mask])) == [0, 1, 2, 3]
    assert arrays.loss_mask[len(engine.prompts[0]) :].all()
    assert engine.samplings[2].max_tokens == 1024 - len(engine.answers[0].token_ids)
    assert len({sampling.seed for sampling in engine.samplings}) == 3
    assert (episode.metrics["turns"], episode.metrics["continued_turns"]) == (1, 2)


def test_a_turn_that_was_full_when_it_was_interrupted_is_full() -> None:
    engine = ScriptedEngine("one two three", reasons=["abort"])
    episode = run(engine, sampling=Sampling(max_tokens=2))
    assert episode.stop_reason == StopReason.TURN_LENGTH
    assert episode.metrics["generated_tokens"] == 2


def test_an_engine_that_always_gives_up_is_not_asked_for_ever() -> None:
    with pytest.raises(EngineFailed, match="before their first token") as caught:
        run(ScriptedEngine(*[""] * 20, reasons=["abort"] * 20))
    assert caught.value.unreachable


def test_an_episode_that_could_not_begin_has_no_stop_reason() -> None:
    episode = Episode()
    loop = AgentLoop(JobPolicy(ScriptedEngine("x"), CHAT, 5, Job(task="t", instance={}), episode), [])
    with pytest.raises(InvalidJob):
        asyncio.run(loop.run(OPENING))
    assert episode.stop_reason is None


def test_a_text_ends_the_turn_with_the_token_that_completes_it() -> None:
    said = "one STOP two"
    episode = run(ScriptedEngine(said), sampling=Sampling(stop=("STOP",)))
    arrays = arrays_of(episode)
    assert episode.last_text == "one STOP"
    assert episode.stop_reason == StopReason.DONE
    assert CHAT.decode(arrays.token_ids[arrays.loss_mask]) == "one STOP"


def test_a_text_that_new_weights_interrupted_ends_the_turn_too() -> None:
    engine = ScriptedEngine("one ST", "OP two", reasons=["abort", "stop"])
    episode = run(engine, sampling=Sampling(stop=("STOP",)))
    assert episode.last_text == "one STOP"
    assert episode.metrics["generated_tokens"] == len(tokenizer.encode("one ST")) + len(tokenizer.encode("OP"))


def test_the_jobs_stop_ids_are_beside_the_formats() -> None:
    seen: list[tuple[int, ...]] = []

    class Noting(ScriptedEngine):
        async def __call__(
            self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
        ) -> Generation:
            seen.append(tuple(stop_token_ids))
            return await super().__call__(token_ids, sampling, stop_token_ids)

    run(Noting("done"), sampling=Sampling(stop_token_ids=(300, CHAT.stop_token_ids[0])))
    assert seen == [(*CHAT.stop_token_ids, 300)]


class Forgetful:
    """A chat format whose template drops what the policy said before: each prompt after the first is a new one."""

    stop_token_ids = CHAT.stop_token_ids
    decode = staticmethod(CHAT.decode)

    def conversation(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> ForgetfulConversation:
        return ForgetfulConversation(CHAT.conversation(messages, tools))


class ForgetfulConversation:
    def __init__(self, inner: Conversation) -> None:
        self._inner = inner
        self._opening = inner.prompt()
        self._turns = 0

    def prompt(self) -> Prompt:
        self._turns += 1
        return Prompt(self._opening.pieces, rewritten=self._turns > 1)

    def add_turn(self, generated: NDArray[np.int32]) -> PolicyTurn:
        return self._inner.add_turn(generated)

    def add_tool_results(self, results: Sequence[str]) -> None:
        pass


def test_a_prompt_that_the_template_rewrote_begins_a_segment() -> None:
    engine = ScriptedEngine(CALL, CALL, "done")
    episode = run(engine, chat=Forgetful())
    builder = episode.trajectory
    result = Result(
        job_id="j",
        task="t",
        outcome=Outcome.COMPLETED,
        tokens=builder.tokens,
        turns=builder.turns,
        segments=builder.segments,
    )
    segments = Trajectory.from_frame(result, builder.block()).segments()
    assert len(segments) == 3
    for segment, prompt, answer in zip(segments, engine.prompts, engine.answers, strict=True):
        assert segment.token_ids.tolist() == [*prompt, *answer.token_ids]
        assert segment.loss_mask.sum() == len(answer.token_ids)
        assert (segment.turns[0, 0], segment.turns[-1, 1]) == (0, len(segment.token_ids))


def test_the_limits_are_those_of_a_segment() -> None:
    one = run(ScriptedEngine("done")).trajectory.tokens
    episode = run(ScriptedEngine(*[CALL] * 5, "done"), EpisodeLimits(max_tokens=one + 60), chat=Forgetful())
    assert episode.stop_reason == StopReason.DONE
    assert episode.trajectory.tokens > one + 60


def test_opening_that_does_not_fit_is_the_jobs_fault() -> None:
    with pytest.raises(InvalidJob, match=r"episode\.max_tokens"):
        run(ScriptedEngine("x"), EpisodeLimits(max_tokens=5))


def test_each_turn_has_a_seed_of_its_own_and_the_same_in_every_run() -> None:
    first, second = ScriptedEngine(CALL, CALL, "done"), ScriptedEngine(CALL, CALL, "done")
    run(first, sampling=Sampling(seed=7))
    run(second, sampling=Sampling(seed=7))
    seeds = [sampling.seed for sampling in first.samplings]
    assert len(set(seeds)) == 3
    assert seeds == [sampling.seed for sampling in second.samplings]
    unseeded = ScriptedEngine("done")
    run(unseeded)
    assert unseeded.samplings[0].seed is None


def test_versions_that_do_not_cover_the_tokens_are_the_engines_fault() -> None:
    class Careless(ScriptedEngine):
        async def __call__(
            self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
        ) -> Generation:
            answer = await super().__call__(token_ids, sampling, stop_token_ids)
            return Generation(answer.token_ids, answer.logprobs, answer.spans[:1], answer.finish_reason)

    with pytest.raises(EngineFailed, match="do not cover"):
        run(Careless("one two three"))
