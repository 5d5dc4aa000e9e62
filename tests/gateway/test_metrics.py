"""`/metrics` at a gateway: by its rules, and what it counts of its own requests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.waiting import until_async

from prorl_zmq.metrics.report import FLUSH_S
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.service.metrics_inbox import MetricsInbox
from prorl_zmq.system.run_folder import own_run_dir
from prorl_zmq.wire.messages.base import KeyRole

from .conftest import Http, http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.services import SharedService


async def scrape(client: Http, **headers: str) -> tuple[int, dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    async with client.session.get("/metrics", headers=headers) as response:
        text = await response.text()
        if response.status != 200:
            return response.status, {}
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(text)
    return 200, {(one.name, frozenset(one.labels.items())): one.value for each in families for one in each.samples}


def test_requests_are_counted_by_route_and_no_client_makes_up_labels(served: SharedService) -> None:
    async def main() -> None:
        async with http(served.url) as client:

            async def counted(name: str, **labels: str) -> float:
                status, samples = await scrape(client)
                assert status == 200
                return samples.get((name, frozenset(labels.items())), 0.0)

            async def both() -> tuple[float, float]:
                requests = "prorl_gateway_requests_total"
                of_job = await counted(requests, route="/v1/jobs/{job_id}", method="GET", status="404")
                return of_job, await counted(requests, route="other", method="other", status="404")

            await asyncio.sleep(1.5 * FLUSH_S)  # what earlier tests asked is counted within that
            of_job, of_none = await both()
            for number in range(3):
                assert (await client.get(f"/v1/jobs/job-{number}"))[0] == 404
                assert (await client("PATCH", f"/teapot-{number}"))[0] == 404

            async def all_counted() -> bool:
                return await both() == (of_job + 3, of_none + 3)

            await until_async(all_counted, "the requests")
            assert await counted("prorl_gateway_request_seconds_count", route="/v1/jobs/{job_id}") >= 3
            for name in ("icon.svg", "main.js"):
                async with client.session.get(f"/dashboard/{name}") as response:
                    assert response.status == 200

            async def of_page() -> bool:
                return await counted("prorl_gateway_request_seconds_count", route="/dashboard/") >= 2

            await until_async(of_page, "the page's files")

    asyncio.run(main())


def test_web_pages_read_no_metrics(served: SharedService) -> None:
    async def main() -> None:
        async with http(served.url) as client:
            assert (await scrape(client, Origin="http://evil.example"))[0] == 403
            assert (await scrape(client, Host="evil.example"))[0] == 403

    asyncio.run(main())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return own_run_dir(tmp_path / "run")


@asynccontextmanager
async def metrics_only(served: SharedService, run_dir: Path, *flags: str) -> AsyncIterator[Http]:
    with served.gateway("--metrics-only", "--run-dir", str(run_dir), *flags) as (process, url):
        async with http(url) as client:
            await until_async(lambda: is_up(client), "the gateway")
            assert process.process.poll() is None
            yield client


async def is_up(client: Http) -> bool:
    try:
        await scrape(client)
    except OSError:
        return False
    return True


@pytest.mark.usefixtures("counting")
def test_with_keys_a_scrape_needs_a_token(served: SharedService, run_dir: Path) -> None:
    keys = KeyFolder(run_dir / "keys")
    tokens = {role: keys.new_bearer(role.value, role) for role in (KeyRole.OPERATOR, KeyRole.TRAINER)}

    async def main() -> None:
        inbox = MetricsInbox(run_dir)
        async with inbox.open(), metrics_only(served, run_dir, "--keys", str(run_dir / "keys")) as client:
            assert (await scrape(client))[0] == 401
            assert (await scrape(client, Authorization="Bearer guess"))[0] == 401
            for token in tokens.values():
                status, samples = await scrape(client, Authorization=f"Bearer {token}")
                assert status == 200
                assert samples["prorl_processes", frozenset({("process", "supervisor")})] == 1.0
            assert (await client.get("/v1/status", headers={"Authorization": f"Bearer {token}"}))[0] == 404

    asyncio.run(main())


def test_where_nobody_collects_the_answer_says_what_to_do(served: SharedService, run_dir: Path) -> None:
    async def main() -> None:
        async with metrics_only(served, run_dir) as client:
            status, body = await client.get("/metrics")
            assert status == 503
            assert "no metrics are collected in" in body["error"]["message"]
            assert "--metrics" in body["error"]["message"]

    asyncio.run(main())
