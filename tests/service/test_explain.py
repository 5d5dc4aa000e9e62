"""`prorl explain` on real services whose bottleneck is known: a short form of bench/explain.py, and what runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.waiting import until

from prorl_zmq import AsyncRolloutClient, RolloutClient
from prorl_zmq.brokers.rollout import transition_log
from prorl_zmq.commands.app import run
from prorl_zmq.errors import RequestTimeout
from prorl_zmq.evaluation.recorded_run import read_recorded
from prorl_zmq.service.rollout_brokers import RolloutBrokers
from prorl_zmq.watching import recorded_jobs
from prorl_zmq.wire.messages.jobs import Phase

from .conftest import scripted

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from explain import explained
from explain_scenarios import ONE, SCENARIOS, layout, same
from explain_service import Feed, StagedService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Batch
    from prorl_zmq.testing import LocalService
    from prorl_zmq.wire.messages.front_door import JobTrace

pytestmark = pytest.mark.xdist_group("staged service")
SHORT = (
    "engines are not ready",
    "one backend of two is slow",
    "one task of two has a slow EVAL",
)
KV = (
    "a KV cache does not hold the contexts",
    "engines are slow, and new weights empty their caches",
)


@pytest.fixture(scope="module")
def staged() -> Iterator[StagedService]:
    with StagedService(ONE) as service:
        yield service


def asked(service: StagedService | LocalService, capsys: pytest.CaptureFixture[str], *what: str) -> dict[str, object]:
    """Ask with `--json`."""
    capsys.readouterr()
    assert run("prorl", ["explain", *what, "--json", "--connect", service.front_door]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SHORT)
def test_what_bounded_a_run_is_named(name: str, staged: StagedService, tmp_path: Path) -> None:
    (scenario,) = (one for one in SCENARIOS if one.name == name)
    ((_, explanation),) = explained([scenario], tmp_path, staged)
    assert scenario.is_named(explanation), " ".join(explanation.sentences)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KV)
def test_a_small_kv_cache_is_named_and_what_only_looks_like_it_is_not(name: str, tmp_path: Path) -> None:
    (scenario,) = (one for one in SCENARIOS if one.name == name)
    ((_, explanation),) = explained([scenario], tmp_path)
    assert scenario.is_named(explanation), " ".join(explanation.sentences)
    assert "kv" not in {one.kind for one in explanation.others}


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
    jobs = same(14, tools={"search": 0.3}, engine_s=0.02)  # a busy machine makes none of them three times as long
    # It begins first and ends long after the others: else the newest work would be it alone.
    (slow,) = same(1, tools={"search": 4.0})
    staged.run([slow, *jobs], Feed(), tmp_path / "run")

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
    assert "nothing is neither a folder nor a batch that is known here, and no job nothing" in capsys.readouterr().err


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


def batch_of(client: RolloutClient, batch_id: str, **options: object) -> Batch:
    return client.open_batch(batch_id=batch_id, stop_early=False, **options)  # type: ignore[arg-type]


def test_a_batch_is_explained_after_it_was_closed(staged: StagedService, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutClient(staged.front_door) as client:
        with batch_of(client, "closed-1", target_groups=3, group_size=4, keep="all", carry="nothing") as batch:
            batch.feed(same(3, eval_s=0.5))
            assert len(list(batch)) == 3
        client.submit(same(4))  # none of the batch's
        assert len(list(client.stream())) == 4
    found = asked(staged, capsys, "closed-1")
    assert (found["of"], found["finding"]["name"], found["rollouts"]) == ("batch closed-1", "EVAL", 12)
    assert found["notes"] == []
    assert asked(staged, capsys, "closed-")["of"] == "batch closed-1"


@pytest.mark.proof(quick=True)
def test_of_a_batch_that_kept_no_group_the_rollouts_are_explained(
    staged: StagedService, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rewards are equal, so no group is informative."""
    options = {"target_groups": 2, "group_size": 4, "keep": "informative", "carry": "nothing"}
    with RolloutClient(staged.front_door) as client, batch_of(client, "dropped", **options) as batch:
        batch.feed(same(3, tools={"search": 0.4}))
        assert list(batch) == []
    found = asked(staged, capsys, "dropped")
    assert (found["finding"]["kind"], found["finding"]["name"], found["rollouts"]) == ("tool", "search", 12)
    assert not any("not known what RUN did" in doubt for doubt in found["doubts"])


@pytest.mark.proof(quick=True)
def test_rollouts_that_a_batch_took_over_count_from_when_it_was_opened(
    staged: StagedService, capsys: pytest.CaptureFixture[str]
) -> None:
    with RolloutClient(staged.front_door, session="carries") as client:
        with batch_of(client, "first", target_groups=1, group_size=2, keep="all") as batch:
            batch.feed([*same(1), *same(1, eval_s=2.5)])
            next(iter(batch))
            time.sleep(1.0)  # it is met, and its client at its own work
        with batch_of(client, "second", target_groups=2, group_size=2, keep="all") as batch:
            batch.feed(same(1))
            assert len(list(batch)) == 2
    first, second = asked(staged, capsys, "first"), asked(staged, capsys, "second")
    assert first["took_s"] < 1.0  # until it was met
    assert first["rollouts"] == 4
    assert second["rollouts"] == 4
    assert second["took_s"] < 2.5  # without what was done before it was opened
    assert second["finding"]["name"] == "EVAL"


@pytest.mark.proof(quick=True)
def test_rollouts_of_a_batch_that_are_no_longer_kept_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transition_log.TransitionLog.__init__, "__defaults__", (None, None, 8, 2**20))
    with StagedService(ONE) as few, RolloutClient(few.front_door) as client:
        with batch_of(client, "old", target_groups=3, group_size=4, keep="all", carry="nothing") as batch:
            batch.feed(same(3))
            assert len(list(batch)) == 3
        found = asked(few, capsys, "old")
        assert found["rollouts"] == 8
        assert found["notes"][0].startswith("of its 12 rollouts, 4 are no longer kept: ")

        client.submit(same(8))
        assert len(list(client.stream())) == 8
        gone = asked(few, capsys, "old")
        assert gone["sentences"][0].startswith("Of batch old nothing can be explained: none of its 12 rollouts is kept")

        capsys.readouterr()
        assert run("prorl", ["explain", "older", "--connect", few.front_door]) == 2
        said = capsys.readouterr().err
        assert "older is neither a folder nor a batch that is known here" in said
        assert "none over a restart" in said


def test_a_batch_is_explained_as_far_as_it_is_known_after_the_broker_was_restarted(
    local_service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_service.client() as client:
        with batch_of(client, "over", target_groups=3, group_size=2, keep="all", carry="nothing") as batch:
            batch.feed([scripted(), scripted()], last=False)
            assert len([batch.next_group(20.0) for _ in range(2)]) == 2
            with pytest.raises(RequestTimeout):
                batch.next_group(0.1)  # it acknowledges both
            local_service.brokers.stop("rollout")
            local_service.brokers.start_rollout_broker()
            nothing = asked(local_service, capsys, "over")
            assert "none of its 4 rollouts is kept any more" in nothing["sentences"][0]
            batch.feed([scripted()])
            batch.next_group(20.0)
        found = asked(local_service, capsys, "over")
    assert found["rollouts"] == 2
    assert found["notes"][0].startswith("of its 6 rollouts, 4 are no longer kept: ")


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
    stages = (Phase.INIT, Phase.RUN, Phase.EVAL)
    assert recorded.recording.slots == {(phase, node): 6 for phase in stages for node in nodes}
    assert len(recorded.notes) == 1
    assert recorded.notes[0].startswith("rollout-2 does not answer: ")


def test_a_job_that_runs_is_compared_with_others_of_its_task(
    staged: StagedService, capsys: pytest.CaptureFixture[str]
) -> None:
    with RolloutClient(staged.front_door) as client:
        client.submit(same(4, "staged-b"))
        assert len(list(client.stream())) == 4
        (job_id,) = client.submit(same(1, "staged-b", tools={"search": 20.0}))
        until(lambda: asked(staged, capsys, job_id)["part"] == "RUN", "RUN to be named")
        found = asked(staged, capsys, job_id)
        assert (found["task"], found["peers"] >= 4) == ("staged-b", True)
        assert "so far" in found["sentences"][0]
        client.cancel([job_id])
        assert len(list(client.stream())) == 1


@pytest.mark.proof(quick=True)
def test_brokers_whose_clocks_differ_are_explained_by_one_clock(
    staged: StagedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two services that stand for two brokers, the other one's clock is an hour ahead."""
    monkeypatch.setattr(recorded_jobs, "IDLE_S", 3600.0)

    class Ahead(AsyncRolloutClient):
        async def trace(self, job_id: str, **options: Any) -> JobTrace:
            found = await super().trace(job_id, **options)
            return msgspec.structs.replace(found, accepted_at=found.accepted_at + 3600.0)

    with StagedService(layout("node-1")) as other:
        began = time.time()
        for number, service in enumerate((staged, other)):
            service.run(same(6, "staged-b"), Feed(), tmp_path / str(number))
        clients = {"rollout-0": AsyncRolloutClient(staged.front_door), "rollout-1": Ahead(other.front_door)}
        with RolloutBrokers(clients) as brokers:
            recorded = recorded_jobs.record_service(brokers, lambda row: row.accepted_at >= began)
    assert recorded.recording is not None
    assert len(recorded.recording.rollouts) == 12
    assert recorded.recording.wall_s < 60.0


@pytest.mark.proof(quick=True)
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
