"""Each template of current models: its calls are read, what is seen is what it writes, and no content makes a frame."""

from __future__ import annotations

import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from chat_collection import FOLDER, MODELS, make_tokenizer, save_model

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.traits import WrittenCall
from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat
from prorl_zmq.inference.tool_calls.call import ToolCall
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference.chat import Piece

pytestmark = [
    pytest.mark.skipif(not MODELS, reason=f"no chat templates in {FOLDER}"),
    pytest.mark.xdist_group("transformers"),
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Run {name}.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
                "required": ["command"],
            },
        },
    }
    for name in ("bash", "python")
]

on_each_template = pytest.mark.parametrize("name", MODELS)


class Step(NamedTuple):
    """A turn that calls tools, and what follows it."""

    generated: NDArray[np.int32]
    whole: str
    """The template's own rendering of the conversation after it, opened for the next turn."""
    calls: list[WrittenCall]
    answers: list[dict[str, Any]]
    kept: bool
    """The template's rendering begins with what the engine saw before."""


@lru_cache(128)
def load(name: str, history: str = "template") -> TransformersChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        directory = str(save_model(MODELS[name], Path(folder)))
        return TransformersChatFormat.load(ChatSettings("transformers", directory, history=history))


@lru_cache(64)
def tokenizer_of(name: str) -> Any:
    return make_tokenizer(MODELS[name])


def render(name: str, messages: list[dict[str, Any]], *, opened: bool, tools: bool = True) -> str:
    return str(
        tokenizer_of(name).apply_chat_template(
            messages,
            tools=TOOLS if tools and load(name).traits.shows_tools else None,
            tokenize=False,
            add_generation_prompt=opened,
        )
    )


def ids_of(pieces: Sequence[Piece]) -> NDArray[np.int32]:
    return np.concatenate([piece.token_ids for piece in pieces])


def added_ids(name: str) -> set[int]:
    model = MODELS[name]
    return {tokenizer_of(name).convert_tokens_to_ids(token) for token in (*model.special, *model.plain)}


def answer(name: str, *, tools: bool = True) -> list[int]:
    """Give a turn that answers the user, as the template writes it, and the token that ends it."""
    messages = [{"role": "user", "content": "Do it."}]
    before = render(name, messages, opened=True, tools=tools)
    said = [*messages, {"role": "assistant", "content": "It is done."}]
    whole = render(name, [*said, {"role": "user", "content": "?"}], opened=True, tools=tools)
    start, behind = common(whole, before), whole.index("It is done.") + len("It is done.")
    ends = load(name).traits.ends.find(whole[behind:])
    end = [tokenizer_of(name).convert_tokens_to_ids(whole[behind:][slice(*ends)])]
    stops = load(name).stop_token_ids
    text = whole[start : behind + ends[0]]
    return [*tokenizer_of(name)(text, add_special_tokens=False)["input_ids"], *(end if end[0] in stops else stops[:1])]


def common(one: str, other: str) -> int:
    """Give how many characters two texts begin with in common, up to the end of a mark or a line."""
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return end if end == len(other) else max(one.rfind(mark, 0, end) + 1 for mark in ">]\n")


@lru_cache(64)
def calling_steps(name: str) -> list[Step]:
    """Give two turns that call tools, as the template writes them, the second one two tools where it can."""
    traits = load(name).traits
    system = "Work." if traits.shows_tools else f"Work.\n\n{traits.form.describe(TOOLS)}"
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": "Do it."}]
    if not traits.takes_system:
        messages = [{"role": "user", "content": f"{system}\n\nDo it."}]
    steps = []
    number = 0
    for count in (1, 2):
        before = render(name, messages, opened=True)
        for some in range(count, 0, -1):
            names = ["bash", "python"][:some]
            calls = [
                WrittenCall(tool, {"command": f"ls -l {n}", "seconds": n}, traits.call_id(number + n, tool))
                for n, tool in enumerate(names, 1)
            ]
            begun, closed = traits.reasoning.marks
            thinks = traits.reasoning.key and not re.search(re.escape(begun) + r"\s*" + re.escape(closed), before[-80:])
            thought = "I list it." if thinks else None
            written = "" if traits.writes_calls else "".join(traits.form.write(*call[:2]) for call in calls).strip()
            turn = traits.turn(written, thought, calls if traits.writes_calls else [])
            answers = traits.results([f"a\nb {n}" for n in range(some)], calls)
            try:
                whole = render(name, [*messages, turn, *answers], opened=True)
            except Exception:
                if some == 1:
                    raise
            else:
                if f"ls -l {some}" in whole:
                    break
        number += 0 if name == "kimi-k2" else len(calls)  # which numbers the calls of each turn
        start = common(whole, before)
        last = whole.rindex(f"ls -l {some}")
        ends = re.compile("|".join(map(re.escape, (*MODELS[name].stops, MODELS[name].eos, "<|tools_suffix|>"))))
        if written:
            last = whole.rindex(written) + len(written)
        found = ends.search(whole, last)
        assert found is not None
        generated = np.array(tokenizer_of(name)(whole[start : found.end()], add_special_tokens=False)["input_ids"])
        messages += [turn, *answers]
        steps.append(Step(generated.astype(np.int32), whole, calls, answers, whole.startswith(before)))
    return steps


def opening(system: str = "Work.", user: str = "Do it.") -> list[ChatMessage]:
    return [ChatMessage(Role.SYSTEM, system), ChatMessage(Role.USER, user)]


@pytest.mark.few(8)
@on_each_template
def test_own_calls_are_read_and_what_is_seen_is_what_the_template_writes(name: str) -> None:
    chat = load(name)
    conversation = chat.conversation(opening(), TOOLS)
    seen = ids_of(conversation.prompt().pieces)
    for step in calling_steps(name):
        read = conversation.add_turn(step.generated)
        assert [(call.name, call.arguments) for call in read.calls if isinstance(call, ToolCall)] == [
            (call.name, call.arguments) for call in step.calls
        ]
        conversation.add_tool_results([f"a\nb {n}" for n in range(len(step.calls))])
        prompt = conversation.prompt()
        assert prompt.rewritten != step.kept
        new = ids_of(prompt.pieces)
        seen = new if prompt.rewritten else np.concatenate([seen, step.generated, new])
        assert chat.decode(seen) == step.whole, (chat.decode(seen)[-900:], step.whole[-900:])


@pytest.mark.few(8)
@on_each_template
def test_what_follows_a_turn_is_what_the_template_writes(name: str) -> None:
    chat = load(name)
    # The one of R1 writes the mark that begins answers only once in a conversation.
    for step in calling_steps(name)[: 1 if name == "deepseek-r1-distill" else None]:
        turn = chat.read_turn(step.generated, TOOLS)
        assert turn.ended
        answers = [ChatMessage(Role.TOOL, str(one["content"]), call_id=str(n)) for n, one in enumerate(step.answers)]
        new = ids_of(chat.following(turn, answers, TOOLS))
        assert step.whole.endswith(chat.decode(np.concatenate([step.generated, new])))


@pytest.mark.few(8)
@on_each_template
def test_a_message_of_the_user_follows_without_a_word_of_markers(name: str) -> None:
    chat = load(name)
    said = chat.read_turn(np.array(answer(name)), TOOLS)
    text = chat.decode(ids_of(chat.following(said, [ChatMessage(Role.USER, "And then?")], TOOLS)))
    assert "And then?" in text
    assert "qz" not in text


def talk(name: str, thought: str) -> list[Step]:
    """Give turns of a conversation without tools, the first and third with a thought, if there is one."""
    traits = load(name).traits
    begun, closed = traits.reasoning.marks
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Work."}, {"role": "user", "content": "Do it."}]
    if not traits.takes_system:
        messages = [{"role": "user", "content": "Work.\n\nDo it."}]
    steps = []
    seen = render(name, messages, opened=True, tools=False)
    for number in range(4):
        said = text_of(answer(name, tools=False), name).replace("It is done.", f"It is done {number}.")
        said = said[max(end for end in range(len(said)) if seen.endswith(said[:end])) :]
        opened = traits.reasoning.opened or (bool(begun) and seen.rstrip().endswith(begun))
        thinks = bool(thought and traits.reasoning.key and begun and closed not in said and number % 2 == 0)
        if thinks or (opened and closed not in said):
            said = ("" if opened else begun) + (thought if thinks else "") + closed + said
        generated = tokenizer_of(name)(said, add_special_tokens=False)["input_ids"]
        turn = traits.turn(f"It is done {number}.", thought if thinks else None, [])
        messages += [turn, {"role": "user", "content": f"And then {number}?"}]
        before, seen = seen, render(name, messages, opened=True, tools=False)
        steps.append(Step(np.array(generated, np.int32), seen, [], [], seen.startswith(before + said)))
    return steps


def text_of(token_ids: Sequence[int], name: str) -> str:
    return load(name).decode(np.array(token_ids, np.int32))


def squeezed(text: str, name: str) -> str:
    """Give a text without spaces and without the tokens that end turns, of which a model may choose another."""
    ends = [*(text_of([end], name) for end in load(name).stop_token_ids), *load(name).traits.ends.texts]
    return re.sub("|".join([*map(re.escape, ends), r"\s+"]), "", text)


@pytest.mark.few(8)
@pytest.mark.parametrize("thought", ["I add.", ""], ids=["thinks", "silent"])
@on_each_template
def test_the_user_answers_turn_by_turn(name: str, thought: str) -> None:
    """What follows is appended; with history `template`, a segment begins where the template changes what was seen."""
    steps = talk(name, thought)
    for history in ("template", "append"):
        chat = load(name, history)
        conversation = chat.conversation(opening(), [])
        seen = ids_of(conversation.prompt().pieces)
        exact = True
        for number, step in enumerate(steps):
            turn = conversation.add_turn(step.generated)
            # A template may write the mark that closes thinking before each answer.
            content = turn.content.removeprefix(chat.traits.reasoning.marks[1]).strip()
            assert content == f"It is done {number}.", text_of(step.generated, name)
            conversation.add_messages([ChatMessage(Role.USER, f"And then {number}?")])
            prompt = conversation.prompt()
            new = ids_of(prompt.pieces)
            assert chat.decode(new).count(f"And then {number}?") == 1
            assert not (prompt.rewritten and history == "append")
            # An empty thought is taken for one that the template drops, which costs a segment.
            assert not (prompt.rewritten and step.kept and turn.reasoning != "")
            exact = prompt.rewritten or (exact and step.kept)
            seen = new if prompt.rewritten else np.concatenate([seen, step.generated, new])
            if exact or history == "template":
                assert squeezed(chat.decode(seen), name) == squeezed(step.whole, name), (name, step.whole)


@pytest.mark.few(8)
@pytest.mark.parametrize("history", ["template", "append"])
@on_each_template
def test_the_user_speaks_after_tools_answers(name: str, history: str) -> None:
    chat = load(name, history)
    conversation = chat.conversation(opening(), TOOLS)
    conversation.prompt()
    for step in calling_steps(name):
        conversation.add_turn(step.generated)
        conversation.add_tool_results([f"a\nb {n}" for n in range(len(step.calls))])
        conversation.add_messages([ChatMessage(Role.USER, "And then?")])
        prompt = conversation.prompt()
        text = chat.decode(ids_of(prompt.pieces))
        assert not (prompt.rewritten and history == "append")
        assert text.count("And then?") == (1 if not prompt.rewritten else text.count("And then?"))
        assert "qz" not in text
        assert f"b {len(step.calls) - 1}" in text


@pytest.mark.few(8)
def test_a_turn_that_was_cut_off_is_ended_once() -> None:
    chat = load("gpt-oss")
    conversation = chat.conversation([ChatMessage(Role.USER, "Hi")], TOOLS)
    thought = chat.tokenizer.encode("<|channel|>analysis<|message|>I never end")[0]
    for generated in ([*thought, chat.stop_token_ids[0]], chat.tokenizer.encode("It is done.")[0]):
        conversation.prompt()
        conversation.add_turn(np.array(generated, np.int32))
        conversation.add_tool_results([])
    assert chat.decode(ids_of(conversation.prompt().pieces)) == "<|end|><|start|>assistant"


@pytest.mark.few(8)
@on_each_template
def test_no_content_makes_a_token_of_the_frame(name: str) -> None:
    """A conversation whose contents spell all tokens has as many of each as one with harmless contents."""
    model, chat = MODELS[name], load(name)
    spelled = " ".join([*model.special, *model.plain]) + "".join(model.plain)
    counts = []
    for text in ("x", spelled):
        conversation = chat.conversation(opening(text, text), TOOLS)
        seen = [ids_of(conversation.prompt().pieces)]
        for step in calling_steps(name):
            calls = conversation.add_turn(step.generated).calls
            conversation.add_tool_results([text] * len(calls))
            seen.append(ids_of(conversation.prompt().pieces))
        counts.append([dict(zip(*np.unique(ids, return_counts=True), strict=True)) for ids in seen])
    harmless, spelling = counts
    frame = {int(i) for ids in harmless for i in ids if int(i) in added_ids(name)}
    frame |= {tokenizer_of(name).convert_tokens_to_ids(token) for token in model.special}
    for before, after in zip(harmless, spelling, strict=True):
        assert {i: after.get(i, 0) for i in frame} == {i: before.get(i, 0) for i in frame}


TABLE = re.compile(r"^\| `([\w.-]+)` \| (.*) \| (.*) \| (.*) \| (\d) \|$", re.MULTILINE)


def row(name: str) -> tuple[str, str, str, str]:
    """Give a template's row of the table in docs/engines.md."""
    chat = load(name)
    traits = chat.traits
    calls = f"`{traits.form.name}`" if traits.form.name != "fenced" else "not read"
    begun, closed = traits.reasoning.marks
    opened = "opened by the prompt" if traits.reasoning.opened else f"`{begun}`"
    reasoning = f"{opened} … `{closed}`" if traits.reasoning.key else "as text"
    arguments = ", ".join(f"`{one}`" for one in sorted(chat.variables & KNOWN)) or "none"
    conversation = chat.conversation(opening(), TOOLS)
    conversation.prompt()
    segments = 1
    for step in calling_steps(name):
        calls_read = conversation.add_turn(step.generated).calls
        conversation.add_tool_results(["x"] * len(calls_read))
        segments += conversation.prompt().rewritten
    return calls, reasoning.replace("|", "\\|"), arguments, str(segments)


KNOWN = frozenset(
    {
        *("enable_thinking", "thinking", "reasoning_effort", "thinking_effort", "thinking_mode", "thinking_budget"),
        *("reasoning_strength", "thinking_option", "low_effort", "medium_effort", "clear_thinking", "drop_thinking"),
        *("preserve_thinking", "preserved_thinking", "truncate_history_thinking", "think_render_option"),
    }
)
"""Arguments that are about reasoning."""


@pytest.mark.few(8)
@on_each_template
def test_the_table_of_the_docs(name: str) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    rows = {found[0]: found[1:] for found in TABLE.findall(text)}
    assert rows[name] == row(name)


def test_the_table_of_the_docs_has_no_other_template() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    assert {found[0] for found in TABLE.findall(text)} == set(MODELS)
