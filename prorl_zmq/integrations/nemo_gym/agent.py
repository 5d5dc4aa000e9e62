"""NeMo Gym (0.4): an agent server whose rollouts the service makes. Needs nemo-gym, on Python 3.12 or newer.

    # responses_api_agents/prorl_agent/app.py
    from prorl_zmq.integrations.nemo_gym.agent import ProrlAgent

    if __name__ == "__main__":
        ProrlAgent.run_webserver()

`prorl init --trainer nemo-gym FOLDER` writes this file and its configuration. Gym sends each row of the data to `POST
/run`, once per rollout. A row has the columns `task` and `instance`; of its `responses_create_params` only
`temperature`, `top_p` and `max_output_tokens` (of one turn) are used, since prompts, tools and rewards are the
service's. `response` describes the answers. A failed rollout has no reward, is not in Gym's averages, and is counted.

A caller that disconnects cancels its job, so a stopped collection leaves none running.
"""

from __future__ import annotations

# ruff: noqa: E402 - check NeMo Gym's version before its modules are imported
import asyncio
from functools import partial
from typing import Any

import msgspec

from ...client.asynchronous.client import AsyncRolloutClient
from ..session import check_version
from .response import split_failures
from .rollouts import GymRollouts

check_version("nemo-gym", "0.4")

from fastapi import Body, HTTPException, Request, Response
from nemo_gym.base_resources_server import AggregateMetrics, AggregateMetricsRequest  # noqa: TC002 - FastAPI reads them
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.reward_profile import compute_aggregate_metrics
from pydantic import Field, PrivateAttr


class ProrlAgentConfig(BaseResponsesAPIAgentConfig):  # type: ignore[misc]
    """The agent's part of Gym's configuration, in addition to `entrypoint`, `host` and `port`.

    One process is enough, since it only waits; Gym's `num_workers` finds no agent outside of its own packages.
    """

    endpoint: str | None = None
    """The service's front door; None: that of `prorl serve` without a topology file."""
    keys: str | None = None
    """The folder of keys, if the service requires them."""
    task: str = ""
    """The task of rows without a column `task`."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Default sampling of rows, under the names of `Sampling`: `{max_tokens: 512}`."""
    episode: dict[str, Any] = Field(default_factory=dict)
    """The jobs' limits, under the names of `EpisodeLimits`: `{max_turns: 8, max_tokens: 16384}`."""
    wait_s: float | None = Field(default=None, gt=0)
    """Longest time in seconds for one rollout, including time in queues; None: only the job's own limits."""


class ProrlAgent(SimpleResponsesAPIAgent):  # type: ignore[misc]
    """Answers `POST /run` with a rollout of the service.

    Args:
        config: see `ProrlAgentConfig`.
        server_client: Gym's; not used.

    Raises:
        InvalidJob: the configuration's `sampling` or `episode` has an unknown name or invalid value.
    """

    config: ProrlAgentConfig
    _rollouts: GymRollouts = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check the configuration; the client is opened by the first rollout."""
        super().model_post_init(context)
        config = self.config
        self._rollouts = GymRollouts(
            partial(AsyncRolloutClient, config.endpoint, keys=config.keys),
            task=config.task,
            sampling=config.sampling,
            episode=config.episode,
            wait_s=config.wait_s,
        )

    async def responses(self) -> None:
        """Reject `POST /v1/responses`: the service makes whole rollouts, with tools and reward."""
        raise HTTPException(501, "this agent makes whole rollouts only: POST /run")

    async def run(self, request: Request, body: dict[str, Any] = Body()) -> Response:  # noqa: B008 - FastAPI's way
        """Roll out one row; the status is always 200."""
        rollout = asyncio.create_task(self._rollouts.run(body))
        gone = asyncio.create_task(_hung_up(request))
        try:
            await asyncio.wait({rollout, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not rollout.done():
                return Response(status_code=204)  # the client is gone
            # Lists of thousands of tokens, each of which pydantic would validate again.
            return Response(msgspec.json.encode(rollout.result()), media_type="application/json")
        finally:
            for task in (rollout, gone):
                task.cancel()
            await asyncio.gather(rollout, gone, return_exceptions=True)

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:  # noqa: B008
        """Return Gym's metrics over the rollouts with a reward, and counts of the `failed` ones by class."""
        rewarded, failed = split_failures(body.verify_responses)
        metrics = compute_aggregate_metrics(
            rewarded, compute_metrics_fn=self.compute_metrics, get_key_metrics_fn=self.get_key_metrics
        )
        counts = {"failed": sum(failed.values())}
        metrics.agent_metrics |= counts | {f"failed/{kind}": count for kind, count in failed.items()}
        metrics.key_metrics |= counts
        return metrics


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
