from __future__ import annotations

import json

import msgspec
import pytest

from prorl_zmq.errors import Busy, DuplicateJob, GraderFailed, InvalidJob, NotAllowed, ProrlError, RequestTimeout
from prorl_zmq.gateway.http_errors import STATUSES, error_response, with_defaults
from prorl_zmq.watching.overview import Overview
from prorl_zmq.wire.messages.backends import Backend, BackendList, BackendStatus
from prorl_zmq.wire.messages.watching import EndedJobs


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (InvalidJob("wrong", field="task"), 400, None),
        (NotAllowed("no"), 403, None),
        (DuplicateJob("another", job_id="a"), 409, None),
        (Busy("full", retry_after_s=2.6), 429, "3"),
        (Busy("full"), 429, "1"),
        (RequestTimeout("away"), 503, "1"),
        (GraderFailed("what no request meets"), 500, None),
    ],
)
def test_an_error_is_a_status_and_its_own_fields(error: ProrlError, status: int, retry: str | None) -> None:
    response = error_response(error)
    assert (response.status, response.headers.get("Retry-After")) == (status, retry)
    assert isinstance(response.body, bytes)
    told = json.loads(response.body)["error"]
    assert told == {"code": error.code, "message": error.message, "fields": error.fields}


def test_no_status_says_that_all_is_well() -> None:
    assert min(STATUSES.values()) >= 400


def test_an_answer_with_defaults_has_all_fields_and_reads_as_the_message_that_it_is() -> None:
    backend = Backend(backend_id="engine-0", endpoint="ipc://engine", model="tiny")
    listed = BackendList("r", backends=(BackendStatus(backend=backend, state="ready", in_flight=0, assigned=0),))
    seen = Overview(at=1.0, backends=listed, ended=(EndedJobs(0.0, 10.0),))
    shown = with_defaults(seen)
    assert tuple(shown) == Overview.__struct_fields__
    assert shown["ended"] == [[0.0, 10.0, {}]]
    assert shown["backends"]["type"] == "backend_list"
    assert (shown["backends"]["waiting"], tuple(shown["backends"]["backends"][0]["backend"])) == (
        0,
        Backend.__struct_fields__,
    )
    assert msgspec.json.decode(msgspec.json.encode(shown), type=Overview) == seen
