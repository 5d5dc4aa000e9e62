from __future__ import annotations

import pytest
from finished_groups import chat

from prorl_zmq import Group, Job
from prorl_zmq.errors import ConfigError, NotTrainable, RequestTimeout
from prorl_zmq.integrations import session
from prorl_zmq.integrations.session import Counts, Outage, Places, check_too_long, load_function, response_room
from prorl_zmq.wire.messages.batches import BatchReport, GivenUpGroup


def job(name: str) -> Job:
    return Job(task="math", instance={}, job_id=name)


def group(prompt_id: str) -> Group:
    return Group(f"group of {prompt_id}", prompt_id, (chat([1], [2]),))


def given_up(*failures: str) -> BatchReport:
    groups = [GivenUpGroup("p", {failure: 2}) for failure in failures]
    return BatchReport(given_up=tuple(groups))


class TestPlaces:
    def test_groups_are_in_the_order_of_the_places(self) -> None:
        places = Places([job("a"), job("b"), job("c")])
        for name in "cab":
            places.add(group(name))
        assert places.filled(None)
        assert [one.prompt_id for one in places.groups] == ["a", "b", "c"]
        assert places.replaced == 0

    def test_another_prompt_takes_the_place_of_one_without_a_group(self) -> None:
        spares = [job("y"), job("x")]
        places = Places([job("a"), job("b")], spares.pop)
        places.add(group("b"))
        assert not places.filled(given_up("timeout"))
        assert [one.job_id for one in places.wanted] == ["x"]
        assert not places.filled(given_up("timeout"))
        places.add(group("y"))
        assert places.filled(BatchReport())
        assert [one.prompt_id for one in places.groups] == ["y", "b"]
        assert places.replaced == 2

    def test_no_place_is_tried_without_end(self) -> None:
        places = Places([job("a"), job("b")], lambda: job("spare"))
        places.add(group("b"))
        for _ in range(session.ROUNDS - 1):
            assert not places.filled(None)
        with pytest.raises(NotTrainable, match=r"1 of 2 prompts could not be rolled out \(timeout 2 times\)") as error:
            places.filled(given_up("timeout"))
        assert error.value.fields["prompts"] == "spare"

    def test_without_a_spare_a_missing_group_is_an_error_at_once(self) -> None:
        with pytest.raises(NotTrainable, match="no reason was given"):
            Places([job("a")]).filled(None)


def test_an_outage_is_waited_for_until_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(session.time, "monotonic", lambda: now)
    outage, error = Outage(10.0), RequestTimeout("no answer")
    assert outage.pause_s(error) == session.PAUSE_S
    now = 110.0
    assert outage.pause_s(error) == session.PAUSE_S
    outage.end()
    now = 130.0
    assert outage.pause_s(error) == session.PAUSE_S, "it has answered meanwhile"
    now = 140.1
    with pytest.raises(RequestTimeout):
        outage.pause_s(error)


def test_counts_begin_anew_when_they_are_taken() -> None:
    counts = Counts()
    counts.count("dropped")
    counts.count("rows", 3)
    assert counts.take_metrics() == {"rollouts/dropped_total": 1.0, "rollouts/rows_total": 3.0}
    assert counts.take_metrics() == {}


def test_rollouts_that_are_too_long() -> None:
    assert [response_room(9, most, "drop") for most in (None, 9, 8)] == [9, 9, 0]
    assert [response_room(9, most, "truncate") for most in (None, 9, 8, -1)] == [9, 9, 8, 0]
    with pytest.raises(ConfigError, match="not 'cut'"):
        check_too_long("cut")


def test_a_function_that_cannot_be_imported_is_named() -> None:
    assert load_function("json.dumps") is __import__("json").dumps
    for path in ("json.nothing", "nothing.at_all", "nothing"):
        with pytest.raises(ConfigError, match=f"there is no {path}"):
            load_function(path)
