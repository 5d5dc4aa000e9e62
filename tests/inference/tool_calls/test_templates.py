"""Calls as chat templates of current models write them, read back by the form of each."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.later import Later

from prorl_zmq.inference.tool_calls.call import ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS

if TYPE_CHECKING:
    from transformers.utils import chat_template_utils
else:
    chat_template_utils = Later("transformers.utils.chat_template_utils")

pytestmark = pytest.mark.xdist_group("transformers")
TEMPLATES = Path(__file__).parents[4] / "shared" / "chat_templates"
FORM_OF = {
    "apertus": "apertus",
    "apriel-1.6": "apriel",
    "command-r7b": "command_r",
    "deepseek-r1-distill": "deepseek_v3",
    "deepseek-v3.1": "deepseek_v31",
    "deepseek-v3.2": "dsml",
    "deepseek-v4": "dsml",
    "deepseek-v4-flash": "dsml",
    "devstral-2507": "mistral",
    "exaone-4": "hermes",
    "gemma-4": "gemma4",
    "gemma-4-interleaved": "gemma4",
    "gigachat-3.1": "gigachat",
    "glm-4.5": "glm",
    "glm-4.6": "glm",
    "glm-4.7-flash": "glm",
    "glm-5.2": "glm",
    "gpt-oss": "harmony",
    "granite-4.0": "hermes",
    "granite-4.1": "hermes",
    "hy3": "glm",
    "inkling": "inkling",
    "kimi-k2": "kimi_k2",
    "kimi-k2-thinking": "kimi_k2",
    "kimi-k2.5": "kimi_k2",
    "kimi-k3": "kimi_k3",
    "laguna-s-2.1": "glm",
    "laguna-xs-2.1": "glm",
    "lfm2": "lfm2",
    "lfm2.5": "lfm2",
    "ling-3-flash": "glm",
    "llama-3.1": "llama3",
    "llama-4": "llama4",
    "mimo-vl": "hermes",
    "minicpm5": "minicpm5",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "ministral-3-reasoning": "mistral",
    "mistral-nemo": "mistral",
    "mistral-small-3.2": "mistral",
    "muse-glimmer": "muse",
    "nemotron-3-nano": "qwen3_coder",
    "nemotron-3-super": "qwen3_coder",
    "nemotron-3-ultra": "qwen3_coder",
    "nemotron-nano-v2": "nemotron_v2",
    "olmo-3": "olmo3",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-2507": "hermes",
    "qwen3-coder": "qwen3_coder",
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "qwen3.8": "qwen3_coder",
    "seed-oss": "seed_oss",
    "solar-open": "solar_open",
    "step-3.5-flash": "qwen3_coder",
}
WRITE_NO_CALLS = {"gemma-3", "granite-3.3", "phi-4-mini", "smollm3"}
ONE_CALL = {"llama-3.1", "gpt-oss", "gigachat-3.1"}
UNQUOTED = {"lfm2.5", "olmo-3"}
"""Templates that escape nothing in strings: what they write for a text with quotes is no Python."""
ENDS = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<EOS>|<turn\|>|<\|end\|>|<\|user\|>|<\|call\|>|<\|end_of_text\|>|<\|content_model_end_"
    r"sampling\|>|<\|end_of_msg\|>|</assistant>|<\|role_end\|>|<\|eot\|>|\[e~\[|<SPECIAL_12>|<\|message_sep\|>|<\|END_OF_"
    r"TURN_TOKEN\|>|\[\|endofturn\|\]|<seed:eos>|<｜hy_eos:opensource｜>|<\|assistant_end\|>|<\|observation\|>"
)
PROPERTIES = {
    "command": {"type": "string", "description": "a"},
    "seconds": {"type": "integer", "description": "a"},
    "exact": {"type": "boolean", "description": "a"},
    "options": {"type": "object", "description": "a", "properties": {"tags": {"type": "array"}}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["command"]},
        },
    }
]
TYPED = {"command": "03106", "seconds": 5, "exact": True, "options": {"tags": ["a", "b"]}}


@lru_cache(64)
def source(name: str) -> str:
    path = TEMPLATES / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"no chat templates in {TEMPLATES}")
    return path.read_text(encoding="utf-8")


def turn(name: str, calls: list[dict[str, Any]]) -> str:
    """Return what a template writes for a turn with calls, without the token that ends it."""
    user = {"role": "user", "content": "HELLO"}
    entries = [
        {
            "type": "function",
            "id": f"abcdefgh{n}" if "stral" in name else f"functions.bash:{n}",
            "function": {"name": "bash", "arguments": arguments},
        }
        for n, arguments in enumerate(calls)
    ]

    def render(messages: list[dict[str, Any]], *, opened: bool) -> str:
        (text,), _ = chat_template_utils.render_jinja_template(
            [messages],
            tools=TOOLS,
            chat_template=source(name),
            add_generation_prompt=opened,
            bos_token="<BOS>",
            eos_token="<EOS>",
        )
        return str(text)

    opening = render([user], opened=True)
    text = render([user, {"role": "assistant", "content": "", "tool_calls": entries}], opened=False)
    start = next((i for i, (a, b) in enumerate(zip(text, opening, strict=False)) if a != b), len(opening))
    while text[start - 1] not in ">]\n":
        start -= 1
    *_, end = [*ENDS.finditer(text, start)] or [None]
    return text[start : end.start()] if end is not None else text[start:]


def read(name: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    form = FORMS[FORM_OF[name]]
    split = form.split(text)
    calls = form.parse(text if split is None else split[1], TOOLS)
    assert all(isinstance(call, ToolCall) for call in calls), calls
    return [(call.name, call.arguments) for call in calls if isinstance(call, ToolCall)]


def test_every_template_is_covered() -> None:
    source("qwen3")
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {*FORM_OF, *WRITE_NO_CALLS}


@pytest.mark.few(14)
@pytest.mark.parametrize("name", FORM_OF)
def test_arguments_have_the_types_of_the_schema(name: str) -> None:
    assert read(name, turn(name, [TYPED])) == [("bash", TYPED)]


@pytest.mark.few(14)
@pytest.mark.parametrize("name", FORM_OF)
def test_the_first_form_that_reads_a_template_is_its_own(name: str) -> None:
    text = turn(name, [{"command": "qzvaluezq"}])
    found = [form.name for form in FORMS.values() if _calls(form.parse(text, TOOLS)) == [{"command": "qzvaluezq"}]]
    assert found[0] == FORM_OF[name]


def _calls(found: list[Any]) -> list[Any]:
    return [call.arguments for call in found]


@pytest.mark.few(14)
@pytest.mark.parametrize("name", sorted(FORM_OF.keys() - ONE_CALL))
def test_several_calls(name: str) -> None:
    calls = [TYPED, {"command": "ls"}, {"command": "pwd", "seconds": 0}]
    assert read(name, turn(name, calls)) == [("bash", arguments) for arguments in calls]


@pytest.mark.few(56)
@pytest.mark.parametrize("name", FORM_OF)
@pytest.mark.parametrize("command", ["  two  spaces  ", "\n\tif x:\n\n", "a\n", " ", "null", '{"a": 1}', "<b> & </b>"])
def test_texts_are_kept_exactly(name: str, command: str) -> None:
    assert read(name, turn(name, [{"command": command}])) == [("bash", {"command": command})]


@pytest.mark.few(14)
@pytest.mark.parametrize("name", sorted(FORM_OF.keys() - UNQUOTED))
def test_arguments_that_hold_calls_of_the_form(name: str) -> None:
    form = FORMS[FORM_OF[name]]
    written = form.write("bash", {"command": "ls", "seconds": 1})
    for command in (f"Write {form.example} to call.", f"One line:\n{written}\nand the next.", f"{written}\n{written}"):
        arguments = {"command": command, "seconds": 7}
        assert read(name, turn(name, [arguments])) == [("bash", arguments)]
