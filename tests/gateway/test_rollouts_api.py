"""Programs outside that lead rollouts through a gateway, on a whole service."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import ANY

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from support.later import Later
from support.ports import free_port
from support.waiting import until, until_async

from prorl_zmq.client import outside_calls
from prorl_zmq.config import GatewaySettings
from prorl_zmq.errors import Busy
from prorl_zmq.gateway.rollouts_api import RolloutsApi
from prorl_zmq.gateway.server import Gateway
from prorl_zmq.gateway.settings import GatewayOptions
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.security.rights import ANYBODY
from prorl_zmq.testing import LocalService, say
from prorl_zmq.wire.messages.base import KeyRole, new_id

from .conftest import Http, http

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import anthropic
    import openai
    from support.services import SharedService
else:
    anthropic, openai = Later("anthropic"), Later("openai")


def run(served: SharedService, body: Callable[[Http], Any]) -> None:
    async def main() -> None:
        async with http(served.url) as client:
            await body(client)

    asyncio.run(main())


def rollout(**more: Any) -> dict[str, Any]:
    return {"job": {"task": "outside", "instance": {}, "sampling": {"max_tokens": 6}, "job_id": new_id(), **more}}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


ASKS = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}


@pytest.mark.xdist_group("SDKs of models")
def test_the_clients_of_openai_and_anthropic_lead_one(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        status, made = await client.post("/v1/rollouts", rollout())
        assert (status, made["base_url"]) == (200, f"{served.url}/v1/rollouts/{made['job_id']}")
        place = f"/v1/rollouts/{made['job_id']}"
        access: dict[str, Any] = {"base_url": made["base_url"], "api_key": made["api_key"], "max_retries": 0}
        async with openai.AsyncOpenAI(**access) as gpt, anthropic.AsyncAnthropic(**access) as claude:
            # The first call comes before a RUN process has the rollout, and waits for it.
            said = await gpt.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1"}])
            events = await gpt.responses.create(model="policy", input="2", stream=True)
            kinds = [event.type async for event in events]
            async with claude.messages.stream(
                model="policy", max_tokens=6, messages=[{"role": "user", "content": "3"}]
            ) as stream:
                message = await stream.get_final_message()
        assert said.usage is not None
        assert message.usage.output_tokens > 0
        assert kinds[0] == "response.created"
        assert kinds[-1] in {"response.incomplete", "response.completed"}  # six tokens, or a drawn end before
        state = (await client.get(place))[1]
        assert (state["state"], state["phase"], state["open"]) == ("running", "run", True)
        finish = await client.post(f"{place}/finish", {"reward": 0.5}, headers=bearer(made["api_key"]))
        assert finish == (200, {"status": "finished", "reward": 0.5})
        status, told = await client.get(f"/v1/jobs/{made['job_id']}/trajectory?wait_s=20")
        assert (status, told["result"]["outcome"], told["result"]["reward"]) == (200, "completed", 0.5)
        assert told["result"]["metrics"]["turns"] == 3
        assert sum(told["loss_mask"]) == told["result"]["metrics"]["generated_tokens"]
        assert (await client.get(place))[1]["open"] is False
        status, told = await client.post(f"{place}/chat/completions", ASKS, headers=bearer(made["api_key"]))
        assert (status, "has ended" in told["error"]["message"]) == (410, True)
        await client("DELETE", f"/v1/jobs/{made['job_id']}/trajectory")

    run(served, asks)


def test_only_the_rollouts_key_opens_it_and_nothing_else(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        made, other = [(await client.post("/v1/rollouts", rollout()))[1] for _ in range(2)]
        path = f"/v1/rollouts/{made['job_id']}"
        for headers in (bearer(other["api_key"]), {"x-api-key": "wrong"}, {}):
            for end in ("chat/completions", "v1/messages", "finish"):
                status, told = await client.post(f"{path}/{end}", {}, headers=headers)
                assert (status, told["error"]["message"]) == (401, "the call does not show the key of this rollout")
        status, told = await client.post("/v1/rollouts/never-was/chat/completions", ASKS, headers=bearer("x"))
        assert (status, told["error"]["code"]) == (404, "unknown_job")
        foreign = {**bearer(made["api_key"]), "Origin": "http://somewhere.example"}
        assert (await client.post(f"{path}/chat/completions", ASKS, headers=foreign))[0] == 403
        status, told = await client.post(f"{path}/nothing", {}, headers=bearer(made["api_key"]))
        assert (status, "there is no" in told["error"]["message"]) == (404, True)
        status, told = await client.post(f"{path}/finish", {"reward": 1}, headers=bearer(made["api_key"]))
        assert (status, "no call of the model" in told["error"]["message"]) == (409, True)
        for one in (made, other):
            assert (await client("DELETE", f"/v1/rollouts/{one['job_id']}")) == (
                200,
                {"type": "cancelled", "request_id": ANY, "jobs": {one["job_id"]: "cancelled"}},
            )
        status, _ = await client.post(f"{path}/chat/completions", ASKS, headers=bearer(made["api_key"]))
        assert status == 410

    run(served, asks)


def test_without_a_key_no_id_of_a_job_is_found(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        beginning = new_id()[:8]
        made = [(await client.post("/v1/rollouts", rollout(job_id=f"{beginning}-{i}")))[1] for i in range(2)]
        for part in (beginning, f"{beginning}-"):
            status, told = await client.post(f"/v1/rollouts/{part}/chat/completions", ASKS)
            assert (status, told["error"]["code"]) == (404, "unknown_job")
            assert told["error"]["message"] == f"no rollout {part}"
        for one in made:
            await client("DELETE", f"/v1/rollouts/{one['job_id']}")

    run(served, asks)


def test_a_call_is_passed_on_by_the_path_that_was_routed(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        made = (await client.post("/v1/rollouts", rollout()))[1]
        path, key = f"/v1/rollouts/{made['job_id']}", bearer(made["api_key"])
        status, told = await client.post(f"{path}/chat/completions?x={path}/finish", ASKS, headers=key)
        assert (status, told["object"]) == (200, "chat.completion")
        await client("DELETE", path)

    run(served, asks)
    api = RolloutsApi(cast("Any", None), cast("Any", None))
    for end in ("../other/finish", "v1/./messages", ".."):
        request = make_mocked_request("POST", "/v1/rollouts/a/x", match_info={"job_id": "a", "path": end})
        assert asyncio.run(api.pass_on(request, ANYBODY)).status == 404


def test_calls_of_one_rollout_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.gateway.rollouts_api.WAITING", 1)

    class Connection:
        async def address_of(self, job_id: str, wait_s: float) -> Any:
            await asyncio.sleep(wait_s)

    async def main() -> None:
        api = RolloutsApi(cast("Any", Connection()), cast("Any", None))
        first = asyncio.create_task(api._address("a"))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="1 calls of the rollout a wait"):
            await api._address("a")
        first.cancel()
        await asyncio.wait({first})
        assert not api._waiting
        await api.close()

    asyncio.run(main())


def test_wrong_rollouts_are_refused_by_field(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        for body, field in (
            ({}, "job"),
            ({**rollout(), "idle_s": 0}, "$.idle_s"),
            ({**rollout(), "train_on": []}, "$.train_on"),
            ({**rollout(), "reward": 1}, "reward"),
            (rollout(sampling={"max_tokens": 0}), "$.job.sampling.max_tokens"),
        ):
            status, told = await client.post("/v1/rollouts", body)
            assert (status, told["error"]["fields"]["field"]) == (400, field)
        status, told = await client.post("/v1/rollouts", rollout(task="chess"))
        assert (status, told["error"]["code"]) == (400, "unknown_task")

    run(served, asks)


def test_a_silent_program_is_a_timeout(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        made = (await client.post("/v1/rollouts", {**rollout(), "idle_s": 0.2}))[1]
        status, told = await client.get(f"/v1/jobs/{made['job_id']}/trajectory?wait_s=20")
        assert (status, told["result"]["outcome"], "reward" in told["result"]) == (200, "timeout", False)
        assert told["result"]["error"]["code"] == "phase_timeout"
        await client("DELETE", f"/v1/jobs/{made['job_id']}/trajectory")

    run(served, asks)


def test_a_program_that_leaves_the_gateway_ends_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = say(lambda prompt: "ye" + 300_000 * "e" + "s" if "slowly" in prompt else "yes")
    long = {"sampling": {"max_tokens": 400_000}, "episode": {"max_tokens": 500_000}}

    async def main(service: LocalService) -> None:
        port = free_port()
        settings = GatewaySettings(bind=f"127.0.0.1:{port}", use_llm_servers=False)
        gateway = Gateway(GatewayOptions(settings=settings, run_dir=tmp_path, front_door=service.front_door))
        async with http(f"http://127.0.0.1:{port}") as client:
            runner = web.AppRunner(gateway._app(), handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            made = (await client.post("/v1/rollouts", rollout(**long)))[1]
            path, headers = f"/v1/rollouts/{made['job_id']}", bearer(made["api_key"])
            body = {**ASKS, "stream": True, "messages": [{"role": "user", "content": "Say it slowly."}]}
            calling = asyncio.create_task(client.post(f"{path}/chat/completions", body, headers=headers))
            await asyncio.to_thread(until, lambda: bool(engine._running), "a call at the engine")
            calling.cancel()
            await asyncio.to_thread(until, lambda: not engine._running, "the end of the generation")
            assert (await client.post(f"{path}/chat/completions", ASKS, headers=headers))[0] == 200
            await client.post(f"{path}/finish", {"reward": 1}, headers=headers)
            _, told = await client.get(f"/v1/jobs/{made['job_id']}/trajectory?wait_s=20")
            metrics = told["result"]["metrics"]
            assert (metrics["calls_without_reply"], metrics["main_turns"]) == (1, 1)
            elsewhere = (await client.post("/v1/rollouts", rollout()))[1]
            with monkeypatch.context() as patched:
                patched.setattr(outside_calls, "loopback_id", lambda: "another")  # as on another machine than RUN's
                path, headers = f"/v1/rollouts/{elsewhere['job_id']}", bearer(elsewhere["api_key"])
                status, told = await client.post(f"{path}/chat/completions", ASKS, headers=headers)
                assert (status, "at that machine's loopback address" in told["error"]["message"]) == (502, True)
            await client("DELETE", path)
            await gateway._json_api.rollouts.close()
            await gateway._prorl_api.close()
            await runner.cleanup()
            await gateway.close()

    with LocalService(engine=engine) as service:
        asyncio.run(main(service))


def test_tokens_and_roles_and_a_gateway_that_is_started_again(
    served: SharedService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = KeyFolder(tmp_path / "keys")
    alice, bob = (folder.new_bearer(name, KeyRole.TRAINER) for name in ("alice", "bob"))
    olga = folder.new_bearer("olga", KeyRole.OPERATOR)
    caplog.set_level(logging.DEBUG)

    async def opens(url: str) -> dict[str, Any]:
        async with http(url) as client:
            await until_async(client.is_up, "the gateway")
            assert (await client.post("/v1/rollouts", rollout()))[0] == 401
            assert (await client.post("/v1/rollouts", rollout(), headers=bearer(olga)))[0] == 403
            made: dict[str, Any] = (await client.post("/v1/rollouts", rollout(), headers=bearer(alice)))[1]
            path = f"/v1/rollouts/{made['job_id']}"
            assert (await client.get(path, headers=bearer(bob)))[0] == 404
            assert (await client("DELETE", path, headers=bearer(bob))) == (
                200,
                {"type": "cancelled", "request_id": ANY, "jobs": {made["job_id"]: "unknown"}},
            )
            assert (await client.get(path, headers=bearer(made["api_key"])))[0] == 401
            # A trainer's token is no rollout's key, not even to who opened it.
            assert (await client.post(f"{path}/chat/completions", ASKS, headers=bearer(alice)))[0] == 401
            assert (await client.post(f"{path}/chat/completions", ASKS, headers=bearer(made["api_key"])))[0] == 200
            return made

    async def goes_on(url: str, made: dict[str, Any]) -> None:
        async with http(url) as client:
            await until_async(client.is_up, "the gateway")
            path, headers = f"/v1/rollouts/{made['job_id']}", bearer(made["api_key"])
            assert (await client.post(f"{path}/chat/completions", ASKS, headers=headers))[0] == 200
            assert (await client.post(f"{path}/finish", {"reward": 1}, headers=headers))[0] == 200
            place = f"/v1/jobs/{made['job_id']}/trajectory"
            _, told = await client.get(f"{place}?wait_s=20", headers=bearer(alice))
            assert (told["result"]["outcome"], told["result"]["metrics"]["turns"]) == ("completed", 2)
            await client("DELETE", place, headers=bearer(alice))

    with served.gateway(PRORL_KEYS=str(folder.path)) as (first, url):
        made = asyncio.run(opens(url))
        first.process.kill()
    with served.gateway(PRORL_KEYS=str(folder.path)) as (second, url):
        asyncio.run(goes_on(url, made))
        assert made["api_key"] not in second.log
    assert made["api_key"] not in caplog.text
