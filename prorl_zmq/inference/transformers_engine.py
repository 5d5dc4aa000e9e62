"""The transformers engine: a Hugging Face model in the host's process, on a CPU or one GPU, for trying a trainer.

Continuous batching with one cache for all rows, padded on the left: a step draws one token for every row, and runs one
forward pass; new rows are prefilled first, at most `PREFILL_TOKENS` at a time. When weights change under running
generations the cache is recomputed from the tokens so far, so each token's log-prob is what a trainer computes for it
with the weights of that token's version. It has no prefix cache, no paged memory and no custom kernels: use vLLM for
throughput.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from ..data.scores import Scores
from ..errors import ConfigError
from ..wire.records import EXPERTS, RECORD_TOP_LIMIT, SAMPLING_MASK, TOP_LOGPROBS
from .adapters import takes_none
from .checkpoint import check_checkpoint, read_in_time, read_tensors
from .engine import EngineDescription
from .local_engine import LOAD_S, LocalEngine, Running, chances_of
from .router_tap import RouterTap
from .truncation import truncated, truncates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ..config import LoraSlots
    from ..wire.messages.chat import ChatSettings
    from .peft_adapters import PeftAdapters

PREFILL_TOKENS = 8192
"""Most tokens, padding included, that are prefilled between two steps; one conversation may be longer."""
SCORED_TOKENS = 512
"""Tokens of a text that are scored between two steps; their logits over a large vocabulary take 300 MB."""
ATTENTIONS = {"full_attention", "sliding_attention"}
"""The kinds of layers whose cache can be padded and concatenated."""


class TransformersEngine(LocalEngine):
    """Implements `engine.Engine` with a causal language model of a folder.

    Args:
        folder: of the model; new weights must have its tensors.
        chat: with its tokenizer's folder.
        device: such as `cpu` or `cuda:0`.
        dtype: of the weights and the computation, such as `float32`; `auto`: that of the folder.
        rows: concurrent generations; more wait.
        lora: the adapters that it takes; None: none.

    Raises:
        InvalidWeights: the folder has no safetensors files, or they cannot be read.
        ConfigError: the model cannot be loaded, or has layers whose state is not an attention cache.
    """

    def __init__(
        self,
        folder: Path,
        chat: ChatSettings,
        weight_version: int,
        *,
        device: str,
        dtype: str,
        rows: int,
        lora: LoraSlots | None = None,
    ) -> None:
        self._folder = folder
        self._device = device
        self._most_rows = rows
        read_tensors(folder)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self._model = self._loaded(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"transformers cannot load {folder}: {error}", key="model") from error
        arguments = inspect.signature(type(self._model).forward).parameters
        self._cache_argument = (
            "cache" if "cache" in arguments else "past_key_values"
        )  # its name up to transformers 5.23
        text = self._model.config.get_text_config()
        others = {*(getattr(text, "layer_types", None) or ATTENTIONS)} - ATTENTIONS
        if others:
            words = f"{folder} has layers of {', '.join(sorted(others))}, which this engine cannot batch; vLLM can"
            raise ConfigError(words, key="model")
        self._routers = RouterTap(self._model)
        experts = (EXPERTS,) if self._routers.complete() else ()
        super().__init__(
            EngineDescription(
                str(folder),
                chat,
                text.max_position_embeddings,
                text.vocab_size,
                rows,
                "processed_logprobs",
                records=(TOP_LOGPROBS, SAMPLING_MASK, *experts),
                top_limit=min(RECORD_TOP_LIMIT, text.vocab_size),
                unrecorded={EXPERTS: "its model is dense, or its routers are unknown"} if not experts else {},
                scores=True,
                adapter_slots=0 if lora is None else lora.slots,
            ),
            weight_version,
        )
        self._adapters: PeftAdapters | None = None
        if lora is not None:
            from .peft_adapters import PeftAdapters

            self._adapters = PeftAdapters(self._model, folder, lora.rank)
        self._rows: list[Running] = []
        self._cache = DynamicCache()
        self._mask = torch.zeros((0, 0), dtype=torch.int64, device=device)
        """int64 [rows, columns]: where the cache holds a token; each row ends with the last column."""
        self._scores = torch.zeros((0, text.vocab_size), device=device)
        """float32 [rows, vocabulary]: of each row's next token. 64 rows with a large vocabulary take 40 MB, so they
        stay on the device."""

    async def load_adapter(self, model: str, version: int, path: Path) -> None:
        """Load an adapter between two tokens; see `AdapterEngine.load_adapter`."""
        adapters = self._own_adapters()
        weights = await read_in_time(LOAD_S, adapters.read, path)
        adapters.attach((model, version), weights)

    async def remove_adapter(self, model: str, version: int) -> None:
        self._own_adapters().detach((model, version))

    def _own_adapters(self) -> PeftAdapters:
        if self._adapters is None:
            raise takes_none()
        return self._adapters

    def _check_adapter(self, adapter: tuple[str, int] | None) -> None:
        if adapter is not None:
            self._own_adapters().check(adapter)

    @torch.inference_mode()
    def _step(self) -> None:
        self._keep_running()
        seated = set(self._rows)
        waiting = [running for running in self._running if running not in seated]
        joining: list[Running] = []
        for running in waiting[: self._most_rows - len(self._rows)]:
            longest = max(len(each.tokens) for each in (*joining, running))
            if joining and longest * (len(joining) + 1) > PREFILL_TOKENS:
                break
            joining.append(running)
        if joining:
            self._join(joining)
        for row, running in enumerate(self._rows):
            cut = truncates(running.sampling)
            if cut or running.asked.top:
                left = self._scores[row].cpu().numpy()
                if cut:
                    left = truncated(left, running.sampling)
                    self._scores[row] = torch.from_numpy(left).to(self._device)
                running.note_distribution(left)
        self._add(self._rows, *_drawn(self._scores, *chances_of(self._rows)))
        self._keep_running()
        if self._rows:
            self._decode_one()

    def _score_parts(self, token_ids: NDArray[np.int32], top: int, adapter: tuple[str, int] | None) -> Iterator[Scores]:
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        model: Any = self._model if adapter is None else self._own_adapters().applied([adapter])
        cache, mask = DynamicCache(), torch.ones_like(ids)[None]
        for start in range(0, len(ids) - 1, SCORED_TOKENS):
            end = min(start + SCORED_TOKENS, len(ids) - 1)
            with torch.inference_mode():
                logits = self._logits(model, ids[None, start:end], mask[:, :end], cache)[0]
                logprobs = logits.log_softmax(1)
                likeliest = logprobs.topk(top)
                own = logprobs.gather(1, ids[start + 1 : end + 1, None])[:, 0]
            yield Scores(own.cpu().numpy(), likeliest.indices.int().cpu().numpy(), likeliest.values.cpu().numpy())

    def _on_new_weights(self) -> None:
        self._keep_running()
        rows, self._rows = self._rows, []
        self._cache, self._mask = DynamicCache(), self._mask[:0]
        self._scores = self._scores[:0]
        for running in rows:
            self._join([running])

    def _read_weights(self, path: Path) -> Any:
        check_checkpoint(path, self._folder)
        files = path.glob("*.safetensors")
        # Not mapped: the folder may be a copy, which the next version changes in place.
        state = {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}
        served = self._model
        return self._loaded(
            type(served).from_pretrained(None, config=served.config, state_dict=state, dtype=served.dtype)
        )

    def _take_weights(self, weights: Any) -> None:
        if self._adapters is not None:
            self._adapters.move_to(weights)
        self._model, self._routers = weights, RouterTap(weights)

    def _loaded(self, model: Any) -> Any:
        return model.to(self._device).eval().requires_grad_(requires_grad=False)

    def _keep_running(self) -> None:
        """Remove the rows of finished and cancelled generations from the batch."""
        kept = [row for row, running in enumerate(self._rows) if not running.done.done()]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[row] for row in kept]
        index = torch.tensor(kept, dtype=torch.int64, device=self._device)
        self._scores = self._scores[index]
        mask = self._mask[index]
        held = mask.any(0).nonzero()
        first = int(held[0]) if len(held) else mask.shape[1]
        self._mask = mask[:, first:]
        self._cache = _cache_of(
            [(keys[index, :, first:], values[index, :, first:]) for keys, values in _layers(self._cache)]
        )

    def _join(self, conversations: Sequence[Running]) -> None:
        """Prefill conversations, and append them to the rows."""
        columns = max(len(running.tokens) for running in conversations)
        ids = torch.zeros((len(conversations), columns), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, running in enumerate(conversations):
            ids[row, columns - len(running.tokens) :] = torch.tensor(running.tokens)
            mask[row, columns - len(running.tokens) :] = 1
        mask = mask.to(self._device)
        cache = DynamicCache()
        scores = self._forward(ids.to(self._device), mask, cache, conversations)
        self._scores = torch.cat([self._scores, scores])
        if self._rows:
            width = max(columns, self._mask.shape[1])
            both = zip(_layers(self._cache), _layers(cache), strict=True)
            cache = _cache_of(
                [
                    tuple(torch.cat([_wide(a, width), _wide(b, width)]) for a, b in zip(*pair, strict=True))
                    for pair in both
                ]
            )
            mask = torch.cat([pad(each, (width - each.shape[1], 0)) for each in (self._mask, mask)])
        self._cache, self._mask = cache, mask
        self._rows += conversations

    def _decode_one(self) -> None:
        last = torch.tensor([[running.tokens[-1]] for running in self._rows], device=self._device)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._scores = self._forward(last, self._mask, self._cache, self._rows)

    @torch.inference_mode()
    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache, batch: Sequence[Running]
    ) -> torch.Tensor:
        """Add ids, int64 [rows, n], of generations to a cache; return the scores of their next tokens.

        The ids are the last ones of each generation's tokens, and the scores float32 [rows, vocabulary].
        """
        recording = any(running.asked.experts for running in batch)
        model: Any = self._model
        if self._adapters is not None:
            model = self._adapters.applied([running.wanted.adapter for running in batch])
        with self._routers.open() if recording else nullcontext():
            logits = self._logits(model, ids, mask, cache, logits_to_keep=1)
        if recording:
            routes = self._routers.routes().reshape(*ids.shape, self._routers.layers, -1)
            for row, running in enumerate(batch):
                if running.asked.experts:
                    start = max(len(running.tokens) - ids.shape[1], 0)
                    running.note_routes(start, routes[row, ids.shape[1] - len(running.tokens) + start :])
        return logits[:, -1]

    def _logits(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache, **options: int
    ) -> torch.Tensor:
        """Add ids, int64 [rows, n], to a cache; return the logits after each, float32 [rows, n, vocabulary]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        done = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_argument: cache},
            use_cache=True,
            **options,
        )
        logits: torch.Tensor = done.logits.float()
        return logits


def _drawn(
    scores: torch.Tensor, temperatures: NDArray[np.float64], uniforms: NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """Draw one token per row of scores, as `policy.draw` does; return the tokens and their log-probs."""
    given = torch.from_numpy(np.stack([temperatures, uniforms])).to(scores.device)
    temperature, uniform = given[0, :, None], given[1, :, None]
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature.clamp(min=1e-30)).float()  # smaller ones are 0 in float32
    logprobs = ((scores - scores.amax(1, keepdim=True)) / divisor).log_softmax(1)
    cumulated = logprobs.exp().cumsum(1, dtype=torch.float64)
    drawn = (cumulated <= uniform * cumulated[:, -1:]).sum(1, keepdim=True).clamp(max=scores.shape[1] - 1)
    tokens = torch.where(greedy, scores.argmax(1, keepdim=True), drawn)
    found = torch.cat([tokens.double(), logprobs.gather(1, tokens)], dim=1).cpu()
    return found[:, 0].long().tolist(), found[:, 1].tolist()


def _layers(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values, [rows, heads, columns, width]."""
    layers: list[Any] = cache.layers  # a fresh `DynamicCache` has only those of attention
    return [(layer.keys, layer.values) for layer in layers]


def _cache_of(layers: Sequence[tuple[torch.Tensor, ...]]) -> DynamicCache:
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def _wide(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    return pad(tensor, (0, 0, columns - tensor.shape[2], 0))


def load_transformers_engine(
    model: str,
    chat: ChatSettings,
    weight_version: int,
    *,
    device: str,
    dtype: str,
    rows: int,
    lora: LoraSlots | None = None,
) -> TransformersEngine:
    """Load a model of a folder or a hub; blocks.

    Raises:
        ConfigError: the model is missing or cannot be loaded, or the device is not available.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            folder = Path(
                snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"])
            )
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            raise ConfigError(
                f"no model in {model}: no such folder, and no hub has it: {error}", key="model"
            ) from error
    chosen = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # the latter if PyTorch was built without CUDA
        raise ConfigError(f"device {chosen} cannot be used: {str(error).splitlines()[0]}", key="device") from error
    # cuDNN makes a new plan for each length of the cache, some 60 ms a step; PyTorch's other kernels do not.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    described = chat if chat.tokenizer else msgspec.structs.replace(chat, tokenizer=str(folder.absolute()))
    return TransformersEngine(
        folder.absolute(), described, weight_version, device=chosen, dtype=dtype, rows=rows, lora=lora
    )
