"""How conversations become tokens for a model: part of a backend's description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.json import decode, encode
from msgspec.structs import replace

from .base import FieldName, Part

ToolCallFormatName = Literal[
    "",
    "apertus",
    "apriel",
    "command_r",
    "deepseek_v3",
    "deepseek_v31",
    "dsml",
    "gemma4",
    "gigachat",
    "glm",
    "granite3",
    "harmony",
    "hermes",
    "inkling",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "llama3",
    "llama4",
    "minicpm5",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "muse",
    "nemotron_v2",
    "olmo3",
    "phi4_mini",
    "qwen3_coder",
    "seed_oss",
    "solar_open",
    "fenced",
]
History = Literal["template", "append"]
TemplateArguments = Annotated[dict[FieldName, Any], Meta(max_length=32)]
"""Named arguments of a chat template, such as `enable_thinking`."""
ParserUrl = Annotated[str, Meta(pattern="^(https?://[^/].*)?$", max_length=2048)]


class ChatSettings(Part, frozen=True):
    """How conversations become tokens for a model (see `prorl_zmq.inference.chat`)."""

    kind: Literal["embedded", "transformers"] = "embedded"
    """`transformers`: by the chat template of the model's tokenizer."""
    tokenizer: str = ""
    """A directory as the stage processes see it, or a hub name; for kind `transformers`."""
    tool_calls: ToolCallFormatName = ""
    """How the model writes tool calls; empty: as its template does."""
    history: History = "template"
    """Where the template changes earlier turns (for example drops old reasoning): `template` follows it and begins a
    new segment of the trajectory; `append` keeps what the engine saw, so that there is always one segment."""
    parser_url: ParserUrl = ""
    """A server of `vllm launch render`, as stage processes reach it: its parsers read tool calls and reasoning of
    rollouts led by a harness. The agent loop reads by the formats above. Empty: harnesses use those too."""
    template_arguments: str = ""
    """The `TemplateArguments` as JSON with sorted names; empty: none. Text, so that settings can be compared."""

    def with_arguments(self, arguments: dict[str, Any]) -> ChatSettings:
        """Return these settings with more template arguments, which override existing ones."""
        if not arguments:
            return self
        merged = {**self.arguments(), **arguments}
        return replace(self, template_arguments=encode(merged, order="deterministic").decode())

    def arguments(self) -> dict[str, Any]:
        """Return the template arguments.

        Raises:
            ValueError: they are not a JSON object.
        """
        return decode(self.template_arguments, type=dict[str, Any]) if self.template_arguments else {}
