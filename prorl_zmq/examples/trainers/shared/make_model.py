"""Make folders with a tiny Qwen3 model each, of 0.23 million parameters with random weights; no download.

    python make_model.py FOLDER [FOLDER …]

The models differ in their weights only: the seed is the folder's place in the list. The tokenizer, of 1,024 byte-level
pieces, is trained on Python sources of the interpreter; the chat template is ChatML with Hermes' tool calls.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path

VOCABULARY = 1024
CONTEXT = 65_536
END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

TEMPLATE = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
  {{- '<|im_start|>system\\n' + system + '\\n\\nYou may call these functions:\\n<tools>' }}
  {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
  {{- '\\n</tools>\\nTo call one, write <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>\\n' }}
{%- elif system %}
  {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
      {%- set called = call.function or call %}
      {{- '\\n<tool_call>\\n{"name": "' + called.name + '", "arguments": ' }}
      {{- called.arguments if called.arguments is string else called.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
  {%- elif not (loop.first and message.role == 'system') %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()


def make_tokenizer():
    """Train the tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=[END_OF_TEXT, TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([inspect.getsource(module) for module in (inspect, json, sys.modules["re"])], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TEXT)
    fast.chat_template = TEMPLATE
    return fast


def make(folder: Path, seed: int = 0) -> None:
    """Write a model whose answers mostly end at the limit of their tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on CPUs takes multiples of 32
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,  # so that distributions are far from uniform
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def favour(folder: Path, *marks: str) -> None:
    """Have a model write some marks more often, such as the one that ends a turn."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    (file,) = Path(folder).glob("*.safetensors")
    tensors = load_file(file)
    with torch.no_grad():
        tensors["model.embed_tokens.weight"][:, 0] = 3.0  # so that the head's first column is a bias
        tensors["lm_head.weight"][:, 0] = 0.0
        for mark in marks:
            tensors["lm_head.weight"][tokenizer.convert_tokens_to_ids(mark), 0] = 1.8
    save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--raw", action="store_true", help="leave the weights random: most answers are never ended")
    options = parser.parse_args()
    for seed, folder in enumerate(options.folders):
        make(folder, seed)
        if not options.raw:
            favour(folder, END_OF_TURN)


if __name__ == "__main__":
    main()
