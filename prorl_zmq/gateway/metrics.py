"""`/metrics`: the collected metrics of a run folder, and the counts of the gateway's own requests.

The answer is 503 if no service collects metrics in the run folder (see `service.metrics_inbox`). Unknown paths are
labelled `other`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..errors import RequestTimeout
from ..metrics.catalog import GATEWAY_REQUEST_SECONDS, GATEWAY_REQUESTS, GATEWAY_REQUESTS_OPEN
from ..metrics.report import OUTLET
from ..metrics.reporter import MetricsReporter
from ..wire.messages.front_door import Status
from .dashboard.page_files import PLACE

if TYPE_CHECKING:
    from pathlib import Path

    from ..security.rights import Sender

READ_S = 10.0
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def answer_metrics(run_dir: Path, sender: Sender) -> web.Response:
    """Return all metrics.

    Raises:
        RequestTimeout: no process collects them here, or not in time.
    """
    sender.check(Status("metrics"))
    try:
        async with asyncio.timeout(READ_S):
            reader, writer = await asyncio.open_unix_connection(run_dir / OUTLET)
            try:
                text = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise RequestTimeout(
            f"no metrics are collected in {run_dir} ({error or 'no answer'}): `prorl serve` and `prorl node` do so "
            "there, with [gateway] or [metrics] in the topology or with --metrics",
            timeout_s=READ_S,
        ) from None
    return web.Response(body=text, headers={"Content-Type": TEXT_TYPE})


class RequestMetrics:
    def __init__(self, run_dir: Path, process: str) -> None:
        self._open = 0
        self._reporter = MetricsReporter(run_dir, process, lambda: GATEWAY_REQUESTS_OPEN.set(self._open))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._reporter.report_forever())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._reporter.close()

    @web.middleware
    async def counted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        began, status = time.monotonic(), 499  # of a client that has left
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        if route.startswith(PLACE):
            route = PLACE  # of whichever file of the page
        method = request.method if resource is not None else "other"
        self._open += 1
        try:
            response: web.StreamResponse = await handler(request)
            status = response.status
            return response
        finally:
            self._open -= 1
            GATEWAY_REQUESTS.add(route, method, str(status))
            GATEWAY_REQUEST_SECONDS.observe(time.monotonic() - began, route)
