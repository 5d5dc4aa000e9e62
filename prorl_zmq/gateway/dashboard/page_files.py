"""The files of the page, as they are in the package, and the policy under which a browser runs them.

The page fetches nothing from elsewhere, runs no script but these files, and may not make HTML of text (trusted types);
no other page may show it in a frame. They hold no secrets, so they need no key: what they ask for does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).with_name("page")
PLACE = "/dashboard/"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: web.Application) -> None:
    """Serve each file at its own path; no path that is asked for is ever looked up."""
    for file in sorted(FOLDER.rglob("*")):
        if file.suffix in TYPES:
            name = file.relative_to(FOLDER).as_posix()
            app.router.add_get(PLACE + ("" if name == "index.html" else name), partial(_file, file))
    for path in ("/", PLACE.rstrip("/")):
        app.router.add_get(path, _moved)


async def _file(file: Path, _request: web.Request) -> web.StreamResponse:
    return web.FileResponse(file, headers={**HEADERS, "Content-Type": f"{TYPES[file.suffix]}; charset=utf-8"})


async def _moved(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": PLACE})
