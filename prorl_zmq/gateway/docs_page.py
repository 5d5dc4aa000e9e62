"""`/docs`: the OpenAPI document as one page of HTML, made once, without a script and with nothing from elsewhere."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .dashboard.page_files import HEADERS, PLACE
from .plain_routes import DOCUMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODE = re.compile(r"`([^`]+)`")
REFERENCE = "#/components/schemas/"


class DocsPage:
    """The page of a document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._body = docs_html(document).encode()

    async def answer(self, _request: web.Request) -> web.Response:
        """Return the page, with the policy of the dashboard's pages."""
        return web.Response(body=self._body, content_type="text/html", charset="utf-8", headers=HEADERS)


def docs_html(document: dict[str, Any]) -> str:
    """Return the page."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: dict[str, Any]) -> Iterator[str]:
    title = f"{document['info']['title']} {document['info']['version']}: HTTP API"
    yield '<!doctype html>\n<html lang="en" data-theme="auto">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>"
    yield "".join(f'<link rel="stylesheet" href="{PLACE}{name}.css">' for name in ("base", "parts", "views"))
    yield f'</head>\n<body>\n<main id="main">\n<h1>{escape(title)}</h1>'
    yield f'<p>For programs: <a href="{DOCUMENT}">{DOCUMENT}</a> (OpenAPI {escape(document["openapi"])}).</p>'
    operations = [
        (method.upper(), path, one) for path, item in document["paths"].items() for method, one in item.items()
    ]
    yield "<table>\n<tbody>"
    for method, path, one in operations:
        link = f'<a href="#{escape(one["operationId"])}"><code>{method} {escape(path)}</code></a>'
        yield f'<tr><td>{link}</td><td class="text">{_words(one["summary"])}</td></tr>'
    yield "</tbody>\n</table>"
    for method, path, one in operations:
        yield from _operation(method, path, one)
    yield "<h2>Types</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="type-{escape(name)}">{escape(name)}</h3>'
        yield from _paragraphs(schema.get("description", ""))
        yield from _fields(schema)
    yield "</main>\n</body>\n</html>"


def _operation(method: str, path: str, one: dict[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{escape(one["operationId"])}"><code>{method} {escape(path)}</code></h2>'
    yield from _paragraphs(one["description"])
    if one["parameters"]:
        rows = {each["name"]: (each["in"], each["schema"]) for each in one["parameters"]}
        yield from _table((name, place, kind) for name, (place, kind) in rows.items())
    for what, content in (("Takes", one.get("requestBody", {})), ("Returns", one["responses"]["200"])):
        for kind, each in content.get("content", {}).items():
            yield f"<p>{what} <code>{escape(kind)}</code>: {_type(each['schema'])}</p>"
            yield from _fields(each["schema"])


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    fields = schema.get("properties", {})
    if fields:
        yield from _table((name, "required" if name in required else "", kind) for name, kind in fields.items())


def _table(rows: Any) -> Iterator[str]:
    yield "<table>\n<tbody>"
    for name, note, kind in rows:
        about = _words(kind.get("description", ""))
        default = f" Default: <code>{escape(repr(kind['default']))}</code>" if "default" in kind else ""
        yield f'<tr><td><code>{escape(name)}</code></td><td>{escape(note)}</td><td class="text">{_type(kind)}</td>'
        yield f'<td class="text long">{about}{default}</td></tr>'
    yield "</tbody>\n</table>"


def _type(schema: dict[str, Any]) -> str:
    """Return the words for a schema, as HTML."""
    if name := schema.get("$ref", "").removeprefix(REFERENCE):
        return f'<a href="#type-{escape(name)}">{escape(name)}</a>'
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(each))}</code>" for each in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(map(_type, schema[several]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    return escape(str(kind))


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.split("\n\n"):
        if part.strip():
            yield f"<p>{_words(part)}</p>"


def _words(text: str) -> str:
    """Return a text as HTML, its words between backquotes as code."""
    return _CODE.sub(r"<code>\1</code>", escape(" ".join(text.split())))
