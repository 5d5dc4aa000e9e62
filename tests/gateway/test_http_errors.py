from __future__ import annotations

import json

import pytest

from prorl_zmq.errors import Busy, DuplicateJob, GraderFailed, InvalidJob, NotAllowed, ProrlError, RequestTimeout
from prorl_zmq.gateway.http_errors import STATUSES, error_response


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
