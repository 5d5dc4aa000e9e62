"""Tinker's own sampling client on the models of a whole service, through a gateway."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from documents import PAGES, ROOT
from needed import lacking
from support.rescoring import exact_logprobs, teacher_policy
from support.waiting import until_async

from prorl_zmq.data.scores import Scores
from prorl_zmq.errors import Busy
from prorl_zmq.gateway import tinker_api
from prorl_zmq.gateway.endpoint import Call
from prorl_zmq.gateway.samples import Served
from prorl_zmq.gateway.tinker_api import NewSamplingSession, TinkerApi
from prorl_zmq.gateway.tinker_bodies import NewSample, TargetLogprobs, read_sample
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.tokenizer import IM_END
from prorl_zmq.model_proxy.calls import CallRefused
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.security.rights import Sender
from prorl_zmq.testing import LocalService, say
from prorl_zmq.testing.scripted_engine import tokens_of
from prorl_zmq.wire.messages.base import KeyRole

from .conftest import Http, gateway_of, http, noted_ends, two_models

TALK = Path(__file__).parents[1] / "tinker_talk.py"
TALK_S = 120.0
CLOSE = 1e-4
(EXAMPLE,) = re.findall(r"```python\n(import tinker.*?)```", PAGES[ROOT / "docs" / "gateway.md"], re.DOTALL)


def test_the_official_client_samples_from_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("tinker") is None:
        lacking("tinker", "tinker is not installed; see make trainers")
    engine = say(lambda _: "yes")
    ends = noted_ends(engine, monkeypatch)
    alice = KeyFolder(tmp_path / "keys").new_bearer("alice", KeyRole.TRAINER)

    async def main() -> dict[str, Any]:
        async with gateway_of(service, tmp_path, keys=tmp_path / "keys") as url:
            shown = EXAMPLE.replace("http://127.0.0.1:8080", url).replace("TOKEN", alice)
            words = [sys.executable, str(TALK), url, alice, shown]
            talk = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            said, complained = await asyncio.wait_for(talk.communicate(), TALK_S)
            assert talk.returncode == 0, complained.decode()
            told: dict[str, Any] = json.loads(said)
            return told

    models = {"teacher": say(lambda _: "no"), "scorer": EmbeddedEngine(teacher_policy(), 5)}
    with LocalService(engine=engine, models=models) as service:
        told = asyncio.run(main())
    yes, no = tokens_of("yes"), tokens_of("no")
    assert told["example"] == [yes] * 4
    assert told["models"] == ["policy", "scorer", "teacher"]
    assert len({one["id"] for one in told["two"]}) == 2
    for one in told["two"]:
        assert (one["tokens"], one["stop"]) == (yes, "stop")
        assert one["logprobs"] == pytest.approx([-(1 + token) / 1000 for token in yes])
    (short,) = told["short"]
    assert (short["tokens"], short["stop"]) == (yes[:2], "length")
    assert [told[name][0]["tokens"] for name in ("teacher", "by engine")] == [no, yes]
    assert told["many"] == [yes, no] * 100
    assert set(ends) == {(IM_END,), (), (7,)}  # None keeps what ends a turn, and [] does not
    assert [one[0]["tokens"] for one in told["stops"]] == [yes, yes, yes, yes[:2]]
    for name, error, words in (
        ("unknown", "NotFoundError", "there are: policy, scorer, teacher"),
        ("version", "NotFoundError", "`policy@3` is not served now; there are: policy@0"),
        ("scoring", "BadRequestError", "do not give log-probs of a prompt"),
        ("wrong id", "RequestFailedError", "outside of 0 to 512"),
    ):
        assert told[name][0] == error
        assert words in told[name][1]
    assert told["current version"][0]["tokens"] == yes
    check_scores(told["scores"])


def check_scores(told: dict[str, Any]) -> None:
    """Check the log-probs of the talk by a rescoring in float64."""
    text, count = told["text"], len(told["text"])
    exact = exact_logprobs(teacher_policy(), np.array(text, np.int32))
    own = exact[np.arange(count - 1), text[1:]]
    assert told["computed"] == told["prompt"]
    assert told["computed"] == [None, *(pytest.approx(one, abs=CLOSE) for one in own)]
    assert told["last two"] == [*[None] * (count - 2), *told["computed"][-2:]]
    check_likely(told["top of the prompt"], 1, exact)
    check_likely(told["top of the last two"], count - 2, exact[-2:])
    for tokens, logprobs, likely in told["replies"]:
        after = exact_logprobs(teacher_policy(), np.array([*text, *tokens], np.int32))[count - 1 :]
        np.testing.assert_allclose(logprobs, after[np.arange(len(tokens)), tokens], atol=CLOSE)
        check_likely(likely, 0, after)
    for at, (ids, values) in enumerate(zip(told["cells"], told["targets"], strict=True)):
        assert ids[0] == -1
        assert values == [0.0, pytest.approx(exact[at, ids[1]], abs=CLOSE)]
    assert told["targets only"] is None
    expected = [exact[0, text[1]], exact[0, 200], exact[1, text[3]]]
    data, shape, rows, columns = told["sparse"]
    np.testing.assert_allclose(data, expected, atol=CLOSE)
    assert (shape, rows, columns) == ([count - 1, 500], [0, 2, *[3] * (count - 2)], [0, 499, 7])
    for name, words in (
        ("too many targets", "at most 64 may be"),
        ("wrong rows", "has 19 rows, not 1"),
        ("wrong last", "must be 1 to 19"),
        ("alternatives", "prompt_alt_tokens_k is not supported"),
    ):
        assert words in told[name][1]


def check_likely(rows: list[Any], empty: int, exact: Any) -> None:
    """Check the likeliest tokens of positions, of which the first ones have none."""
    assert rows[:empty] == [None] * empty
    assert len(rows) == empty + len(exact)
    for row, each in zip(rows[empty:], exact, strict=True):
        likeliest = np.sort(-each)[: len(row)]
        np.testing.assert_allclose([logprob for _, logprob in row], -likeliest, atol=CLOSE)
        np.testing.assert_allclose([each[token] for token, _ in row], -likeliest, atol=CLOSE)


async def retrieved(client: Http, request_id: str) -> bytes:
    async with client.session.post("/api/v1/retrieve_future", json={"request_id": request_id}) as answer:
        assert answer.headers["Content-Type"] == "application/x-protobuf"
        data: bytes = await answer.read()
        return data


def test_a_repeated_request_gets_the_same_replies(tmp_path: Path) -> None:
    turns = iter(range(100))

    async def main() -> None:
        async with gateway_of(service, tmp_path) as url, http(url) as client:
            _, made = await client.post("/api/v1/create_session", {})
            session = {"session_id": made["session_id"], "sampling_session_seq_id": 0, "base_model": "policy"}
            ids = [(await client.post("/api/v1/create_sampling_session", session))[1] for _ in range(2)]
            assert ids[0] == ids[1]
            sampling = {"sampling_session_id": ids[0]["sampling_session_id"], "sampling_params": {"max_tokens": 8}}
            asks = {**sampling, "seq_id": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}}
            promises = [(await client.post("/api/v1/asample", asks))[1] for _ in range(3)]
            assert promises[0] == promises[1] == promises[2]
            replies = [await retrieved(client, promises[0]["request_id"]) for _ in range(2)]
            assert replies[0] == replies[1]
            _, another = await client.post("/api/v1/asample", {**asks, "seq_id": 2})
            assert await retrieved(client, another["request_id"]) != replies[0]
            assert (await client.post("/api/v1/retrieve_future", {"request_id": "f" * 32}))[0] == 410

    with LocalService(engine=say(lambda _: f"{next(turns)}")) as service:
        asyncio.run(main())
    assert next(turns) == 2


def test_a_prompt_of_one_token_has_nothing_to_score(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_of(service, tmp_path) as url, http(url) as client:
            asks = {
                "sampling_session_id": "s:0:policy",
                "prompt": {"chunks": [{"tokens": [5]}]},
                "prompt_logprobs": True,
            }
            empty = {"data": [], "shape": [0, 3]}
            for number, more in enumerate(({}, {"sparse_crow_indices": [0], "sparse_col_indices": []})):
                wanted = {
                    "prompt_logprobs": True,
                    "target_prompt_logprobs": {**empty, **more},
                    "sampling_params": {"max_tokens": 1},
                }
                _, promise = await client.post("/api/v1/asample", {**asks, **wanted, "seq_id": number})
                reply = await retrieved(client, promise["request_id"])
                assert b"\x12\x04" + np.float32("nan").tobytes() in reply  # prompt_logprobs, of the first token

    with LocalService(engine=EmbeddedEngine(base_policy())) as service:
        asyncio.run(main())


def test_a_client_waits_for_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.gateway.samples.BACKEND_WAIT_S", 0.1)
    monkeypatch.setattr("prorl_zmq.gateway.tinker_api.LOOK_S", 0.5)

    async def main() -> None:
        async with gateway_of(service, tmp_path) as url, http(url) as client:
            asks = {"sampling_session_id": "s:0:policy", "seq_id": 1, "sampling_params": {"max_tokens": 8}}
            _, promise = await client.post("/api/v1/asample", {**asks, "prompt": {"chunks": [{"tokens": [5]}]}})
            while (told := (await client.post("/api/v1/retrieve_future", promise))[1])["queue_state"] == "active":
                assert told["type"] == "try_again"
            assert told["queue_state"] == "paused_capacity"
            assert "backend" in told["queue_state_reason"]

    with LocalService() as service:
        asyncio.run(main())


def test_targets_are_looked_up_in_parts_and_scored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.gateway.tinker_bodies.AT_ONCE", 2)
    prompt = np.array([5, 6, 7, 8], np.int32)
    targets = {"data": [6, 50, -1, 9, 8], "shape": [3, 9], "sparse_crow_indices": [0, 2, 4, 5]}
    asks = {
        "sampling_session_id": "s:0:policy",
        "seq_id": 1,
        "prompt": {"chunks": [{"tokens": prompt.tolist()}]},
        "sampling_params": {},
        "target_prompt_logprobs": {**targets, "sparse_col_indices": [0, 1, 0, 1, 0]},
    }
    wanted = read_sample(msgspec.convert(asks, NewSample), "policy")
    top_ids = np.array([[-1], [50], [1], [1]], np.int32)
    top_logprobs = np.array([[0], [-0.5], [-0.25], [-0.125]], np.float32)
    scores = Scores(np.array([0, -1, -2, -3], np.float32), top_ids, top_logprobs)
    found = TargetLogprobs(wanted, prompt, scores)
    assert [text.tolist() for text in found.texts] == [[5, 6, 9]]
    found.add([Scores(np.array([0, -1, -7], np.float32), np.zeros((3, 0), np.int32), np.zeros((3, 0), np.float32))])
    assert found.values.tolist() == [-1, -0.5, 0, -7, -3]


def test_a_request_for_no_tokens_is_refused() -> None:
    asks = {"sampling_session_id": "s:0:policy", "seq_id": 1, "prompt": {"chunks": [{"tokens": [5]}]}}
    with pytest.raises(CallRefused, match="max_tokens"):
        read_sample(msgspec.convert({**asks, "sampling_params": {"max_tokens": 0}}, NewSample), "policy")


class Silent:
    """Samples that never come."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    async def check(self, asked: Any) -> None:
        await asyncio.sleep(0)

    async def have_ended(self) -> bool:
        return self.ended > 0

    async def run_all(self, sender: Sender, asked: Any) -> Any:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


def asking(owner: str, seq_id: int, **more: Any) -> Call:
    body = {
        "sampling_session_id": "s:0:policy",
        "seq_id": seq_id,
        "sampling_params": {"max_tokens": 8},
        "prompt": {"chunks": [{"tokens": [5]}]},
        **more,
    }
    return Call(Sender(name=owner), msgspec.convert(body, NewSample), {}, None, False, "", "")


def test_a_token_has_its_own_share_of_the_open_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_api, "OWN_OPEN_LIMIT", 3)
    monkeypatch.setattr(tinker_api, "LOAD_LIMIT", 2 * tinker_api.REPLY_LOAD)

    async def main() -> None:
        api = TinkerApi(cast("Any", Silent()))
        await api.asample(asking("alice", 1, num_samples=4))  # one request always has room
        with pytest.raises(Busy, match="this token has 1 open requests"):
            await api.asample(asking("alice", 2))
        for number in range(2):
            await api.asample(asking("bob", number))
        with pytest.raises(Busy, match="this token has 2 open requests"):
            await api.asample(asking("bob", 2))
        monkeypatch.setattr(tinker_api, "LOAD_LIMIT", 2**26)
        await api.asample(asking("bob", 2))
        with pytest.raises(Busy, match="this token has 3 open requests"):
            await api.asample(asking("bob", 3))
        await api.close()

    asyncio.run(main())


def test_replies_that_may_be_too_large_are_refused_before_they_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_api, "KEPT_BYTES", 100)
    samples = Silent()

    async def main() -> None:
        api = TinkerApi(cast("Any", samples))
        refused: Any = await api.asample(asking("alice", 1, num_samples=2))
        assert refused.status == 400
        assert b"16 tokens of replies have 128 bytes of log-probs (limit: 100)" in refused.body
        assert samples.begun == 0
        await api.close()

    asyncio.run(main())


def test_a_tokens_replies_are_dropped_for_its_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_api, "KEPT_LIMIT", 3)
    monkeypatch.setattr(tinker_api, "KEPT_BYTES", 100)
    sizes = iter([1, 1, 1, 1, 60, 60, 200, 1])

    async def reply(*_: Any) -> bytes:
        return bytes(next(sizes))

    async def main() -> None:
        api = TinkerApi(cast("Any", Silent()))
        monkeypatch.setattr(api, "_reply", reply)

        async def ask(owner: str, number: int) -> Any:
            promise: Any = await api.asample(asking(owner, number))
            await asyncio.wait({api._requests[promise.request_id].task})
            return Call(Sender(name=owner), promise, {}, None, False, "", "")

        async def statuses(calls: list[Any]) -> list[int]:
            answers: list[Any] = [await api.retrieve_future(call) for call in calls]
            return [one.status for one in answers]

        others = await ask("bob", 0)
        mine = [await ask("alice", number) for number in range(3)]
        assert await statuses(mine) == [200, 200, 200]
        mine += [await ask("alice", 3)]
        assert await statuses(mine) == [410, 200, 200, 200]  # too many
        mine += [await ask("alice", 4)]
        assert await statuses(mine) == [410, 410, 410, 410, 200]  # too many bytes
        mine += [await ask("alice", 5)]
        assert await statuses(mine) == [410] * 5 + [200]  # the latest, even if it is too large
        assert await statuses([others]) == [200]
        monkeypatch.setattr(tinker_api, "FETCHED_S", 0.0)
        await ask("alice", 6)
        assert await statuses([others, mine[-1]]) == [410, 410]
        await api.close()

    asyncio.run(main())


def test_the_replies_of_all_tokens_have_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_api, "ALL_KEPT_BYTES", 100)

    async def reply(*_: Any) -> bytes:
        return bytes(60)

    async def main() -> None:
        api = TinkerApi(cast("Any", Silent()))
        monkeypatch.setattr(api, "_reply", reply)
        for number, owner in enumerate(("alice", "bob", "carol")):
            promise: Any = await api.asample(asking(owner, number))
            await asyncio.wait({api._requests[promise.request_id].task})
        assert [one.owner for one in api._requests.values()] == ["bob", "carol"]
        await api.close()

    asyncio.run(main())


@pytest.mark.parametrize("fetches", [True, False])
def test_a_reply_is_dropped_in_time_without_another_request(monkeypatch: pytest.MonkeyPatch, *, fetches: bool) -> None:
    async def reply(*_: Any) -> bytes:
        return b"reply"

    async def main() -> None:
        api = TinkerApi(cast("Any", Silent()))
        monkeypatch.setattr(api, "_reply", reply)
        if not fetches:
            monkeypatch.setattr(tinker_api, "FETCHED_S", 0.0)
        promise: Any = await api.asample(asking("alice", 1))
        await asyncio.wait({api._requests[promise.request_id].task})
        if fetches:
            monkeypatch.setattr(tinker_api, "FETCHED_S", 0.0)
            reply_: Any = await api.retrieve_future(Call(Sender(name="alice"), promise, {}, None, False, "", ""))
            assert reply_.status == 200

        async def is_dropped() -> bool:
            return not api._requests

        await until_async(is_dropped, "the end of the reply")
        await api.close()

    asyncio.run(main())


def test_the_same_request_at_the_same_time_is_one() -> None:
    samples = Silent()

    async def main() -> None:
        api = TinkerApi(cast("Any", samples))
        first, second = await asyncio.gather(*(api.asample(asking("alice", 1)) for _ in range(2)))
        assert first is second
        await asyncio.sleep(0)
        await api.close()
        assert len(api._requests) == 1

    asyncio.run(main())


def test_a_request_that_no_client_asks_for_is_dropped_with_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_api, "ABANDONED_S", 0.1)
    samples = Silent()

    async def main() -> None:
        api = TinkerApi(cast("Any", samples))
        promise: Any = await api.asample(asking("alice", 1))
        await until_async(samples.have_ended, "the end of the samples")
        assert samples.begun == 1
        asked = Call(Sender(name="alice"), promise, {}, None, False, "", "")
        answered: Any = await api.retrieve_future(asked)
        assert answered.status == 410
        await api.close()

    asyncio.run(main())


def test_a_token_sees_its_own_requests_only(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    alice, bob = (folder.new_bearer(name, KeyRole.TRAINER) for name in ("alice", "bob"))

    async def main() -> None:
        async with gateway_of(service, tmp_path, keys=tmp_path / "keys") as url, http(url) as client:
            asks = {"sampling_session_id": "s:0:policy", "seq_id": 1, "sampling_params": {"max_tokens": 8}}
            body = {**asks, "prompt": {"chunks": [{"tokens": [5]}]}}
            assert (await client.post("/api/v1/asample", body))[0] == 401
            mine, other = ({"X-API-Key": f"tml-{token}"} for token in (alice, bob))
            status, promise = await client.post("/api/v1/asample", body, headers=mine)
            assert status == 200
            assert (await client.post("/api/v1/retrieve_future", promise, headers=other))[0] == 410
            _, twin = await client.post("/api/v1/asample", body, headers=other)
            assert twin["request_id"] != promise["request_id"]

    with two_models() as service:
        asyncio.run(main())


def test_an_engines_name_is_no_adapter_and_only_one_model(tmp_path: Path) -> None:
    """Of several models whose engines have the name, only `policy` is meant without being named."""

    async def main(names: tuple[str, ...]) -> list[tuple[int, str]]:
        async with gateway_of(service, tmp_path) as url, http(url) as client:
            body = {"session_id": "s", "sampling_session_seq_id": 0}
            path = "/api/v1/create_sampling_session"
            answers = [await client.post(path, {**body, "base_model": name}) for name in names]
            return [(status, said.get("sampling_session_id", said.get("error"))) for status, said in answers]

    with two_models() as service:
        assert asyncio.run(main(("scripted",))) == [(200, "s:0:policy")]
    with LocalService(models={"b": say(lambda _: "b"), "a": say(lambda _: "a")}) as service:
        several, named = asyncio.run(main(("scripted", "b")))
    assert several == (400, "scripted is the engine's name of a, b: give one of these names")
    assert named == (200, "s:0:b")

    class WithAdapter(Silent):
        async def models(self) -> dict[str, Served]:
            return {"a": Served(engine="qwen", is_adapter=True), "base": Served(engine="qwen")}

    async def of_base() -> Any:
        asked = NewSamplingSession("s", 0, base_model="qwen")
        call = Call(Sender(name="alice"), asked, {}, None, False, "", "")
        return await TinkerApi(cast("Any", WithAdapter())).create_sampling_session(call)

    assert asyncio.run(of_base())["sampling_session_id"] == "s:0:base"
