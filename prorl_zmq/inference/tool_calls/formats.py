"""The forms of tool calls that there are, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .gemma import GemmaFormat
from .harmony import HarmonyFormat
from .llama3 import Llama3Format
from .marked_json import (
    ApertusFormat,
    AprielFormat,
    CommandFormat,
    FencedFormat,
    GigaChatFormat,
    GraniteFormat,
    HermesFormat,
    InklingFormat,
    NemotronFormat,
    PhiFormat,
)
from .minimax_m3 import MiniMax3Format
from .named_json import DeepSeek31Format, DeepSeekFormat, KimiFormat, MistralFormat, SolarFormat
from .python_calls import Lfm2Format, Llama4Format, OlmoFormat
from .tagged import (
    DsmlFormat,
    GlmFormat,
    KimiK3Format,
    MiniCpmFormat,
    MiniMaxFormat,
    MuseFormat,
    QwenCoderFormat,
    SeedFormat,
)

if TYPE_CHECKING:
    from .call import ToolCallFormat

FORMS: dict[str, ToolCallFormat] = {
    form.name: form
    for form in (
        HermesFormat(),
        QwenCoderFormat(),
        SeedFormat(),
        GlmFormat(),
        MistralFormat(),
        KimiFormat(),
        KimiK3Format(),
        DeepSeekFormat(),
        DeepSeek31Format(),
        DsmlFormat(),
        MiniMaxFormat(),
        MiniMax3Format(),
        MuseFormat(),
        MiniCpmFormat(),
        GemmaFormat(),
        HarmonyFormat(),
        SolarFormat(),
        InklingFormat(),
        NemotronFormat(),
        AprielFormat(),
        CommandFormat(),
        ApertusFormat(),
        GigaChatFormat(),
        PhiFormat(),
        GraniteFormat(),
        Lfm2Format(),
        OlmoFormat(),
        Llama3Format(),
        Llama4Format(),
        FencedFormat(),
    )
}
"""In the order in which they are tried on what a template writes: a form with a mark of its own before one without."""


def format_named(name: str) -> ToolCallFormat:
    """Return a form by the name that `ChatSettings.tool_calls` has."""
    return FORMS[name]
