"""verifiers 0.4 (v1): rollouts of a taskset on its own `EnvServer`, which calls the model itself.

An instance's args: `taskset`, the id of an installed taskset, or its configuration with `id`; `task`, the number of a
task in the taskset, from 0, or the data of one; `env`, further keys of the environment's configuration, such as `id`,
or `agent` with `harness` and `max_turns`.

Seats run as processes of this machine unless `env` names another `runtime`. The reward is that of the trainable traces,
on average if they are several; then the metric `reward of SEAT` has each seat's.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import env_config_type, load_taskset, resolve_env_config

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""Its programs are prepared by `uv`, which is installed beside it."""
SERVERS: dict[str, tuple[EnvServer, EnvClient, asyncio.Task[None]]] = {}
"""One server for each configuration in this process."""
TASKS: dict[str, list[Any]] = {}
"""The tasks of each server's taskset."""


class Verifiers:
    limit_s = 600.0
    """A taskset may load for minutes."""

    async def run(self, url: str, key: str, models: Any, args: dict[str, Any], seed: int | None) -> dict[str, Any]:
        del seed  # it takes none
        taskset = args["taskset"] if isinstance(args["taskset"], dict) else {"id": args["taskset"]}
        _check(env := {**args.get("env", {}), "taskset": taskset})
        server, client = _served(env)
        task = args["task"] if isinstance(args["task"], dict) else await _task(server, args["task"])
        model = EvalClientConfig(base_url=url, api_key_var="", headers={"x-api-key": key})
        episode = await client.run(model, models[0], SamplingConfig(), task)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            words = "; ".join(f"{error.type}: {error.message}" for error in errors)
            return {"reward": 0.0, "error": words or "the episode did not complete"}
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if not trained:
            return {"reward": 0.0, "error": "no seat of the environment is trainable"}
        seats = {f"reward of {trace.agent.name}": trace.reward for trace in trained} if len(trained) > 1 else {}
        metrics = {name: value for trace in trained for name, value in trace.metrics.items()}
        return {"reward": fmean(trace.reward for trace in trained), "metrics": {**seats, **metrics}}


def _check(config: Any) -> None:
    """Refuse what makes verifiers install or import code that a job names.

    Raises:
        ValueError: an id is of a hub, or a hook names a function.
    """
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if key == "fn" or (key == "id" and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", str(value))):
            raise ValueError(f"{key} = {value!r:.100}: only what is installed is loaded, by its id")
        if isinstance(value, dict | list):
            _check(value)


def _served(env: dict[str, Any]) -> tuple[EnvServer, EnvClient]:
    known = json.dumps(env, sort_keys=True)
    if known not in SERVERS:
        kind = env_config_type(env["taskset"]["id"], env.get("id", ""))
        for name, field in kind.model_fields.items():
            if isinstance(field.default, AgentConfig):  # its own default is a remote sandbox
                env[name] = {"runtime": {"type": "subprocess"}, **env.get(name, {})}
        server = EnvServer(resolve_env_config(env), f"ipc://{tempfile.mkdtemp()}/server")
        SERVERS[known] = server, EnvClient(server.address), asyncio.create_task(server.run())
    server, client, serving = SERVERS[known]
    if serving.done():
        del SERVERS[known]
        serving.result()
    return server, client


async def _task(server: EnvServer, number: int) -> dict[str, Any]:
    if (tasks := TASKS.get(server.address)) is None:
        tasks = TASKS[server.address] = await asyncio.to_thread(lambda: list(load_taskset(server.env.config.taskset)))
    if not 0 <= number < len(tasks):
        raise LookupError(f"the taskset {server.taskset_id} has no task {number}")
    data: dict[str, Any] = tasks[number].data.model_dump(mode="json")
    return data
