"""The JSON API on a whole service, beside a ZeroMQ client of the same one."""

from __future__ import annotations

import asyncio
import gc
import io
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import ANY

import msgspec
import pytest
from finished_groups import Talk, Turn, played
from support.waiting import until_async

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.data.trajectory import Role, array_views
from prorl_zmq.errors import RequestTimeout
from prorl_zmq.gateway.bodies import TrajectoryBody
from prorl_zmq.gateway.json_api import JsonApi
from prorl_zmq.service.rollout_brokers import Answers

from .conftest import Http, http, problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.services import SharedService

BYTES = {"Accept": "application/octet-stream"}


def run(served: SharedService, body: Callable[[Http], Any]) -> None:
    async def main() -> None:
        async with http(served.url) as client:
            await body(client)

    asyncio.run(main())


def test_requests_for_health_share_a_question() -> None:
    class Connection:
        asked = 0

        async def ask_all(self, _sender: Any, _request: Any) -> Answers[Any]:
            self.asked += 1
            await asyncio.sleep(0)
            return Answers({"a": None}, {})

    async def main() -> None:
        connection, nothing = Connection(), cast("Any", None)
        api = JsonApi(cast("Any", connection))
        await asyncio.gather(*(api.health(nothing) for _ in range(10)))
        assert connection.asked == 1
        await api.health(nothing)
        assert connection.asked == 2

    asyncio.run(main())


def test_a_failed_question_that_nobody_waits_for_is_not_reported() -> None:
    reported: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        begun, fails = asyncio.Event(), asyncio.Event()

        class Connection:
            async def ask_all(self, _sender: Any, _request: Any) -> Answers[Any]:
                begun.set()
                await fails.wait()
                raise RequestTimeout("no broker answered", timeout_s=1.0)

        api = JsonApi(cast("Any", Connection()))
        asking = asyncio.create_task(api.health(cast("Any", None)))
        await begun.wait()
        asking.cancel()
        await asyncio.wait({asking})
        question = api._greeting
        assert question is not None
        fails.set()
        await asyncio.wait({question})
        api._greeting = question = None
        gc.collect()  # when asyncio reports an error that was not read

    asyncio.run(main())
    assert reported == []


def test_a_jobs_trajectory_is_the_same_by_json_by_bytes_and_by_zeromq(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        job = problem(sampling={"max_tokens": 6, "seed": 7})
        assert await client.post("/v1/jobs", job) == (200, {"job_ids": [job["job_id"]], "new": 1})
        assert (await client.post("/v1/jobs", job))[1]["new"] == 0  # it is there already
        place = f"/v1/jobs/{job['job_id']}"
        status, told = await client.get(f"{place}/trajectory?wait_s=20")
        assert (status, told["result"]["outcome"]) == (200, "completed")
        async with client.session.get(f"{place}/trajectory", headers=BYTES) as response:
            tokens, turns = (int(response.headers[f"Prorl-{name}"]) for name in ("Tokens", "Turns"))
            arrays = array_views(await response.read(), tokens, turns)
            assert float(response.headers["Prorl-Reward"]) == told["result"]["reward"]
        assert {name: array.tolist() for name, array in arrays._asdict().items()} == {
            name: told[name] for name in arrays._fields
        }
        async with AsyncRolloutClient(served.front_door, session="http") as zeromq:
            await until_async(lambda: _found(zeromq, job["job_id"], told), "the same by ZeroMQ")
        assert (await client.get(f"{place}/trajectory"))[0] == 404  # that client acknowledged it

    run(served, asks)


async def _found(zeromq: AsyncRolloutClient, job_id: str, told: dict[str, Any]) -> bool:
    for trajectory in await zeromq.collect(wait_s=1.0):
        if trajectory.job_id == job_id:
            assert trajectory.token_ids.tolist() == told["token_ids"]
            assert trajectory.logprobs.tolist() == told["logprobs"]
            assert trajectory.turns.tolist() == told["turns"]
            return True
    return False


def test_a_body_has_the_conversations_and_the_rewards_of_turns() -> None:
    spoke = [Turn(Role.USER, [1]), Turn(Role.ASSISTANT, [], [(2, -0.5, 0)], reward=-0.25)]
    game = played([Talk("white", spoke, 1.0, "environment"), Talk("user", [], trained=False)])
    body = msgspec.json.decode(msgspec.json.encode(TrajectoryBody.of(game, arrays=False)))
    assert body["result"]["turn_rewards"] == [[1, -0.25]]
    assert body["result"]["conversations"] == [
        {"name": "white", "first_segment": 0, "segments": 1, "reward": 1.0, "stop_reason": "environment"},
        {"name": "user", "first_segment": 1, "segments": 0, "trained": False},
    ]


def test_trajectories_come_until_they_are_acknowledged(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        jobs = [problem(str(number)) for number in range(5)]
        ids = {job["job_id"] for job in jobs}
        assert (await client.post("/v1/jobs", jobs))[1]["new"] == 5
        received: list[str] = []
        lost = ""
        while len(set(received)) < 5:
            status, answer = await client.post(
                "/v1/trajectories/next?wait_s=10", {"max_results": 2, "acknowledge": received, "arrays": False}
            )
            assert status == 200
            here = [one["result"]["job_id"] for one in answer["trajectories"]]
            if not lost:
                lost = here[0]  # as if this answer had not arrived: it comes again
                continue
            received += here
            assert "token_ids" not in answer["trajectories"][0] or answer["trajectories"][0]["token_ids"] is None
        assert set(received) == ids
        assert lost in received
        assert sorted(received) == sorted(ids)  # each once
        assert (await client.post("/v1/trajectories/next", {"max_results": 0, "acknowledge": received}))[1] == {
            "trajectories": [],
            "remaining": 0,
            "journal_id": answer["journal_id"],
        }

    run(served, asks)


def test_a_job_runs_is_cancelled_and_is_acknowledged(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        job = problem()
        place = f"/v1/jobs/{job['job_id']}"
        async with served.without_engine() as service:
            await client.post("/v1/jobs", job)
            await until_async(lambda: _waits(served, service), "the job")
            status, state = await client.get(f"{place}/trajectory")
            assert (status, state["state"], state["phase"]) == (202, "running", "run")
            assert (await client.get(place))[1]["state"] == "running"
            assert (await client("DELETE", place)) == (
                200,
                {"type": "cancelled", "request_id": ANY, "jobs": {job["job_id"]: "cancelled"}},
            )
        status, told = await client.get(f"{place}/trajectory?wait_s=20&arrays=false")
        assert (status, told["result"]["outcome"]) == (200, "cancelled")
        assert (await client("DELETE", place)) == (
            200,
            {"type": "cancelled", "request_id": ANY, "jobs": {job["job_id"]: "finished"}},
        )
        assert (await client("DELETE", f"{place}/trajectory"))[1] == {"session": "http", "remaining": 0}
        assert (await client.get(place))[0] == 404
        assert (await client.get("/v1/jobs"))[1]["remaining"] == 0

    run(served, asks)


async def _waits(served: SharedService, service: AsyncRolloutClient) -> bool:
    return await served.waiting(service) == 1


def test_a_batch_of_groups(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        options = {"target_groups": 2, "group_size": 2, "keep": {"policy": "all"}, "carry": "nothing"}
        opened = {"batch_id": "by-http", "options": options}
        assert (await client.post("/v1/batches", opened))[0] == 200
        assert (await client.post("/v1/batches", opened))[1]["fed"] == 0
        prompts = {"prompts": [problem(str(number)) for number in range(2)], "start": 0, "last": True}
        for _ in range(2):  # the second is a repeat
            assert (await client.post("/v1/batches/by-http/prompts", prompts))[1] == {
                "type": "fed",
                "request_id": ANY,
                "fed": 2,
            }
        assert (await client.get("/v1/batches/by-http"))[1]["batches"][0]["target_groups"] == 2
        assert (await client.post("/v1/alive")) == (200, {"status": "ok"})
        groups: list[str] = []
        while True:
            body = {"acknowledge": groups}
            status, answer = await client.post("/v1/batches/by-http/groups/next?wait_s=20", body)
            assert status == 200
            if answer["ended"] and not answer["group_id"]:
                break
            groups.append(answer["group_id"])
            assert [one["result"]["outcome"] for one in answer["trajectories"]] == ["completed"] * 2
        assert len(set(groups)) == 2
        status, closed = await client.post("/v1/batches/by-http/close", {"acknowledge": groups})
        assert (status, closed["batch"]["state"], closed["report"]["kept_groups"]) == (200, "met", 2)
        assert (await client.get("/v1/batches/by-http"))[0] == 404

    run(served, asks)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/jobs", problem(task="never-was"), 400, "unknown_task"),
        ("POST", "/v1/jobs", problem(surplus=1), 400, "malformed_message"),
        ("POST", "/v1/jobs", [], 400, "malformed_message"),
        ("POST", "/v1/jobs", {"task": "math"}, 400, "malformed_message"),
        ("POST", "/v1/jobs", problem(instance={"problem": "x" * (5 * 2**20)}), 413, "job_too_large"),
        ("GET", "/v1/jobs/never-was", None, 404, "unknown_job"),
        ("GET", "/v1/jobs/never-was/trajectory", None, 404, "unknown_job"),
        ("GET", "/v1/jobs/never-was/trajectory?wait_s=61", None, 400, "malformed_message"),
        ("GET", "/v1/jobs/never-was/trajectory?wait=6", None, 400, "malformed_message"),
        ("GET", "/v1/jobs/-/trajectory", None, 404, "unknown_job"),
        ("POST", "/v1/trajectories/next", {"max_results": 65}, 400, "malformed_message"),
        ("POST", "/v1/batches", {"options": {"target_groups": 1, "group_size": 1}}, 400, "invalid_batch"),
        ("POST", "/v1/batches/never-was/close", {}, 404, "unknown_batch"),
        ("DELETE", "/v1/backends/never-was", None, 404, "unknown_backend"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        ("PUT", "/v1/jobs", {}, 405, "method_not_allowed"),
    ],
)
def test_errors_are_json_with_a_code(
    served: SharedService, method: str, path: str, body: Any, status: int, code: str
) -> None:
    async def asks(client: Http) -> None:
        answer = await client(method, path, body)
        assert (answer[0], answer[1]["error"]["code"]) == (status, code)
        assert answer[1]["error"]["message"]

    run(served, asks)


def test_another_job_of_the_same_id_is_a_conflict(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        async with served.without_engine():
            job = problem()
            await client.post("/v1/jobs", job)
            status, answer = await client.post("/v1/jobs", {**job, "max_attempts": 2})
            assert (status, answer["error"]["code"]) == (409, "duplicate_job")
            assert answer["error"]["fields"] == {"job_id": job["job_id"]}
            await client("DELETE", f"/v1/jobs/{job['job_id']}")
        await client.get(f"/v1/jobs/{job['job_id']}/trajectory?wait_s=20")
        await client("DELETE", f"/v1/jobs/{job['job_id']}/trajectory")

    run(served, asks)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 5000, b'{"task": 1}'])
def test_bodies_that_are_no_jobs(served: SharedService, content: bytes) -> None:
    async def asks(client: Http) -> None:
        async with client.session.post("/v1/jobs", data=content) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "malformed_message"

    run(served, asks)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" + b'{"task":"math"},' * 513 + b"{}]", "there are 514 jobs; a request may have 512"),
        (b"[" + b"{}," * 400_000 + b"{}]", "there are 400001 jobs"),
        (b"[" + b"[]," * 600_000 + b"{}]", "more than 1000000 values"),
        (b'{"task": "math", "instance": {"a": [' + b"0," * 1_000_000 + b"0]}}", "more than 1000000 values"),
    ],
)
def test_more_than_a_request_may_have_is_refused_before_it_is_decoded(
    served: SharedService, content: bytes, words: str
) -> None:
    async def asks(client: Http) -> None:
        async with client.session.post("/v1/jobs", data=io.BytesIO(content)) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (400, "malformed_message")
            assert words in answer["error"]["message"]

    run(served, asks)


def test_prompts_of_a_batch_are_counted_too(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        status, answer = await client.post("/v1/batches/never/prompts", {"prompts": [{}] * 513, "start": 0})
        assert status == 400
        assert "there are 513 jobs" in answer["error"]["message"]

    run(served, asks)


def test_a_body_over_the_limit_is_refused(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        async with client.session.post("/v1/jobs", data=io.BytesIO(bytes(65 * 2**20))) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "too_large"

    run(served, asks)


def test_the_service_is_described(served: SharedService) -> None:
    async def asks(client: Http) -> None:
        assert "math" in (await client.get("/v1/status"))[1]["tasks"]
        listed = (await client.get("/v1/backends"))[1]["backends"]
        assert [one["backend"]["backend_id"] for one in listed] == ["engine-0"]
        assert (await client.get("/v1/openapi.json"))[1]["openapi"] == "3.1.0"

    run(served, asks)
