"""The agent loop's own cost per turn, as the conversation grows: parse a turn, render and tokenise its answer.

CPU time of one thread from the policy's ids to the next prompt's: `add_turn`, `add_tool_results`, `prompt`, and their
additions to the trajectory. Each turn calls one tool with 64 generated tokens and is answered with about 200. The peer
renders and tokenises the whole conversation each turn with `apply_chat_template`, as a loop over messages does, on the
same conversations. The tokenizer is trained here on the standard library's sources.
"""

from __future__ import annotations

import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from harness import Row, main, picture_path

from prorl_zmq.data.trajectory import Role
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.inference.chat import ChatFormat, ChatMessage
from prorl_zmq.inference.chat.loading import load_chat_format
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

CONTEXTS = (2_000, 8_000, 30_000)
"""Tokens before the turn that is measured."""
EARLIER_TURNS = 8
GENERATED_TOKENS = 64
ANSWER_TOKENS = 200
VOCABULARY = 8_000
LIMIT_MS = 2.0
GROWTH = 1.3
PEER = "apply_chat_template"
TEMPLATE = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Tools:' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role != 'system' or not tools %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a shell that stays as it is left.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class Costs(NamedTuple):
    """Seconds of each measured turn at one length."""

    ours: list[float]
    theirs: list[float]


class Samples:
    """Turns and answers of a wanted number of tokens, cut from the standard library's sources.

    Args:
        tokenizer: cuts them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = tokenizer(sources(600_000), add_special_tokens=False)["input_ids"]
        self._position = 0

    def text(self, tokens: int) -> str:
        """Give the next text of so many tokens."""
        self._position = (self._position + tokens) % (len(self._ids) - tokens)
        return str(self._tokenizer.decode(self._ids[self._position :][:tokens]))

    def turn(self) -> tuple[str, dict[str, str]]:
        """Give a turn's text without its call, and the call's arguments."""
        return self.text(GENERATED_TOKENS // 2), {"command": self.text(GENERATED_TOKENS // 5)}


def sources(limit: int) -> str:
    """Give the beginning of the standard library's sources."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        limit -= len(texts[-1])
        if limit < 0:
            break
    return "\n".join(texts)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer with ChatML's tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([sources(1_500_000)], trainer)
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE.strip()
    return tokenizer


def one_conversation(
    chat: ChatFormat, tokenizer: PreTrainedTokenizerFast, samples: Samples, context: int
) -> tuple[float, float]:
    """Build a conversation of so many tokens; give the seconds of its last turn in our way and the peer's."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Work in bash."},
        {"role": "user", "content": samples.text(100)},
    ]
    opening = [ChatMessage(Role.SYSTEM, messages[0]["content"]), ChatMessage(Role.USER, messages[1]["content"])]
    conversation = chat.conversation(opening, [TOOL])
    trajectory = TrajectoryBuilder()
    add(trajectory, conversation.prompt())
    ours = 0.0
    for number in range(EARLIER_TURNS + 1):
        measured = number == EARLIER_TURNS
        said, arguments = samples.turn()
        answer = samples.text(ANSWER_TOKENS if measured else context // EARLIER_TURNS - GENERATED_TOKENS)
        call = {"type": "function", "id": f"call{number:05d}", "function": {"name": "bash", "arguments": arguments}}
        messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
        generated = ids_of_turn(tokenizer, messages)
        messages.append({"role": "tool", "content": answer})
        logprobs, versions = np.zeros(len(generated), np.float32), np.zeros(len(generated), np.int32)
        begun = time.thread_time()
        trajectory.add_generated(generated, logprobs, versions)
        turn = conversation.add_turn(generated)
        conversation.add_tool_results([answer])
        add(trajectory, conversation.prompt())
        prompt = trajectory.prompt()
        ours = time.thread_time() - begun
        assert len(turn.calls) == 1
    begun = time.thread_time()
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, return_dict=False)
    np.array(whole, np.int32)
    theirs = time.thread_time() - begun
    assert tokenizer.decode(prompt.tolist()) == tokenizer.decode(whole)
    return ours, theirs


def ids_of_turn(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> NDArray[np.int32]:
    """Give the last message's ids as the policy generates them."""
    message = messages[-1]
    text = str(tokenizer.apply_chat_template([message], tokenize=False))
    said = text.removeprefix("<|im_start|>assistant\n").removesuffix("\n")
    return np.array(tokenizer(said, add_special_tokens=False)["input_ids"], np.int32)


def add(trajectory: TrajectoryBuilder, prompt: Any) -> None:
    """Append a prompt, as the agent loop does."""
    for piece in prompt.pieces:
        if piece.new_turn:
            trajectory.begin_turn(piece.role)
        trajectory.add_context(piece.token_ids)


def measure(quick: bool) -> list[Row]:
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        tokenizer.save_pretrained(folder)
        chat = load_chat_format(ChatSettings(kind="transformers", tokenizer=folder))
    samples = Samples(tokenizer)
    for context in CONTEXTS:
        one_conversation(chat, tokenizer, samples, context)
    costs = {context: Costs([], []) for context in CONTEXTS}
    for _ in range(10 if quick else 60):
        for context, cost in costs.items():
            ours, theirs = one_conversation(chat, tokenizer, samples, context)
            cost.ours.append(ours)
            cost.theirs.append(theirs)
    medians = {context: [1e3 * float(np.median(side)) for side in cost] for context, cost in costs.items()}
    if not quick:
        draw(costs)
    shortest, longest = CONTEXTS[0], CONTEXTS[-1]
    growth = medians[longest][0] / medians[shortest][0]
    rows = [
        Row(
            f"a turn at {context // 1000}k tokens",
            ours,
            "ms CPU",
            PEER,
            ours / theirs,
            f"under {LIMIT_MS:g} ms" if context == longest else "",
            ours < LIMIT_MS if context == longest else None,
        )
        for context, (ours, theirs) in medians.items()
    ]
    rows.append(
        Row(
            f"a turn at {longest // 1000}k tokens, again",
            medians[longest][0],
            "ms CPU",
            f"the same at {shortest // 1000}k",
            growth,
            f"at most {GROWTH:g}×: linear in the new tokens only",
            growth <= GROWTH,
        )
    )
    rows += [
        Row(f"the peer's at {context // 1000}k tokens", theirs, "ms CPU") for context, (_, theirs) in medians.items()
    ]
    return rows


def draw(costs: dict[int, Costs]) -> None:
    """Draw the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, name in enumerate(("only what is new (ours)", f"the whole conversation ({PEER})")):
        sides = [1e3 * np.array(cost[index]) for cost in costs.values()]
        low, middle, high = (np.array([np.percentile(side, q) for side in sides]) for q in (10, 50, 90))
        errors = np.stack([middle - low, high - middle])
        axes.errorbar(list(costs), middle, errors, marker="o", capsize=3, label=name)
    axes.axhline(LIMIT_MS, color="gray", linestyle=":", linewidth=1)
    axes.text(CONTEXTS[0], LIMIT_MS * 1.08, f"{LIMIT_MS:g} ms", color="gray", fontsize=8)
    axes.set(
        title=f"CPU per turn: {GENERATED_TOKENS} tokens generated, {ANSWER_TOKENS} answered",
        xlabel="tokens of context before the turn",
        ylabel="ms (median, p10 to p90)",
        yscale="log",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(picture_path("turns"), dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    main("turns", "CPU that the agent loop takes per turn, by the length of the conversation", measure)
