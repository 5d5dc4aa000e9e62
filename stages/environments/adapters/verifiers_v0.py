"""verifiers 0.1 (v0): rollouts of an environment that `load_environment` makes, which calls the model itself.

An instance's args:

- `id`: the installed environment's module.
- `args`: the arguments of its `load_environment`.
- `task`: the number of a row of its data set, from 0; with `"split": "eval"`, of its evaluation set.

Rewards that need all rollouts of a group (functions with plural parameters) are refused.
"""

from __future__ import annotations

import json
from typing import Any

import verifiers as vf
from verifiers.clients import resolve_client
from verifiers.types import ClientConfig

LOADED: dict[str, Any] = {}
"""One environment for each id and arguments in this process."""


class VerifiersV0:
    limit_s = 600.0
    """Loading an environment, and its data set, blocks the worker."""

    async def run(self, url: str, key: str, models: Any, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        del seed  # it takes none
        environment = _loaded(args["id"], args.get("args", {}))
        rows = environment.get_eval_dataset() if args.get("split") == "eval" else environment.get_dataset()
        number = args["task"]
        if not 0 <= number < len(rows):
            raise LookupError(f"the environment {args['id']} has no task {number}; it has {len(rows)}")
        headers = {"x-api-key": key}
        client = resolve_client(ClientConfig(api_base_url=url, api_key_var="", extra_headers=headers, max_retries=0))
        try:
            made = await environment.run_rollout(
                vf.RolloutInput(**rows[number]), client, models[0], {}, state_columns=["trajectory"]
            )
        finally:
            await client.close()
        if made.get("error"):
            return {"reward": 0.0, "error": str(made["error"].get("error_chain_repr") or made["error"])}
        per_turn = {n: step["reward"] for n, step in enumerate(made["trajectory"]) if step.get("reward") is not None}
        return {"reward": made["reward"], "turn_rewards": per_turn, "metrics": made["metrics"]}


def _loaded(name: str, args: dict[str, Any]) -> Any:
    known = json.dumps([name, args], sort_keys=True)
    if known not in LOADED:
        LOADED[known] = vf.load_environment(name, **args)  # in the main thread, since it sets handlers of signals
    environment = LOADED[known]
    if environment.requires_group_rollouts:
        raise ValueError(f"the environment {name} judges all rollouts of a group together, which is not supported")
    return environment
