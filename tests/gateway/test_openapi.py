"""The OpenAPI document: valid, and of all that is served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from support.later import Later

from prorl_zmq.gateway.json_api import JsonApi
from prorl_zmq.gateway.openapi import openapi_document

if TYPE_CHECKING:
    import openapi_spec_validator
else:
    openapi_spec_validator = Later("openapi_spec_validator")

API = JsonApi(cast("Any", None))
DOCUMENT = openapi_document(API.endpoints)


@pytest.mark.xdist_group("OpenAPI")
def test_it_is_valid_and_plain() -> None:
    openapi_spec_validator.validate(DOCUMENT)
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


def test_it_has_each_endpoint_with_words_for_it() -> None:
    paths = DOCUMENT["paths"].items()
    operations = {(path, method.upper()): each for path, item in paths for method, each in item.items()}
    assert operations.keys() == {(endpoint.path, endpoint.method) for endpoint in API.endpoints}
    assert all(operation["summary"] for operation in operations.values())
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations)


def test_it_says_how_a_trajectory_may_be_asked_for() -> None:
    operation = DOCUMENT["paths"]["/v1/jobs/{job_id}/trajectory"]["get"]
    assert [each["name"] for each in operation["parameters"]] == ["job_id", "wait_s", "arrays"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "application/octet-stream"}
