"""The OpenAPI document: valid, and of all that is served."""

from __future__ import annotations

import asyncio
import html
import json
import re
from typing import TYPE_CHECKING, Any, cast

import pytest
from support.later import Later

from prorl_zmq.config import GatewaySettings
from prorl_zmq.gateway.json_api import JsonApi
from prorl_zmq.gateway.openapi import docs_html, openapi_document
from prorl_zmq.gateway.prorl_api import ProrlApi
from prorl_zmq.gateway.server import Gateway
from prorl_zmq.gateway.settings import GatewayOptions

if TYPE_CHECKING:
    from pathlib import Path

    import openapi_spec_validator
else:
    openapi_spec_validator = Later("openapi_spec_validator")

NOTHING = cast("Any", None)
ENDPOINTS = (*JsonApi(NOTHING).endpoints, *ProrlApi(NOTHING, NOTHING, NOTHING, NOTHING, "", NOTHING).endpoints)
DOCUMENT = openapi_document(ENDPOINTS)
SCHEMAS = "#/components/schemas/"


@pytest.mark.xdist_group("OpenAPI")
def test_it_is_valid_and_plain() -> None:
    openapi_spec_validator.validate(DOCUMENT)
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


def test_it_has_each_endpoint_with_words_for_it() -> None:
    paths = DOCUMENT["paths"].items()
    operations = {(path, method.upper()): each for path, item in paths for method, each in item.items()}
    assert operations.keys() == {(each.path.replace(":.+", ""), each.method) for each in ENDPOINTS}
    assert all(operation["summary"] for operation in operations.values())
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations)


def test_it_says_how_a_trajectory_may_be_asked_for() -> None:
    operation = DOCUMENT["paths"]["/v1/jobs/{job_id}/trajectory"]["get"]
    assert [each["name"] for each in operation["parameters"]] == ["job_id", "wait_s", "arrays"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "application/octet-stream"}


def test_the_routes_of_prorls_clients_have_the_fields_of_their_structs() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    process = DOCUMENT["paths"]["/process"]["post"]
    assert process["requestBody"]["content"]["application/json"]["schema"] == {"$ref": f"{SCHEMAS}Process"}
    assert set(schemas["Process"]["properties"]) == {"instance", "sampling_params", "job_id"}
    assert schemas["Process"]["required"] == ["instance"]
    answers = {
        path: DOCUMENT["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        for path, method in (("/process", "post"), ("/status", "get"), ("/cancel", "post"), ("/healthz", "get"))
    }
    assert answers == {
        "/process": f"{SCHEMAS}Processed",
        "/status": f"{SCHEMAS}ProrlStatus",
        "/cancel": f"{SCHEMAS}ProrlDone",
        "/healthz": f"{SCHEMAS}Health",
    }
    assert {"messages", "reward", "critical_error"} <= set(schemas["Processed"]["required"])
    assert schemas["ProrlMessage"]["properties"]["role"]["enum"] == ["assistant", "system", "tool", "user"]


def test_all_routes_of_a_gateway_are_in_it(tmp_path: Path) -> None:
    """All but pages, whose paths are the dashboard's, the root and this document's own page."""

    async def main() -> tuple[set[tuple[str, str]], dict[str, Any]]:
        options = GatewayOptions(
            settings=GatewaySettings(bind="127.0.0.1:1"), run_dir=tmp_path, front_door=f"ipc://{tmp_path}/front_door"
        )
        gateway = Gateway(options)
        routes = gateway._app().router.routes()  # a started gateway does not name them
        served = {(route.resource.canonical, route.method) for route in routes if route.resource is not None}
        await gateway._prorl_api.close()
        await gateway.close()
        return served, openapi_document(gateway.endpoints)

    served, document = asyncio.run(main())
    api = {
        (path, method)
        for path, method in served
        if method != "HEAD" and not path.startswith("/dashboard") and path not in ("/", "/docs")
    }
    named = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    assert api == named
    assert len(named) > 25


def test_the_page_shows_all_of_it() -> None:
    page = docs_html(DOCUMENT)
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            assert f"<code>{method.upper()} {html.escape(path)}</code>" in page
            assert f'id="{operation["operationId"]}"' in page
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r'id="([^"]+)"', page))
    assert "<script" not in page
    assert re.findall(r"https?://|style=|onclick", page) == []


def test_what_a_document_says_is_no_markup_of_the_page() -> None:
    operation = {"operationId": "x", "summary": "<b>", "description": "<script>", "parameters": [], "responses": {}}
    operation["responses"] = {"200": {"content": {"a/b": {"schema": {"enum": ["</td>"]}}}}}
    document = {**DOCUMENT, "paths": {"/<i>": {"get": operation}}}
    page = docs_html(document)
    assert all(mark not in page for mark in ("<b>", "<script>", "<i>"))
    assert "<code>&lt;/td&gt;</code>" in page
