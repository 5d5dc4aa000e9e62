"""A conversation: what it sends to the engine, what it records, where it stops. The engine alone is scripted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from prorl_zmq.data.trajectory import Role, Trajectory, array_views
from prorl_zmq.errors import EngineFailed, HandlerFailed, InvalidJob
from prorl_zmq.inference import tokenizer
from prorl_zmq.inference.chat import ChatMessage, Prompt
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.inference.engine import Generation
from prorl_zmq.stages.conversation import Conversation
from prorl_zmq.stages.episode import Episode, JobPolicy, StopReason, Turn
from prorl_zmq.tools.think_and_finish import FinishTool
from prorl_zmq.tools.tool import Arguments, Tool
from prorl_zmq.wire.messages.engines import VersionSpan
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Job, Outcome, Result, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference import chat as chats
    from prorl_zmq.inference.chat import ChatFormat, ReadTurn
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
    policy = JobPolicy(engine, chat, context_tokens, job, episode)
    asyncio.run(conversation(policy, tools).say())
    return episode


def conversation(policy: JobPolicy, tools: Sequence[Tool[Any]] = (), **options: Any) -> Conversation:
    async def given() -> JobPolicy:
        return policy

    return Conversation(policy.episode, given, options.pop("opening", OPENING), tools, **options)


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


def test_a_call_of_no_tool_is_answered_in_short_however_many_tools_there_are() -> None:
    tools = [Echo() for _ in range(500)]
    for number, tool in enumerate(tools):
        tool.name = f"tool_{number}_{'x' * 40}"  # type: ignore[misc]
    engine = ScriptedEngine('<tool_call>{"name": "ls"}</tool_call>', "done")
    talk = conversation(policy(engine), tools)
    asyncio.run(talk.say())
    answer = CHAT.decode(engine.prompts[1][len(engine.prompts[0]) :])
    assert "There is no tool 'ls'. The tools are: tool_0_x" in answer
    assert len(answer) < 2500


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
    talk = conversation(JobPolicy(ScriptedEngine("x"), CHAT, 5, Job(task="t", instance={}), episode))
    with pytest.raises(InvalidJob):
        asyncio.run(talk.say())
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
    def __init__(self, inner: chats.Conversation) -> None:
        self._inner = inner
        self._opening = inner.prompt()
        self._turns = 0

    def prompt(self) -> Prompt:
        self._turns += 1
        return Prompt(self._opening.pieces, rewritten=self._turns > 1)

    def add_turn(self, generated: NDArray[np.int32]) -> ReadTurn:
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


def policy(engine: ScriptedEngine, limits: EpisodeLimits | None = None, **options: Any) -> JobPolicy:
    job = Job(task="t", instance={}, episode=limits or EpisodeLimits(), sampling=options.pop("sampling", Sampling()))
    return JobPolicy(engine, CHAT, options.pop("context_tokens", 0), job, Episode())


def roles_of(talk: Conversation) -> str:
    return " ".join(Role(code).name.lower() for code in talk.trajectory.arrays().turns[:, 2])


def test_the_user_speaks_turn_by_turn() -> None:
    engine = ScriptedEngine("five", CALL, "seven", "right")
    talk = conversation(policy(engine), [Echo()], opening=OPENING[:1])

    async def game() -> list[str]:
        said = [(await talk.say("Guess.")).text, (await talk.say("More.")).text, (await talk.say("Yes.")).text]
        talk.end()
        return said

    assert asyncio.run(game()) == ["five", "seven", "right"]
    assert roles_of(talk) == "system user assistant user assistant tool assistant user assistant"
    for (before, answer), after in zip(
        zip(engine.prompts, engine.answers, strict=True), engine.prompts[1:], strict=False
    ):
        seen = [*before, *answer.token_ids]
        assert after[: len(seen)].tolist() == seen
    assert [turn.calls for turn in talk.turns].count(()) == 3
    assert (talk.stop_reason, talk.stop) == (StopReason.ENVIRONMENT, StopReason.ENVIRONMENT)


def test_without_tools_what_looks_like_a_call_is_what_was_said() -> None:
    talk = conversation(policy(ScriptedEngine(CALL)))
    assert asyncio.run(talk.say()).text == CALL
    assert talk.stop_reason == StopReason.DONE


def test_a_turns_reward_is_any_finite_number() -> None:
    talk = conversation(policy(ScriptedEngine("one", "two", "three")))

    async def game() -> None:
        (await talk.say()).reward = -1.5
        await talk.say("And?")
        (await talk.say("And?")).reward = np.float32(2.0)  # type: ignore[assignment]

    asyncio.run(game())
    assert talk.rewards == [(2, -1.5), (6, 2.0)]
    assert talk.trajectory.arrays().turns[[2, 6], 2].tolist() == [Role.ASSISTANT] * 2


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1.0", b"1", [1.0], {}])
def test_a_reward_that_is_no_finite_number_is_refused_by_name(reward: Any) -> None:
    talk = conversation(policy(ScriptedEngine("one")))
    turn = asyncio.run(talk.say())
    with pytest.raises(HandlerFailed, match="a turn's reward must be a finite number, and not"):
        turn.reward = reward
    assert talk.rewards == []


def test_what_no_longer_fits_is_not_said_and_earns_nothing() -> None:
    talk = conversation(policy(ScriptedEngine("one", "two"), context_tokens=100))

    async def game() -> Turn:
        await talk.say()
        return await talk.say("a b c " * 100)

    turn = asyncio.run(game())
    assert (turn.text, turn.stop, talk.stop_reason) == ("", *[StopReason.CONTEXT_LENGTH] * 2)
    assert roles_of(talk) == "system user assistant"
    with pytest.raises(HandlerFailed, match=r"without trained tokens: nothing was generated \(context_length\)"):
        turn.reward = 1.0
    with pytest.raises(HandlerFailed, match=r"'main' has ended \(context_length\)"):
        asyncio.run(talk.say("Still there?"))


def test_a_turn_cut_off_by_a_limit_ends_the_conversation() -> None:
    talk = conversation(policy(ScriptedEngine("one two three four"), sampling=Sampling(max_tokens=3)))
    turn = asyncio.run(talk.say())
    assert (turn.stop, turn.row) == (StopReason.TURN_LENGTH, 2)


def test_the_limit_on_turns_counts_all_trained_conversations() -> None:
    shared = policy(ScriptedEngine(*"abcdef"), EpisodeLimits(max_turns=3))
    black, white = (conversation(shared, name=name) for name in ("black", "white"))
    user = conversation(shared, name="user", trained=False)

    async def game() -> list[Turn]:
        await user.say("Begin.")
        return [await one.say("Play.") for one in (black, white, black, white)]

    turns = asyncio.run(game())
    assert [turn.stop for turn in turns] == [None, None, None, StopReason.MAX_TURNS]
    assert shared.episode.stop_reason == StopReason.MAX_TURNS
    assert (black.stop_reason, white.stop_reason) == (StopReason.DONE, StopReason.MAX_TURNS)


def test_several_conversations_at_once_are_segments_in_the_order_of_their_opening() -> None:
    shared = policy(ScriptedEngine(*"abcdef"))
    talks = [conversation(shared, name=name, opening=OPENING[:1]) for name in ("black", "white", "unused")]

    async def game() -> None:
        await asyncio.gather(talks[1].say("w1"), talks[0].say("b1"))
        await talks[1].say("w2")

    asyncio.run(game())
    whole = shared.episode.whole()
    result = Result(
        job_id="j",
        task="t",
        outcome=Outcome.COMPLETED,
        tokens=whole.tokens,
        turns=whole.turns,
        segments=whole.segments,
    )
    segments = Trajectory.from_frame(result, whole.block()).segments()
    assert len(segments) == 2
    for segment, talk in zip(segments, talks, strict=False):
        for given_array, own in zip(segment, talk.trajectory.arrays(), strict=True):
            assert given_array.tolist() == own.tolist()


def test_an_untrained_conversation_is_a_note_and_not_in_the_arrays() -> None:
    shared = policy(ScriptedEngine("I am a user", "Hello"))
    user = conversation(shared, name="user", trained=False)
    talk = conversation(shared, opening=OPENING[:1])

    async def game() -> Turn:
        asked = await user.say()
        await talk.say(asked.text)
        return asked

    turn = asyncio.run(game())
    assert shared.episode.whole() is talk.trajectory
    assert user.note.endswith("user: Count to three.\n\nassistant: I am a user")
    assert (shared.episode.metrics["turns"], shared.episode.last_text) == (1, "Hello")
    assert shared.episode.timings["engine"] > 0
    with pytest.raises(HandlerFailed, match="its conversation is not trained"):
        turn.reward = 1.0


def test_calls_of_a_turn_are_answered_by_whoever_leads() -> None:
    engine = ScriptedEngine(CALL, "done")
    talk = conversation(policy(engine), [Echo()])

    async def game() -> tuple[Turn, Turn]:
        calling = await talk.turn()
        with pytest.raises(HandlerFailed, match="1 unanswered tool calls; answer them with `turn`"):
            await talk.say("Hm?")
        return calling, await talk.turn(ChatMessage(Role.TOOL, "mine"), ChatMessage(Role.USER, "And?"))

    calling, last = asyncio.run(game())
    assert [call.name for call in calling.calls] == ["echo"]
    assert (last.text, roles_of(talk)) == ("done", "system user assistant tool user assistant")


def test_as_many_answers_as_calls() -> None:
    talk = conversation(policy(ScriptedEngine(CALL)), [Echo()])

    async def game() -> None:
        await talk.turn()
        await talk.turn(ChatMessage(Role.USER, "And?"))

    with pytest.raises(HandlerFailed, match="the last turn has 1 tool calls, and 0 answers were given"):
        asyncio.run(game())


def test_one_call_at_a_time() -> None:
    class Slow(ScriptedEngine):
        async def __call__(
            self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
        ) -> Generation:
            await asyncio.sleep(0)
            return await super().__call__(token_ids, sampling, stop_token_ids)

    talk = conversation(policy(Slow("one", "two")))

    async def game() -> None:
        await asyncio.gather(talk.say(), talk.say("And?"))

    with pytest.raises(HandlerFailed, match="was called while another call is under way"):
        asyncio.run(game())


def test_after_a_failed_turn_nothing_can_be_said() -> None:
    talk = conversation(policy(ScriptedEngine(*[""] * 20, reasons=["abort"] * 20)))
    with pytest.raises(EngineFailed):
        asyncio.run(talk.say())
    assert talk.stop_reason is None
    with pytest.raises(HandlerFailed, match="an earlier call failed, so nothing more can be said"):
        asyncio.run(talk.say("And?"))


def test_after_run_nothing_is_said_and_no_turn_is_rewarded() -> None:
    """What a task left running must not change a trajectory whose size the broker knows."""
    shared = policy(ScriptedEngine("one", "two"))
    talk = conversation(shared)
    turn = asyncio.run(talk.say())
    tokens = talk.trajectory.tokens
    shared.episode.end()
    for late in (talk, conversation(shared, name="late")):
        with pytest.raises(HandlerFailed, match="`say` was called after RUN had ended"):
            asyncio.run(late.say("And?"))
    with pytest.raises(
        HandlerFailed, match=r"the reward 1\.0 was given to a turn after RUN had ended; EVAL gives rewards"
    ):
        turn.reward = 1.0
    assert (talk.trajectory.tokens, turn.reward) == (tokens, None)


def test_a_tool_that_ends_the_episode_ends_the_conversation() -> None:
    finish = '<tool_call>{"name": "finish", "arguments": {"message": "It is 3."}}</tool_call>'
    talk = conversation(policy(ScriptedEngine(finish)), [FinishTool()])
    assert asyncio.run(talk.say()).stop == StopReason.FINISHED
    with pytest.raises(HandlerFailed, match=r"has ended \(finished\)"):
        asyncio.run(talk.say("And?"))


def test_a_tool_that_ends_one_conversation_leaves_the_others_open() -> None:
    finish = '<tool_call>{"name": "finish", "arguments": {"message": "It is 3."}}</tool_call>'
    shared = policy(ScriptedEngine(finish, CALL, "done"))
    first, second = (conversation(shared, [Echo(), FinishTool()], name=name) for name in ("first", "second"))
    assert asyncio.run(first.say()).stop == StopReason.FINISHED
    assert asyncio.run(second.say()).stop is None
    assert second.turns[-1].text == "done"


def test_nothing_to_answer_is_said_so() -> None:
    with pytest.raises(HandlerFailed, match="has no message that the model could answer"):
        asyncio.run(conversation(policy(ScriptedEngine("x")), opening=[]).say())
    talk = conversation(policy(ScriptedEngine("x")))
    asyncio.run(talk.say())
    with pytest.raises(HandlerFailed, match="`say` needs a message, since the model spoke last"):
        asyncio.run(talk.say())


def test_conversations_with_equal_prompts_have_seeds_of_their_own() -> None:
    engine = ScriptedEngine(*"abcd")
    shared = policy(engine, sampling=Sampling(seed=7))
    black, white = (conversation(shared, name=name) for name in ("black", "white"))

    async def game() -> None:
        for one in (black, white, black, white):
            await one.say("Play.")

    asyncio.run(game())
    assert len({sampling.seed for sampling in engine.samplings}) == 4
