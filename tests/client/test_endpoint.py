"""Rollouts that programs outside lead, through a whole service: the address, the reward, and each way to an end."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import pytest
from support.waiting import until

from prorl_zmq import AsyncRolloutClient, EpisodeLimits, Job, PhaseLimits, RolloutClient, Sampling
from prorl_zmq.client.outside_calls import ask, reached_at, with_key
from prorl_zmq.errors import EndpointFailed, InvalidJob, RequestTimeout, UnknownJob
from prorl_zmq.testing import LocalService, say
from prorl_zmq.wire.messages.front_door import JobTrace, Span
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq.client.blocking.endpoint import Endpoint

WAIT_S = 30.0
OUTSIDE = Job(task="outside", instance={"prompt": "Say yes."})
MATH = Job(task="math", instance={"problem": "6 times 7?", "ground_truth": "42"})


def answer(prompt: str) -> str:
    if "fail" in prompt:
        raise ValueError("the engine fails")
    if "slowly" in prompt:
        return "ye" + 300_000 * "e" + "s"
    return "I think \\boxed{42}" if "6 times 7" in prompt else "yes"


ENGINE = say(answer)


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with LocalService(engine=ENGINE, slots=4) as running:
        yield running


def is_generating() -> bool:
    return bool(ENGINE._running)


@pytest.fixture
def client(service: LocalService) -> Iterator[RolloutClient]:
    with service.client(timeout_s=WAIT_S) as connected:
        yield connected


def job(base: Job = OUTSIDE, **changes: Any) -> Job:
    fields = {"task": base.task, "instance": base.instance, "limits": PhaseLimits(run_s=60)} | changes
    return Job(**fields)


def chat(rollout: Any, *said: str, key: str = "", path: str = "chat/completions", **more: Any) -> tuple[int, Any]:
    """Ask the model as a program outside does."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return post(f"{rollout.base_url}/{path}", key or rollout.api_key, {"model": "m", "messages": messages, **more})


def post(url: str, key: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=WAIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


SLOW = job(sampling=Sampling(max_tokens=400_000), episode=EpisodeLimits(max_tokens=500_000))


def words(reply: Any) -> str:
    return str(reply["choices"][0]["message"]["content"])


def test_a_program_reports_its_reward_and_every_token_is_captured(client: RolloutClient) -> None:
    with client.endpoint(job(group_id="g1")) as rollout:
        _, first = chat(rollout, "Say yes.")
        status, second = chat(rollout, "Say yes.", words(first), "Again.", return_token_ids=True)
        assert (status, words(first), words(second)) == (200, "yes", "yes")
        assert rollout.api_key not in repr(rollout.job)
        trajectory = rollout.finish(reward=0.25)
        assert rollout.finish(reward=0.25) is trajectory  # said twice, it is the same
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == ("completed", 0.25, None)
    result = trajectory.result
    assert (result.stop_reason, result.group_id, result.metrics["turns"]) == ("done", "g1", 2)
    assert result.metrics["reward_reported"] == 1
    assert len(trajectory.segments()) == 1
    # The second prompt is the first one, what was said, and what is new: all of it is in the trajectory as it was.
    whole = [*second["prompt_token_ids"], *second["choices"][0]["token_ids"]]
    assert trajectory.token_ids.tolist() == whole
    generated = trajectory.token_ids[trajectory.loss_mask]
    assert np.allclose(trajectory.logprobs[trajectory.loss_mask], -(1 + generated) / 1000)
    assert client.status().uncollected == 0  # it was acknowledged at the end of the block


def test_the_task_judges_where_no_reward_is_reported(client: RolloutClient) -> None:
    with client.endpoint(job(MATH)) as rollout:
        chat(rollout, "What is 6 times 7?")
        trajectory = rollout.finish()
    assert (trajectory.outcome, trajectory.reward) == ("completed", 1.0)
    assert trajectory.result.notes["answer"] == "\\boxed{42}"
    with client.endpoint(job(MATH)) as rollout:  # and where one is, it counts
        chat(rollout, "What is 6 times 7?")
        trajectory = rollout.finish(reward=-3)
    assert (trajectory.reward, "answer" in trajectory.result.notes) == (-3.0, False)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"reward": NaN}', 400, "finish takes"),
        (b'{"reward": 1e999}', 400, "out of range"),
        (b'{"reward": 1e39}', 400, "the reward must be a finite number"),
        (b'{"reward": "1"}', 400, "float"),
        (b'{"reward": true}', 400, "float"),
        (b'{"rewards": 1}', 400, "rewards"),
        (b"[1]", 400, "finish takes"),
        (b"\xff", 400, "finish takes"),
        (b"{}", 400, "the task outside does not judge"),
        (b'{"reward": 1}' + b" " * 5000, 400, "4096 bytes"),
    ],
)
def test_a_reward_that_is_none_is_refused_and_ends_nothing(
    service: LocalService, body: bytes, status: int, says: str
) -> None:
    with service.client(timeout_s=WAIT_S) as client, client.endpoint(job()) as rollout:
        chat(rollout, "Say yes.")
        found, told = post(f"{rollout.base_url}/finish", rollout.api_key, body)
        assert (found, says in told["error"]["message"]) == (status, True), told
        assert rollout.finish(reward=1.0).reward == 1.0


def test_a_client_refuses_such_a_reward_too(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        chat(rollout, "Say yes.")
        for wrong in (math.nan, math.inf, "1", True):
            with pytest.raises(EndpointFailed, match="must be a finite number"):
                rollout.finish(reward=wrong)  # type: ignore[arg-type]
        assert rollout.finish(reward=0).reward == 0.0


def test_a_rollout_without_a_turn_cannot_be_finished(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        with pytest.raises(EndpointFailed, match="no call of the model was answered") as caught:
            rollout.finish(reward=1.0)
        assert caught.value.status == 409
        trajectory = rollout.cancel()
    assert (trajectory.outcome, trajectory.reward, len(trajectory.token_ids)) == ("cancelled", None, 0)


def test_after_the_end_nothing_is_answered_and_a_second_reward_changes_nothing(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        chat(rollout, "Say yes.")
        assert rollout.finish(reward=1.0).reward == 1.0
        finish = f"{rollout.base_url}/finish"
        assert post(finish, rollout.api_key, {"reward": 1}) == (200, {"status": "finished", "reward": 1.0})
        status, told = post(finish, rollout.api_key, {"reward": 2})
        assert (status, "with reward 1, which stays" in told["error"]["message"]) == (409, True)
        status, told = chat(rollout, "Say yes.")
        assert (status, "has ended" in told["error"]["message"]) == (410, True)
        assert chat(rollout, "Say yes.", key="another")[0] == 401


def test_the_key_of_another_rollout_opens_none(client: RolloutClient, caplog: pytest.LogCaptureFixture) -> None:
    with client.endpoint(job(), idle_s=60) as one, client.endpoint(job()) as other:
        for key in (other.api_key, "", "x" * 5000, "ключ"):
            status, told = chat(one, "Say yes.", key=key.encode().decode("latin-1") or "none")
            assert (status, told["error"]["message"]) == (401, "the call does not show the key of this rollout")
            assert post(f"{one.base_url}/finish", other.api_key, {"reward": 1})[0] == 401
        assert chat(one, "Say yes.")[0] == 200
        assert one.finish(reward=0.5).result.metrics["turns"] == 1
        nowhere = one.base_url.replace(one.job_id, "never-was")
        assert post(f"{nowhere}/chat/completions", one.api_key, {})[0] == 410
    assert one.api_key not in caplog.text


def test_a_silent_program_ends_its_rollout(client: RolloutClient) -> None:
    with client.endpoint(job(), idle_s=0.2) as rollout:
        chat(rollout, "Say yes.")
        trajectory = rollout.trajectory(timeout_s=WAIT_S)
        assert rollout.finish(reward=1.0) is trajectory  # too late
    assert (trajectory.outcome, trajectory.reward, trajectory.error.code) == ("timeout", None, "phase_timeout")
    assert "made no call for 0.2 s" in trajectory.error.message
    assert trajectory.result.metrics["generated_tokens"] > 0  # what it said is kept


def test_a_call_that_is_being_answered_is_not_silence(client: RolloutClient) -> None:
    with client.endpoint(job(), idle_s=0.3) as rollout:
        client.begin_weights(1)  # until their end, engines answer nothing
        caller = threading.Thread(target=chat, args=(rollout, "Say yes."))
        caller.start()
        with pytest.raises(RequestTimeout, match=r"did not end in 0\.6 s"):
            rollout.trajectory(timeout_s=0.6)
        client.cancel_weights(1)
        caller.join(WAIT_S)
        assert rollout.finish(reward=1.0).outcome == "completed"


def test_limits_hold_whatever_the_program_does(client: RolloutClient) -> None:
    with client.endpoint(job(episode=EpisodeLimits(max_turns=1))) as rollout:
        chat(rollout, "Say yes.")
        status, told = chat(rollout, "Say yes.", "yes", "Again.")
        assert (status, "its turns are used up" in told["error"]["message"]) == (400, True)
        trajectory = rollout.finish(reward=1.0)  # the program still reports what it came to
    assert (trajectory.outcome, trajectory.result.stop_reason) == ("completed", "max_turns")
    with client.endpoint(job(limits=PhaseLimits(run_s=0.3))) as rollout:
        trajectory = rollout.trajectory(timeout_s=WAIT_S)
    assert (trajectory.outcome, trajectory.error.message) == ("timeout", "run took longer than its limit of 0.3 s")
    assert trajectory.reward is None


def test_what_is_not_finished_in_the_block_is_cancelled(client: RolloutClient) -> None:
    def fails() -> None:
        with client.endpoint(job(job_id="fails")) as rollout:
            chat(rollout, "Say yes.")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert client.trace("fails").outcome == "cancelled"
    assert client.collect(wait_s=0.0) == []


def test_a_stream_is_cut_off_when_the_rollout_is_cancelled(client: RolloutClient) -> None:
    async def stream(rollout: Endpoint) -> bytes:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Say it slowly."}]}
        request = {"json": body, "headers": {"Authorization": f"Bearer {rollout.api_key}"}}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{rollout.base_url}/chat/completions", **request) as response,
        ):
            return await response.read()

    async def main() -> None:
        with client.endpoint(SLOW) as rollout:
            streaming = asyncio.create_task(stream(rollout))
            await asyncio.to_thread(until, is_generating, "a call at the engine")
            cancelled = await asyncio.to_thread(rollout.cancel)
            assert cancelled.outcome == "cancelled"
            with pytest.raises(aiohttp.ClientError):
                await streaming

    asyncio.run(main())
    until(lambda: not is_generating(), "the end of the generation")


def test_a_program_that_hangs_up_ends_its_call(client: RolloutClient) -> None:
    with client.endpoint(SLOW) as rollout:
        url = urlsplit(rollout.base_url)
        with socket.create_connection((str(url.hostname), int(url.port or 0))) as program:
            body = b'{"model": "m", "messages": [{"role": "user", "content": "Say it slowly."}]}'
            head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {rollout.api_key}\r\n"
            program.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(is_generating, "a call at the engine")
        until(lambda: not is_generating(), "the end of the generation")
        assert chat(rollout, "Say yes.")[0] == 200  # asked again
        result = rollout.finish(reward=1.0).result
    assert (result.metrics["calls_without_reply"], result.metrics["main_turns"]) == (1, 1)


def test_an_engine_that_fails_is_no_reward_of_the_programs(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        assert chat(rollout, "fail")[0] == 400  # the engine refuses this prompt
        with pytest.raises(EndpointFailed, match="no call of the model was answered"):
            rollout.finish(reward=0.0)


def test_a_collect_of_the_same_client_takes_no_rollout_away(client: RolloutClient) -> None:
    with client.endpoint(job()) as rollout:
        chat(rollout, "Say yes.")
        client.submit(job(MATH, job_id="plain"))
        post(f"{rollout.base_url}/finish", rollout.api_key, {"reward": 0.75})
        assert [one.job_id for one in client.stream(timeout_s=WAIT_S)] == ["plain"]
        assert rollout.finish(reward=0.75).reward == 0.75
    assert client.collect(wait_s=0.0) == []


def test_rollouts_wait_for_slots_and_a_wait_has_a_limit(client: RolloutClient) -> None:
    with (
        client.endpoint(job()) as first,
        client.endpoint(job()),
        client.endpoint(job()),
        client.endpoint(job()),
    ):
        with pytest.raises(RequestTimeout, match=r"no RUN process had a free slot .* within 0.3 s"):
            client.endpoint(job(job_id="fifth"), timeout_s=0.3).__enter__()
        until(lambda: client.trace("fifth").outcome == "cancelled", "the end of the fifth")
        chat(first, "Say yes.")
        first.finish(reward=1.0)
        with client.endpoint(job(), timeout_s=WAIT_S) as sixth:
            assert chat(sixth, "Say yes.")[0] == 200


def test_what_no_program_outside_can_lead_is_said(client: RolloutClient) -> None:
    tools = job(MATH, instance={**MATH.instance, "tools": ["ipython"]})
    with pytest.raises(InvalidJob, match=r"gives tools to the policy \(ipython\)"), client.endpoint(tools):
        pass
    with pytest.raises(InvalidJob, match="a harness or has a program outside, not both"):
        client.endpoint(job(MATH, harness="pi")).__enter__()
    client.submit(job(job_id="plain"))
    (plain,) = client.stream(timeout_s=WAIT_S)
    assert (plain.outcome, plain.error.code) == ("failed", "invalid_job")
    assert "client.endpoint(job)" in plain.error.message
    led, _ = with_key(job(MATH), 60.0, ("all",))
    with client.open_batch(1, 2) as batch:
        batch.feed([led])
        with pytest.raises(InvalidJob, match=r"open each with `client\.endpoint`"):
            batch.next_group()
    with pytest.raises(EndpointFailed, match="idle_s"):
        client.endpoint(job(), idle_s=0)
    with pytest.raises(EndpointFailed, match="train_on"):
        client.endpoint(job(), train_on=("everything",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a prorl_zmq\.Job"):
        client.endpoint({"task": "outside"})  # type: ignore[arg-type]


def test_which_calls_are_trained_on_is_chosen(client: RolloutClient) -> None:
    def led(rollout: Endpoint) -> Any:
        chat(rollout, "Say yes.")
        chat(rollout, "Give it a title.")
        return rollout.finish(reward=1.0)

    with client.endpoint(job()) as rollout:
        everything = led(rollout)
    with client.endpoint(job(), train_on=("main",)) as rollout:
        main = led(rollout)
    assert (len(everything.segments()), len(main.segments())) == (2, 1)
    assert main.result.metrics["side_turns"] == 1


def test_a_key_is_known_to_its_client_only() -> None:
    made, key = with_key(OUTSIDE, 60.0, ("all",))
    assert made.outside is not None
    assert (made.max_attempts, made.outside.idle_s, len(made.outside.key_sha256)) == (1, 60.0, 64)
    assert key not in repr(made)
    assert with_key(OUTSIDE, 60.0, ("all",))[1] != key


def test_a_loopback_address_of_another_machine_is_never_asked() -> None:
    span = Span(phase=Phase.RUN, place="held", attempt=1, start_s=0.0, node="gpu-7")
    trace = JobTrace(
        "1", job_id="r", accepted_at=0.0, age_s=1.0, spans=(span,), address="http://127.0.0.1:1/rollouts/r#0"
    )
    with pytest.raises(EndpointFailed, match="rollout r is on node gpu-7, at that machine's loopback address"):
        reached_at(trace)
    assert reached_at(msgspec.structs.replace(trace, address="http://10.0.0.7:1/rollouts/r")).startswith("http://10.")


def test_an_address_that_is_out_of_reach_is_an_os_error() -> None:
    with pytest.raises(OSError, match="refused"):
        ask("GET", "http://127.0.0.1:1/models", "key", None)


def test_a_broker_that_is_restarted_learns_the_address_again() -> None:
    with (
        LocalService(engine=say("yes", "yes")) as service,
        service.client(timeout_s=WAIT_S) as client,
        client.endpoint(job()) as rollout,
    ):
        assert chat(rollout, "Say yes.")[0] == 200
        with pytest.raises(UnknownJob):
            client.trace("never-was")
        assert reached_at(client.trace(rollout.job_id)) == rollout.base_url
        assert rollout.finish(reward=1.0).reward == 1.0
        assert client.trace(rollout.job_id).address == ""


@pytest.mark.proof
def test_256_programs_at_once() -> None:
    """Each asks twice, and none waits for another's end."""

    async def lead(client: AsyncRolloutClient, session: aiohttp.ClientSession, number: int, begun: Any) -> float:
        async with client.endpoint(job(job_id=f"r{number}")) as rollout:
            headers = {"Authorization": f"Bearer {rollout.api_key}"}
            messages = [{"role": "user", "content": f"Number {number}."}]
            for _ in range(2):
                body = {"model": "m", "messages": messages}
                async with session.post(f"{rollout.base_url}/chat/completions", json=body, headers=headers) as response:
                    assert response.status == 200
                    messages += [(await response.json())["choices"][0]["message"], {"role": "user", "content": "?"}]
                await begun.wait()  # all are open at one time
            trajectory = await rollout.finish(reward=number)
            assert trajectory.result.metrics["turns"] == 2
            return float(trajectory.reward or 0.0)

    async def main() -> list[float]:
        begun = asyncio.Barrier(256)
        with LocalService(engine=say(lambda _: "yes"), slots=256) as service:
            async with service.async_client(timeout_s=60) as client, aiohttp.ClientSession() as session:
                return await asyncio.gather(*(lead(client, session, number, begun) for number in range(256)))

    assert asyncio.run(main()) == [float(number) for number in range(256)]
