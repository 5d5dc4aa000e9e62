"""Bodies of ProRL Agent's REST API, for the OpenAPI document.

Requests are read more leniently: fields of other types are ignored or reported in the answer, since clients treat other
statuses than 200 as a reward of 0.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Process(msgspec.Struct, frozen=True):
    """A rollout to run."""

    instance: dict[str, Any]
    """A row of a known data set, a `task` with its instance's fields, or a whole job."""
    sampling_params: dict[str, Any] = {}
    """LiteLLM's, such as `temperature`, `max_output_tokens`, `max_iterations`."""
    job_id: str | None = None
    """The client's name for the job, for `/cancel`; need not be unique."""


class CancelJobs(msgspec.Struct, frozen=True):
    """The jobs to cancel."""

    job_id: str


class LlmServerAddress(msgspec.Struct, frozen=True):
    """The address of a server."""

    address: str
    """Its URL, such as `http://10.0.0.5:8000`."""


class ProrlDone(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was done."""

    status: str
    jobs: int | msgspec.UnsetType = msgspec.UNSET
    """Of `/cancel`: how many jobs were cancelled."""


class LlmServerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server that a client has added."""

    address: str
    state: str
    """`named` (it waits for a tokenizer), `started` or `failed`."""
    problem: str = ""


class ProrlStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `/status`."""

    status: str
    pending_jobs: int
    """This client's jobs that have not ended."""
    init_jobs: int | msgspec.UnsetType = msgspec.UNSET
    """Of all clients; missing, as the next two, if the service does not answer."""
    run_jobs: int | msgspec.UnsetType = msgspec.UNSET
    eval_jobs: int | msgspec.UnsetType = msgspec.UNSET
    llm_servers: list[LlmServerState] | msgspec.UnsetType = msgspec.UNSET
    """Missing if the service has its own backends."""


class ProrlToolCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    name: str
    arguments: Any


class ProrlMessage(msgspec.Struct, frozen=True):
    """A message of a rollout."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    token_ids: list[int]
    """Of an assistant: the generated tokens only."""
    input_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Of an assistant: all tokens before its own."""
    logprobs: list[float] | msgspec.UnsetType = msgspec.UNSET
    """Of an assistant, if the engine gave all of them."""
    tool_calls: list[ProrlToolCall] | msgspec.UnsetType = msgspec.UNSET


class Processed(msgspec.Struct, frozen=True):
    """The answer of `/process`, for every outcome of the job."""

    instance_id: Any
    """As in the instance, as the next."""
    trajectory_id: Any
    job_id: str | None
    error: str | None
    resolved: bool
    """The reward is 1 or more."""
    success: bool
    """The rollout completed."""
    finish: bool
    """The policy ended it by itself."""
    critical_error: Literal["init", "run", "eval", "timeout"] | None
    """Where it failed, if it has no reward."""
    end_properly: bool
    """No limit cut it off."""
    filter: bool
    """True: there is nothing to learn from, so `messages` is empty."""
    git_patch: str | None
    messages: list[ProrlMessage]
    tools: list[dict[str, Any]]
    """JSON schemas of its tools."""
    timing: dict[str, float]
    """Seconds by phase and by tool."""
    reward: float | None
    outcome: str | msgspec.UnsetType = msgspec.UNSET
    """Missing, as the next three, for a job that could not be run."""
    stop_reason: str | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    notes: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
