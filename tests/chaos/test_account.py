"""The accounting of bench/chaos.py: that it would see what it says did not happen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.data.trajectory import Trajectory
from prorl_zmq.wire.messages.jobs import Outcome, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from chaos_account import WINDOW_S, Account, delays, read_account, recoveries, usual_count
from chaos_engine import SABOTAGES
from chaos_jobs import expected_reward, is_saboteurs, job_name, make_job, oddity
from chaos_plan import KILLED, LASTING, Strike, plan_strikes

if TYPE_CHECKING:
    from collections.abc import Sequence


def account(folder: Path, events: Sequence[dict[str, Any]], *, service_still_has: bool = False) -> Account:
    path = folder / "ledger"
    defaults = {"at": 1.0, "pid": 1, "outcome": "completed", "attempt": 1, "code": "", "odd": ""}
    defaults |= {"saboteurs": False, "reward": 0.5, "version": 0}
    path.write_text("\n".join(json.dumps(defaults | event) for event in events) + '\n7\n{"event": {}\n{"event": "resu')
    return read_account(path, service_still_has=service_still_has)


def accepted(*numbers: int) -> list[dict[str, Any]]:
    return [{"event": "accepted", "number": number} for number in numbers]


def result(number: int, **fields: Any) -> dict[str, Any]:
    return {"event": "result", "number": number, **fields}


def test_each_accepted_job_is_ended_or_lost_or_hung(tmp_path: Path) -> None:
    events = [*accepted(1, 2, 3), result(1), {"event": "lost", "number": 2}]
    silent = account(tmp_path, events)
    assert (silent.outcomes["completed"], silent.lost, silent.hung) == (1, {2, 3}, set())
    waiting = account(tmp_path, events, service_still_has=True)
    assert (waiting.outcomes["completed"], waiting.lost, waiting.hung) == (1, {2}, {3})


@pytest.mark.parametrize(
    ("again", "duplicates", "given_again"),
    [
        (result(1), [1], 0),
        (result(1, pid=2), [], 1),
        (result(1, pid=2, outcome="timeout"), [1], 0),
    ],
    ids=["to one trainer", "to its successor", "another outcome"],
)
def test_a_result_that_is_given_twice(
    tmp_path: Path, again: dict[str, Any], duplicates: list[int], given_again: int
) -> None:
    found = account(tmp_path, [*accepted(1), result(1), again])
    assert (found.duplicates, found.given_again, found.outcomes["completed"]) == (duplicates, given_again, 1)


def test_infrastructure_errors_and_restarts_are_counted(tmp_path: Path) -> None:
    events = [
        *accepted(1, 2),
        result(1, outcome="infrastructure_error", code="lease_lost", attempt=3, at=9.0),
        result(2, odd="reward 0.5, not 0.003"),
    ]
    found = account(tmp_path, events)
    assert found.infrastructure == {"lease_lost": 1}
    assert found.restarted == [(1.0, 9.0)]
    assert found.fabricated == {2: "reward 0.5, not 0.003"}


@pytest.mark.parametrize(
    ("fields", "escapes"),
    [
        ({"reward": 0.0}, 0),
        ({"outcome": "failed", "code": "sandbox_broken", "reward": 0.0}, 0),
        ({"outcome": "infrastructure_error", "code": "handler_failed", "reward": None}, 1),
        ({"outcome": "timeout", "reward": None}, 1),
        ({"reward": 1.0}, 1),
    ],
)
def test_a_saboteur_that_does_not_earn_0_has_escaped(tmp_path: Path, fields: dict[str, Any], escapes: int) -> None:
    found = account(tmp_path, [*accepted(10), result(10, saboteurs=True, **fields)])
    assert (len(found.escapes), found.sabotages.total(), found.outcomes.total()) == (escapes, 1, 0)
    assert not account(tmp_path, [*accepted(11), result(11, **fields)]).escapes


def test_tokens_of_older_weights_than_announced_are_found(tmp_path: Path) -> None:
    events = [
        {"event": "intent", "number": 1},
        {"event": "weights", "version": 4},
        {"event": "update", "version": 5},
        {"event": "intent", "number": 2},
        {"event": "intent", "number": 3},
        {"event": "no update", "version": 5, "code": "engine_failed"},
        *accepted(1, 2, 3),
        result(1, version=3),
        result(2, version=3),
        result(3, version=4),
    ]
    found = account(tmp_path, events)
    assert list(found.outdated) == [2]
    assert (found.updates, found.refused_updates) == (1, {"engine_failed": 1})


@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_reward_that_the_job_cannot_have_earned_is_odd(number: int, outcome: Outcome) -> None:
    def trajectory(reward: float | None) -> Trajectory:
        job = make_job(1, number)
        header = Result(job_id=job.job_id, task=job.task, outcome=outcome, reward=reward)
        return Trajectory.from_frame(header, b"")

    assert oddity(1, number, trajectory(0.5))
    if outcome == Outcome.COMPLETED:
        assert oddity(1, number, trajectory(None))
        assert "arrays" in oddity(1, number, trajectory(expected_reward(number)))  # a reward for no conversation
    else:
        assert not oddity(1, number, trajectory(None))
        assert oddity(1, number, trajectory(0.0))


def test_jobs_have_different_rewards_and_are_the_same_again() -> None:
    shells = [number for number in range(900) if make_job(1, number).task == "shell"]
    assert len({expected_reward(number) for number in shells}) == len(shells) == 600
    saboteurs = {
        make_job(1, number).instance["instruction"].partition(":")[2] for number in range(900) if is_saboteurs(number)
    }
    assert len(saboteurs) == len(SABOTAGES)
    assert not any(
        "sabotage" in make_job(1, number, saboteurs=False).instance.get("instruction", "") for number in shells
    )
    assert make_job(1, 7) == make_job(1, 7)
    assert make_job(1, 7).job_id == job_name(1, 7) != job_name(2, 7)


def test_recovery_is_the_time_until_the_rate_is_back() -> None:
    ended = [index / 10 for index in range(1000) if not 300 <= index < 350]  # 10 a second, and none for 5 s
    strikes = [Strike(30.0, "kill", "run", 0.0, began=30.0, lifted=30.0)]
    usual = usual_count(ended, 0.0, 100.0, strikes)
    assert usual == pytest.approx(10 * WINDOW_S, abs=1)
    (seconds,) = recoveries(ended, strikes, usual, 100.0)
    assert seconds == pytest.approx(5.0)


def test_what_is_alone_and_stands_still_recovers_from_when_it_goes_on() -> None:
    ended = [index / 10 for index in range(1000) if not 300 <= index < 420]
    strike = Strike(30.0, "stop", "rollout broker", 0.0, began=30.0, lifted=42.0)
    assert recoveries(ended, [strike], 10 * WINDOW_S, 100.0) == [0.0]
    assert recoveries(ended, [Strike(30.0, "stop", "run", 0.0, began=30.0, lifted=42.0)], 10 * WINDOW_S, 100.0) != [0.0]


def test_a_job_that_was_started_again_waits_from_the_first_strike_in_its_life() -> None:
    strikes = [Strike(0.0, "kill", "run", 0.0, began=at) for at in (5.0, 10.0, 20.0)]
    assert delays([(7.0, 22.0), (1.0, 6.0), (21.0, 30.0)], strikes) == [12.0, 1.0]


def test_a_plan_comes_from_its_seed_and_strikes_every_kind_of_process() -> None:
    strikes = plan_strikes(3, 10.0)
    assert strikes == plan_strikes(3, 10.0) != plan_strikes(4, 10.0)
    killed = [strike.victim for strike in strikes if strike.kind == "kill"]
    assert len(killed) >= 60
    assert {*killed} == {*KILLED}
    assert {(strike.kind, strike.victim) for strike in strikes if strike.kind != "kill"} == {*LASTING}
    assert strikes[-1].at_s < 600
