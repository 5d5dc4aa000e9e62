"""Starts an `AsyncLLM` from a model and vLLM's own flags.

vLLM's own parser reads the flags, above this module's defaults. A wrong model folder or flag raises `ConfigError`;
exceptions of vLLM's start pass through.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...data.scores import SCORES_TOP_LIMIT
from ...errors import ConfigError
from ...system.installation import how_to_install
from .vllm_draft import extend_workers, takes_draft
from .vllm_kv_logger import kv_logger
from .vllm_processes import bind_to_cores, is_cpu_build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..kv_figures import KvMeter
    from .vllm_kv_events import VllmKvEvents

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tokenizer_config.json")
"""A folder with one of these files has a tokenizer."""


def model_folder(model: str) -> Path | None:
    """Return the folder that `model` names, if it is complete; None: it is a name on a hub.

    Raises:
        ConfigError: the folder is missing, or has no model with a tokenizer.
    """
    folder = Path(model).absolute()
    if not folder.is_dir():
        if HUB_NAME.fullmatch(model):
            return None
        raise ConfigError(f"no model in {model}: there is no such folder", key="model")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no model in {folder}: it has no config.json", key="model")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(
            f"no tokenizer in {folder}: it has none of {', '.join(TOKENIZERS)}; save the model's tokenizer there",
            key="model",
        )
    return folder


def downloaded_folder(config: Any) -> Path:
    """Return the folder of a model that vLLM has loaded, by its `ModelConfig`."""
    from huggingface_hub import snapshot_download

    if Path(config.model).is_dir():
        return Path(config.model).absolute()
    return Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))


def draft_folder(llm: Any) -> Path | None:
    """Return the folder of the draft model whose weights can be replaced; None: there is none."""
    return downloaded_folder(llm.vllm_config.speculative_config.draft_model_config) if takes_draft(llm) else None


def start_async_llm(
    model: str, arguments: Sequence[str], meter: KvMeter | None = None, events: VllmKvEvents | None = None
) -> Any:
    """Start vLLM with a model and flags; return its `AsyncLLM`. vLLM's own exceptions pass through.

    Args:
        model: a folder or a name on a hub.
        arguments: vLLM's own flags.
        meter: gets the state of the KV cache after each step; None: it is not measured.
        events: where it publishes the events of its prefix cache; None: nowhere.

    Raises:
        ConfigError: vLLM is not installed or too old, or rejects the flags.
    """
    try:
        from vllm import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == "vllm":
            raise ConfigError(
                f"engines of the kind vllm need a recent vLLM in their environment ({error}): {how_to_install('vllm')}",
                key="engine",
            ) from error
        raise
    if not hasattr(AsyncLLM, "update_weight_version"):
        raise ConfigError("this vLLM does not note which weights made a token; install a newer one", key="engine")

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM does not take these flags: {message}", key="vllm")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", add_help=False))
    parser.set_defaults(
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        enable_log_requests=False,
        disable_log_stats=True,
        max_logprobs=SCORES_TOP_LIMIT,
    )
    if is_cpu_build():
        # A seeded request whose prompt is computed in parts ends the engine: "CPU Generator does not use offset".
        parser.set_defaults(enable_chunked_prefill=False)
    options = parser.parse_args([f"--model={model}", *arguments])
    if options.model != model:
        raise ConfigError(f"the model is given twice: {model} and {options.model}", key="vllm")
    if options.logprobs_mode not in ("processed_logprobs", "raw_logprobs"):
        raise ConfigError(f"--logprobs-mode {options.logprobs_mode} does not give log-probs", key="vllm")
    extend_workers(options)
    asked = AsyncEngineArgs.from_cli_args(options)
    if events is not None:
        events.ask_for(asked)
    cores = sorted(os.sched_getaffinity(0))
    if is_cpu_build() and len(cores) < (os.cpu_count() or 1):
        bind_to_cores(cores, asked.tensor_parallel_size * asked.pipeline_parallel_size * asked.data_parallel_size)
    loggers = [kv_logger(meter, StatLoggerBase)] if meter is not None else None
    return AsyncLLM.from_engine_args(asked, stat_loggers=loggers)
