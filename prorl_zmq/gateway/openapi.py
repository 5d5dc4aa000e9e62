"""The OpenAPI 3.1 document of a gateway, and `/docs`, its HTML page without scripts or outside resources.

It is made by hand of msgspec's schemas, since aiohttp does not describe its routes.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from .dashboard.page_files import PLACE
from .endpoint import JSON
from .http_errors import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .endpoint import Endpoint

DOCUMENT, DOCS = "/v1/openapi.json", "/docs"
DESCRIPTION = "The HTTP API of a gateway: the JSON API, ProRL Agent's REST API, and the dashboard's requests."
REFERENCE = "#/components/schemas/"
_CODE = re.compile(r"`([^`]+)`")
PROBLEMS = {
    "400": "The request is wrong.",
    "401": "No bearer token, or one that is not allowed.",
    "403": "The token's role may not do this.",
    "404": "There is no such job, batch or backend.",
    "409": "Another one has this id.",
    "413": "The body, or a job, is too large.",
    "429": "The service is full: retry after `Retry-After` seconds.",
    "503": "The service does not answer.",
}


def openapi_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    routes = tuple(endpoints)
    kinds = [kind for route in routes for kind in (route.returns, route.query, route.takes or type(None))]
    (problem, *schemas), components = msgspec.json.schema_components(
        [ErrorBody, *kinds], ref_template=f"{REFERENCE}{{name}}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for number, route in enumerate(routes):
        answer, query, body = schemas[3 * number : 3 * number + 3]
        parameters = components[query["$ref"].rpartition("/")[2]]["properties"]
        path = re.sub(r":[^}]+", "", route.path)  # aiohttp's patterns
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, answer, parameters, body, problem)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "prorl_zmq", "version": version("prorl-zmq"), "description": DESCRIPTION},
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


def _operation(
    route: Endpoint, answer: Any, parameters: dict[str, Any], body: Any, problem: dict[str, Any]
) -> dict[str, Any]:
    content = {route.content: {"schema": answer}}
    if route.binary:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    text = (route.handler.__doc__ or "").strip()
    problems = {"503": PROBLEMS["503"]} if route.raw else PROBLEMS
    failed = {
        status: {"description": about, "content": {JSON: {"schema": problem}}} for status, about in problems.items()
    }
    operation: dict[str, Any] = {
        "operationId": route.name or route.handler.__name__,
        "summary": text.partition("\n")[0],
        "description": text,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)", route.path)
        ],
        "responses": {"200": {"description": "Done.", "content": content}, **failed},
    }
    operation["parameters"] += [{"name": name, "in": "query", "schema": each} for name, each in parameters.items()]
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if route.needs == "nothing":
        operation["security"] = [{}]
    return operation


def docs_html(document: dict[str, Any]) -> str:
    """Return the page of a document."""
    environment = Environment(
        loader=PackageLoader("prorl_zmq.gateway", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"type": _type, "words": _words, "repr": repr}
    page = environment.get_template("docs.html")
    return page.render(document=document, place=PLACE, source=DOCUMENT)


def _type(schema: dict[str, Any]) -> Markup:
    if name := schema.get("$ref", "").removeprefix(REFERENCE):
        return Markup('<a href="#type-{0}">{0}</a>').format(name)
    if "enum" in schema:
        return Markup(" | ").join(Markup("<code>{}</code>").format(each) for each in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return Markup(" or ").join(map(_type, schema[several]))
    kind = schema.get("type", "anything")
    return Markup("list of ") + _type(schema.get("items") or {}) if kind == "array" else escape(kind)


def _words(text: str) -> Markup:
    """Return a text as HTML, with words between backquotes as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", escape(" ".join(text.split()))))  # noqa: S704 - escaped
