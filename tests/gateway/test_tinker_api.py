"""Tinker's own sampling client on the models of a whole service, through a gateway."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import PAGES, ROOT
from needed import lacking

from prorl_zmq.inference.tokenizer import IM_END
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.testing import LocalService, say
from prorl_zmq.testing.scripted_engine import tokens_of
from prorl_zmq.wire.messages.base import KeyRole

from .conftest import http
from .test_openai_api import gateway_of, two_models

TALK = Path(__file__).parents[1] / "tinker_talk.py"
TALK_S = 120.0
(EXAMPLE,) = re.findall(r"```python\n(import tinker.*?)```", PAGES[ROOT / "docs" / "gateway.md"], re.DOTALL)


def test_the_official_client_samples_from_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("tinker") is None:
        lacking("tinker", "tinker is not installed; see make trainers")
    engine = say(lambda _: "yes")
    ends: list[tuple[int, ...]] = []
    generate = engine.generate

    async def noted(ids: Any, sampling: Any, stop_token_ids: Any, job_id: str) -> Any:
        ends.append(tuple(stop_token_ids))
        return await generate(ids, sampling, stop_token_ids, job_id)

    monkeypatch.setattr(engine, "generate", noted)
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

    with LocalService(engine=engine, models={"teacher": say(lambda _: "no")}) as service:
        told = asyncio.run(main())
    yes, no = tokens_of("yes"), tokens_of("no")
    assert told["example"] == [yes] * 4
    assert told["models"] == ["policy", "teacher"]
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
        ("unknown", "NotFoundError", "there are: policy, teacher"),
        ("version", "BadRequestError", "names a version"),
        ("scoring", "BadRequestError", "the log-probs of prompts"),
        ("wrong id", "RequestFailedError", "outside of 0 to 512"),
    ):
        assert told[name][0] == error
        assert words in told[name][1]


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

    async def retrieved(client: Any, request_id: str) -> bytes:
        async with client.session.post("/api/v1/retrieve_future", json={"request_id": request_id}) as answer:
            assert answer.headers["Content-Type"] == "application/x-protobuf"
            data: bytes = await answer.read()
            return data

    with LocalService(engine=say(lambda _: f"{next(turns)}")) as service:
        asyncio.run(main())
    assert next(turns) == 2


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
