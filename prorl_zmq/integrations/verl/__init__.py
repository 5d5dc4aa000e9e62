"""verl (0.9): its V1 trainer with the service's rollouts and engines. Needs the extra `[verl]`.

    python -m verl.trainer.main_ppo … \
        trainer.v1.trainer_mode=prorl actor_rollout_ref.rollout.name=prorl \
        actor_rollout_ref.rollout.checkpoint_engine.backend=prorl \
        +actor_rollout_ref.rollout.agent.agent_loop_manager_class=prorl_zmq.integrations.verl.rollouts.RolloutManager

Four parts, each found by verl itself through the entry point `verl.plugins` and these keys:

    trainer       `trainer.ServiceTrainer`: verl's own loop, without engines in the trainer's processes
    rollouts      `rollouts.RolloutManager`: prompts in, rows of trajectories into verl's TransferQueue
    replay buffer `replay.ServiceReplayBuffer`, or `replay.DynamicReplayBuffer` for DAPO's sampling by the service
    weights       `weights.ServiceCheckpointEngine`: `WeightsPublisher`, on the actor's ranks

`options` lists the keys. The rows themselves, and the deprecated `DataProto`, are made by `arrays`, without verl.
"""

from .arrays import agent_loop_outputs, data_proto, rollout_batch

__all__ = ["agent_loop_outputs", "data_proto", "rollout_batch"]
