"""Who may use a gateway, and what is left of it when it, or the service behind it, is gone."""

from __future__ import annotations

import asyncio
import gzip
import signal
import socket
import ssl
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import aiohttp
import pytest
import trustme
from support.commands import complaint, prorl
from support.ports import free_port
from support.services import started
from support.waiting import until_async

from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.wire.messages.base import KeyRole

from .conftest import http, problem

if TYPE_CHECKING:
    from pathlib import Path

    from support.services import Program, SharedService


def bearer(token: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {token}"}}


def test_tokens_and_their_roles(served: SharedService, tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    alice, bob = (folder.new_bearer(name, KeyRole.TRAINER) for name in ("alice", "bob"))
    olga = folder.new_bearer("olga", KeyRole.OPERATOR)

    async def asks(url: str) -> None:
        async with http(url) as client:
            await until_async(client.is_up, "the gateway")  # without a key
            for more in ({}, bearer("wrong"), bearer(f"{alice}x"), {"headers": {"x-api-key": "wrong"}}):
                status, answer = await client.get("/v1/status", **more)
                assert (status, answer["error"]["code"]) == (401, "not_allowed")
            assert (await client.get("/v1/openapi.json"))[0] == 200
            async with client.session.head("/healthz") as head:  # as load balancers ask
                assert head.status == 200
            async with client.session.get("/docs") as page:
                assert "default-src 'none'" in page.headers["Content-Security-Policy"]
                assert 'id="submit"' in await page.text()
            assert (await client.get("/v1/status", headers={"x-api-key": alice}))[0] == 200
            server = {"address": "http://127.0.0.1:1"}  # it would get the rollouts of all
            assert (await client.post("/add_llm_server", server, **bearer(alice)))[0] == 403
            job = problem()
            place = f"/v1/jobs/{job['job_id']}"
            status, answer = await client.post("/v1/jobs", job, **bearer(olga))
            assert (status, answer["error"]["code"]) == (403, "not_allowed")
            assert (await client.post("/start", **bearer(olga)))[0] == 403
            assert (await client.post("/v1/jobs", job, **bearer(alice)))[0] == 200
            # Another's job is none, whatever is asked of it; an operator sees it, and not its trajectory.
            for method, path in (("GET", place), ("GET", f"{place}/trajectory?wait_s=0.1")):
                assert (await client(method, path, **bearer(bob)))[0] == 404
            assert (await client("DELETE", place, **bearer(bob))) == (
                200,
                {"type": "cancelled", "request_id": ANY, "jobs": {job["job_id"]: "unknown"}},
            )
            assert (await client.post("/v1/jobs", job, **bearer(bob)))[0] == 409
            assert (await client.get(f"{place}/trajectory?wait_s=20", **bearer(alice)))[0] == 200
            assert (await client.get(place, **bearer(olga)))[1]["state"] == "ended"
            assert (await client.get(f"{place}/trajectory", **bearer(olga)))[0] == 403
            assert (await client.post("/v1/backends/engine-0/drain", **bearer(alice)))[0] == 403
            assert (await client("DELETE", "/v1/backends/never-was", **bearer(olga)))[0] == 404
            assert (await client("DELETE", f"{place}/trajectory", **bearer(alice)))[1]["session"] == "http-alice"
            # /start of one is not that of another.
            assert (await client.post("/start", **bearer(alice)))[0] == 200
            rollout = {"instance": {"problem": "1", "answer": "1"}, "sampling_params": {"max_output_tokens": 4}}
            status, answer = await client.post("/process", rollout, **bearer(alice))
            assert (status, answer["error"], len(answer["messages"]) > 2) == (200, None, True)
            assert (await client.get("/status", **bearer(bob)))[0] == 503
            folder.revoke("alice")
            await until_async(lambda: _refused(client, alice), "the revocation")
            carol = folder.new_bearer("carol", KeyRole.OPERATOR)
            await until_async(lambda: _let_in(client, carol), "a new token")

    with served.gateway(PRORL_KEYS=str(folder.path)) as (_, url):
        asyncio.run(asks(url))


async def _refused(client: Any, token: str) -> bool:
    return bool((await client.get("/v1/status", **bearer(token)))[0] == 401)


async def _let_in(client: Any, token: str) -> bool:
    return bool((await client.get("/v1/status", **bearer(token)))[0] == 200)


def test_a_web_page_may_not_use_a_gateway_without_keys(served: SharedService) -> None:
    async def asks() -> None:
        async with http(served.url) as client:
            await until_async(client.is_up, "the gateway")
            assert (await client.get("/v1/status", headers={"Host": "somewhere.example"}))[0] == 403  # a name led here
            status, answer = await client.post("/v1/jobs", problem(), headers={"Origin": "http://somewhere.example"})
            assert (status, answer["error"]["code"]) == (403, "not_allowed")

    asyncio.run(asks())


def test_an_insecure_gateway_answers_to_names_of_its_machine_only(served: SharedService) -> None:
    """A page whose name was led here would read all jobs otherwise, with requests that change nothing."""

    async def asks(url: str) -> None:
        async with http(url) as client:
            await until_async(client.is_up, "the gateway")
            for host in ("10.1.2.3:80", "[::1]", "localhost", socket.gethostname().upper()):
                assert (await client.get("/v1/status", headers={"Host": host}))[0] == 200
            for method, path in (("GET", "/v1/status"), ("GET", "/v1/jobs/a/view"), ("POST", "/v1/jobs")):
                status, answer = await client(method, path, headers={"Host": "evil.example"})
                assert (status, answer["error"]["code"]) == (403, "not_allowed")
                assert "'evil.example' is not a name of this machine" in answer["error"]["message"]

    with served.gateway("--insecure") as (_, url):
        asyncio.run(asks(url))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/process"])
def test_a_compressed_body_is_refused(served: SharedService, path: str, encoding: str) -> None:
    async def asks() -> None:
        async with http(served.url) as client:
            await until_async(client.is_up, "the gateway")
            bomb = gzip.compress(bytes(10**7))
            async with client.session.post(path, data=bomb, headers={"Content-Encoding": encoding}) as response:
                assert response.status == 415
                assert (await response.json())["error"]["code"] == "unsupported_encoding"

    asyncio.run(asks())


def test_a_second_header_does_not_hide_that_a_body_is_compressed(served: SharedService) -> None:
    async def asks() -> None:
        async with http(served.url) as client:
            await until_async(client.is_up, "the gateway")
            headers = [("Content-Encoding", "identity"), ("Content-Encoding", "gzip")]
            async with client.session.post("/v1/jobs", data=gzip.compress(bytes(10**7)), headers=headers) as response:
                assert response.status == 415

    asyncio.run(asks())


def test_a_key_in_a_request_that_is_malformed_is_in_no_log(served: SharedService) -> None:
    async def asks() -> None:
        async with http(served.url) as client:
            assert await client.is_up()
        for line in (b"Authorization : Bearer the-key", b"Authorization: Bearer the-key\x01"):
            reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
            writer.write(b"GET /v1/me HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()

    asyncio.run(asks())
    assert "the-key" not in served.log
    assert "Error handling request" not in served.log


def test_tls(served: SharedService, tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def asks(url: str) -> None:
        async with http(url, ssl=trusting) as client:
            await until_async(client.is_up, "the gateway")
            assert (await client.get("/v1/status"))[0] == 200
        async with http(url) as client:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.get("/v1/status")
        async with http(url.replace("https", "http")) as client:
            with pytest.raises(aiohttp.ClientError):
                await client.get("/v1/status")

    with served.gateway("--tls-cert", str(cert), "--tls-key", str(key)) as (_, url):
        asyncio.run(asks(url))


@pytest.mark.proof
def test_a_gateway_that_is_killed_loses_no_trajectory(served: SharedService) -> None:
    port = free_port()
    job = problem()

    async def before(url: str, process: Program) -> None:
        async with http(url) as client, served.without_engine() as service:
            await until_async(client.is_up, "the gateway")
            assert (await client.post("/start"))[0] == 200
            assert (await client.post("/v1/jobs", job))[0] == 200
            held = asyncio.create_task(client.get(f"/v1/jobs/{job['job_id']}/trajectory?wait_s=30"))
            await until_async(lambda: _one_waits(service), "the job")
            process.process.kill()
            with pytest.raises(aiohttp.ClientError):
                await held

    async def after(url: str, other: str) -> None:
        async with http(url) as client, http(other) as beside:
            await until_async(client.is_up, "the gateway")
            assert (await client.get("/status"))[1]["status"] == "running"  # what was started is known again
            status, told = await client.get(f"/v1/jobs/{job['job_id']}/trajectory?wait_s=20")
            assert (status, told["result"]["outcome"]) == (200, "completed")
            assert (await beside.get(f"/v1/jobs/{job['job_id']}/trajectory"))[1] == told
            assert (await beside("DELETE", f"/v1/jobs/{job['job_id']}/trajectory"))[0] == 200
            assert (await client.get(f"/v1/jobs/{job['job_id']}/trajectory"))[0] == 404
            assert (await client.post("/stop"))[0] == 200

    async def _one_waits(service: Any) -> bool:
        return await served.waiting(service) == 1

    with served.gateway(port=port) as (process, url):
        asyncio.run(before(url, process))
    assert process.wait() == -signal.SIGKILL
    with served.gateway(port=port) as (_, url):
        asyncio.run(after(url, served.url))


def test_without_a_front_door_every_request_ends_with_503(served: SharedService) -> None:
    async def asks(url: str) -> None:
        async with http(url) as client:
            await until_async(lambda: _listens(client), "the gateway")
            asked = [
                client.get("/healthz"),
                client.get("/v1/status"),
                client.post("/v1/jobs", problem()),
                client.get("/v1/jobs/some/trajectory?wait_s=1"),
            ]
            for status, answer in await asyncio.gather(*asked):
                assert (status, answer["error"]["code"]) == (503, "request_timeout")
            assert (await client.post("/start"))[0] == 200
            body = {"instance": {"problem": "1", "answer": "1"}, "sampling_params": {}}
            status, answer = await client.post("/process", body)  # that is an outage, not a reward of 0
            assert (status, answer["messages"], "no reply" in answer["error"]) == (200, [], True)

    async def _listens(client: Any) -> bool:
        try:
            return bool((await client.get("/v1/openapi.json"))[0] == 200)
        except aiohttp.ClientError:
            return False

    away = f"ipc://{served.folder}/nobody"
    with served.gateway("--front-door", away, "--timeout", "0.5") as (_, url):
        asyncio.run(asks(url))


def test_a_gateway_says_that_no_service_runs_before_it_says_ready(served: SharedService, tmp_path: Path) -> None:
    away = f"ipc://{served.folder}/nobody"
    bind = ("--bind", f"127.0.0.1:{free_port()}", "--runs", tmp_path / "none")
    with started("prorl", "gateway", *map(str, bind), "--front-door", away, environment=served.environment) as gateway:
        gateway.wait_line("ready at")
        said = gateway.log
        assert said.index(f"no process listens at {away}; is the service running?") < said.index("ready at")
        assert f"{tmp_path / 'none'} is not a folder: no evaluation is shown until" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bind", "0.0.0.0:PORT"), "--tls-cert"),
        (("--bind", "0.0.0.0:PORT", "--tls-cert", "FOLDER/cert", "--tls-key", "FOLDER/cert"), "cannot be used"),
        (("--bind", "127.0.0.1:PORT", "--tls-cert", "FOLDER/cert"), "belong together"),
        (("--bind", "127.0.0.1"), "HOST:PORT"),
        (("--bind", "127.0.0.1:99999"), "HOST:PORT"),
        (("--bind", "127.0.0.1:PORT", "--keys", "FOLDER/nothing"), "key folder"),
        (("--bind", "127.0.0.1:PORT", "--name", "../x"), "--name"),
        (("--bind", "127.0.0.1:TAKEN"), "in use"),
    ],
)
def test_what_a_gateway_does_not_start_with(
    served: SharedService, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    (tmp_path / "cert").write_text("no certificate")
    places = {"PORT": str(free_port()), "FOLDER": str(tmp_path), "TAKEN": served.url.rpartition(":")[2]}
    for name, value in places.items():
        flags = tuple(flag.replace(name, value) for flag in flags)
    assert said in complaint(prorl("gateway", *flags, environment=served.environment))
