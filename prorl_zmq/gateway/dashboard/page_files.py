"""The page's files, and the security policy that browsers apply to them.

Files are read once at the start, so a page is of one version even during an upgrade; browsers revalidate each by its
ETag. The policy allows no outside resource, no other script, no HTML made of text (trusted types) and no frames. The
files hold no secrets and need no key; the page's requests do.
"""

from __future__ import annotations

import hashlib
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
    """Serve each file at its own path; requested paths are never looked up on disk."""
    for file in sorted(FOLDER.rglob("*")):
        if file.suffix in TYPES:
            name = file.relative_to(FOLDER).as_posix()
            app.router.add_get(PLACE + ("" if name == "index.html" else name), PageFile(file).answer)
    for path in ("/", PLACE.rstrip("/")):
        app.router.add_get(path, _moved)


class PageFile:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._type = TYPES[path.suffix]
        self._digest = hashlib.blake2b(self._content, digest_size=12).hexdigest()

    async def answer(self, request: web.Request) -> web.Response:
        """Return the file, or 304 if the browser has it."""
        headers = {**HEADERS, "ETag": f'"{self._digest}"'}
        known = {tag.value for tag in request.if_none_match or ()}
        if known & {self._digest, "*"}:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self._content, content_type=self._type, charset="utf-8", headers=headers)


async def _moved(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": PLACE})
