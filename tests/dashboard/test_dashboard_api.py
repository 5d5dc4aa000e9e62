"""The endpoints of the dashboard, as the OpenAPI document has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from support.later import Later

from prorl_zmq.gateway.dashboard.dashboard_api import DashboardApi
from prorl_zmq.gateway.openapi import openapi_document

if TYPE_CHECKING:
    import openapi_spec_validator
else:
    openapi_spec_validator = Later("openapi_spec_validator")


@pytest.mark.xdist_group("OpenAPI")
def test_they_are_described() -> None:
    endpoints = DashboardApi(*cast("Any", [None] * 4)).endpoints
    document = openapi_document(endpoints)
    openapi_spec_validator.validate(document)
    assert {(path, method.upper()) for path, item in document["paths"].items() for method in item} == {
        (each.path, each.method) for each in endpoints
    }
