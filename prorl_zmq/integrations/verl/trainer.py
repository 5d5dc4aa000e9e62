"""`ServiceTrainer`: verl's V1 trainer with `trainer.v1.trainer_mode=prorl`, and the publication of its weights.

Loss, advantages, rollout correction, checkpoints and metrics are verl's own. Its processes have no inference engines.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
import transfer_queue
from omegaconf import open_dict
from verl.checkpoint_engine import CheckpointEngineRegistry, ColocatedCheckpointEngine
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.debug import marked_timer

from ...client.blocking.client import RolloutClient
from ...data.reward_curve import RewardCurve
from ...errors import ConfigError
from ...weights_publisher import WeightsPublisher
from ..session import check_version
from .buffers import DynamicReplayBuffer, ServiceReplayBuffer
from .options import NAME, SERVICE_KEYS, TESTED, job_maker_of, read_service, rollout_options, service_options

MANAGER = "prorl_zmq.integrations.verl.rollouts.RolloutManager"


@register_trainer(NAME)
class ServiceTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer with the service's rollouts, which publishes its weights to the service's engines.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: a key of the service is unknown or invalid, or one of verl's cannot be used here.
        InvalidJob: the first row of a data set cannot be made into a job.
    """

    _enable_hybrid_replicas = False  # verl's option for no engines next to the actor

    def __init__(self, config: Any) -> None:
        check_version("verl", TESTED)
        service_options(config)
        options = rollout_options(config)
        wanted = ServiceReplayBuffer if options.keep == "all" else DynamicReplayBuffer
        _check(config)
        sampler = config.trainer.v1.sampler
        if not sampler.custom_sampler.path:
            with open_dict(config):
                sampler.custom_sampler.path = f"pkg://{wanted.__module__}"
                sampler.custom_sampler.name = wanted.__name__
        self._curve = RewardCurve()
        self._warmup_batches = options.num_warmup_batches if options.keep == "all" else 0
        super().__init__(config)
        if not isinstance(self.replay_buffer, wanted):
            raise ConfigError(
                f"trainer.v1.sampler.custom_sampler: {type(self.replay_buffer).__name__} is not a subclass of "
                f"{wanted.__module__}.{wanted.__name__}, and would not see when rollouts end",
                key="trainer.v1.sampler.custom_sampler",
            )

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and cancel the running rollouts at the end."""
        self.replay_buffer.manager = agent_loop_manager
        try:
            super().fit(agent_loop_manager)
            print(self._curve.conclusion(), flush=True)
        finally:
            self.replay_buffer.close()
            agent_loop_manager.close()

    def _init_dataloader(self) -> None:
        """Reject a data set without a job's columns before verl starts its workers."""
        super()._init_dataloader()
        make_job = job_maker_of(self.config)
        for rows in (self.train_dataset, self.val_dataset):
            if len(rows):
                make_job(rows[0])

    def on_init_end(self) -> None:
        self._publish()

    def on_train_begin(self) -> None:
        self._add_async_warmup_batches(self._warmup_batches)

    def on_sample_end(self) -> None:
        """Do nothing: the engines continue."""

    def on_step_end(self) -> None:
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._pending_sync_metrics = self._publish()

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        found = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores"]
        )
        rows = zip(batch.tags, found["rm_scores"].unbind(), strict=True)
        line = self._curve.add([float(scores.sum()) for tag, scores in rows if not tag.get("is_padding", False)])
        print(f"step {global_steps}: {line}", flush=True)

    def _publish(self) -> dict[str, float]:
        """Publish the actor's weights; return the seconds of each part."""
        # In this mode verl hands its engine to the checkpoint engine, and not tensors, of which none are the adapter's.
        mode = "delta_sharded" if service_options(self.config).lora else NAME
        found = ray.get(self.actor_rollout_wg.update_weights(global_steps=self.global_steps, mode=mode))
        return next((metrics for metrics in found if metrics), {})


@CheckpointEngineRegistry.register(NAME)
class ServiceCheckpointEngine(ColocatedCheckpointEngine):  # type: ignore[misc]
    """Publishes the actor's weights as version `global_steps`; verl makes one on each of the actor's ranks.

    Args:
        bucket_size: verl's; not used, since tensors go through files.
        is_master: this is rank 0.
        options: `engine_kwargs.prorl`; see `ServiceOptions`.

    Raises:
        ConfigError: an option is unknown, missing or invalid, or another trainer publishes in the folder.
        InvalidWeights: the served model cannot be read.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        super().__init__(bucket_size, is_master)
        given = read_service(options)
        connect = partial(RolloutClient, given.endpoint, keys=given.keys)
        self._lora = given.lora
        self._publisher = WeightsPublisher(
            connect,
            given.served,
            given.folder,
            form=given.form,
            keep=given.keep,
            mode=given.mode,
            model=given.model,
            lora=given.lora,
            base=given.base,
        )

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Have all engines serve these weights; return the seconds of each part on rank 0, elsewhere an empty dict.

        Args:
            weights: names and tensors; with the option `lora`, verl's training engine.
            global_steps: their version.

        Raises:
            ProrlError: as `WeightsPublisher.publish`.
        """
        config = None
        if self._lora:
            weights, config = weights.get_per_tensor_param(base_sync_done=True)
        published = self._publisher.publish(weights, global_steps or 0, lora_config=config)
        return {f"timing_s/weights/{part}": s for part, s in published.seconds.items()} if published else {}


def _check(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    for key, value, wanted in (
        ("actor_rollout_ref.rollout.name", rollout.name, NAME),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", rollout.checkpoint_engine.backend, NAME),
        ("actor_rollout_ref.rollout.calculate_log_probs", rollout.calculate_log_probs, True),
        ("algorithm.filter_groups.enable", (config.algorithm.get("filter_groups") or {}).get("enable", False), False),
        ("reward.reward_model.enable", config.reward.reward_model.enable, False),
        ("reward.custom_reward_function.path", config.reward.custom_reward_function.path, None),
        (
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
            rollout.agent.get("agent_loop_manager_class"),
            MANAGER,
        ),
    ):
        if value != wanted:
            raise ConfigError(f"with trainer_mode={NAME}, {key} must be {wanted}; it is {value}", key=key)
    model = config.actor_rollout_ref.model
    rank = model.get("lora_rank", 0) or model.get("lora", {}).get("rank", 0)
    merged, as_adapter = model.get("lora", {}).get("merge", False), service_options(config).lora
    if as_adapter != bool(rank and not merged):
        raise ConfigError(
            f"a LoRA is published as an adapter ({SERVICE_KEYS}.lora=true, model.lora.merge=false) or merged "
            f"({SERVICE_KEYS}.lora=false, model.lora.merge=true); here lora={as_adapter}, merge={merged}, rank={rank}",
            key=f"{SERVICE_KEYS}.lora",
        )
