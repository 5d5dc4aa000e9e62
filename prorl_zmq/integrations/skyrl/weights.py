"""`ServedWeights`: SkyRL's weights go to the service's engines, in place of SkyRL's transfer to engines of its own.

    SkyRL's workers ── save_hf_model ──> WEIGHTS/.saved ── cast ──> WEIGHTS/weights-N ── update_weights ──> engines

The workers gather and write the model by SkyRL's own means, whatever their sharding. N is the trainer's global step.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from ...errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ...weights_publisher import Published, WeightsPublisher


class ServedWeights:
    """Publishes a trainer's weights before its first step, and after each.

    Args:
        trainer: SkyRL's `RayPPOTrainer` or `FullyAsyncRayPPOTrainer`, before its `train`.
        publisher: of this process alone; it casts to the dtypes of the served model.
        folder: the publisher's folder. The trainer's machines see it under this path too.
    """

    def __init__(self, trainer: Any, publisher: WeightsPublisher, folder: Path) -> None:
        self._trainer = trainer
        self._publisher = publisher
        self._saved = folder / ".saved"
        self.published: list[Published | None] = []
        """What each publication took."""
        trainer.init_weight_sync_state = self._begin

    def _begin(self) -> None:
        """Take the place of the step in which SkyRL's workers connect to SkyRL's engines."""
        self._trainer.dispatch.save_weights_for_sampler = self.save_weights_for_sampler

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:  # noqa: ARG002 - as SkyRL's
        """Have all engines load the trainer's weights, while rollouts go on.

        Raises:
            ConfigError: the workers' files are not seen here.
            ProrlError: as `WeightsPublisher.publish`.
        """
        await asyncio.to_thread(self._publish, self._trainer.global_step)

    def _publish(self, step: int) -> None:
        shutil.rmtree(self._saved, ignore_errors=True)  # of a run that was killed
        try:
            self._trainer.dispatch.save_hf_model("policy", str(self._saved), self._trainer.tokenizer)
            done = self._publisher.publish(self._tensors(), step)
        finally:
            shutil.rmtree(self._saved, ignore_errors=True)
        self.published.append(done)
        if done is not None:
            seconds = {"gather": done.gather_s, "write": done.write_s, "update": done.update_s}
            self._trainer.all_metrics.update({f"weights/{name}_s": value for name, value in seconds.items()})
            self._trainer.all_metrics["weights/version"] = step

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        files = sorted(self._saved.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"SkyRL's workers have saved the model, and nothing is in {self._saved} here: weights_folder must be "
                "seen under one path by all machines of the trainer and by all engine hosts",
                key="prorl.weights_folder",
            )
        with ExitStack() as stack:  # all stay open: the publisher tells tensors apart by their addresses
            for file in files:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    yield name, opened.get_tensor(name)
