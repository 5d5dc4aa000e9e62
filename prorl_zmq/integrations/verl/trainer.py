"""`ServiceTrainer`: verl's V1 trainer with `trainer.v1.trainer_mode=prorl`. Its processes have no inference engines.

    step n   ├ wait for rows ┤ old log-probs, advantages, update ┤ weights n to the engines ┤
    service  ├── rollouts of step n ──┤ …and with num_warmup_batches, of step n + 1 ──────────

Loss, advantages, rollout correction, checkpoints, metrics: all verl's own.
"""

from __future__ import annotations

from typing import Any

import ray
import transfer_queue
from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.debug import marked_timer

from ...data.reward_curve import RewardCurve
from ...errors import ConfigError
from ..session import check_version
from .options import NAME, TESTED, job_maker_of, rollout_options, service_options
from .replay import DynamicReplayBuffer, ServiceReplayBuffer

MANAGER = "prorl_zmq.integrations.verl.rollouts.RolloutManager"


@register_trainer(NAME)
class ServiceTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer, whose rollouts are the service's and whose weights go to its engines.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: a key of ours is unknown or has a wrong value, or one of verl's cannot be used here.
        InvalidJob: the first row of a data set makes no job.
    """

    _enable_hybrid_replicas = False  # verl's word for: no engines beside the actor

    def __init__(self, config: Any) -> None:
        check_version("verl", TESTED)
        service_options(config)
        options = rollout_options(config)
        dynamic = options.keep != "all"
        _check(config)
        sampler = config.trainer.v1.sampler
        if not sampler.custom_sampler.path:
            with open_dict(config):
                sampler.custom_sampler.path = "pkg://prorl_zmq.integrations.verl.replay"
                sampler.custom_sampler.name = "DynamicReplayBuffer" if dynamic else "ServiceReplayBuffer"
        self._curve = RewardCurve()
        self._warmup_batches = 0 if dynamic else options.num_warmup_batches
        super().__init__(config)
        wanted = DynamicReplayBuffer if dynamic else ServiceReplayBuffer
        if not isinstance(self.replay_buffer, wanted):
            raise ConfigError(
                f"trainer.v1.sampler.custom_sampler: {type(self.replay_buffer).__name__} is no subclass of "
                f"{wanted.__module__}.{wanted.__name__}, and would not see when rollouts end",
                key="trainer.v1.sampler.custom_sampler",
            )

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and cancel the rollouts that are under way at the end."""
        self.replay_buffer.manager = agent_loop_manager
        try:
            super().fit(agent_loop_manager)
            print(self._curve.conclusion(), flush=True)
        finally:
            self.replay_buffer.close()
            agent_loop_manager.close()

    def _init_dataloader(self) -> None:
        """Refuse a data set without what a job needs before verl starts its workers."""
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
        """Nothing: the engines go on."""

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
        """Give the engines the actor's weights; return what it took."""
        found = ray.get(self.actor_rollout_wg.update_weights(global_steps=self.global_steps, mode=NAME))
        return next((metrics for metrics in found if metrics), {})


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
