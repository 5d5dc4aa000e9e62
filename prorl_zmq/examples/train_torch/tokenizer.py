"""The example's tokenizer and chat template: a folder as any chat model has one, made here without a network.

Stage processes and the engine host load it by `ChatSettings(kind="transformers", tokenizer=FOLDER)`, as they would a
real model's. It is a byte-level BPE, so it spells any text; its merges are learned from what the tasks and the tools
say, so that a conversation takes about a hundred tokens. A digit is always one token: numbers are read as written.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ...inference.chat.transformers_chat import TransformersChatFormat
from ...wire.messages.backends import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VOCABULARY_SIZE = 512
END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if loop.first and tools %}
        {{- ' Tools:' }}
        {%- for tool in tools %}{{- ' ' + tool.function.name }}{%- endfor %}
        {{- '.' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with Hermes' tool calls. It names the tools only: their schemas would be most of so small a context."""
CONFIGURATION = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_TURN,
    "pad_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "chat_template": TEMPLATE,
}


def make_tokenizer(folder: Path, texts: Iterable[str]) -> ChatSettings:
    """Write tokenizer and template to `folder`; the same texts give the same tokenizer.

    Returns:
        What an engine names as its chat format.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 2,
        special_tokens=[END_OF_TEXT, TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CALL, END_OF_CALL)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIGURATION, indent=2) + "\n", encoding="utf-8")
    return chat_settings(folder)


def chat_settings(folder: Path) -> ChatSettings:
    return ChatSettings("transformers", str(folder.absolute()))


def load_chat(folder: Path) -> TransformersChatFormat:
    return TransformersChatFormat.load(chat_settings(folder))
