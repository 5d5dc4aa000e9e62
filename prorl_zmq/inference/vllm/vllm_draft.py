"""New weights for the draft model of vLLM's speculative decoding, a plain checkpoint like the model's own.

vLLM's `reload_weights` reloads the model alone, and its weight transfer reaches the draft model only from a trainer's
group. So its processes get the method of `DraftLoading`, which does with the draft model what `reload_weights` does.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

EXTENSION = f"{__name__}.DraftLoading"


class DraftLoading:
    """A `--worker-extension-cls`: vLLM adds it to the class of its workers."""

    def load_draft_weights(self: Any, path: str) -> None:
        """Load the draft model's weights from a folder, in place."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, config = self.get_draft_model(), copy.copy(self.speculative_config.draft_model_config)
        config.model, config.model_weights, config.revision = path, "", None
        with set_current_vllm_config(self.vllm_config):
            weights = get_model_loader(self.vllm_config.load_config).get_all_weights(config, model)
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, config)


def extend_workers(options: Namespace) -> None:
    """Add `DraftLoading` to vLLM's parsed flags if they name a draft model, and no extension of the user's."""
    if (options.speculative_config or {}).get("model") and not options.worker_extension_cls:
        options.worker_extension_cls = EXTENSION


def takes_draft(llm: Any) -> bool:
    """Return whether an `AsyncLLM` has a draft model that takes weights."""
    config, speculative = llm.vllm_config, llm.vllm_config.speculative_config
    is_extended = config.parallel_config.worker_extension_cls == EXTENSION
    # vLLM's workers can name their draft model since there is this method.
    is_new = hasattr(llm, "start_draft_weight_update")
    return is_extended and is_new and speculative is not None and speculative.method == "draft_model"


async def load_draft(llm: Any, path: Path) -> None:
    """Have vLLM load the draft model's weights; it generates nothing meanwhile. vLLM's exceptions pass through."""
    await llm.collective_rpc("load_draft_weights", args=(str(path),))
