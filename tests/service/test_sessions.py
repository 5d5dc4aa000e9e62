"""Sessions of a whole service: what a client leaves behind that is killed, and `prorl sessions`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.commands import complaint, prorl
from support.waiting import until

import prorl_zmq.client.blocking.client as client_module
from prorl_zmq.errors import SessionEnded

from .conftest import busy_slots, scripted

if TYPE_CHECKING:
    from prorl_zmq.testing import LocalService


def listed(service: LocalService) -> dict[str, dict[str, object]]:
    done = prorl("sessions", "list", "--json", "--connect", service.front_door)
    return {row["session"]: row for row in json.loads(done.stdout)["sessions"]}


def test_a_nameless_session_ends_with_its_client_and_not_before(
    shared_service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "NAMELESS_S", 2.0)
    killed, alive = shared_service.client(), shared_service.client()
    with alive, killed:
        alive.submit(scripted(run="sleep"))
        killed.submit(scripted(run="sleep"))
        assert killed._keep_alive is not None
        killed._keep_alive.close()  # as its process would, without a word
        until(lambda: killed.session not in listed(shared_service), "the silent session to be ended")
        until(lambda: busy_slots(shared_service) == 1, "its job to be stopped")
        assert listed(shared_service)[alive.session]["lease_s"] == 2.0
        with pytest.raises(SessionEnded, match="was silent for 2 s"):
            killed.collect(wait_s=0.0)
        done = prorl("sessions", "end", alive.session, "--connect", shared_service.front_door)
        assert done.stdout == f"{alive.session}: 1 jobs cancelled, 0 results dropped, 0 batches closed\n"


def test_an_operator_ends_a_session(shared_service: LocalService) -> None:
    with shared_service.client(session="mine") as client:
        client.submit([scripted(run="sleep"), scripted()])
        until(lambda: listed(shared_service)["mine"]["results"] == 1, "one to end")
        assert (listed(shared_service)["mine"]["running"], listed(shared_service)["mine"]["lease_s"]) == (1, None)
        assert " mine " in prorl("sessions", "list", "--connect", shared_service.front_door).stdout
        done = prorl("sessions", "end", "mine", "--json", "--connect", shared_service.front_door)
        assert json.loads(done.stdout) == {"session": "mine", "jobs": 1, "results": 1, "batches": 0}
        assert "mine" not in listed(shared_service)
        with shared_service.client(session="mine") as another:
            another.submit(scripted())
            assert [one.outcome for one in another.stream(timeout_s=20)] == ["completed"]
            assert "mine" not in listed(shared_service)  # it lives, and holds nothing


def test_a_session_that_is_ended_ends_the_wait_for_its_batch(shared_service: LocalService) -> None:
    def end() -> None:
        until(lambda: listed(shared_service)["trainer"]["batches"] == 1, "its batch to be open")
        prorl("sessions", "end", "trainer", "--connect", shared_service.front_door)

    with shared_service.client(session="trainer") as client, ThreadPoolExecutor() as pool:
        batch = client.open_batch(1, 2, keep="all")
        batch.feed([scripted(run="sleep")])
        ending = pool.submit(end)
        with pytest.raises(SessionEnded, match="an operator has ended it"):
            next(iter(batch))
        ending.result()


def test_a_name_that_no_session_has_is_refused(shared_service: LocalService) -> None:
    door = ("--connect", shared_service.front_door)
    assert "session typo holds nothing here" in complaint(prorl("sessions", "end", "typo", *door))
    assert "is not a name of a session" in complaint(prorl("sessions", "end", "no name", *door))
