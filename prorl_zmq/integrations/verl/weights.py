"""`ServiceCheckpointEngine`: verl's checkpoint engine that gives the actor's weights to the service's engines.

verl calls `send_weights` on all ranks of the actor, with an iterator of whole tensors under their Hugging Face names;
rank 0 writes and has the engines load them. Nothing is received in verl's processes: they have no engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ...client.blocking.client import RolloutClient
from ...errors import ConfigError
from ...weights_publisher import WeightsPublisher
from .options import NAME, SERVICE_KEYS, ServiceOptions, checked

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


@CheckpointEngineRegistry.register(NAME)
class ServiceCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes the weights of each step; its version is verl's `global_steps`.

    Args:
        bucket_size: verl's; not used, since tensors go through files.
        is_master: this is rank 0.
        options: `engine_kwargs.prorl`; see `ServiceOptions`.

    Raises:
        ConfigError: an option is unknown or lacks, or another trainer publishes in the folder.
        InvalidWeights: the served model cannot be read.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:  # noqa: ARG002
        try:
            given = checked(msgspec.convert(options, ServiceOptions))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{SERVICE_KEYS}: {error}", key=SERVICE_KEYS) from None
        client = RolloutClient(given.endpoint, keys=given.keys) if is_master else None
        self._publisher = WeightsPublisher(client, given.served, given.folder, keep=given.keep, mode=given.mode)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Have all engines serve these weights; return the seconds of each part on rank 0, elsewhere nothing.

        Raises:
            ProrlError: as `WeightsPublisher.publish`.
        """
        published = self._publisher.publish(weights, global_steps or 0)
        if published is None:
            return {}
        return {f"timing_s/weights/{part}": getattr(published, f"{part}_s") for part in ("gather", "write", "update")}

    def prepare(self) -> dict[str, Any]:
        """Nothing: there are no buckets."""
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,  # noqa: ARG003 - verl's contract
        rollout_world_size: int,  # noqa: ARG003
        metadata: list[dict[str, Any]],  # noqa: ARG003
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Nothing: tensors go through files."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Nothing: the actor's own group is used."""

    def finalize(self) -> None:
        """Nothing: the publisher lives as long as the actor."""

    async def receive_weights(self, global_steps: int | None = None) -> Any:  # noqa: ARG002 - verl's contract
        """Never called by `ServiceTrainer`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("engines outside of verl read weights from files; set trainer.v1.trainer_mode=prorl")
