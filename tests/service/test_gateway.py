"""A gateway of a service in a folder with two rollout brokers: each token has its own, which may move."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import ANY

import aiohttp
import pytest
from support.waiting import WAIT_S, until, until_async

from prorl_zmq import RolloutClient
from prorl_zmq.config import load_topology
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.wire.messages.base import KeyRole, new_id

from .test_node import Cluster, cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from support.services import Program

ROLLOUT = {"instance": {"problem": "1", "answer": "1"}, "sampling_params": {"max_output_tokens": 4}}

pytestmark = pytest.mark.xdist_group("services in folders")


class Shared(NamedTuple):
    cluster: Cluster
    folder: ServiceFolder
    serving: Program
    url: str
    tokens: dict[str, str]
    """A trainer's, by the rollout broker of its session; and `operator`."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with cluster() as made:
        folder = ServiceFolder.open(made.folder)
        keys = KeyFolder(folder.keys("service"))
        tokens = {
            broker: keys.new_bearer(named(folder, "http", broker), KeyRole.TRAINER) for broker in folder.rollout_brokers
        }
        tokens["operator"] = keys.new_bearer("olga", KeyRole.OPERATOR)
        with socket.create_server(("127.0.0.1", 0)) as server:
            bind = f"127.0.0.1:{server.getsockname()[1]}"
        flags = [
            "--no-llm-servers",
            "--timeout",
            "60",
            "--run-dir",
            made.run_dir("g"),
            "--name",
            named(folder, "gateway", "rollout-0"),
        ]
        made.start("gateway", "--bind", bind, *flags).wait_line("ready at")  # before any broker is there
        serving = made.serve()
        serving.wait_line("ready; clients")
        made.node("one").wait_line("ready: one")
        yield Shared(made, folder, serving, f"http://{bind}", tokens)


def named(folder: ServiceFolder, prefix: str, broker: str) -> str:
    """A name whose session belongs to a broker."""
    return next(name for name in map(str, range(100)) if folder.broker_of(f"{prefix}-{name}") == broker)


def problem() -> dict[str, Any]:
    instance = {"problem": "1", "ground_truth": "1"}
    return {"task": "math", "instance": instance, "sampling": {"max_tokens": 6}, "job_id": new_id()}


class Http:
    def __init__(self, session: aiohttp.ClientSession, tokens: dict[str, str]) -> None:
        self._session = session
        self._tokens = tokens

    async def __call__(self, who: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self._tokens[who]}"}
        async with self._session.request(method, path, json=body, headers=headers) as response:
            return response.status, await response.json()


def run(shared: Shared, body: Callable[[Http], Awaitable[None]]) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession(shared.url, timeout=aiohttp.ClientTimeout(WAIT_S)) as session:
            await body(Http(session, shared.tokens))

    asyncio.run(main())


@asynccontextmanager
async def without_engine(shared: Shared, http: Http) -> AsyncIterator[None]:
    """Jobs wait while this is open."""
    (one,) = (await http("operator", "GET", "/v1/backends"))[1]["backends"]
    assert (await http("operator", "POST", "/v1/backends/one-engine-0/drain"))[0] == 200
    assert one["backend"]["backend_id"] == "one-engine-0"
    try:
        yield
    finally:
        await asyncio.to_thread(take_back, shared.folder)


def take_back(folder: ServiceFolder) -> None:
    with RolloutClient(service=folder.path, keys=folder.keys("operator")) as client:
        (status,) = client.backends.list()
        client.backends.add(status.backend)


async def until_running(http: Http, who: str, job_id: str) -> None:
    async def runs() -> bool:
        return bool((await http(who, "GET", f"/v1/jobs/{job_id}"))[1].get("phase") == "run")

    await until_async(runs, "RUN to begin")


def test_programs_outside_lead_rollouts_of_either_broker(shared: Shared) -> None:
    """Their addresses come by the node's broker."""

    async def asks(http: Http) -> None:
        for broker in shared.folder.rollout_brokers:
            job = {"task": "outside", "instance": {}, "sampling": {"max_tokens": 4}}
            status, made = await http(broker, "POST", "/v1/rollouts", {"job": job})
            assert status == 200
            program = Http(http._session, {"program": made["api_key"]})
            path, body = f"/v1/rollouts/{made['job_id']}", {"messages": [{"role": "user", "content": "1"}]}
            assert (await program("program", "POST", f"{path}/chat/completions", body))[0] == 200
            assert (await program("program", "POST", f"{path}/finish", {"reward": 1}))[0] == 200
            place = f"/v1/jobs/{made['job_id']}/trajectory"
            status, told = await http(broker, "GET", f"{place}?wait_s=50")
            assert (status, told["result"]["outcome"], told["result"]["reward"]) == (200, "completed", 1.0)
            assert (await http(broker, "DELETE", place))[1]["remaining"] == 0

    run(shared, asks)


def test_each_token_has_its_broker_and_all_are_told_of_the_whole_service(shared: Shared) -> None:
    brokers = shared.folder.rollout_brokers

    async def asks(http: Http) -> None:
        before = (await http("operator", "GET", "/v1/status"))[1].get("outcomes", {}).get("completed", 0)
        jobs = {broker: problem() for broker in brokers}
        for broker, job in jobs.items():
            assert (await http(broker, "POST", "/v1/jobs", job)) == (200, {"job_ids": [job["job_id"]], "new": 1})
            status, told = await http(broker, "GET", f"/v1/jobs/{job['job_id']}/trajectory?wait_s=50")
            assert (status, told["result"]["outcome"]) == (200, "completed")
            with shared.cluster.client(shared.folder.session_of(broker)) as client:
                assert client.trace(job["job_id"]).outcome == "completed"  # there it is
        for who in ("operator", *brokers):
            status, told = await http(who, "GET", "/v1/status")
            assert (status, told["outcomes"]["completed"], "problems" in told) == (200, before + 2, False)
            slots = {stage["role"]: stage["slots"] for stage in told["stages"]}
            assert slots == {stage.role: stage.slots for stage in load_topology(shared.cluster.topology).stage}
        for job in jobs.values():
            assert (await http("operator", "GET", f"/v1/jobs/{job['job_id']}"))[1]["state"] == "ended"
        assert (await http("rollout-0", "GET", f"/v1/jobs/{jobs['rollout-1']['job_id']}"))[0] == 404
        assert (await http("operator", "GET", "/v1/jobs/none"))[0] == 404
        for broker, job in jobs.items():
            assert (await http(broker, "DELETE", f"/v1/jobs/{job['job_id']}/trajectory"))[1]["remaining"] == 0

    run(shared, asks)


@pytest.mark.proof(quick=True)
def test_an_operator_cancels_at_whichever_broker_has_the_job(shared: Shared) -> None:
    async def asks(http: Http) -> None:
        async with without_engine(shared, http):
            for broker in shared.folder.rollout_brokers:
                job_id = problem()["job_id"]
                place = f"/v1/jobs/{job_id}"
                assert (await http(broker, "POST", "/v1/jobs", {**problem(), "job_id": job_id}))[0] == 200
                await until_running(http, broker, job_id)
                assert (await http("operator", "DELETE", place)) == (
                    200,
                    {"type": "cancelled", "request_id": ANY, "jobs": {job_id: "cancelled"}},
                )
                status, told = await http(broker, "GET", f"{place}/trajectory?wait_s=50")
                assert (status, told["result"]["outcome"]) == (200, "cancelled")
                assert (await http("operator", "DELETE", place)) == (
                    200,
                    {"type": "cancelled", "request_id": ANY, "jobs": {job_id: "finished"}},
                )
                assert (await http(broker, "DELETE", f"{place}/trajectory"))[0] == 200
        assert (await http("operator", "DELETE", "/v1/jobs/none")) == (
            200,
            {"type": "cancelled", "request_id": ANY, "jobs": {"none": "unknown"}},
        )

    run(shared, asks)


def test_the_dashboard_sees_both_brokers(shared: Shared) -> None:
    async def body(http: Http) -> None:
        _, seen = await http("operator", "GET", "/v1/overview")
        assert (set(seen["brokers"]), seen.get("problems", {})) == ({"rollout-0", "rollout-1"}, {})
        assert [node["node"] for node in seen["nodes"]] == ["one"]
        for who in seen["brokers"]:
            job = problem()
            assert (await http(who, "POST", "/v1/jobs", job))[0] == 200
            place = f"/v1/jobs/{job['job_id']}"
            assert (await http(who, "GET", f"{place}/trajectory?wait_s=30"))[0] == 200
            assert (await http("operator", "GET", f"{place}/trace"))[1]["outcome"] == "completed"
            _, view = await http("operator", "GET", f"{place}/view")
            assert [turn["role"] for turn in view["transcript"]["turns"]][:2] == ["system", "user"]
            assert (await http(who, "GET", f"{place}/view"))[0] == 403  # a trainer's token looks at nothing here
            assert (await http("operator", "POST", f"{place}/cancel"))[1] == {
                "type": "cancelled",
                "request_id": ANY,
                "jobs": {job["job_id"]: "finished"},
            }
            assert (await http(who, "DELETE", f"{place}/trajectory"))[1]["remaining"] == 0

    run(shared, body)


@pytest.mark.proof
def test_a_broker_that_died_is_named_and_its_clients_follow_it_to_its_new_place(shared: Shared) -> None:
    dead = "rollout-0"

    async def asks(http: Http) -> None:
        job = problem()
        assert (await http(dead, "POST", "/start"))[0] == 200
        async with without_engine(shared, http):
            assert (await http(dead, "POST", "/v1/jobs", job))[0] == 200
            await until_running(http, dead, job["job_id"])
            place = f"/v1/jobs/{job['job_id']}/trajectory"
            held = asyncio.create_task(http(dead, "GET", f"{place}?wait_s=50"))
            process = asyncio.create_task(http(dead, "POST", "/process", ROLLOUT))  # of the gateway's own session
            await until_two_run(http)
            before = shared.folder.announcement(dead)
            assert before is not None
            shared.serving.process.send_signal(signal.SIGSTOP)  # it would restart the broker where it was
            try:
                os.kill(before.pid, signal.SIGKILL)
                with taken(before.endpoints["front_door"]):
                    (status, told), (refused, _) = await asyncio.gather(
                        http("operator", "GET", "/v1/status"), http("operator", "DELETE", "/v1/jobs/none")
                    )
                    assert (status, told["running"]) == (200, {"init": 0, "run": 0, "eval": 0, "score": 0})
                    (line,) = told["problems"]
                    assert line.startswith("rollout-0 does not answer: no reply from tcp://")
                    assert (await http("rollout-1", "GET", "/v1/jobs"))[1]["remaining"] == 0
                    assert refused == 503  # it may have that one
                    shared.serving.process.send_signal(signal.SIGCONT)
                    await asyncio.to_thread(until_moved, shared.folder, dead, before.endpoints)
            finally:
                shared.serving.process.send_signal(signal.SIGCONT)
            assert not held.done()
        status, told = await held
        assert (status, told["result"]["outcome"]) == (200, "completed")
        assert (await http(dead, "DELETE", place))[1]["remaining"] == 0
        status, answer = await process
        assert (status, answer["error"], len(answer["messages"]) > 2) == (200, None, True)
        assert "problems" not in (await http("operator", "GET", "/v1/status"))[1]

    run(shared, asks)


async def until_two_run(http: Http) -> None:
    async def run() -> bool:
        return bool((await http("operator", "GET", "/v1/status"))[1]["running"]["run"] == 2)

    await until_async(run, "two jobs in RUN")


def taken(endpoint: str) -> socket.socket:
    """Take a port as soon as the process that had it is dead."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

    def take() -> socket.socket | None:
        try:
            return socket.create_server((host, int(port)))
        except OSError:
            return None

    taken = until(take, f"port {port}")
    assert taken is not None
    return taken


def until_moved(folder: ServiceFolder, broker: str, before: dict[str, str]) -> None:
    def moved() -> bool:
        one = folder.announcement(broker)
        return one is not None and one.endpoints["front_door"] != before["front_door"]

    until(moved, f"{broker} to be elsewhere")
