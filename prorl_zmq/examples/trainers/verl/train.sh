#!/usr/bin/env bash
# Train with verl; further arguments are keys of its configuration, such as trainer.total_training_steps=100
set -eu
cd "$(dirname "$0")"
exec python -m verl.trainer.main_ppo --config-path "$PWD" --config-name prorl "$@"
