"""Which suspect is named, of recordings made by hand. `tests/service/test_explain.py` has real runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.explain.diagnosis import diagnose
from prorl_zmq.explain.recording import Recording
from prorl_zmq.explain.rollout import Rollout, within
from prorl_zmq.explain.suspects import suspects
from prorl_zmq.wire.messages.jobs import Outcome, Phase

from .recordings import SLOTS, USUAL, Parts, passing, recording, rollout, work


def spread(count: int, parts: Parts, seed: int = 0) -> list[tuple[float, Parts]]:
    """Return so many jobs of a log-normal length, all there at the beginning."""
    draw = np.random.default_rng(seed)
    return [(0.0, {part: s * float(draw.lognormal(sigma=0.3)) for part, s in parts.items()}) for _ in range(count)]


@pytest.mark.parametrize(
    ("part", "kind", "name"),
    [
        ("INIT", "stage", "INIT"),
        ("EVAL", "stage", "EVAL"),
        ("engine", "engine", "engine"),
        ("tool.bash", "tool", "bash"),
        ("own code", "stage", "RUN"),
    ],
)
def test_a_part_that_takes_most_of_the_time(part: str, kind: str, name: str) -> None:
    found = diagnose(recording(passing(spread(40, USUAL | {part: 1.0}))), "the run")
    assert (found.finding.kind, found.finding.name, found.finding.part) == (kind, name, part)
    assert found.finding.without_s < 0.7 * found.took_s
    assert found.sureness == "sure"
    assert len(found.sentences) == 3
    assert found.parts[0].path_s > 0.4 * found.took_s


def test_of_a_stage_with_few_slots_these_are_named() -> None:
    slots = SLOTS | {(Phase.INIT, "n"): 16}
    found = diagnose(recording(passing(spread(40, USUAL)), slots=slots), "the run")
    assert (found.finding.kind, found.finding.name) == ("slots", "RUN")
    assert found.sentences[0].startswith("RUN has too few slots, which bounded the run: it is")


def test_a_slow_node_is_named_and_not_the_tool_that_is_slow_there() -> None:
    good = passing(spread(30, USUAL | {"tool.bash": 0.5}), node="a")
    bad = passing(spread(20, USUAL | {"tool.bash": 2.5}), node="b")
    slots = {(phase, node): 4 for phase in Phase for node in ("a", "b")}
    found = diagnose(recording(good, bad, slots=slots), "the run")
    assert (found.finding.kind, found.finding.name, found.finding.part) == ("node", "b", "tool.bash")
    assert "node b took" in found.finding.evidence


def test_a_slow_node_that_costs_nothing_is_not() -> None:
    """EVAL is slow on one of two nodes, and engines take the time."""
    parts = USUAL | {"engine": 3.0, "EVAL": 0.01}
    good, bad = passing(spread(30, parts), node="a"), passing(spread(30, parts | {"EVAL": 0.05}), node="b")
    slots = {(phase, node): 4 for phase in Phase for node in ("a", "b")}
    assert diagnose(recording(good, bad, slots=slots), "the run").finding.kind == "engine"


def test_a_backend_of_a_larger_model_is_not_slow() -> None:
    parts = USUAL | {"engine": 1.0}
    small, large = passing(spread(30, parts)), passing(spread(30, parts | {"engine": 4.0}), backend="large")
    slots = {(phase, "n"): 8 for phase in Phase}
    assert diagnose(recording(small, large, slots=slots), "the run").finding.name == "large"
    of_b = [replace(one, model="b") for one in large]
    assert diagnose(recording(small, of_b, slots=slots), "the run").finding.kind == "engine"


def test_parts_that_take_as_long_as_each_other() -> None:
    """Too few rollouts for a queue, each part a fifth: nothing is to be named."""
    found = diagnose(recording(passing([(0.0, dict.fromkeys(USUAL, 1.0))] * 4)), "the run")
    assert found.finding.kind == "nothing"
    assert found.sentences[0] == "Nothing stands out in the run, which took 5.000 s."
    assert found.doubts == ("only 4 rollouts are known",)
    assert "fairly sure" in found.sentences[2]


def test_a_second_part_that_costs_about_as_much_is_a_doubt() -> None:
    found = diagnose(recording(passing(spread(40, USUAL | {"engine": 1.0, "tool.bash": 0.9}))), "the run")
    assert found.finding.kind == "engine"
    assert found.doubts == ("tool bash costs about as much",)


def test_it_says_what_it_does_not_know() -> None:
    plain = [replace(one, divided=False, left_out=1) for one in passing(spread(8, USUAL | {"EVAL": 2.0}))]
    found = diagnose(recording(plain), "the run")
    assert found.finding.name == "EVAL"
    assert found.sureness == "not sure"
    assert [doubt.split(" ")[0] for doubt in found.doubts] == ["only", "of", "some"]


def first_inits(at_once: bool) -> list[Rollout]:
    """Four slow INITs on a node, and quick ones later: as many at once as the first ones, or one after the other."""
    first = passing([(0.0, {"INIT": 1.2, "tool.bash": 0.4, "EVAL": 0.01})] * 4)
    later = [(1.2 + (0.0 if at_once else 0.25 * n), {"INIT": 0.2, "tool.bash": 0.4, "EVAL": 0.01}) for n in range(20)]
    return [*first, *passing(later, task="t", backend="later")]


@pytest.mark.parametrize("at_once", [True, False])
def test_first_inits_that_were_crowded_are_doubtful_as_cold_ones(at_once: bool) -> None:
    (cold,) = (one for one in suspects(recording(first_inits(at_once))) if one.kind == "cold")
    assert bool(cold.doubt) != at_once


def test_what_is_doubtful_is_not_named_before_a_part_that_costs_more() -> None:
    """A client has four jobs in flight; only the first four INITs are at work at once, and slow."""
    jobs: list[tuple[float, Parts]] = []
    ends: list[float] = []
    for number in range(12):
        parts = USUAL | {"INIT": 1.2 if number < 4 else 0.2, "engine": 0.4 * (1 + 0.2 * (number % 4))}
        jobs.append((ends[number - 4] if number >= 4 else 0.0, parts))
        ends.append(jobs[-1][0] + sum(parts.values()))
    found = diagnose(recording(passing(sorted(jobs, key=lambda one: one[0]))), "the run")
    assert (found.finding.kind, [one.kind for one in found.others]) == ("engine", ["cold"])


def test_what_run_did_is_not_missed_of_rollouts_that_did_not_get_there() -> None:
    made = [replace(one, works=one.works[:1], divided=False) for one in passing(spread(20, USUAL | {"INIT": 1.0}))]
    assert diagnose(recording(made), "the run").sureness == "sure"


def test_rollouts_that_never_worked_make_whole_sentences() -> None:
    made = [
        replace(one, works=(), ended=one.accepted, outcome=Outcome.FAILED, code="x")
        for one in passing([(0.0, USUAL)] * 12)
    ]
    found = diagnose(recording(made), "the run")
    assert found.sentences[:2] == ("Nothing stands out in the run, which took 0.000 s.", "Its rollouts did no work.")
    assert (found.others, found.notes) == ((), ("12 of 12 rollouts ended as failed (x)",))


def test_rollouts_that_did_not_complete_are_noted() -> None:
    made = passing(spread(20, USUAL))
    late = [replace(one, outcome=Outcome.TIMEOUT, code="phase_timeout") for one in made[:5]]
    assert diagnose(recording(late, made[5:]), "the run").notes == (
        "5 of 20 rollouts ended as timeout (phase_timeout)",
    )


def test_slots_that_others_have_are_noted() -> None:
    """The service has twelve slots of RUN, and these jobs wait although they hold four."""
    slots = {(phase, "n"): 12 for phase in Phase}
    found = diagnose(recording(passing(spread(40, USUAL | {"engine": 1.0})), slots=slots), "the run")
    assert found.notes[0].startswith("while these jobs waited for RUN, they held 4.0 of its 12 slots")
    assert "the replay of the recorded times takes" in found.doubts[0]


def test_of_a_run_that_goes_on_it_says_so() -> None:
    made = recording(passing(spread(30, USUAL | {"INIT": 1.0})), now=60.0)
    assert "so far" in diagnose(made, "batch b").sentences[0]


@pytest.mark.parametrize("now", [None, 5.0])
def test_rollouts_that_have_done_nothing_yet(now: float | None) -> None:
    (one,) = passing([(0.0, USUAL)])
    waiting = replace(one, works=(), ended=None, waits=(Phase.INIT, 0.0), outcome=None)
    found = diagnose(Recording((waiting,), {}, now), "the run")
    assert found.finding.kind == "nothing"
    assert found.notes == (("there is no slot of INIT, and 1 jobs wait for one",) if now else ())
    assert [row.part for row in found.parts] == (["wait for INIT"] if now else [])


def test_of_jobs_that_wait_and_work_the_work_is_the_critical_path() -> None:
    """Of four slots of RUN each is held by a job that has not ended; the others wait."""
    made = [replace(one, ended=None, outcome=None) for one in passing([(0.0, {"INIT": 0.1, "engine": 50.0})] * 4)]
    waiting = [replace(one, job_id=f"w-{n}", works=one.works[:1], waits=(Phase.RUN, 0.1)) for n, one in enumerate(made)]
    found = diagnose(recording(made, waiting, now=50.1), "the run")
    assert found.finding.kind == "engine"
    assert {row.part: row.path_s for row in found.parts}["engine time"] == pytest.approx(50.0)


def test_a_rollout_that_was_not_waited_for_is_not_the_end_of_the_critical_path() -> None:
    """One with a long tool call was cut off when the last of the others ended."""
    needed = passing([(0.0, {"INIT": 0.1, "engine": 1.0})] * 12, slots=3)
    ended = max(one.ended or 0.0 for one in needed)
    (long,) = passing([(0.0, {"INIT": 0.1, "tool.bash": 50.0})], node="n", backend="long")
    found = diagnose(recording([within(long, 0.0, ended)], needed), "the batch")
    assert (found.finding.kind, found.finding.name) == ("engine", "engine")
    assert long.job_id not in found.critical_jobs


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.dictionaries(st.sampled_from([*USUAL]), st.floats(0, 9), min_size=1)), min_size=1
    ),
    st.sampled_from([None, 100.0]),
)
def test_any_recording_can_be_explained(jobs: list[tuple[float, Parts]], now: float | None) -> None:
    found = diagnose(recording(passing(sorted(jobs, key=lambda one: one[0])), now=now), "the run")
    assert len(found.sentences) == 3
    assert all(not text[0].islower() and text.endswith(".") for text in found.sentences)
    assert found.finding.without_s >= 0


def first_runs(busy: float, later: int = 24) -> list[Rollout]:
    """Four RUNs of a process load its tokenizer; a busy machine makes all work of the processor longer."""
    usual = {"INIT": 0.02 * busy, "engine": 0.05, "own code": 0.004 * busy, "EVAL": 0.02 * busy}
    return passing([(0.0, usual | {"own code": 1.6 * busy})] * 4 + [(0.0, usual)] * later)


@pytest.mark.parametrize("busy", [1.0, 3.0])
def test_the_first_runs_of_a_process_that_loads_its_tokenizer_are_named_also_on_a_busy_machine(busy: float) -> None:
    """'Nothing stands out' was said with 63 % of the critical path in RUN's own code."""
    found = diagnose(recording(first_runs(busy)), "the run")
    assert (found.finding.kind, found.finding.name, found.finding.part) == ("cold", "RUN", "own code")
    assert found.sentences[0].startswith("Cold RUNs bounded the run, which took ")
    assert "in the first 4 RUNs of their stage processes" in found.sentences[1]
    assert found.parts[0].part == "RUN's own code", "the table shows what is said first"
    assert found.sureness == "sure"


def test_the_first_runs_alone_are_named_for_their_own_code_and_are_not_sure() -> None:
    found = diagnose(recording(first_runs(1.0, later=0)), "the run")
    assert (found.finding.kind, found.finding.part) == ("stage", "own code")
    assert found.doubts == ("only 4 rollouts are known",)


def test_a_part_that_is_most_of_the_critical_path_is_named_though_other_work_would_take_its_time() -> None:
    """Two rollouts of nothing but bash, and beside them two of engine time that end a moment sooner."""
    found = diagnose(recording(passing([(0.0, {"tool.bash": 10.0}), (0.0, {"engine": 9.8})] * 2)), "the run")
    assert (found.finding.kind, found.finding.name) == ("tool", "bash")
    assert "without it other work would have taken most of its time" in found.doubts
    assert found.parts[0].part == "tool bash"
    assert found.sureness != "sure"


def test_a_task_that_is_slow_in_what_the_critical_path_hardly_has_is_not_named() -> None:
    """'Most of all by its EVAL' was said with EVAL at 5 % of the critical path."""
    made, free = [], [0.0] * 4
    for number in range(150):
        task, engine_s, eval_s = ("graded", 1.5, 4.0) if number % 5 < 2 else ("quick", 0.6, 0.01)
        ran = free[0] + engine_s
        run = work(Phase.RUN, free[0], {"engine": engine_s}, queued_at=0.0)
        made.append(rollout(str(number), [run, work(Phase.EVAL, ran, {"EVAL": eval_s})], task=task))
        free = sorted([*free[1:], ran])
    found = diagnose(recording(made, slots=SLOTS | {(Phase.EVAL, "n"): 16}), "the run")
    assert (found.finding.kind, found.finding.name, found.parts[0].part) == ("slots", "RUN", "engine time")
    assert found.doubts == ("task graded costs about as much",)
    assert found.sureness == "fairly sure"
