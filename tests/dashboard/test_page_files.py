"""How the page's files are cached: a browser asks for each, and gets again only what has changed."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from prorl_zmq.gateway.dashboard import page_files
from prorl_zmq.gateway.dashboard.page_files import FOLDER, TYPES, PageFile

if TYPE_CHECKING:
    from http.client import HTTPMessage
    from pathlib import Path

    from playwright.sync_api import Page
    from support.services import SharedService

pytestmark = pytest.mark.xdist_group("served")
NAMES = [
    "" if file.name == "index.html" else file.relative_to(FOLDER).as_posix()
    for file in sorted(FOLDER.rglob("*"))
    if file.suffix in TYPES
]
MOVED = "performance.getEntriesByType('resource').map((each) => [each.name, each.transferSize])"


def ask(address: str, **headers: str) -> tuple[int, HTTPMessage, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def test_each_file_is_sent_once_and_then_not_again(served: SharedService) -> None:
    assert len(NAMES) > 25
    for name in NAMES:
        status, headers, content = ask(f"{served.url}/dashboard/{name}")
        assert (status, content) == (200, (FOLDER / (name or "index.html")).read_bytes()), name
        assert headers["Content-Type"] in {f"{each}; charset=utf-8" for each in TYPES.values()}
        for known in (headers["ETag"], f"W/{headers['ETag']}", f'"other", {headers["ETag"]}', "*"):
            again, told, nothing = ask(f"{served.url}/dashboard/{name}", **{"If-None-Match": known})
            assert (again, nothing) == (304, b""), (name, known)
            assert {key: told[key] for key in (*page_files.HEADERS, "ETag")} == {
                key: headers[key] for key in (*page_files.HEADERS, "ETag")
            }
        assert ask(f"{served.url}/dashboard/{name}", **{"If-None-Match": '"other"'})[0] == 200


def test_a_file_that_changed_is_sent_though_its_size_and_time_did_not(tmp_path: Path) -> None:
    """Reproducible installations give all files one time, so that a tag made of time and size said `not modified`."""

    def tag(content: str) -> str:
        file = tmp_path / "a.js"
        file.write_text(content)
        answer = asyncio.run(PageFile(file).answer(make_mocked_request("GET", "/")))
        assert isinstance(answer, web.Response)
        return answer.headers["ETag"]

    assert tag("one") != tag("two")
    assert tag("one") == tag("one")


@pytest.mark.proof(quick=True)
def test_a_reload_fetches_no_file_whole(dashboard: Page) -> None:
    def moved() -> dict[str, int]:
        entries = [(re.sub(r".*/dashboard/", "", name), size) for name, size in dashboard.evaluate(MOVED)]
        return {name: max(size for other, size in entries if other == name) for name, _ in entries if name in NAMES}

    first = moved()
    dashboard.reload()
    dashboard.locator("#state.is-live").wait_for()
    again = moved()
    assert {*first} == {*again}
    assert all(size > (FOLDER / name).stat().st_size for name, size in first.items())
    assert all(size <= 300 for size in again.values())  # the headers, which Chromium counts as 300
    assert len(again) > 20
