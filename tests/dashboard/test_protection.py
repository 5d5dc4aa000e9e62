"""Who sees the dashboard, and what other pages of the same browser can do with it."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.later import Later
from support.ports import free_port
from support.services import started

from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from pathlib import Path

    from playwright import sync_api as playwright
    from playwright.sync_api import Page
    from support.services import SharedService
else:
    playwright = Later("playwright.sync_api")

pytestmark = pytest.mark.xdist_group("served")
ATTACK = """
async (there) => {
  const ask = async (path, options) => {
    try {
      const answer = await fetch(there + path, options);
      return answer.type === 'opaque' ? 'opaque' : answer.status;
    } catch { return 'refused'; }
  };
  return {
    read: await ask('/v1/status'),
    stream: await ask('/v1/watch'),
    cancel: await ask('/v1/jobs/x/cancel', {method: 'POST'}),
    blind: await ask('/v1/backends/engine-0/drain', {method: 'POST', mode: 'no-cors', body: '{}'}),
  };
}
"""


@pytest.mark.proof(quick=True)
def test_a_viewer_without_the_key_sees_only_the_form(served: SharedService, page: Page) -> None:
    address, _, key = served.dashboard.partition("#key=")
    page.goto(f"{address}#/jobs")
    form = page.get_by_role("heading", name="This dashboard asks for a key")
    playwright.expect(form).to_be_visible()
    playwright.expect(page.locator("nav")).to_be_hidden()
    assert page.locator("main").inner_text().count("\n") < 10
    page.get_by_label("Key").fill("wrong")
    page.get_by_role("button", name="Open").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text("prorl dashboard")
    page.get_by_label("Key").fill("пароль …")  # no header can have it
    page.get_by_role("button", name="Open").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text("No key has such letters")
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Open").click()
    playwright.expect(page.locator("#state")).to_have_text("live")
    page.get_by_role("button", name="Forget key").click()
    playwright.expect(form).to_be_visible()


@pytest.mark.proof(quick=True)
def test_one_that_only_shows_has_no_buttons_and_refuses_changes(
    served: SharedService, page: Page, tmp_path: Path
) -> None:
    """Also for who may cancel and drain elsewhere."""
    folder = KeyFolder(tmp_path / "keys")
    token = folder.new_bearer("lead", KeyRole.OPERATOR)
    bind = f"127.0.0.1:{free_port()}"

    def ask(method: str, path: str) -> tuple[int, bytes]:
        request = Request(f"http://{bind}{path}", b"{}" if method == "POST" else None, method=method)
        request.add_header("Authorization", f"Bearer {token}")
        try:
            with urlopen(request, timeout=20) as reply:
                return reply.status, reply.read()
        except HTTPError as error:
            with error:
                return error.code, error.read()

    flags = ("--read-only", "--bind", bind, "--keys", folder.path)
    with started("prorl", "dashboard", *flags, environment=served.environment) as shown:
        shown.wait_line("open http")
        assert json.loads(ask("GET", "/v1/me")[1])["may"] == ["watch"]
        for method, path in (
            ("POST", "/v1/jobs/any/cancel"),
            ("DELETE", "/v1/jobs/any"),
            ("POST", "/v1/jobs"),
            ("POST", "/v1/backends/engine-0/drain"),
            ("DELETE", "/v1/backends/engine-0"),
            ("POST", "/clear_llm_server"),
        ):
            status, said = ask(method, path)
            assert (status, b"--read-only" in said) == (403, True), (path, said)
        page.goto(f"http://{bind}/dashboard/#key={token}")
        page.goto(f"http://{bind}/dashboard/#/backends")
        playwright.expect(page.locator("tr", has_text="engine-0").first).to_be_visible()
        playwright.expect(page.get_by_role("button", name="Drain")).to_have_count(0)


@pytest.mark.proof(quick=True)
def test_tokens_of_each_role(served: SharedService, page: Page, tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    tokens = {role: folder.new_bearer(role, role) for role in (KeyRole.OPERATOR, KeyRole.TRAINER)}
    bind = f"127.0.0.1:{free_port()}"
    flags = ("--bind", bind, "--keys", folder.path)
    with started("prorl", "dashboard", *flags, environment=served.environment) as shown:
        shown.wait_line("open http")
        for role, token in tokens.items():
            page.goto(f"http://{bind}/dashboard/#key={token}")
            page.reload()
            if role == KeyRole.OPERATOR:
                playwright.expect(page.locator("#state")).to_have_text("live")
                folder.revoke(role)
                playwright.expect(page.get_by_role("heading", name="This dashboard asks for a key")).to_be_visible()
            else:
                playwright.expect(page.locator("main")).to_contain_text("use a key of role operator")


@pytest.mark.proof(quick=True)
def test_at_a_gateway_without_keys_its_own_page_needs_none(served: SharedService, page: Page) -> None:
    page.goto(f"{served.url}/dashboard/#/backends")
    playwright.expect(page.locator("#state")).to_have_text("live")
    playwright.expect(page.get_by_role("button", name="Forget key")).to_be_hidden()
    row = page.get_by_role("region", name="Backends", exact=True).locator("tr", has_text="engine-0")
    row.get_by_role("button", name="Drain").click()  # a browser sends the page's origin with it
    playwright.expect(row).to_contain_text("draining")
    with served.client() as client:
        (status,) = client.backends.list()
        client.backends.add(status.backend)


@pytest.mark.parametrize("keyed", [True, False])
def test_a_page_of_another_origin_can_do_nothing(
    served: SharedService, page: Page, tmp_path: Path, *, keyed: bool
) -> None:
    there = re.match(r"http://[^/]+", served.dashboard if keyed else served.url)
    assert there is not None
    frame = f"<iframe src='{there[0]}/dashboard/'></iframe>"
    (tmp_path / "index.html").write_text(f"<!doctype html><title>evil</title>{frame}")
    server = HTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for host in ("127.0.0.1", "evil.example"):
            page.goto(f"http://{host}:{server.server_port}/")
            assert page.evaluate(ATTACK, there[0]) == {
                "read": "refused",
                "stream": "refused",
                "cancel": "refused",
                "blind": "opaque",
            }
            assert page.frames[1].url.startswith("chrome-error:")  # it may not be framed
    finally:
        server.shutdown()
        server.server_close()
    with served.client() as client:
        (status,) = client.backends.list()
        assert status.state == "ready"  # what was sent blindly did nothing


@pytest.mark.proof(quick=True)
@pytest.mark.parametrize("keyed", [True, False])
def test_a_name_that_is_led_here_is_of_no_use(served: SharedService, page: Page, *, keyed: bool) -> None:
    address = (served.dashboard.partition("#")[0] if keyed else f"{served.url}/dashboard/").replace(
        "127.0.0.1", "evil.example"
    )
    page.goto(address)
    assert page.evaluate("fetch('/v1/status').then((answer) => answer.status)") in (401, 403)
    assert page.evaluate("fetch('/v1/backends/engine-0/drain', {method: 'POST'}).then((answer) => answer.status)") in (
        401,
        403,
    )


def test_who_has_the_key_may_come_by_any_name(served: SharedService) -> None:
    """A dashboard on all addresses, with a certificate, is opened by its machine's name."""
    address, _, key = served.dashboard.partition("/dashboard/#key=")

    def status(**headers: str) -> int:
        try:
            with urlopen(Request(f"{address}/v1/me", headers={"Host": "node-1.example", **headers})) as answer:
                return int(answer.status)
        except HTTPError as error:
            return error.code

    assert status(Authorization=f"Bearer {key}") == 200
    assert status() == 401


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass
