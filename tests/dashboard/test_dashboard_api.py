"""The endpoints of the dashboard, as the OpenAPI document has them."""

from __future__ import annotations

from typing import Any, cast

from prorl_zmq.gateway.dashboard.dashboard_api import DashboardApi
from prorl_zmq.gateway.openapi import openapi_document


def test_they_are_described() -> None:
    from openapi_spec_validator import validate  # half a second, which workers without this test need not take

    endpoints = DashboardApi(*cast("Any", [None] * 4)).endpoints
    document = openapi_document(endpoints)
    validate(document)
    assert {(path, method.upper()) for path, item in document["paths"].items() for method in item} == {
        (endpoint.path, endpoint.method) for endpoint in endpoints
    }
