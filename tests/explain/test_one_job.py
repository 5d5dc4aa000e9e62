"""One job beside the others of its task."""

from __future__ import annotations

from dataclasses import replace

from prorl_zmq.explain.one_job import explain_job, with_job
from prorl_zmq.wire.messages.jobs import Outcome, Phase, Step

from .recordings import USUAL, passing, recording, rollout, work

OTHERS = passing([(0.0, USUAL)] * 4)


def test_the_part_that_took_longer_than_usual() -> None:
    (job,) = passing([(0.0, USUAL | {"tool.bash": 3.0})], task="t", node="m")
    job = replace(job, longest=Step("tool.bash", 2, 0.4, 2.9))
    found = explain_job(job, [*OTHERS, job])
    assert (found.part, found.peers) == ("tool.bash", 4)
    assert found.sentences[0] == (
        "Job t-m-b-0 took 3.350 s, and the median of 4 others of task t is 0.450 s: 2.900 s more went into tool bash."
    )
    assert found.sentences[2] == "Its longest step was tool bash in turn 2, 2.900 s."
    assert found.parts[0] == ("tool bash", 3.0, 0.1) or found.parts[0].seconds == 3.0


def test_a_wait_and_work_done_again_are_parts() -> None:
    first = replace(work(Phase.INIT, 2.0, {"INIT": 1.0}, queued_at=0.0), lost="lease_lost", failed=True)
    job = rollout("j", [first, work(Phase.INIT, 5.0, {"INIT": 0.1}, queued_at=3.0)])
    found = explain_job(job, OTHERS)
    seconds = {row.part: row.seconds for row in found.parts}
    assert seconds["wait for INIT"] == 4.0
    assert seconds["work done again"] == 1.0
    assert found.part == "wait for INIT"
    assert found.sentences[2] == "It failed once, last in INIT on node n with lease_lost."


def test_a_job_like_the_others() -> None:
    found = explain_job(OTHERS[0], OTHERS)
    assert found.part == ""
    assert found.sentences[0].endswith("nothing stands out.")


def test_too_few_to_compare_with() -> None:
    found = explain_job(OTHERS[0], OTHERS[:3])
    assert "there are 2 others of task t to compare with, which is too few" in found.sentences[0]


def test_a_job_is_compared_with_jobs_of_its_model() -> None:
    of_b = [replace(one, model="b") for one in OTHERS]
    found = explain_job(of_b[0], [*OTHERS, *of_b[1:3]])
    assert "there are 2 others of task t and model b to compare with" in found.sentences[0]


def test_its_backend_is_slow_beside_the_others() -> None:
    slow = passing([(0.0, USUAL | {"engine": 1.0})] * 4, backend="slow")
    usual = passing([(0.0, USUAL)] * 8, backend="usual")
    found = explain_job(slow[0], [*usual, *slow], recording(usual, slow))
    assert found.part == "engine"
    assert "backend slow took 1.000 s for a rollout of task t and its peers 0.100 s" in " ".join(
        found.sentences
    ).replace("Backend", "backend")


def test_a_slow_backend_that_explains_next_to_nothing_is_not_named() -> None:
    slow = passing([(0.0, USUAL | {"engine": 0.2}), (1.0, USUAL | {"engine": 0.2, "tool.bash": 4.0})] * 2, backend="s")
    usual = passing([(0.0, USUAL)] * 8, backend="usual")
    job = replace(slow[1], longest=Step("tool.bash", 1, 0.4, 4.0))
    found = explain_job(job, [*usual, *slow], recording(usual, slow))
    assert found.sentences[2] == "Its longest step was tool bash in turn 1, 4.000 s."


def test_it_had_more_to_do() -> None:
    others = [replace(one, turns=2, tokens=100) for one in OTHERS]
    (job,) = passing([(0.0, USUAL | {"engine": 2.0})], node="m")
    found = explain_job(replace(job, turns=9, tokens=900), others)
    assert "had 9 turns, and the median of the others is 2; it had 900 generated tokens" in found.sentences[2]


def test_a_job_is_counted_once() -> None:
    made = recording(OTHERS)
    assert with_job(made, OTHERS[0]) is made
    (other,) = passing([(0.0, USUAL)], node="m")
    assert len(with_job(made, other).rollouts) == 5


def test_a_job_that_failed_says_how_it_ended() -> None:
    (job,) = passing([(0.0, USUAL)], task="t")
    found = explain_job(replace(job, outcome=Outcome.INFRASTRUCTURE_ERROR, code="sandbox_failed"), OTHERS)
    assert found.sentences[2] == "It ended as infrastructure_error (sandbox_failed)."


def test_nothing_to_compare_with() -> None:
    found = explain_job(OTHERS[0], [])
    assert found.sentences[0] == "Job t-n-b-0 took 0.450 s; there are no others of task t to compare with."
