from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the example needs torch: install the extra `train`")

from prorl_zmq.data.trajectory import Role
from prorl_zmq.examples.train_torch import script
from prorl_zmq.examples.train_torch.model import Model
from prorl_zmq.examples.train_torch.tasks import CONTEXT_TOKENS, MAX_TURN_TOKENS
from prorl_zmq.examples.train_torch.tokenizer import END_OF_TURN, VOCABULARY_SIZE, load_chat, make_tokenizer
from prorl_zmq.inference.base_policy import COMMANDS
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.tool_calls.call import ToolCall

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> TransformersChatFormat:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, script.texts(np.random.default_rng(0), 400))
    return load_chat(folder)


def test_the_tokenizer_fills_the_models_vocabulary_and_spells_anything(
    chat: TransformersChatFormat, tmp_path: Path
) -> None:
    for text in ("naïve ☃ 1234", "a\tb\n\n  c", "<tool_call>"):
        (ids,) = chat.tokenizer.encode(text)
        assert chat.decode(ids) == text
        assert ids.max() < VOCABULARY_SIZE
    assert chat.decode(np.arange(VOCABULARY_SIZE, dtype=np.int32)), "every id that the model can draw is a token"
    assert len(chat.tokenizer.encode("90210")[0]) == 5
    make_tokenizer(tmp_path, script.texts(np.random.default_rng(0), 400))
    text = "Write to answer.txt: How many lines are in data.txt?"
    assert load_chat(tmp_path).tokenizer.encode(text)[0].tolist() == chat.tokenizer.encode(text)[0].tolist()


def test_transcripts_are_conversations_as_the_service_has_them(chat: TransformersChatFormat) -> None:
    random = np.random.default_rng(1)
    commands, answers = set(), set()
    for _ in range(120):
        one = script.transcript(chat, random)
        assert len(one.token_ids) == len(one.mask) < CONTEXT_TOKENS
        text = chat.decode(one.token_ids)
        assert text.startswith("<|im_start|>system\n")
        turns = [chat.decode(part) for part in np.split(one.token_ids, np.flatnonzero(np.diff(one.mask)) + 1)][1::2]
        assert all(turn.endswith(END_OF_TURN) for turn in turns)
        lengths = [len(part) for part in np.split(one.token_ids, np.flatnonzero(np.diff(one.mask)) + 1)][1::2]
        assert max(lengths) <= MAX_TURN_TOKENS, "a rollout has room for what the script says"
        calls = [call for turn in turns for call in chat.traits.form.parse(turn)]
        if "Work in bash." in text:
            (call,) = calls
            assert isinstance(call, ToolCall)
            commands.add(call.arguments["command"])
            assert "<|im_start|>tool\n" in text
        else:
            assert not calls
            answers.add(turns[0])
    assert {command.rpartition(" > ")[0] for command in commands} == set(COMMANDS)
    assert answers == {f"The answer is \\boxed{{{number}}}{END_OF_TURN}" for number in (3, 4, 5, 6)}


def test_the_script_does_not_look_at_the_instruction(chat: TransformersChatFormat) -> None:
    """What a prompt asks for, and what the script does, are independent: each command goes with each question."""
    random = np.random.default_rng(2)
    pairs = set()
    for _ in range(500):
        text = chat.decode(script.transcript(chat, random).token_ids)
        if "Work in bash." in text:
            command = next(command for command in COMMANDS if f'"{command} >' in text)
            pairs.add((text.partition("answer.txt: ")[2].partition("<")[0], command))
    questions = {question for question, _ in pairs}
    assert len(questions) == 5
    assert len(pairs) == len(questions) * len(COMMANDS)


def test_imitation_lowers_the_loss_the_same_each_time(chat: TransformersChatFormat) -> None:
    losses: list[list[float]] = []
    for _ in range(2):
        losses.append([])
        script.imitate(Model(), chat, 0, lambda _, loss: losses[-1].append(loss), steps=4)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.5


def test_the_shell_opening_is_the_handlers(chat: TransformersChatFormat) -> None:
    conversation = chat.conversation([ChatMessage(Role.SYSTEM, script.SHELL_SYSTEM)], [script.BASH])
    (prompt, _) = conversation.prompt().pieces
    assert chat.decode(prompt.token_ids) == f"<|im_start|>system\n{script.SHELL_SYSTEM} Tools: bash.<|im_end|>\n"
