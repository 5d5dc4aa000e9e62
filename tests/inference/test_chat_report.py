"""`prorl doctor --model`: what is understood of a model's chat template."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from chat_families import FAMILIES, make_tokenizer, save_tokenizer
from support.commands import complaint, prorl

from prorl_zmq.inference.chat.report import report
from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("transformers")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_example_holds_a_call_its_answer_and_what_opens_the_next_turn(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    chat = TransformersChatFormat.load(ChatSettings("transformers", str(save_tokenizer(family, tmp_path))))
    found = report(chat)
    assert dict(found.rows)["tool calls"].startswith(family.form)
    assert family.end in dict(found.rows)["stop tokens"]
    assert [who for who, _ in found.conversation].count("policy") == 1
    text = "".join(text for _, text in found.conversation)
    assert text.count("notes.txt") == 1
    assert "ls -l /tmp" in text
    assert [who.rpartition(" ")[2] for who, _ in found.conversation][-1] == "assistant"
    assert bool(found.warnings) == (family.form == "fenced")


def test_command(tmp_path: Path) -> None:
    save_tokenizer(FAMILIES["qwen3"], tmp_path / "read")
    unread = make_tokenizer(FAMILIES["chatml"])
    unread.chat_template = FAMILIES["chatml"].template.replace("tool_call>", "own>")
    unread.save_pretrained(tmp_path / "unread")
    wide = {**os.environ, "COLUMNS": "200"}
    shown = prorl("doctor", "--model", tmp_path / "read", environment=wide)
    assert shown.returncode == 0, shown.stderr
    for said in ("hermes", "<|im_end|>", "<think> … </think>", "notes.txt"):
        assert said in shown.stdout
    warned = prorl("doctor", "--model", tmp_path / "unread", environment=wide)
    assert warned.returncode == 1
    assert "in a form that is not read here" in " ".join(warned.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "/nowhere"), "/nowhere is not a directory"),
        (("--tool-calls", "glm"), "name it with --model"),
        (
            ("--model", "{model}", "--template-argument", "a"),
            "--template-argument a: write NAME=JSON, such as enable_thinking=false",
        ),
        (("--model", "{model}", "--template-argument", "a=False"), "--template-argument a=False: write false"),
        (("--model", "{model}", "--template-argument", "a=1"), "does not look at the argument a: it looks at none"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    save_tokenizer(FAMILIES["qwen3"], tmp_path)
    assert said in complaint(prorl("doctor", *(argument.format(model=tmp_path) for argument in arguments)))
