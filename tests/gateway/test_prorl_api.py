"""The requests of ProRL Agent's clients, in the order in which verl and NeMo Gym make them, errors included."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from finished_groups import chat
from support.waiting import until_async

from prorl_zmq.gateway.message_texts import LoadedTexts
from prorl_zmq.gateway.prorl_api import ProrlApi
from prorl_zmq.gateway.stored_state import StoredState
from prorl_zmq.security.rights import ANYBODY
from prorl_zmq.wire.messages.backends import Backend, BackendList, BackendStatus
from prorl_zmq.wire.messages.chat import ChatSettings

from .conftest import Http, http

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.services import SharedService

    from prorl_zmq import Job
    from prorl_zmq.data.trajectory import Trajectory

VERL = {
    "model": "hosted_vllm/ORG/NAME",
    "api_key": "EMPTY",
    "modify_params": False,
    "log_completions": False,
    "native_tool_calling": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_output_tokens": 24,
    "max_iterations": 3,
    "token_level_generation": True,
    "max_model_len": 2048,
}
GYM = {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 24}


def instance(number: int = 0) -> dict[str, Any]:
    return {"problem": f"1 + {number}", "answer": "2", "instance_id": f"row-{number}", "trajectory_id": number}


def run(served: SharedService, body: Callable[[Http], Any]) -> None:
    """Call `body` with a client of the gateway, which is stopped before and after."""

    async def main() -> None:
        async with http(served.url) as client:
            await client.post("/stop")
            try:
                await body(client)
            finally:
                await client.post("/stop")

    asyncio.run(main())


def check_for_verl(answer: dict[str, Any]) -> None:
    """Read an answer as verl's conversion does, which has a KeyError for what is missing."""
    ids, mask = [], []
    for message in answer["messages"]:
        ids += message["token_ids"]
        mask += [message["role"] == "assistant"] * len(message["token_ids"])
        if message["role"] == "assistant":
            assert len(message["logprobs"]) == len(message["token_ids"])
            assert message["input_ids"] == ids[: -len(message["token_ids"])]
    assert True in mask
    assert answer["resolved"] in (True, False)
    assert answer["finish"] in (True, False)
    assert (answer["error"], answer["critical_error"]) == (None, None)


def test_two_steps_of_verl(served: SharedService) -> None:
    async def steps(client: Http) -> None:
        assert (await client.post("/clear_llm_server"))[0] == 200  # at construction: before /start
        for url in ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1"):
            status, said = await client.post("/add_llm_server", {"address": url})
            assert (status, "ignored" in said["status"]) == (200, True)  # and says why
        for _ in range(2):
            assert (await client.post("/start"))[0] == 200
            asked = [client.post("/process", {"instance": instance(n), "sampling_params": VERL}) for n in range(8)]
            answers = await asyncio.gather(*asked)
            for number, (status, answer) in enumerate(answers):
                assert (status, answer["instance_id"], answer["trajectory_id"]) == (200, f"row-{number}", number)
                check_for_verl(answer)
            assert (await client.post("/stop"))[0] == 200
            assert (await client.post("/process", {"instance": instance(), "sampling_params": VERL}))[0] == 503

    run(served, steps)


def test_nemo_gyms_repeats_have_one_job_id_at_the_same_time(served: SharedService) -> None:
    async def repeats(client: Http) -> None:
        assert (await client.post("/start"))[0] == 200
        assert await client.post("/start") == (400, {"detail": "Server is already running"})
        asked = {"instance": instance(5), "sampling_params": GYM, "job_id": "row-5"}
        answers = await asyncio.gather(*(client.post("/process", asked) for _ in range(6)))
        assert [(status, answer["job_id"]) for status, answer in answers] == [(200, "row-5")] * 6
        sampled = {
            tuple(chain(*(one["token_ids"] for one in answer["messages"] if one["role"] == "assistant")))
            for _, answer in answers
        }
        assert len(sampled) > 1  # each was a job of its own
        users = [one["content"] for _, answer in answers for one in answer["messages"] if one["role"] == "user"]
        assert set(users) == {"1 + 5"}

    run(served, repeats)


def test_cancel_ends_all_jobs_of_an_id_and_no_other(served: SharedService) -> None:
    async def cancels(client: Http) -> None:
        await client.post("/start")
        async with served.without_engine() as service:
            asked = {"instance": instance(), "sampling_params": GYM}
            named = [asyncio.create_task(client.post("/process", {**asked, "job_id": "twice"})) for _ in range(2)]
            other = asyncio.create_task(client.post("/process", {**asked, "job_id": "other"}))
            await until_async(lambda: _equals(served.waiting(service), 3), "three jobs")
            assert (await client.get("/status"))[1]["pending_jobs"] == 3
            assert (await client.post("/cancel", {"job_id": "never-was"}))[0] == 200
            assert (await client.post("/cancel", {"job_id": "twice"}))[1]["jobs"] == 2
            for status, answer in await asyncio.gather(*named):
                assert (status, answer["messages"], answer["critical_error"]) == (200, [], "run")
                assert "cancelled" in answer["error"]
            await until_async(lambda: _equals(served.waiting(service), 1), "the others' end")
        status, answer = await other
        check_for_verl(answer)

    run(served, cancels)


def test_a_dropped_connection_cancels_and_a_retry_is_a_new_job(served: SharedService) -> None:
    async def drops(client: Http) -> None:
        await client.post("/start")
        asked = {"instance": instance(), "sampling_params": VERL}
        async with served.without_engine() as service:
            with pytest.raises(asyncio.TimeoutError):
                async with client.session.post("/process", json=asked, timeout=aiohttp.ClientTimeout(0.5)):
                    pass
            await until_async(lambda: _equals(served.waiting(service), 0), "the job's end")
            retry = asyncio.create_task(client.post("/process", asked))
            await until_async(lambda: _equals(served.waiting(service), 1), "the retry")
        check_for_verl((await retry)[1])

    run(served, drops)


def test_stop_ends_what_goes_on(served: SharedService) -> None:
    async def stops(client: Http) -> None:
        await client.post("/start")
        async with served.without_engine() as service:
            asked = {"instance": instance(), "sampling_params": VERL}
            open_ = [asyncio.create_task(client.post("/process", asked)) for _ in range(5)]
            await until_async(lambda: _equals(served.waiting(service), 5), "five jobs")
            assert (await client.post("/stop"))[0] == 200
            assert [(status, answer["messages"]) for status, answer in await asyncio.gather(*open_)] == [(200, [])] * 5
            await until_async(lambda: _equals(served.waiting(service), 0), "the jobs' end")
        assert (await client.get("/status"))[0] == 503
        assert (await client.post("/start"))[0] == 200
        assert (await client.get("/status"))[1]["status"] == "running"

    run(served, stops)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"instance": {"foo": 1}}, "no known row format"),
        ({"instance": None}, "are objects"),
        ({}, "are objects"),
        ({"instance": instance(), "sampling_params": {"temperature": 9}}, "temperature"),
        ({"instance": {"task": "math", "problem": "1"}}, "ground_truth"),
    ],
)
def test_what_cannot_be_run_is_answered_and_never_refused(
    served: SharedService, asked: dict[str, Any], said: str
) -> None:
    async def asks(client: Http) -> None:
        await client.post("/start")
        status, answer = await client.post("/process", {"sampling_params": GYM, **asked})
        assert (status, answer["messages"], answer["resolved"]) == (200, [], False)
        assert answer["critical_error"] in ("init", "run")
        assert said in answer["error"]

    run(served, asks)


class Service:
    """One backend whose tokenizer is not on this machine, and jobs that end at once."""

    async def ask_backend_broker(self, *_: object) -> BackendList:
        settings = ChatSettings("transformers", "/nowhere/at/all")
        backend = Backend(backend_id="far", endpoint="ipc:///x", chat=settings)
        status = BackendStatus(backend=backend, state="ready", in_flight=0, assigned=1)
        return BackendList("r", (status,))

    async def run(self, job: Job) -> Trajectory:
        return chat([1], [2], job_id=job.job_id, backend="far")

    async def close(self) -> None:
        pass


def test_the_first_job_names_the_tokenizer_of_the_engines(tmp_path: Path) -> None:
    class Servers:
        def __init__(self) -> None:
            self.started: list[str] = []

        def start(self, tokenizer: str) -> None:
            self.started.append(tokenizer)

        async def keep_only(self, addresses: set[str]) -> None:
            assert not addresses

    def api(tokenizer: str) -> Any:
        unused: Any = None
        return ProrlApi(unused, unused, state, cast("Any", servers), tokenizer, unused)

    state, servers = StoredState(tmp_path / "state.json"), Servers()
    for named in ("--trust", "", "x" * 1025, 7, None, "/models/x", "attacker/repo"):
        api("")._start_engines({"custom_tokenizer": named})
    assert servers.started == [*[""] * 5, "/models/x", "/models/x"]
    assert StoredState(tmp_path / "state.json").tokenizer == "/models/x"
    api("/models/own")._start_engines({"custom_tokenizer": "attacker/repo"})
    assert (servers.started[-1], state.tokenizer) == ("/models/own", "/models/x")
    asyncio.run(api("").clear_llm_server(cast("Any", None), ANYBODY))
    assert state.tokenizer == "", "without servers the next job names it"


@pytest.mark.parametrize(("token_mode", "told"), [(True, True), (False, False)])
def test_messages_without_texts_are_for_those_only_who_read_tokens(
    tmp_path: Path, token_mode: bool, told: bool
) -> None:
    service: Any = Service()
    api = ProrlApi(service, service, StoredState(tmp_path / "state"), None, "", LoadedTexts(service))

    async def main() -> dict[str, Any]:
        app = web.Application()
        for each in api.endpoints:
            app.router.add_route(each.method, each.path, partial(_as_anybody, each.handler))
        async with TestClient(TestServer(app)) as client:
            await client.post("/start")
            parameters = {"token_level_generation": token_mode}
            body = {"instance": instance(), "sampling_params": parameters}
            async with client.post("/process", json=body) as response:
                assert response.status == 200
                answer: dict[str, Any] = await response.json()
                return answer

    answer = asyncio.run(main())
    assert bool(answer["messages"]) == told
    assert (answer["error"] is None) == told
    assert told or "/nowhere/at/all" in answer["error"]


async def _as_anybody(handler: Any, request: web.Request) -> web.Response:
    response: web.Response = await handler(request, ANYBODY)
    return response


async def _equals(awaited: Any, value: object) -> bool:
    return bool(await awaited == value)
