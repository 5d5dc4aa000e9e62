# SkyRL learns to write letters on one GPU, with rollouts by prorl_zmq; see README.md. Further key=value words come behind these.
# prorl.endpoint=tcp://… names a service elsewhere, and prorl.keys its keys.
exec python -m skyrl.train.entrypoints.main_base \
    trainer.override_entrypoint=prorl_zmq.integrations.skyrl.experiment \
    prorl.weights_folder="$PWD/weights" \
    data.train_data="['$PWD/train.jsonl']" \
    data.val_data="['$PWD/val.jsonl']" \
    trainer.policy.optimizer_config.lr=3e-3 \
    trainer.placement.colocate_all=false \
    trainer.placement.policy_num_gpus_per_node=1 \
    trainer.algorithm.use_kl_loss=false \
    trainer.algorithm.off_policy_correction.tis_ratio_type=token \
    trainer.train_batch_size=32 \
    trainer.policy_mini_batch_size=32 \
    trainer.micro_train_batch_size_per_gpu=8 \
    trainer.micro_forward_batch_size_per_gpu=8 \
    trainer.epochs=4 \
    trainer.eval_interval=10 \
    trainer.ckpt_path="$PWD/checkpoints" \
    trainer.export_path="$PWD/exports" \
    trainer.log_path="$PWD/logs" \
    trainer.logger=console \
    generator.n_samples_per_prompt=8 \
    generator.sampling_params.max_generate_length=512 \
    generator.inference_engine.enable_ray_prometheus_stats=false \
    "$@"
