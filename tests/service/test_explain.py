"""`prorl explain` on real services whose bottleneck is known: a short form of bench/explain.py, and what runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prorl_zmq import AsyncRolloutClient, RolloutClient
from prorl_zmq.commands.app import run
from prorl_zmq.errors import RequestTimeout
from prorl_zmq.evaluation.recorded_run import read_recorded
from prorl_zmq.service.rollout_brokers import RolloutBrokers
from prorl_zmq.watching import recorded_jobs
from prorl_zmq.wire.messages.jobs import Phase

from .conftest import until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from explain import explained
from explain_scenarios import ONE, SCENARIOS, layout, same
from explain_service import Feed, StagedService

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = (
    "engines are not ready",
    "one backend of two is slow",
    "one task of two has a slow EVAL",
)


@pytest.fixture(scope="module")
def staged() -> Iterator[StagedService]:
    with StagedService(ONE) as service:
        yield service


def asked(service: StagedService, capsys: pytest.CaptureFixture[str], *what: str) -> dict[str, object]:
    """Ask with `--json`."""
    capsys.readouterr()
    assert run("prorl", ["explain", *what, "--json", "--connect", service.front_door]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("name", SHORT)
def test_what_bounded_a_run_is_named(name: str, staged: StagedService, tmp_path: Path) -> None:
    (scenario,) = (one for one in SCENARIOS if one.name == name)
    ((_, explanation),) = explained([scenario], tmp_path, staged)
    assert scenario.is_named(explanation), " ".join(explanation.sentences)


@pytest.mark.proof
@pytest.mark.timeout(400)
def test_what_bounded_a_run_is_named_in_all_of_them(tmp_path: Path) -> None:
    missed = [
        f"{scenario.name}: {' '.join(explanation.sentences)}"
        for scenario, explanation in explained(SCENARIOS, tmp_path)
        if not scenario.is_named(explanation)
    ]
    assert len(SCENARIOS) >= 20
    assert missed == []


def test_a_job_and_the_newest_work_of_a_running_service(
    staged: StagedService, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_jobs, "IDLE_S", 0.0)  # all of the tests before this one has ended
    jobs = same(14, tools={"search": 0.05}, engine_s=0.02)
    (slow,) = same(1, tools={"search": 2.0})
    staged.run([*jobs, slow], Feed(), tmp_path / "run")

    newest = asked(staged, capsys)
    assert newest["finding"]["kind"] == "straggler"
    assert newest["finding"]["job_ids"] == [slow.job_id]

    one = asked(staged, capsys, slow.job_id[:20])
    assert (one["job_id"], one["part"]) == (slow.job_id, "tool.search")
    assert one["peers"] >= 14
    assert "Its longest step was tool search in turn 1" in one["sentences"][2]

    with RolloutClient(staged.front_door) as client:
        result, trajectory = client.views.peek(slow.job_id)
        assert trajectory is not None
        assert client.views.result(slow.job_id) == result

    assert run("prorl", ["explain", slow.job_id, "--connect", staged.front_door]) == 0
    shown = capsys.readouterr().out
    assert "more went into tool search" in " ".join(shown.split())

    assert run("prorl", ["explain", "nothing", "--connect", staged.front_door]) == 2
    assert "nothing is no folder and no open batch, and no job nothing" in capsys.readouterr().err


def test_an_open_batch_says_what_it_waits_for(staged: StagedService, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutClient(staged.front_door) as client, client.open_batch(2, 4, keep="all", carry="nothing") as batch:
        prompts = same(3, eval_s=30.0)
        batch.feed(prompts)
        with pytest.raises(RequestTimeout):
            batch.next_group(0.3)  # the prompts are fed

        # Until EVAL has lasted longer than what was before it.
        until(lambda: asked(staged, capsys, batch.batch_id[:8])["finding"]["name"] == "EVAL", "EVAL to be named")
        found = asked(staged, capsys, batch.batch_id[:8])
    assert "so far" in found["sentences"][0]
    assert found["notes"][0].startswith("The batch waits for this now: ")
    assert any("is in EVAL on node node-0" in note for note in found["notes"])


def test_rollout_brokers_are_explained_together_without_one_that_is_silent(
    staged: StagedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two services stand for two brokers of one: of a job's broker, nothing is asked of the other."""
    monkeypatch.setattr(recorded_jobs, "IDLE_S", 3600.0)
    with StagedService(layout("node-1")) as other:
        for number, service in enumerate((staged, other)):
            service.run(same(6, "staged-b"), Feed(), tmp_path / str(number))
        doors = {"rollout-0": staged.front_door, "rollout-1": other.front_door, "rollout-2": "ipc:///nowhere/door"}
        clients = {name: AsyncRolloutClient(door, timeout_s=2.0) for name, door in doors.items()}
        with RolloutBrokers(clients) as brokers:
            recorded = recorded_jobs.record_service(brokers, lambda row: row.task == "staged-b")
    assert recorded.recording is not None
    nodes = {work.node for one in recorded.recording.rollouts for work in one.works}
    assert nodes == {"node-0", "node-1"}
    assert recorded.recording.slots == {(phase, node): 6 for phase in Phase for node in nodes}
    assert len(recorded.notes) == 1
    assert recorded.notes[0].startswith("rollout-2 does not answer: ")


def test_the_traces_of_a_run_are_beside_its_results(staged: StagedService, tmp_path: Path) -> None:
    staged.run(same(3), Feed(), tmp_path)
    staged.run(same(5), Feed(), tmp_path)
    recorded = read_recorded(tmp_path)
    assert recorded.notes == ("the run was continued; explained is its largest part, 5 of 8 rollouts",)
    assert recorded.recording is not None
    assert len(recorded.recording.rollouts) == 5
    assert all(one.divided and one.longest for one in recorded.recording.rollouts)
    assert recorded.recording.slots == dict.fromkeys(recorded.recording.slots, 6)
    assert len(recorded.recording.slots) == 3
