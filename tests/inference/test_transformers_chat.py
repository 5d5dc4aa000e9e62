"""Conversations by the chat templates of several families: the ids that the engine sees, turn after turn."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
from chat_families import FAMILIES, Call, Family, make_tokenizer, save_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import ConfigError, InvalidJob
from prorl_zmq.inference.chat import ChatMessage, Prompt
from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat
from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from prorl_zmq.inference.chat import Piece

pytestmark = pytest.mark.xdist_group("transformers")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Run {name}.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
    for name in ("bash", "python")
]
SPELLED = sorted({token for family in FAMILIES.values() for token in (*family.special, *family.added)})
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CONTENTS = st.lists(st.one_of(TEXTS, st.sampled_from([*SPELLED, " ", "\n", "\n\n", "xQcut0Qx"])), max_size=6).map(
    "".join
)
"""Of messages and tools' answers: with spaces at the edges, and spelling special tokens of all families."""
WORDS = st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"], exclude_characters="<[{`"), min_size=1, max_size=8)
SPOKEN = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
"""Of the policy: as every template writes it again."""
FEW, MANY = hypothesis.settings(max_examples=10), hypothesis.settings(max_examples=100)
"""How many conversations of each family `make test` and the proofs make."""
ARGUMENTS = st.dictionaries(SPOKEN, st.one_of(SPOKEN, st.integers(-9, 9)), max_size=2)


@dataclass
class Turn:
    content: str
    reasoning: str | None
    calls: list[Call]
    results: list[str]


@dataclass
class Scene:
    """A conversation that a family can hold."""

    system: str | None
    user: str
    tools: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)

    @property
    def opening(self) -> list[ChatMessage]:
        system = [] if self.system is None else [ChatMessage(Role.SYSTEM, self.system)]
        return [*system, ChatMessage(Role.USER, self.user)]


@st.composite
def scenes(draw: st.DrawFn, family: Family) -> Scene:
    scene = Scene(draw(st.none() | CONTENTS), draw(CONTENTS), TOOLS)
    for _ in range(draw(st.integers(1, 3))):
        calls = draw(
            st.lists(st.tuples(st.sampled_from(["bash", "python"]), ARGUMENTS), min_size=1, max_size=family.max_calls)
        )
        content = draw(SPOKEN) if family.speaks_with_calls else ""
        reasoning = draw(SPOKEN if family.opened else st.none() | SPOKEN) if family.reasons else None
        scene.turns.append(Turn(content, reasoning, calls, [draw(CONTENTS) for _ in calls]))
    return scene


@lru_cache(32)
def load(name: str, history: str = "template") -> TransformersChatFormat:
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        directory = save_tokenizer(family, Path(folder))
        return TransformersChatFormat.load(ChatSettings("transformers", str(directory), history=history))


@lru_cache(16)
def oracle(name: str) -> Any:
    return make_tokenizer(FAMILIES[name])


def call_id(turn: int, index: int) -> str:
    return f"id{turn:03d}{index:04d}"


def rendered(family: Family, chat: TransformersChatFormat, scene: Scene, turns: int) -> str:
    """The template's own rendering of the whole conversation, with so many turns, opened for the next."""
    messages = []
    system, user = scene.system, scene.user
    if scene.tools and family.described:
        described = chat.traits.form.describe(scene.tools)
        system = f"{system}\n\n{described}" if system else described
    if system is not None:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": user})
    for number, turn in enumerate(scene.turns[:turns]):
        written = family.form != "fenced"
        ids = [call_id(number, index) for index in range(len(turn.calls))]
        content = turn.content
        if not written:
            content = family.write_spoken(content, list(zip(turn.calls, ids, strict=True)))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if turn.reasoning is not None and family.name == "qwen3":
            message["reasoning_content"] = turn.reasoning
        elif turn.reasoning is not None:
            message["content"] = f"<think>\n{turn.reasoning}\n</think>\n\n{content}"
        if written:
            message["tool_calls"] = [
                {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}
                for id_, (name, arguments) in zip(ids, turn.calls, strict=True)
            ]
        messages.append(message)
        if family.results_as_user:
            messages.append({"role": "user", "content": "\n\n".join(turn.results)})
        else:
            messages += [
                {"role": "tool", "name": name, "tool_call_id": id_, "content": result}
                for id_, (name, _), result in zip(ids, turn.calls, turn.results, strict=True)
            ]
    tools = scene.tools if scene.tools and not family.described else None
    text = oracle(family.name).apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return str(text)


def encode_turn(family: Family, text: str) -> NDArray[np.int32]:
    ids = oracle(family.name)(text, add_special_tokens=False)["input_ids"]
    return np.array([*ids, oracle(family.name).convert_tokens_to_ids(family.end)], np.int32)


def ids_of(prompt: Prompt) -> NDArray[np.int32]:
    return np.concatenate([piece.token_ids for piece in prompt.pieces])


def joined(pieces: Sequence[Piece]) -> NDArray[np.int32]:
    return np.concatenate([piece.token_ids for piece in pieces])


def special_ids(family: Family) -> list[int]:
    return [oracle(family.name).convert_tokens_to_ids(token) for token in family.special]


@pytest.mark.few(4)
@pytest.mark.parametrize("history", ["template", "append"])
@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(data=st.data())
def test_engine_sees_what_it_saw_and_what_the_template_writes(name: str, history: str, data: st.DataObject) -> None:
    family, chat = FAMILIES[name], load(name, history)
    scene = data.draw(scenes(family))
    conversation = chat.conversation(scene.opening, scene.tools)
    prompt = conversation.prompt()
    seen = ids_of(prompt)
    assert not prompt.rewritten
    assert chat.decode(seen) == rendered(family, chat, scene, 0)
    exact = True  # the engine saw exactly what the template makes of it
    for number, turn in enumerate(scene.turns):
        calls = [(call, call_id(number, index)) for index, call in enumerate(turn.calls)]
        written = family.write(turn.content, turn.reasoning, calls)
        generated = encode_turn(family, written)
        read = conversation.add_turn(generated)
        assert read.text == chat.traits.split(written)[1]
        assert [(call.name, call.arguments) for call in read.calls if isinstance(call, ToolCall)] == turn.calls
        conversation.add_tool_results(turn.results)
        prompt = conversation.prompt()
        assert prompt.pieces[-1].role == Role.ASSISTANT
        whole = rendered(family, chat, scene, number + 1)
        rewrites = family.rewrites(turn.reasoning is not None, number == 0 and scene.system is not None)
        assert prompt.rewritten == (rewrites and history == "template")
        if prompt.rewritten:
            seen, exact = ids_of(prompt), True
        else:
            added = ids_of(prompt)
            assert whole.endswith(chat.decode(added))
            seen = np.concatenate([seen, generated, added])
            exact = exact and not rewrites
        if exact:
            assert chat.decode(seen) == whole


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(data=st.data())
def test_what_follows_a_turn_is_what_a_conversation_goes_on_with(name: str, data: st.DataObject) -> None:
    family, chat = FAMILIES[name], load(name, "append")
    scene = data.draw(scenes(family))
    conversation = chat.conversation(scene.opening, scene.tools)
    assert np.array_equal(joined(chat.opening(scene.opening, scene.tools)), ids_of(conversation.prompt()))
    for number, turn in enumerate(scene.turns):
        ids = [call_id(number, index) for index in range(len(turn.calls))]
        spoken = family.write(turn.content, turn.reasoning, list(zip(turn.calls, ids, strict=True)))
        generated = encode_turn(family, spoken)
        generated = generated[: data.draw(st.sampled_from([len(generated), len(generated) - 1]))]
        said = conversation.add_turn(generated)
        results = turn.results if len(turn.results) == len(said.calls) else ["?"] * len(said.calls)
        conversation.add_tool_results(results)
        answers = [ChatMessage(Role.TOOL, text, call_id=str(index)) for index, text in enumerate(results)]
        pieces = chat.following(chat.read_turn(generated), answers, scene.tools)
        assert np.array_equal(joined(pieces), ids_of(conversation.prompt()))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(data=st.data())
def test_no_content_makes_a_special_token(name: str, data: st.DataObject) -> None:
    """The same conversation with harmless contents has as many of each special token."""
    family, chat = FAMILIES[name], load(name)
    scene = data.draw(scenes(family))
    harmless = Scene(
        None if scene.system is None else "x",
        "x",
        scene.tools,
        [Turn(turn.content, turn.reasoning, turn.calls, ["x" for _ in turn.results]) for turn in scene.turns],
    )
    counts = []
    for one in (scene, harmless):
        conversation = chat.conversation(one.opening, one.tools)
        seen = [ids_of(conversation.prompt())]
        for number, turn in enumerate(one.turns):
            calls = [(call, call_id(number, index)) for index, call in enumerate(turn.calls)]
            conversation.add_turn(encode_turn(family, family.write(turn.content, turn.reasoning, calls)))
            conversation.add_tool_results(turn.results)
            seen.append(ids_of(conversation.prompt()))
        counts.append([[int((ids == special).sum()) for special in special_ids(family)] for ids in seen])
    assert counts[0] == counts[1]


@pytest.mark.proof
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("test", "options"),
    [
        (test_engine_sees_what_it_saw_and_what_the_template_writes, {"history": "template"}),
        (test_engine_sees_what_it_saw_and_what_the_template_writes, {"history": "append"}),
        (test_what_follows_a_turn_is_what_a_conversation_goes_on_with, {}),
        (test_no_content_makes_a_special_token, {}),
    ],
)
def test_many_conversations(name: str, test: Any, options: dict[str, str]) -> None:
    """The tests before this one, each with a hundred conversations."""
    MANY(given(data=st.data())(test.hypothesis.inner_test))(name=name, **options)


def with_template(directory: Path, template: str | None, name: str = "chatml") -> Path:
    tokenizer = make_tokenizer(FAMILIES[name])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def settings(directory: Path, **changes: Any) -> ChatSettings:
    return ChatSettings("transformers", str(directory), **changes)


HI = [ChatMessage(Role.USER, "hi")]
WORK = [ChatMessage(Role.SYSTEM, "Work."), *HI]
BASH_CALL: Call = ("bash", {"command": "ls"})


@pytest.mark.parametrize(
    ("name", "form", "ours"),
    [
        ("chatml", "hermes", set()),
        ("qwen3", "hermes", {"takes_reasoning"}),
        ("r1", "fenced", {"describes"}),
        ("r1-opened", "fenced", {"describes", "opens_reasoning"}),
        ("llama3", "llama3", set()),
        ("mistral", "mistral", set()),
        ("gemma", "fenced", {"describes", "results_as_user"}),
        ("phi", "fenced", {"describes"}),
    ],
)
def test_rendering_shows_what_a_template_does(name: str, form: str, ours: set[str]) -> None:
    chat = load(name)
    traits = chat.traits
    found = {
        "takes_reasoning": bool(traits.reasoning.key),
        "opens_reasoning": traits.reasoning.opened,
        "describes": not traits.shows_tools,
        "results_as_user": not traits.takes_results,
    }
    assert traits.form.name == form
    assert {trait for trait, holds in found.items() if holds} == ours
    assert traits.ends.texts == (FAMILIES[name].end,)
    assert traits.takes_system
    assert traits.reasoning.marks == ("<think>", "</think>")
    ends = {FAMILIES[name].end, FAMILIES[name].eos}
    assert chat.stop_token_ids == tuple(sorted(oracle(name).convert_tokens_to_ids(end) for end in ends))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("messages", [HI, WORK])
def test_harmless_opening_has_the_ids_that_transformers_gives_it(name: str, messages: list[ChatMessage]) -> None:
    conversation = load(name).conversation(messages, [])
    plain = [{"role": message.role.name.lower(), "content": message.content} for message in messages]
    wanted = oracle(name).apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert ids_of(conversation.prompt()).tolist() == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_text_has_the_ids_that_transformers_gives_it(name: str) -> None:
    text = f"To be {FAMILIES[name].end} or"
    assert load(name).encode(text).tolist() == oracle(name)(text)["input_ids"]


@pytest.mark.few(4)
@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral", "gemma", "phi"])
def test_harmless_conversation_has_the_ids_that_transformers_gives_it(name: str, strips: bool, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    if strips:  # as Phi's do: a special token takes the space behind it
        tokens = [AddedToken(token, special=True, rstrip=True, normalized=False) for token in family.special]
        tokenizer.backend_tokenizer.add_special_tokens(tokens)
    tokenizer.save_pretrained(tmp_path)
    chat = TransformersChatFormat.load(settings(tmp_path))
    result = "of the shell\n\n what"
    content = family.write("the data" if family.speaks_with_calls else "", None, [(BASH_CALL, call_id(0, 0))])
    turn = Turn("the data" if family.speaks_with_calls else "", None, [BASH_CALL], [result])
    scene = Scene(None, "say", TOOLS, [turn])
    conversation = chat.conversation(scene.opening, TOOLS)
    opening = ids_of(conversation.prompt())
    generated = np.array(tokenizer(content, add_special_tokens=False)["input_ids"], np.int32)
    generated = np.append(generated, np.int32(tokenizer.convert_tokens_to_ids(family.end)))
    conversation.add_turn(generated)
    conversation.add_tool_results([result])
    seen = np.concatenate([opening, generated, ids_of(conversation.prompt())])
    whole = rendered(family, chat, scene, 1)
    assert seen.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert strips or chat.decode(seen) == whole


@pytest.mark.parametrize(
    ("name", "messages", "tools", "roles"),
    [
        ("chatml", WORK, TOOLS, "SUA"),
        ("chatml", HI, TOOLS, "SUA"),
        ("chatml", HI, [], "UA"),
        ("llama3", WORK, [], "SUA"),
        ("mistral", HI, TOOLS, "SUA"),
        ("mistral", HI, [], "UA"),
        ("gemma", WORK, [], "UA"),
        ("gemma", HI, TOOLS, "UA"),
        ("phi", HI, [], "SUA"),
        ("phi", [*HI, ChatMessage(Role.ASSISTANT, "ho"), *HI], [], "SUAUA"),
    ],
)
def test_opening_has_a_piece_for_each_message(
    name: str, messages: list[ChatMessage], tools: list[dict[str, Any]], roles: str
) -> None:
    prompt = load(name).conversation(messages, tools).prompt()
    assert "".join(piece.role.name[0] for piece in prompt.pieces) == roles
    assert all(piece.new_turn for piece in prompt.pieces)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_off_is_ended_for_it(name: str) -> None:
    family, chat = FAMILIES[name], load(name, "append")
    seen = []
    for ended in (True, False):
        conversation = chat.conversation(HI, TOOLS)
        opening = ids_of(conversation.prompt())
        turn = encode_turn(
            family,
            family.write(
                "" if not family.speaks_with_calls else "ok",
                "so" if family.opened else None,
                [(BASH_CALL, "abcdefghi")],
            ),
        )
        turn = turn if ended else turn[:-1]
        conversation.add_turn(turn)
        conversation.add_tool_results(["out"])
        seen.append(np.concatenate([opening, turn, ids_of(conversation.prompt())]).tolist())
    assert seen[0] == seen[1]


def test_a_stop_token_other_than_the_templates_stands_in_its_place() -> None:
    family, chat = FAMILIES["llama3"], load("llama3")
    prompts = []
    for end in ("<|eot_id|>", "<|eom_id|>"):
        conversation = chat.conversation(HI, TOOLS)
        conversation.prompt()
        turn = encode_turn(family, family.write("", None, [(BASH_CALL, "")]))
        turn[-1] = oracle("llama3").convert_tokens_to_ids(end)
        assert not conversation.add_turn(turn).text.endswith(end)
        conversation.add_tool_results(["out"])
        prompts.append(chat.decode(ids_of(conversation.prompt())))
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|start_header_id|>ipython")


def test_pieces_of_a_turns_answers() -> None:
    chat, family = load("chatml"), FAMILIES["chatml"]
    conversation = chat.conversation(HI, TOOLS)
    conversation.prompt()
    conversation.add_turn(encode_turn(family, family.write("", None, [(BASH_CALL, "")] * 2)))
    conversation.add_tool_results(["one", "two<|im_end|>"])
    assert [(piece.role, piece.new_turn, chat.decode(piece.token_ids)) for piece in conversation.prompt().pieces] == [
        (Role.ASSISTANT, False, "\n"),
        (Role.TOOL, True, "<|im_start|>tool\none<|im_end|>\n"),
        (Role.TOOL, True, "<|im_start|>tool\ntwo<|im_end|><|im_end|>\n"),
        (Role.ASSISTANT, True, "<|im_start|>assistant\n"),
    ]


def test_several_calls_where_the_template_writes_one() -> None:
    chat = load("llama3")
    conversation = chat.conversation(HI, TOOLS)
    conversation.prompt()
    turn = conversation.add_turn(encode_turn(FAMILIES["llama3"], '{"name": "bash"}; {"name": "python"}'))
    assert turn.calls == (ToolCall("bash"), ToolCall("python"))
    conversation.add_tool_results(["one", "two"])
    text = chat.decode(ids_of(conversation.prompt()))
    assert text.count("<|start_header_id|>ipython") == 2


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("history", ["template", "append"])
def test_a_call_that_cannot_be_read_is_answered_too(name: str, history: str) -> None:
    family, chat = FAMILIES[name], load(name, history)
    broken = {
        "hermes": "<tool_call>ls",
        "llama3": '{"name": ',
        "mistral": "[TOOL_CALLS]ls",
        "fenced": "```tool_call\nls",
    }
    conversation = chat.conversation(WORK, TOOLS)
    conversation.prompt()
    thought = "so</think>" if family.opened else ""
    (call,) = conversation.add_turn(encode_turn(family, thought + broken[family.form])).calls
    assert isinstance(call, MalformedCall)
    conversation.add_tool_results(["That was no call."])
    assert "That was no call." in chat.decode(ids_of(conversation.prompt()))


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3", '<think>I could <tool_call>{"name": "x"}</tool_call></think>No.', 0),
        ("qwen3", '<think>I must look.\n<tool_call>{"name": "x"}</tool_call>', 1),
        ("qwen3", '<think>I must look.\n<tool_call>{"name"', 1),
        ("qwen3", "<think>I must look.", 0),
        ("qwen3", 'The mark is <think>: <tool_call>{"name": "x"}</tool_call>', 1),
        ("r1-opened", 'I could\n```tool_call\n{"name": "x"}\n```\nor not.</think>No.', 0),
        ("r1-opened", 'I must look.\n```tool_call\n{"name": "x"}\n```', 1),
        ("r1-opened", 'Yes.</think>\n```tool_call\n{"name": "x"}\n```', 1),
        ("r1", 'Yes.\n```tool_call\n{"name": "x"}\n```', 1),
    ],
)
def test_only_reasoning_that_was_not_closed_ends_in_a_call(name: str, text: str, calls: int) -> None:
    turn = load(name).conversation(HI, TOOLS).add_turn(encode_turn(FAMILIES[name], text))
    assert turn.text == load(name).traits.split(text)[1]
    assert len(turn.calls) == calls


def test_reasoning_that_only_the_last_turn_keeps_is_rewritten_a_turn_later(tmp_path: Path) -> None:
    forgets = FAMILIES["chatml"].template.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + (message.content if message == (messages | selectattr('role', 'equalto', "
        "'assistant') | list)[-1] else message.content.split('</think>')[-1].lstrip('\\n'))",
    )
    chat = TransformersChatFormat.load(settings(with_template(tmp_path, forgets)))
    conversation = chat.conversation(HI, TOOLS)
    conversation.prompt()
    rewritten = []
    for thought in ("<think>\na\n</think>\n\n", "<think>\nb\n</think>\n\n", "", ""):
        conversation.add_turn(
            encode_turn(FAMILIES["chatml"], f'{thought}Go.\n<tool_call>{{"name": "bash"}}</tool_call>')
        )
        conversation.add_tool_results(["x"])
        rewritten.append(conversation.prompt().rewritten)
    assert rewritten == [False, True, True, False]


def test_a_named_form_that_the_template_does_not_write_is_described(tmp_path: Path) -> None:
    save_tokenizer(FAMILIES["chatml"], tmp_path)
    chat = TransformersChatFormat.load(settings(tmp_path, tool_calls="fenced"))
    text = chat.decode(ids_of(chat.conversation(WORK, TOOLS).prompt()))
    assert text.startswith("<|im_start|>system\nWork.\n\nYou may call these tools")
    assert "Tools:" not in text


def test_a_template_without_a_token_after_turns(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    chat = TransformersChatFormat.load(settings(with_template(tmp_path, template)))
    conversation = chat.conversation(HI, TOOLS)
    assert chat.decode(ids_of(conversation.prompt())).endswith("user: hi\nassistant: ")
    (call,) = conversation.add_turn(encode_turn(FAMILIES["chatml"], '```tool_call\n{"name": "a"}\n```')).calls
    assert call == ToolCall("a")
    conversation.add_tool_results(["out"])
    assert chat.decode(ids_of(conversation.prompt())) == "\ntool: out\nassistant: "


def test_a_template_that_refuses_system_messages_gets_them_with_the_users(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + FAMILIES["chatml"].template
    )
    chat = TransformersChatFormat.load(settings(with_template(tmp_path, template)))
    text = chat.decode(ids_of(chat.conversation(WORK, []).prompt()))
    assert text == "<|im_start|>user\nWork.\n\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_stop_tokens_of_the_generation_config(tmp_path: Path) -> None:
    save_tokenizer(FAMILIES["chatml"], tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert TransformersChatFormat.load(settings(tmp_path)).stop_token_ids == (0, 2)


def test_an_opening_that_the_template_refuses_is_an_invalid_job() -> None:
    with pytest.raises(InvalidJob, match="refuses the conversation: roles must alternate") as caught:
        load("gemma").conversation([*HI, *HI], []).prompt()
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "said", "key"),
    [
        (None, "has no chat template", "chat.template"),
        ("{{ raise_exception('I only translate') }}", "I only translate", "chat.template"),
        ("{{ messages[0].content.text }}", "leaves out what was said", "chat.template"),
        ("\n{% for", "is no Jinja template, line 2: ", "chat.template"),
    ],
)
def test_a_template_that_holds_no_conversation(tmp_path: Path, template: str | None, said: str, key: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        TransformersChatFormat.load(settings(with_template(tmp_path, template)))
    assert caught.value.key == key


def test_a_directory_that_is_none_and_one_without_a_tokenizer(tmp_path: Path) -> None:
    for directory, said in ((tmp_path / "none", "is not a directory"), (tmp_path, "no tokenizer could be loaded")):
        with pytest.raises(ConfigError, match=said) as caught:
            TransformersChatFormat.load(settings(directory))
        assert caught.value.key == "chat.tokenizer"


def test_a_tokenizer_of_python_code_is_not_run(tmp_path: Path) -> None:
    entry = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entry))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match="is Python code in the model's own files, which prorl does not run"):
        TransformersChatFormat.load(settings(tmp_path))


def test_a_broken_generation_config(tmp_path: Path) -> None:
    save_tokenizer(FAMILIES["chatml"], tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        TransformersChatFormat.load(settings(tmp_path))


def test_each_call_has_one_answer() -> None:
    conversation = load("chatml").conversation(HI, TOOLS)
    conversation.add_turn(encode_turn(FAMILIES["chatml"], "Done."))
    with pytest.raises(ValueError, match="0 calls, 1 answers"):
        conversation.add_tool_results(["x"])


def test_a_generation_config_that_is_no_file(tmp_path: Path) -> None:
    save_tokenizer(FAMILIES["chatml"], tmp_path)
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read: it is not a file"):
        TransformersChatFormat.load(settings(tmp_path))


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_an_opening_of_many_messages_is_rendered_few_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = load(name)
    talk = [ChatMessage((Role.USER, Role.ASSISTANT)[n % 2], f" no. {n} ") for n in range(301)]
    counted = count_renderings(chat, monkeypatch)
    pieces = chat.conversation(talk, []).prompt().pieces
    assert len(counted) < 80
    told = [piece for piece in pieces if "no. " in chat.decode(piece.token_ids)]
    assert [piece.role for piece in told] == [message.role for message in talk]
    assert all(f"no. {n}" in chat.decode(piece.token_ids) for n, piece in enumerate(told))


def test_messages_that_do_not_stand_as_earlier_ones_are_one_piece() -> None:
    chat = load("chatml")
    roles = [Role.USER, Role.ASSISTANT] * 40
    talk = [ChatMessage(role, f"no. {n}") for n, role in enumerate(roles)]
    talk += [ChatMessage(Role.SYSTEM, "never before"), ChatMessage(Role.USER, "last")]
    pieces = chat.conversation(talk, []).prompt().pieces
    assert [piece.role for piece in pieces[-3:]] == [Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert "never before" in chat.decode(pieces[-2].token_ids)
    assert "last" in chat.decode(pieces[-2].token_ids)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_large_answers_are_each_rendered_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, family = load(name), FAMILIES[name]
    conversation = chat.conversation(HI, TOOLS)
    conversation.prompt()
    calls = [(BASH_CALL, call_id(0, n)) for n in range(20 if name != "llama3" else 1)]
    conversation.add_turn(encode_turn(family, family.write("", None, calls)))
    results = [f'\n"{n}" é<|im_end|></s> ' + "y" * 1000 for n in range(len(calls))]
    conversation.add_tool_results(results)
    counted = count_renderings(chat, monkeypatch)
    pieces = [piece for piece in conversation.prompt().pieces if piece.role == Role.TOOL]
    assert sum(counted) < 3 * sum(map(len, results)) + 500 * len(counted) + 40 * len(calls) * len(counted) * 5
    assert len(pieces) == len(calls)
    assert all("y" * 1000 in chat.decode(piece.token_ids) for piece in pieces)
    assert all(str(n) in chat.decode(piece.token_ids)[:90] for n, piece in enumerate(pieces))


def count_renderings(chat: TransformersChatFormat, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give a list that gets the length of each rendering from now on."""
    lengths: list[int] = []
    render = chat.template.render

    def counting(*arguments: Any, **named: Any) -> str:
        text = render(*arguments, **named)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(chat.template, "render", counting)
    return lengths
