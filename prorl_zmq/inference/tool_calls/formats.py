"""All forms of tool calls, by their names in `ChatSettings.tool_calls`."""

from __future__ import annotations

import re

from .call import NAME, Frames, ToolCallFormat
from .gemma import GemmaFormat
from .harmony import HarmonyFormat
from .json_calls import BareJsonFormat, ForeignFormat, InklingFormat, MarkedJsonFormat, NamedJsonFormat
from .minimax_m3 import MiniMax3Format
from .python_calls import Llama4Format, PythonCallsFormat
from .tagged import KimiK3Format, arg_keys, invoke, xml_parameters

_SOLAR = Frames(
    re.compile(
        r"(?:<\|begin\|>assistant)?<\|(think|content|tool_calls)\|>(.*?)(?:<\|(?:end|calls|flush)\|>|\Z)", re.DOTALL
    ),
    thought="think",
    said="content",
)
_INKLING = Frames(
    re.compile(
        r"(?:<\|message_model\|>[^<]{0,256})?<\|content_(thinking|text|invoke_tool_json)\|>(.*?)"
        r"(?:<\|end_message\|>|\Z)",
        re.DOTALL,
    ),
    thought="thinking",
    said="text",
)
_MUSE = Frames(
    re.compile(r"(?:<\|start\|>assistant)? to=([^\s<]{1,256})<\|message\|>(.*?)(?:<\|eom\|>|<\|eot\|>|\Z)", re.DOTALL),
    thought="self",
    said="user",
)

HERMES = MarkedJsonFormat("hermes", "<tool_call>", "</tool_call>")
FENCED = MarkedJsonFormat("fenced", "\n```tool_call\n", "\n```", begins=r"(?:\A|\n)```tool_call\b", only_calls=False)
"""No model's own form: a block between fences, which stand at the beginnings of lines."""
FOREIGN = ForeignFormat(FENCED)

_FORMS: tuple[ToolCallFormat, ...] = (
    HERMES,  # Qwen 2.5 and 3, Granite 4, EXAONE 4, MiMo and many others
    xml_parameters("qwen3_coder", "tool_call", lines=True),  # Qwen3-Coder, Qwen 3.5 and later, Nemotron 3, Step 3.5
    xml_parameters("seed_oss", "seed:tool_call", lines=False),
    arg_keys("glm"),  # GLM 4.5 and later, Laguna, Ling 3, Hy3
    NamedJsonFormat(  # Mistral's models; those up to Nemo write a list
        "mistral",
        "[TOOL_CALLS]",
        rf"\s*(?P<name>{NAME})(?:\[CALL_ID\](?P<id>\w{{1,64}}))?(?:\[ARGS\])?\s*(?=\{{)",
        "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        listed=True,
    ),
    NamedJsonFormat(  # Kimi K2, K2 Thinking and K2.5; a call's id is kept, since tools' answers name it
        "kimi_k2",
        "<|tool_call_begin|>",
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]{1,256})(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>\s*",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
        "<|tool_call_end|><|tool_calls_section_end|>",
        section="<|tool_calls_section_begin|>",
    ),
    KimiK3Format("kimi_k3"),
    NamedJsonFormat(  # DeepSeek V3 and R1
        "deepseek_v3",
        "<｜tool▁call▁begin｜>",
        rf"function<｜tool▁sep｜>\s*(?P<name>{NAME})\s*```json\s*",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        section="<｜tool▁calls▁begin｜>",
    ),
    NamedJsonFormat(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>",
        rf"\s*(?P<name>{NAME})\s*<｜tool▁sep｜>\s*",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        section="<｜tool▁calls▁begin｜>",
    ),
    invoke(  # DeepSeek V3.2, V4 and V4.1
        "dsml",
        ("｜DSML｜invoke", "｜DSML｜parameter", "｜DSML｜tool_calls"),
        tags=("｜DSML｜ ?invoke", "｜DSML｜ ?parameter", "｜DSML｜ ?(?:function_calls|tool_calls|calls)"),
        typed_strings=True,
    ),
    invoke("minimax_m2", ("invoke", "parameter", "minimax:tool_call")),
    MiniMax3Format("minimax_m3"),
    invoke("muse", ("atem:invoke", "atem:parameter", "atem:function_calls"), frames=_MUSE),
    invoke("minicpm5", ("function", "param", "")),
    GemmaFormat("gemma4"),
    HarmonyFormat("harmony"),
    NamedJsonFormat(
        "solar_open",
        "<|tool_call:begin|>",
        rf"(?P<id>[^\s<|]{{1,256}})?\s*<\|tool_call:name\|>\s*(?P<name>{NAME})\s*<\|tool_call:args\|>\s*",
        "<|tool_calls|><|tool_call:begin|>call0<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>"
        "<|calls|>",
        section="<|tool_calls|>",
        frames=_SOLAR,
    ),
    InklingFormat(
        "inkling",
        "<|content_invoke_tool_json|>",
        "<|end_message|>",
        keys=("name", "args"),
        only_calls=False,
        frames=_INKLING,
    ),
    MarkedJsonFormat("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>", listed=True),
    MarkedJsonFormat("apriel", "<tool_calls>", "</tool_calls>", listed=True),  # also Hunyuan A13B
    MarkedJsonFormat("command_r", "<|START_ACTION|>", "<|END_ACTION|>", keys=("tool_name", "parameters"), listed=True),
    MarkedJsonFormat("apertus", "<|tools_prefix|>", "<|tools_suffix|>", keys=None, listed=True),
    MarkedJsonFormat("gigachat", "<|function_call|>"),
    MarkedJsonFormat("phi4_mini", "functools", begins=r"functools|<\|tool_call\|>", listed=True),
    MarkedJsonFormat("granite3", "<|tool_call|>", listed=True),
    PythonCallsFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", listed=True),  # also LFM2.5
    PythonCallsFormat("olmo3", "<function_calls>", "</function_calls>", listed=False),
    BareJsonFormat(),
    Llama4Format("llama4"),
    FENCED,
)
FORMS = {form.name: form for form in _FORMS}
"""In the order in which they are tried on a template's text: a form with its own mark before one without."""


def format_named(name: str) -> ToolCallFormat:
    return FORMS[name]
