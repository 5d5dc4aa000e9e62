"""Chat templates in miniature, one for each family's quirks, and tokenizers trained here for them.

None is a copy: each has what makes its family hard, in as few lines as that takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""

CHATML = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Tools:' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Reasoning stays after the user's last message only; the answers of one turn share a message of the user.
QWEN3 = r"""
{%- set found = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set found.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > found.last and (loop.last or message.reasoning_content) %}
{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}
{{- message.content.lstrip('\n') }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Reasoning is dropped from all earlier turns, and every turn is opened with its mark. It knows nothing of tool calls.
R1 = r"""
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1].lstrip('\n') + eos_token }}
{%- elif message.role == 'tool' %}{{- '<｜output｜>' + message.content + '<｜output▁end｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>THINK' }}{%- endif %}"""

# Contents are trimmed; the tools are told in the first message of the user; one call a turn.
LLAMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set said = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- else %}{%- set said = '' %}{%- set rest = messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Knowledge until: 2023\n\n' + said + '<|eot_id|>' }}
{%- if tools %}
{%- if not rest %}{{- raise_exception('there is no first message of the user to tell the tools in') }}{%- endif %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nTools:\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
{{- (rest[0].content | trim) + '<|eot_id|>' }}{%- set rest = rest[1:] %}
{%- endif %}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + (message.content | trim) + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Turns must alternate; the tools are told before the last message of the user; call ids have nine letters or digits.
# The system message is part of that of the user, but only while it is the last of all.
MISTRAL = r"""
{%- if messages[0].role == 'system' %}{%- set said = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set turn = namespace(number=0) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (turn.number % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set turn.number = turn.number + 1 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- if said is defined and loop.last %}{{- '[INST] ' + said + '\n\n' + message.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('call ids have nine characters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('no such role') }}
{%- endif %}{%- endfor %}"""

# The system message is folded into the first of the user; turns alternate; there is no role for tools.
GEMMA = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set said = messages[0].content + '\n\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set said = '' %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- (said if loop.first else '') + (message.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

# A default system message; a text that is not opened for a turn ends with a token of its own.
PHI = r"""
{%- if messages[0].role != 'system' %}{{- '<|system|>\nYou are helpful.<|end|>\n' }}{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """One family."""

    name: str
    template: str
    special: tuple[str, ...]
    """Special tokens; the last ends a turn."""
    added: tuple[str, ...] = ()
    """Other added tokens."""
    bos: str | None = None
    eos: str = ""
    form: str = "fenced"
    """How it writes tool calls; `fenced` where the template has no form."""
    described: bool = False
    """Its template does not tell of the tools."""
    reasons: bool = False
    """Its turns may begin with reasoning."""
    opened: bool = False
    """What opens a turn opens its reasoning."""
    rewrites: Callable[[bool, bool], bool] = lambda reasoning, first: False
    """Whether the template changes what was seen, given whether a turn had reasoning, and whether it is the first of a
    conversation with a system message."""
    max_calls: int = 3
    results_as_user: bool = False
    speaks_with_calls: bool = True
    """A turn that calls tools may say something too."""
    said_before: str = ""
    """What the template writes before the text of a turn without calls."""

    @property
    def end(self) -> str:
        return self.special[-1]

    def write(self, content: str, reasoning: str | None, calls: Sequence[tuple[Call, str]]) -> str:
        """Give a turn as the policy would write it, without the token that ends it; each call comes with its id."""
        thought = ""
        if reasoning is not None:
            thought = f"{'' if self.opened else '<think>'}\n{reasoning}\n</think>\n\n".removeprefix("\n" * self.opened)
        return thought + self.write_spoken(content, calls)

    def write_spoken(self, content: str, calls: Sequence[tuple[Call, str]]) -> str:
        """Give the part of a turn that is not reasoning."""
        if not calls:
            return self.said_before + content
        if self.form == "llama3":
            ((name, arguments), _), *_ = calls
            return f'{{"name": "{name}", "parameters": {as_json(arguments)}}}'
        if self.form == "mistral":
            entries = [
                f'{{"name": "{name}", "arguments": {as_json(arguments)}, "id": "{call_id}"}}'
                for (name, arguments), call_id in calls
            ]
            return f"[TOOL_CALLS] [{', '.join(entries)}]"
        before, after = {"hermes": ("<tool_call>", "</tool_call>"), "fenced": ("```tool_call", "```")}[self.form]
        written = [
            f'{before}\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n{after}'
            for (name, arguments), _ in calls
        ]
        if self.name == "chatml":
            return "".join([content, *(f"\n{call}" for call in written)])
        return "\n".join([*([content] if content else []), *written])


def as_json(value: Any) -> str:
    """Give JSON as the templates' `tojson` does."""
    return json.dumps(value, ensure_ascii=False)


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_R1 = ("<bos>", "<｜User｜>", "<｜Assistant｜>", "<｜output｜>", "<｜output▁end｜>", "<｜end｜>")
_HEADER = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|python_tag|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
_INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")

FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", CHATML, _IM, _CALLS[:4], eos="<|im_end|>", form="hermes"),
        Family("qwen3", QWEN3, _IM, _CALLS, eos="<|im_end|>", form="hermes", reasons=True),
        Family(
            "r1",
            R1.replace("THINK", ""),
            _R1,
            ("<think>", "</think>"),
            bos="<bos>",
            eos="<｜end｜>",
            described=True,
            reasons=True,
            rewrites=lambda reasoning, first: reasoning,
        ),
        Family(
            "r1-opened",
            R1.replace("THINK", r"<think>\n"),
            _R1,
            ("<think>", "</think>"),
            bos="<bos>",
            eos="<｜end｜>",
            described=True,
            reasons=True,
            opened=True,
            rewrites=lambda reasoning, first: True,
        ),
        Family(
            "llama3",
            LLAMA3,
            _HEADER,
            bos="<|begin_of_text|>",
            eos="<|eom_id|>",
            form="llama3",
            max_calls=1,
            speaks_with_calls=False,
        ),
        Family(
            "mistral",
            MISTRAL,
            ("<s>", *_INST, "[/TOOL_RESULTS]", "</s>"),
            bos="<s>",
            eos="</s>",
            form="mistral",
            rewrites=lambda reasoning, first: first,
            speaks_with_calls=False,
            said_before=" ",
        ),
        Family(
            "gemma",
            GEMMA,
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            bos="<bos>",
            eos="<eos>",
            described=True,
            results_as_user=True,
        ),
        Family(
            "phi",
            PHI,
            ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
            eos="<|endoftext|>",
            described=True,
        ),
    )
}


def make_tokenizer(family: Family, vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer on a family's own template, and give it the family's tokens."""
    from transformers import PreTrainedTokenizerFast  # here, since workers that run no such test import it in vain

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(family.special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([family.template, "the tools of a shell say what is in the data\n\n" * 4], trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = family.template.strip("\n")
    return tokenizer


def save_tokenizer(family: Family, directory: Path) -> Path:
    """Write a family's tokenizer as a model's directory has it."""
    make_tokenizer(family).save_pretrained(directory)
    return directory
