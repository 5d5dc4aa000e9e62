#!/usr/bin/env bash
# Train with slime: SLIME is its folder, MODEL a Hugging Face folder, MODEL_ARGS_FILE the script of slime that describes it.
# Further arguments are slime's.
set -eu
cd "$(dirname "$0")"
SLIME=${SLIME:?set SLIME to the folder of slime}
MODEL=${MODEL:-model}
source "${MODEL_ARGS_FILE:-$SLIME/scripts/models/qwen2.5-0.5B.sh}"

ours=(
  --rollout-function-path prorl_zmq.integrations.slime.generate_rollout
  --custom-config-path "$PWD/prorl.yaml"
  --custom-reward-post-process-path prorl_zmq.integrations.slime.post_process_rewards
  --update-weight-mode full
  --update-weight-transport disk
  --update-weight-disk-dir "$PWD/out/weights"       # engine hosts see it under the same path
  --custom-update-weight-post-write-path prorl_zmq.integrations.slime.update_weights
)
exec python "$SLIME/train.py" "${ours[@]}" "${MODEL_ARGS[@]}" \
  --hf-checkpoint "$MODEL" --ref-load "${REF_LOAD:-${MODEL}_torch_dist}" \
  --prompt-data train.jsonl --input-key messages --metadata-key metadata --rollout-shuffle \
  --num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 \
  --rollout-max-response-len 1024 --rollout-temperature 1 \
  --advantage-estimator grpo --use-tis \
  --optimizer adam --lr 1e-6 --lr-decay-style constant \
  --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 "$@"
