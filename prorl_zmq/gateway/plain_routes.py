"""The routes of a gateway that are no `Endpoint`: what the OpenAPI document says of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from .bodies import Health
from .prorl_bodies import CancelJobs, LlmServerAddress, Process, Processed, ProrlDone, ProrlStatus

if TYPE_CHECKING:
    import msgspec

TEXT, JSON, EVENTS = "text/plain", "application/json", "text/event-stream"
DOCUMENT, DOCS = "/v1/openapi.json", "/docs"
_BY_PRORL = "ProRL Agent's API (see the page HTTP gateway of the manual)."


class PlainRoute(NamedTuple):
    method: str
    path: str
    name: str
    summary: str
    takes: type[msgspec.Struct] | None = None
    """What its body is."""
    returns: Any = None
    """What its answer is; None: text, or JSON that is not described."""
    content: str = JSON
    public: bool = False
    """It asks for no token."""


_PATHS = (
    "The path is that of an API, such as `chat/completions`, `responses` or `v1/messages`; or `finish`, which ends the "
    'rollout and takes `{"reward": number}`, or `{}` where the task judges.'
)
PLAIN_ROUTES = (
    PlainRoute("GET", "/healthz", "health", "Whether the service answers.", returns=Health, public=True),
    PlainRoute("GET", DOCUMENT, "openapi", "This document.", public=True),
    PlainRoute("GET", "/metrics", "metrics", "The metrics of this run folder, for Prometheus.", content=TEXT),
    PlainRoute(
        "GET", "/v1/watch", "watch", "The service's changes as server-sent events, for the dashboard.", content=EVENTS
    ),
    PlainRoute(
        "POST",
        "/v1/rollouts/{job_id}/{path}",
        "rollout_call",
        f"A program's call of the model of its rollout, with the rollout's key. {_PATHS}",
    ),
    PlainRoute(
        "GET",
        "/v1/rollouts/{job_id}/{path}",
        "rollout_models",
        "The model of a rollout, at the path `models`, with the rollout's key.",
    ),
    PlainRoute("POST", "/start", "prorl_start", f"Take jobs of /process from now on. {_BY_PRORL}", returns=ProrlDone),
    PlainRoute(
        "POST", "/stop", "prorl_stop", f"Cancel this client's jobs, and take no more. {_BY_PRORL}", returns=ProrlDone
    ),
    PlainRoute(
        "GET",
        "/status",
        "prorl_status",
        f"Return the counts of jobs, and the engines. {_BY_PRORL}",
        returns=ProrlStatus,
    ),
    PlainRoute(
        "POST",
        "/process",
        "prorl_process",
        f"Run a rollout; return its messages and reward. {_BY_PRORL}",
        Process,
        Processed,
    ),
    PlainRoute("POST", "/cancel", "prorl_cancel", f"Cancel jobs of /process. {_BY_PRORL}", CancelJobs, ProrlDone),
    PlainRoute(
        "POST",
        "/add_llm_server",
        "prorl_add_llm_server",
        f"Start an engine in front of a server. {_BY_PRORL}",
        LlmServerAddress,
        ProrlDone,
    ),
    PlainRoute(
        "POST",
        "/clear_llm_server",
        "prorl_clear_llm_server",
        f"Remove this client's servers. {_BY_PRORL}",
        returns=ProrlDone,
    ),
)
"""In the order of the page."""


def plain_operation(
    route: PlainRoute, problem: dict[str, Any], body: dict[str, Any] | None, answer: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what the document says of a route.

    Args:
        route: it.
        problem: the content of an error's answer.
        body: the schema of what it takes; None: nothing.
        answer: the schema of what it returns; None: it is not described.
    """
    schema = answer or ({"type": "object"} if route.content == JSON else {"type": "string"})
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": f"{route.summary.partition('. ')[0].rstrip('.')}.",
        "description": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", route.path)
        ],
        "responses": {
            "200": {"description": "Done.", "content": {route.content: {"schema": schema}}},
            "503": {"description": "The service does not answer.", **problem},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if route.public:
        operation["security"] = [{}]
    return operation
