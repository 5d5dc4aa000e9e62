"""Roll out two prompts by our manager for verl, whose queue only notes: `verl_talk.py FRONT_DOOR SIZE`; prints JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from prorl_zmq.integrations.verl import rollouts


def main(front_door: str, size: str) -> None:
    statuses: dict[str, str] = {}
    rows: list[dict[str, Any]] = []

    def put(keys: list[str], fields: Any, **_: Any) -> None:
        parts = (fields[index] for index in range(len(keys)))
        rows.extend({name: part[name].tolist() for name in ("input_ids", "routed_experts")} for part in parts)

    def note(key: str, tag: dict[str, str], **_: Any) -> None:
        statuses[key] = tag["status"]

    rollouts.tq = SimpleNamespace(kv_put=note, kv_batch_put=put)
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    ours = {"endpoint": front_door, "served": "model", "folder": "weights"}
    rollout = {"n": int(size), "prompt_length": 64, "response_length": 64, **drawn, "val_kwargs": drawn}
    rollout |= {"multi_turn": {}, "checkpoint_engine": {"engine_kwargs": {"prorl": ours}}}
    trained = {"v1": {"prorl": {"record": ["experts"], "turn_tokens": 12}}}
    manager = rollouts.RolloutManager(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "trainer": trained}))
    prompts = [{"uid": uid, "task": "talk", "instance": {}, "global_steps": 1} for uid in ("a", "b")]
    manager.generate_sequences(list_of_dict_to_tensordict(prompts))
    while sum(status != "running" for status in statuses.values()) < len(prompts):
        manager.wait(10.0)
    manager.close()
    print(json.dumps({"statuses": statuses, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
