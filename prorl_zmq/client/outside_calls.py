"""A client's HTTP calls to the RUN process of a rollout that its program leads, by the standard library.

Proxy settings of the environment are ignored: the address is on this machine or in the service's own network.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..data.conversations import finite_reward
from ..errors import EndpointFailed
from ..system.node_name import loopback_id
from ..wire.messages.jobs import Job, Outside

if TYPE_CHECKING:
    from ..wire.messages.front_door import JobTrace
    from ..wire.messages.jobs import TrainOn

ANSWER_S = 30.0
"""Longest wait for one answer."""
ANSWER_BYTES = 64 * 1024
GONE = 410
_KEY_PREFIX = "prorl-"


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    message: str
    """Of an error."""


def new_key() -> str:
    """Return a key for one rollout."""
    return f"{_KEY_PREFIX}{secrets.token_urlsafe(32)}"


def with_key(job: Job, idle_s: float, train_on: TrainOn, key: str = "") -> tuple[Job, str]:
    """Return a job led by a program with the returned key, with one attempt.

    Raises:
        TypeError: it is not a `Job`.
        EndpointFailed: an option is invalid.
    """
    if not isinstance(job, Job):
        raise TypeError(f"endpoint takes a prorl_zmq.Job, and not a {type(job).__name__}")
    key = key or new_key()
    digest = hashlib.sha256(key.encode()).hexdigest()
    try:
        outside = msgspec.convert({"key_sha256": digest, "idle_s": idle_s, "train_on": train_on}, Outside)
    except msgspec.ValidationError as error:
        raise EndpointFailed(f"the rollout cannot be opened so: {error}", status=400) from None
    return msgspec.structs.replace(job, outside=outside, max_attempts=1), key


def reached_at(trace: JobTrace) -> str:
    """Return the URL at which a rollout is reached from here.

    Raises:
        EndpointFailed: it is on the loopback network of another machine or container, whose port may be another
            program's here.
    """
    url, _, loopback = trace.address.partition("#")
    if loopback and loopback != loopback_id():
        node = trace.spans[-1].node if trace.spans else "?"
        raise EndpointFailed(
            f"rollout {trace.job_id} is on node {node}, at that machine's loopback address, which cannot be reached "
            "from here: run the program, or a gateway, on that machine",
            status=0,
        )
    return url


def check_reward(reward: Any) -> None:
    """Raise `EndpointFailed` unless `reward` is None or a finite number."""
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if reward is not None and not (is_number and finite_reward(reward) is not None):
        raise EndpointFailed(f"the reward is {reward!r}; it must be a finite number", status=400)


def ask(method: str, url: str, key: str, body: dict[str, Any] | None) -> Answer:
    """Call a rollout's RUN process.

    Raises:
        OSError: it cannot be reached, or does not speak HTTP.
    """
    from http.client import HTTPException  # imports much that few clients need
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = Request(url, data, headers, method=method)  # noqa: S310 - an address of the service
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_S) as response:
            return Answer(response.status, "")
    except HTTPError as error:
        with error:
            return Answer(error.code, _message(error.read(ANSWER_BYTES)))
    except HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None


def is_over(answer: Answer) -> bool:
    """Return whether the rollout has already ended; raise `EndpointFailed` if the request was refused."""
    if answer.status == GONE:
        return True
    if answer.status != 200:
        raise EndpointFailed(answer.message or f"the rollout's address answers {answer.status}", status=answer.status)
    return False


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
