"""Each view of the dashboard in a real browser, in front of a real service."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from support.later import Later
from support.waiting import until

from prorl_zmq import PhaseLimits, Sampling
from prorl_zmq.errors import NoBackend
from prorl_zmq.wire.messages.backends import AddBackend, Backend, BackendAlive, EngineLoad
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.jobs import Harness

from ..evaluation.conftest import HOSTILE
from .conftest import MEGABYTE, make_long, problem

if TYPE_CHECKING:
    from pathlib import Path

    from playwright import sync_api as playwright
    from playwright.sync_api import Locator, Page
    from support.services import SharedService
else:
    playwright = Later("playwright.sync_api")

pytestmark = pytest.mark.xdist_group("served")
VIEWS = ("", "jobs", "batches", "training", "nodes", "backends", "runs")


def go(page: Page, place: str) -> None:
    page.evaluate("place => { location.hash = place }", place)


def cells(page: Page, table: str, name: str) -> dict[str, str]:
    """One row of a table, by its heads."""
    region = page.get_by_role("region", name=table, exact=True)
    row = region.locator("tbody tr", has_text=name)
    playwright.expect(row).to_have_count(1)
    return dict(zip(region.locator("th").all_inner_texts(), row.locator("td").all_inner_texts(), strict=True))


def row_of(page: Page, job_id: str) -> Locator:
    """A job's row in the table."""
    return page.locator("tbody tr", has=page.locator(f"a[href$='/{job_id}']"))


def ended_lately(page: Page) -> int:
    """How many jobs the legend of the overview's chart names as timed out."""
    return int(page.locator(".legend a", has_text="timeout").locator("b").inner_text())


def test_the_overview_shows_stages_backends_and_what_ended(served: SharedService, dashboard: Page) -> None:
    for phase in ("INIT", "RUN", "EVAL"):
        playwright.expect(dashboard.locator(".stage", has_text=phase)).to_contain_text("of 8 slots")
    playwright.expect(dashboard.get_by_role("region", name="Backends")).to_contain_text("engine-0")
    playwright.expect(dashboard.locator(".figure", has_text="jobs ended")).to_contain_text(re.compile(r"[1-9]"))
    before = ended_lately(dashboard)
    address = dashboard.url
    dashboard.goto("about:blank")  # nobody looks
    with served.client() as client:
        client.submit(problem(limits=PhaseLimits(run_s=0.001)) for _ in range(3))
        list(client.stream())
    for _ in range(2):
        dashboard.goto(address)
        playwright.expect(dashboard.locator(".over-time g rect[class^=fill]").first).to_be_attached()
        until(lambda: ended_lately(dashboard) >= before + 3, "what ended before the page was opened")
        dashboard.get_by_text("hour", exact=True).click()
        chart = dashboard.get_by_role("img", name="Ended in the last hour")
        playwright.expect(chart).to_have_attribute("aria-label", re.compile(r"[1-9]\d* timeout"))
    assert dashboard.title() == "Overview · prorl"
    assert "#key=" not in dashboard.url  # it would stay in the history


@pytest.mark.proof(quick=True)
def test_a_change_is_shown_by_itself(served: SharedService, dashboard: Page) -> None:
    go(dashboard, "#/jobs")
    with served.client() as client:
        job = problem()
        client.submit(job)
        (trajectory,) = client.stream()
        playwright.expect(row_of(dashboard, job.job_id)).to_contain_text(str(trajectory.outcome))


@pytest.mark.proof(quick=True)
def test_jobs_are_searched_filtered_sorted_and_opened_by_keyboard(served: SharedService, dashboard: Page) -> None:
    session = f"s-{new_id()[:8]}"
    with served.client(session) as client:
        late = problem(limits=PhaseLimits(run_s=0.001), group_id=session)
        client.submit([late, *(problem(group_id=session) for _ in range(3))])
        list(client.stream())
    dashboard.keyboard.press("2")
    playwright.expect(dashboard).to_have_title("Jobs · prorl")
    dashboard.keyboard.press("/")
    dashboard.keyboard.type(session)
    playwright.expect(dashboard.get_by_role("status").filter(has_text=" of ")).to_contain_text(re.compile("^4 of "))
    rows = dashboard.locator("tbody tr[aria-rowindex]")
    dashboard.get_by_label("state").select_option("timeout")
    playwright.expect(rows).to_have_count(1)
    assert "state%3Atimeout" in dashboard.url  # the address can be sent to somebody
    dashboard.get_by_label("state").select_option("cancelled")
    playwright.expect(dashboard.get_by_text("No job is like that.")).to_be_visible()
    dashboard.get_by_label("state").select_option("")
    dashboard.get_by_role("button", name="Duration").click()
    playwright.expect(dashboard.get_by_role("columnheader", name="Duration")).to_have_attribute(
        "aria-sort", "descending"
    )
    rows.first.locator("a").focus()
    dashboard.keyboard.press("End")
    last = dashboard.evaluate("document.activeElement.closest('tr').getAttribute('aria-rowindex')")
    dashboard.keyboard.press("ArrowUp")
    above = dashboard.evaluate("document.activeElement.closest('tr').getAttribute('aria-rowindex')")
    assert (last, above) == ("5", "4")
    dashboard.keyboard.press("Enter")
    playwright.expect(dashboard.get_by_role("heading", name="Conversation")).to_be_visible()


@pytest.mark.proof(quick=True)
def test_a_drop_down_shows_what_the_search_names_even_if_no_job_is_like_that(dashboard: Page) -> None:
    """It was blank."""
    go(dashboard, "#/jobs?q=task%3Anowhere")
    playwright.expect(dashboard.get_by_label("task", exact=True)).to_have_value("nowhere")


def check_zoom(page: Page) -> None:
    """Look closer at a part of a job's time line: by buttons, keys, wheel and pointer."""
    lanes = page.get_by_role("group", name="Time line: ")
    part = page.locator(".zoom").get_by_role("status")
    button = {name: page.get_by_role("button", name=name) for name in ("Zoom in", "Zoom out", "Later", "Show all")}

    def ticks() -> list[str]:
        return page.locator(".axis .tick").all_inner_texts()

    playwright.expect(part).to_have_text("")
    playwright.expect(button["Zoom out"]).to_be_disabled()
    whole = ticks()
    button["Zoom in"].click()
    playwright.expect(part).to_have_text(re.compile(r"^[\d.]+ m?s to [\d.]+ m?s$"))
    playwright.expect(button["Zoom in"]).to_be_focused()
    assert ticks() != whole
    first = part.inner_text()
    button["Later"].click()
    playwright.expect(part).not_to_have_text(first)
    button["Show all"].click()
    playwright.expect(part).to_have_text("")
    assert ticks() == whole
    lanes.focus()
    for key in ("+", "ArrowRight", "-", "+"):
        page.keyboard.press(key)
    playwright.expect(lanes).to_be_focused()
    playwright.expect(part).to_have_text(re.compile(" to "))
    page.keyboard.press("0")
    playwright.expect(part).to_have_text("")
    room = page.locator(".axis .lane-room").bounding_box()
    assert room is not None
    page.mouse.move(room["x"] + room["width"] * 0.5, room["y"] + 4)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    playwright.expect(part).to_have_text(re.compile(" to "))
    page.mouse.dblclick(room["x"] + room["width"] * 0.5, room["y"] + 4)
    playwright.expect(part).to_have_text("")
    page.mouse.move(room["x"] + room["width"] * 0.25, room["y"] + 4)
    page.mouse.down()
    page.mouse.move(room["x"] + room["width"] * 0.5, room["y"] + 4)
    page.mouse.up()
    playwright.expect(part).to_have_text(re.compile(" to "))
    button["Show all"].click()


@pytest.mark.proof(quick=True)
def test_a_job_shows_its_time_its_words_and_its_tokens(served: SharedService, dashboard: Page) -> None:
    job = problem("What is 1 + 0?", sampling=Sampling(max_tokens=12))
    with served.client() as client:
        client.submit(job)
        (trajectory,) = client.stream()
    go(dashboard, f"#/jobs/{job.job_id}")
    for bar in ("queue", "init", "run", "eval"):
        playwright.expect(dashboard.locator(f".lane .block.{bar}").first).to_be_attached()
    playwright.expect(dashboard.locator(".lane .block.engine").first).to_be_attached()  # of `Result.steps`
    check_zoom(dashboard)
    playwright.expect(dashboard.locator(".turn.is-user")).to_contain_text("What is 1 + 0?")
    playwright.expect(dashboard.locator(".turn.is-assistant").first).to_be_visible()
    tokens = dashboard.locator(".tokens .tok")
    playwright.expect(tokens).to_have_count(len(trajectory.token_ids))
    own = int(trajectory.loss_mask.nonzero()[0][0])
    tokens.nth(own).hover()
    told = dashboard.locator(".told")
    playwright.expect(told).to_contain_text(f"id {trajectory.token_ids[own]}")
    playwright.expect(told).to_contain_text(f"log-prob {trajectory.logprobs[own]:.4f}")
    dashboard.get_by_text("weight version", exact=True).click()
    playwright.expect(dashboard.locator(".tok.version-0")).to_have_count(
        1 + int(trajectory.loss_mask.sum())
    )  # and the legend
    tokens.first.focus()
    dashboard.keyboard.press("ArrowRight")
    playwright.expect(told).to_contain_text("token 1")
    dashboard.get_by_label("mask").focus()
    dashboard.keyboard.press("2")  # a field that takes no text takes no keys
    playwright.expect(dashboard).to_have_title("Jobs · prorl")


AGENT = """
import json, pathlib, sys, time, urllib.request
url, key, mark = sys.argv[1:]
messages = [{"role": "user", "content": sys.stdin.read()}]
for turn in ("first", "second"):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    while not pathlib.Path(f"{mark}.{turn}").exists():
        time.sleep(0.05)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"after the {turn} turn"}]
"""
"""A program that leads a rollout: two turns, and after each it waits for a file."""


@pytest.mark.proof(quick=True)
def test_the_turns_of_a_running_job_are_shown_as_they_come(
    served: SharedService, dashboard: Page, tmp_path: Path
) -> None:
    command = ("python3", "-c", AGENT, "{url}", "{key}", str(tmp_path / "mark"))
    job = problem("What is 1 + 0?", harness=Harness("command", arguments=command))
    with served.client() as client:
        client.submit(job)
        try:
            go(dashboard, f"#/jobs/{job.job_id}")
            live = dashboard.locator(".live")
            playwright.expect(live.locator(".turn.is-assistant")).to_have_count(1)
            playwright.expect(live.locator(".turn.is-user")).to_contain_text("What is 1 + 0?")
            playwright.expect(live.get_by_role("status")).to_contain_text(
                re.compile(r"2 messages, \d+ tokens so far\.")
            )
            playwright.expect(dashboard.locator(".lane .block.engine").first).to_be_attached()
            live.locator(".turn.is-user").evaluate("turn => { turn.dataset.seen = 'yes' }")
            (tmp_path / "mark.first").touch()
            playwright.expect(live.locator(".turn.is-assistant")).to_have_count(2)
            playwright.expect(live).to_contain_text("after the first turn")
            playwright.expect(live.locator(".turn.is-user").first).to_have_attribute("data-seen", "yes")
            playwright.expect(dashboard.locator(".figure", has_text="turns")).to_contain_text("2")
            (tmp_path / "mark.second").touch()
            playwright.expect(dashboard.get_by_role("heading", name="Tokens")).to_be_visible()
            playwright.expect(live).to_have_count(0)
        finally:
            client.cancel(job.job_id)
        assert [one.outcome for one in client.stream()] == ["completed"]


def test_hostile_text_is_shown_as_text_and_never_run(served: SharedService, runs: Path, dashboard: Page) -> None:
    image = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
    job = problem(f"{image}{HOSTILE}unseen:\u200b\xad")
    with served.client() as client:
        client.submit(job)
        list(client.stream())
    go(dashboard, f"#/jobs/{job.job_id}")
    said = dashboard.locator(".turn.is-user .said")
    playwright.expect(said).to_contain_text(image)
    playwright.expect(said).to_contain_text("\u241b[2J[red]not red[/red] <script>alert(1)</script>")
    playwright.expect(said).to_contain_text("\u27e8202E\u27e9gnp")  # it would turn the text around
    playwright.expect(said).to_contain_text("unseen:\u27e8200B\u27e9\u27e800AD\u27e9")
    make_long(runs, "x" * MEGABYTE + "<b>the end")  # more than the embedded engine's context holds: in a run's folder
    go(dashboard, "#/runs/after/problem-0")
    dashboard.get_by_role("button", name=re.compile("Show all")).click()
    playwright.expect(dashboard.locator(".turn.is-user .said .piece").last).to_contain_text("<b>the end")
    assert dashboard.locator(".turn.is-user .said").evaluate("each => each.textContent.length") > MEGABYTE
    assert dashboard.evaluate("[window.hacked, document.querySelectorAll('main script, main img').length]") == [None, 0]
    tried = "() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } }"
    assert dashboard.evaluate(tried) == "TypeError"  # even a fault of ours could make no HTML of text


def check_training(page: Page, session: str, batch_id: str) -> None:
    """Look at the one step of a session."""
    go(page, f"#/training?session={session}")
    charts = page.locator(".charts").get_by_role("img")
    playwright.expect(charts).to_have_count(4)
    playwright.expect(charts.first).to_have_attribute("aria-label", re.compile("^Reward over 1 step;"))
    playwright.expect(page.locator(".figure", has_text="step").first).to_contain_text("1 of 1")
    playwright.expect(page.locator(".figure", has_text="reward")).to_contain_text("3 rollouts, 4 groups kept")
    playwright.expect(page.locator(".lines", has_text="Tokens per rollout")).to_contain_text(re.compile(r"mean \d+"))
    assert "undefined" not in page.locator("main").inner_text()
    row = page.get_by_role("region", name="Steps", exact=True).locator("tbody tr")
    playwright.expect(row).to_have_count(1)
    playwright.expect(row.locator("a")).to_have_attribute("href", f"#/batches/{batch_id}")
    page.get_by_role("group", name="Step 1 of 1").focus()
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.get_by_role("group", name="Step 1 of 1")).to_be_focused()


@pytest.mark.proof(quick=True)
def test_a_batch_shows_its_groups_and_rollouts(served: SharedService, dashboard: Page) -> None:
    with served.client() as client, client.open_batch(4, 3, keep="all") as batch:
        batch.feed(problem(job_id=f"prompt-{number}-{new_id()[:8]}") for number in range(4))
        next(iter(batch))
        go(dashboard, "#/batches")
        dashboard.locator(f"a[href$='/{batch.batch_id}']").click()
        playwright.expect(dashboard.locator(".group")).to_have_count(4)
        playwright.expect(dashboard.locator(".group .cell.in")).to_have_count(12)
        playwright.expect(dashboard.locator(".figure", has_text="groups kept")).to_contain_text("4 of 4")
        dashboard.locator(".group .cell.in").first.click()
        playwright.expect(dashboard.get_by_role("heading", name="math")).to_be_visible()
        go(dashboard, f"#/batches/{batch.batch_id}")
        playwright.expect(dashboard.get_by_text("Waits now for")).to_be_visible()
    playwright.expect(dashboard.get_by_text("This batch is closed.")).to_be_visible()
    check_training(dashboard, client.session, batch.batch_id)
    go(dashboard, f"#/batches/{batch.batch_id}")
    playwright.expect(dashboard.get_by_text("This batch is closed.")).to_be_visible()
    playwright.expect(dashboard.get_by_text("Waits now for")).to_have_count(0)


@pytest.mark.proof(quick=True)
def test_nodes_and_backends(served: SharedService, dashboard: Page) -> None:
    with served.client() as client:
        (node,) = client.nodes().nodes
    go(dashboard, "#/nodes")
    assert node.facts is not None
    of_node = cells(dashboard, "Nodes", node.node)
    assert re.fullmatch(r"\d+", of_node["sandboxes"])
    assert re.fullmatch(r"[\d.]+ m?s ago", of_node["last heard"])
    assert re.fullmatch(r"[\d.]+ m?s of [\d.]+ s", of_node["lease"])
    machine = cells(dashboard, "Machines", node.node)
    assert machine["version"] == version("prorl-zmq")
    assert machine["host"] == node.facts.host == socket.gethostname()
    assert re.fullmatch(r"[\d.]+ of [\d.]+ [GT]iB", machine["memory"])
    assert re.fullmatch(r"[\d.]+ of [\d.]+ [GT]iB", machine["disk"])
    go(dashboard, "#/backends")
    row = dashboard.get_by_role("region", name="Backends", exact=True).locator("tr", has_text="engine-0")
    playwright.expect(row).to_contain_text("ready")
    of_host = cells(dashboard, "Engine hosts", "engine-0")
    assert of_host["version"] == version("prorl-zmq")
    assert re.fullmatch(r"[\d.]+ [MG]iB", of_host["memory"])
    assert re.fullmatch(r"[\d.]+ m?s ago", of_host["last heard"])
    assert re.fullmatch(r"[\d.]+ m?s of [\d.]+ s", of_host["lease"])
    row.get_by_role("button", name="Drain").click()
    playwright.expect(row).to_contain_text("draining")
    with served.client() as client:
        (status,) = client.backends.list()
        client.backends.add(status.backend)
    playwright.expect(row).to_contain_text("ready")


@pytest.mark.proof(quick=True)
def test_an_engines_kv_cache_and_its_room_are_shown(served: SharedService, dashboard: Page) -> None:
    engine = Backend(backend_id="with-kv", endpoint="ipc:///nowhere", name="other", max_in_flight=64)
    load = EngineLoad(prompt_tokens=2000, cached_tokens=1000, kv_tokens=1_234_567)
    load = replace(load, kv_used=0.625, queued=3, preempted=17, again_tokens=500)
    with served.client() as client:
        client.backends.ask(AddBackend(new_id(), engine, heartbeats=True, room=19))
        try:
            client.backends.ask(BackendAlive(new_id(), "with-kv", 0, load, room=19))
            go(dashboard, "#/backends")
            row = cells(dashboard, "Backends", "with-kv")
            assert (row["in flight"], row["cache hits"]) == ("0 of 19", "50 %")
            cache = cells(dashboard, "KV caches", "with-kv")
        finally:
            client.backends.remove("with-kv")
    assert cache == {
        "backend": "with-kv",
        "tokens": "1,234,567",
        "in use": "63 %",
        "rollouts": "0",
        "room": "19",
        "requests waiting": "3",
        "preempted": "17",
        "computed again": "25 %",
    }


@pytest.mark.proof(quick=True)
def test_a_fetch_of_weights_is_shown_while_it_runs(served: SharedService, dashboard: Page, tmp_path: Path) -> None:
    engine = Backend(backend_id="fetches", endpoint=f"ipc://{tmp_path}/silent", name="other")
    region = dashboard.get_by_role("region", name="Fetching weights", exact=True)
    with served.client() as client, served.client() as trainer, ThreadPoolExecutor() as pool:
        client.backends.add(engine)
        try:
            go(dashboard, "#/backends")
            playwright.expect(dashboard.get_by_role("region", name="Backends", exact=True)).to_contain_text("fetches")
            playwright.expect(region).to_have_count(0)
            update = pool.submit(trainer.update_weights, tmp_path, 7, model="other", timeout_s=60)
            fetched = cells(dashboard, "Fetching weights", "fetches")
        finally:
            client.backends.remove("fetches")
        assert isinstance(update.exception(60), NoBackend)
        playwright.expect(region).to_have_count(0)
    assert fetched == {"backend": "fetches", "version": "7"}


def test_a_job_is_cancelled_by_its_button(served: SharedService, dashboard: Page) -> None:
    with served.client() as client:
        (status,) = client.backends.list()
        client.backends.drain("engine-0")
        try:
            job = problem()
            client.submit(job)
            go(dashboard, f"#/jobs/{job.job_id}")
            playwright.expect(dashboard.get_by_text("Nothing has been said yet.")).to_be_visible()
            dashboard.get_by_role("button", name="Cancel this job").click()
            playwright.expect(dashboard.locator(".title .badge")).to_have_text("cancelled")
            (trajectory,) = client.stream()
            assert trajectory.outcome == "cancelled"
        finally:
            client.backends.add(status.backend)


@pytest.mark.usefixtures("runs")
@pytest.mark.proof(quick=True)
def test_runs_stand_side_by_side(dashboard: Page) -> None:
    go(dashboard, "#/runs?run=before&run=after")
    passes = dashboard.locator(".of-k", has_text="pass@1")
    playwright.expect(passes.locator(".of-run")).to_have_count(2)
    playwright.expect(passes.get_by_role("img").first).to_have_attribute(
        "aria-label", re.compile(r"50\.0 %, 95 % interval")
    )
    solved = cells(dashboard, "Solved by both, one, none", "before → after")
    assert [solved[name] for name in ("shared", "both", "only first", "only second", "none", "p")] == (
        ["3", "1", "1", "1", "0", "1"]
    )
    playwright.expect(dashboard.get_by_text("None: all are equal.")).to_be_visible()
    changed = dashboard.get_by_role("region", name="Problems", exact=True)
    playwright.expect(changed.locator("tbody tr")).to_have_count(2)
    playwright.expect(changed).to_contain_text("▼ −50 %")
    playwright.expect(changed).to_contain_text("▲ +50 %")
    changed.locator("summary", has_text="problem-1").click()
    playwright.expect(changed.locator("details[open] .asked")).to_contain_text("What is 2 + 2?")
    changed.get_by_role("link", name="1 of 2").last.click()
    playwright.expect(dashboard.locator(".card", has_text="Problem").locator(".asked")).to_contain_text("2 + 2")
    playwright.expect(dashboard.locator(".turn.is-tool")).to_contain_text("<script>alert(1)</script>")
    dashboard.get_by_role("link", name="Runs").last.click()
    dashboard.get_by_label("Compare before").uncheck()
    playwright.expect(dashboard.get_by_role("region", name="Failures by reason").locator("th")).to_have_count(2)


@pytest.mark.proof
def test_the_page_outlives_a_restart_of_the_broker(served: SharedService, dashboard: Page) -> None:
    go(dashboard, "#/jobs")
    with served.client() as client:
        client.submit(before := problem())
        list(client.stream())
        playwright.expect(row_of(dashboard, before.job_id)).to_be_visible()
        started_s = client.status().uptime_s
        os.kill(served.child("rollout_broker.json"), signal.SIGKILL)
        until(lambda: client.status().uptime_s < started_s, "the broker's next life")
        client.submit(after := problem())
        list(client.stream())
    playwright.expect(row_of(dashboard, after.job_id)).to_contain_text("completed")
    playwright.expect(dashboard.locator("#state")).to_have_text("live")


@pytest.mark.proof(quick=True)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(dashboard: Page, scheme: str) -> None:
    def brightness() -> int:
        colours = dashboard.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colours)))

    dashboard.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    assert (brightness() > 600) == (scheme == "light")
    switch = dashboard.locator("#theme")
    switch.click()
    assert brightness() > 600
    switch.click()
    assert brightness() < 100
    dashboard.reload()
    assert brightness() < 100  # it is remembered


@pytest.mark.proof(quick=True)
def test_it_works_at_the_width_of_a_phone_and_by_keyboard(dashboard: Page) -> None:
    dashboard.set_viewport_size({"width": 360, "height": 740})
    for view in VIEWS:
        go(dashboard, f"#/{view}")
        playwright.expect(dashboard.locator("nav [aria-current=page]")).to_have_attribute("href", f"#/{view}")
        assert dashboard.evaluate("document.documentElement.scrollWidth") <= 360, view
        playwright.expect(dashboard.locator("nav [aria-current=page]")).to_be_in_viewport(ratio=0.9)
    dashboard.reload()
    dashboard.locator("#state.is-live").wait_for()
    dashboard.keyboard.press("Tab")
    playwright.expect(dashboard.locator(".skip")).to_be_focused()
    dashboard.keyboard.press("Enter")
    playwright.expect(dashboard.locator("main")).to_be_focused()


RIGHT_EDGES = "heads => heads.map(head => [head.textContent, head.getBoundingClientRect().right])"
PHONE_COLUMNS = {
    ("", "Backends"): ("backend", "state", "in flight"),
    ("", "Latest failures"): ("outcome", "error", "job"),
    ("batches", "Open batches"): ("batch", "state", "groups kept"),
    ("backends", "Backends"): ("backend", "state", "in flight"),
    ("runs", "Evaluations"): ("run", "pass@1", "rollouts"),
    ("runs?run=before&run=after", "Solved by both, one, none"): ("runs", "p", "difference in points, 95 %"),
}
"""By view and table: what must be on the screen of a phone without scrolling sideways."""


@pytest.mark.usefixtures("runs")
def test_the_columns_that_matter_are_on_the_screen_of_a_phone(served: SharedService, dashboard: Page) -> None:
    dashboard.set_viewport_size({"width": 390, "height": 800})
    with served.client() as client, client.open_batch(4, 3, keep="all") as batch:
        client.submit(problem(limits=PhaseLimits(run_s=0.001)))
        next(iter(client.stream()))
        batch.feed([problem()])
        for (view, table), names in PHONE_COLUMNS.items():
            go(dashboard, f"#/{view}")
            region = dashboard.get_by_role("region", name=table, exact=True)
            playwright.expect(region).to_be_visible()
            right = dict(region.locator("th").evaluate_all(RIGHT_EDGES))
            assert {name: right[name] for name in names if not right[name] <= 390} == {}, (view, table)


@pytest.mark.proof(quick=True)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_has_a_shadow_where_it_goes_on(dashboard: Page, scheme: str) -> None:
    dashboard.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    dashboard.set_viewport_size({"width": 360, "height": 740})
    go(dashboard, "#/backends")
    region = dashboard.get_by_role("region", name="Engine hosts", exact=True)
    region.wait_for()

    def shaded(scrolled: float) -> tuple[bool, bool]:
        """Whether the table is anywhere darker than its card at its left and at its right edge."""
        region.evaluate("(each, part) => { each.scrollLeft = part * (each.scrollWidth - each.clientWidth) }", scrolled)
        left, right = darkest(dashboard, dashboard.screenshot(clip=region.bounding_box()))
        card = region.evaluate("each => getComputedStyle(each.closest('.card')).backgroundColor")
        plain = sum(map(int, re.findall(r"\d+", card)[:3]))
        return left < plain - 9, right < plain - 9

    until(lambda: shaded(0) == (False, True), "a shadow at the right")
    until(lambda: shaded(0.5) == (True, True), "shadows at both edges")
    until(lambda: shaded(1) == (True, False), "a shadow at the left")
    dashboard.set_viewport_size({"width": 1280, "height": 740})
    until(lambda: shaded(0) == (False, False), "no shadow, as all is in view")


def darkest(page: Page, image: bytes) -> tuple[int, int]:
    """Red, green and blue together of the darkest points beside a picture's left and right edge."""
    with page.context.browser.new_page() as blank:  # type: ignore[union-attr]
        left, right = blank.evaluate(
            """async (data) => {
              const picture = await createImageBitmap(await (await fetch(data)).blob());
              const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
              canvas.drawImage(picture, 0, 0);
              return [1, picture.width - 2].map((x) => {
                const { data: values } = canvas.getImageData(x, 0, 1, picture.height);
                let least = 765;
                for (let at = 0; at < values.length; at += 4)
                  least = Math.min(least, values[at] + values[at + 1] + values[at + 2]);
                return least;
              });
            }""",
            f"data:image/png;base64,{base64.b64encode(image).decode()}",
        )
    return left, right
