"""The OpenAPI 3.1 document of all routes: the JSON API's from its endpoints and their Structs, and the plain ones."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from .http_errors import ErrorBody
from .plain_routes import PLAIN_ROUTES, plain_operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .endpoint import Endpoint

REFERENCE = "#/components/schemas/{name}"
PROBLEMS = {
    "400": "The request is wrong.",
    "401": "No bearer token, or one that is not let in.",
    "403": "The token's role may not do this.",
    "404": "There is no such job, batch or backend.",
    "409": "Another one has this id.",
    "413": "The body, or a job, is too large.",
    "429": "The service is full: retry after `Retry-After` seconds.",
    "503": "The service does not answer.",
}


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document as plain data."""
    kinds: list[Any] = [ErrorBody]
    for endpoint in endpoints:
        kinds += [endpoint.returns, endpoint.query, *([endpoint.takes] if endpoint.takes is not None else [])]
    for route in PLAIN_ROUTES:
        kinds += [kind for kind in (route.takes, route.returns) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    found = iter(schemas)
    problem = {"content": {"application/json": {"schema": next(found)}}}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        answer, query = next(found), next(found)
        body = next(found) if endpoint.takes is not None else None
        operation = _operation(endpoint, answer, body, components[query["$ref"].rpartition("/")[2]])
        operation["responses"] |= {status: {"description": text, **problem} for status, text in PROBLEMS.items()}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    for route in PLAIN_ROUTES:
        takes = next(found) if route.takes is not None else None
        returns = next(found) if route.returns is not None else None
        paths.setdefault(route.path, {})[route.method.lower()] = plain_operation(route, problem, takes, returns)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "prorl_zmq", "version": version("prorl-zmq"), "description": (__doc__ or "").strip()},
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))  # defaults are tuples
    return plain


def _operation(endpoint: Endpoint, answer: Any, body: Any, query: dict[str, Any]) -> dict[str, Any]:
    places = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    places += [{"name": name, "in": "query", "schema": schema} for name, schema in query["properties"].items()]
    content = {"application/json": {"schema": answer}}
    if endpoint.binary:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    operation: dict[str, Any] = {
        "operationId": endpoint.answer.__name__,
        "summary": endpoint.summary.partition("\n")[0],
        "description": endpoint.summary,
        "parameters": places,
        "responses": {"200": {"description": "Done.", "content": content}},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
