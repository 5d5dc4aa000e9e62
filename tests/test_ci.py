"""What CI decides by itself: which proofs are due, which tests are of which tier, and what a run may cost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import bare, tiers
from support.costs import Cost, exceeded
from support.due import id_of, with_quarter
from support.import_graph import ROOT, closure
from support.proofs import (
    AGAIN,
    CHANGED,
    ENVIRONMENTS,
    IN_TURN,
    MOST_CHANGED,
    NEEDS,
    QUARTERS,
    BadTurn,
    Proof,
    Turn,
    due,
    raised,
)
from support.tiers import PROOF, mark_all_but_few, tier_of

pytestmark = pytest.mark.xdist_group("import graph")
TESTS = ROOT / "tests"
JOB_TABLE = Proof("tests/brokers/rollout/test_job_table_machine.py::test_a")
RESTARTS = Proof("tests/service/test_restarts.py::test_b")
VIEWS = Proof("tests/make_swe/test_whole.py::test_c")
GYM = Proof("tests/integrations/test_nemo_gym.py::test_d")
VLLM = Proof("tests/commands/test_eval.py::test_e", vllm=True)
BENCH = Proof("tests/test_bench.py::test_f[fetch]", bench="bench/fetch.py")
ALL = (JOB_TABLE, RESTARTS, VIEWS, GYM, VLLM, BENCH)


@given(st.integers(0, 10_000), st.sets(st.text(min_size=1), min_size=1))
def test_four_turns_in_a_row_run_every_proof(number: int, names: set[str]) -> None:
    proofs = [*(Proof(f"tests/test_bench.py::{name}") for name in names), GYM, VLLM]
    landed, ran = Turn(number), set()
    for _ in range(QUARTERS):
        landed = raised(landed, "landed", "head")
        ran |= due(proofs, [], landed).reasons.keys()
    assert ran == {proof.id for proof in proofs}


def test_a_proof_is_due_in_one_quarter_of_about_a_quarter() -> None:
    counts = [
        len(due([Proof(f"tests/test_bench.py::{n}") for n in range(1000)], [], Turn(q)).reasons) for q in range(4)
    ]
    assert sum(counts) == 1000
    assert min(counts) > 200


def turn_without(*proofs: Proof) -> Turn:
    """A turn in whose quarter none of these is."""
    return next(Turn(number) for number in range(QUARTERS) if number not in {proof.quarter for proof in proofs})


@pytest.mark.parametrize(
    ("file", "selected"),
    [
        ("brokers/rollout/job_table.py", {JOB_TABLE.id, RESTARTS.id}),
        ("tests/service/test_restarts.py", {RESTARTS.id}),
        ("tests/service/conftest.py", {RESTARTS.id}),
        ("bench/fetch.py", {BENCH.id}),
        ("bench/soak.py", set()),
        ("CHANGELOG.md", set()),
    ],
)
def test_a_change_makes_the_proofs_of_its_code_due(file: str, selected: set[str]) -> None:
    reasons = {test for test, why in due(ALL, [file], Turn(0)).reasons.items() if why == CHANGED}
    assert reasons == selected


def test_what_most_proofs_import_makes_none_due_and_is_named() -> None:
    found = due(ALL, ["prorl_zmq/errors.py"], Turn(0))
    assert found.common == ["prorl_zmq/errors.py"]
    assert CHANGED not in found.reasons.values()
    assert "changed, but imported by most proofs, which run in turn: prorl_zmq/errors.py" in found.lines()


def test_a_submission_that_changed_the_code_of_very_many_proofs_runs_them_in_turn() -> None:
    file = "tests/service/test_restarts.py"
    many = [Proof(f"{file}::test[{number}]") for number in range(MOST_CHANGED + 1)]
    assert set(due(many[1:], [file], Turn(0)).reasons.values()) == {CHANGED}
    found = due(many, [file], Turn(0))
    assert set(found.reasons) == {proof.id for proof in many if proof.quarter == 0}
    assert (
        f"the code of {MOST_CHANGED + 1} proofs changed; more than {MOST_CHANGED} run in turn: see make proof"
        in found.lines()
    )
    quick = [proof._replace(quick=True) for proof in many]
    assert due(quick, [file], Turn(0)).reasons.keys() == {proof.id for proof in quick}


def test_a_proof_that_failed_is_due_in_any_quarter() -> None:
    turn = turn_without(RESTARTS)
    assert RESTARTS.id in due([RESTARTS], [], turn).left_out
    again = Turn(turn.number, again=(RESTARTS.id,))
    assert due([RESTARTS], [], again).reasons == {RESTARTS.id: AGAIN}


@pytest.mark.parametrize("number", range(QUARTERS))
def test_an_environment_is_needed_in_one_quarter_only(number: int) -> None:
    found = due([GYM, VLLM], [], Turn(number))
    assert found.environments == [name for name in ("vllm", "gym") if ENVIRONMENTS[name] == number]


def test_what_is_left_out_is_printed() -> None:
    turn = turn_without(RESTARTS)
    lines = due(
        [RESTARTS, Proof("tests/test_bench.py::x", vllm=True)], [], Turn(turn.number, "abcdef0123456789")
    ).lines()
    assert lines[0].endswith("changed since abcdef012345")
    assert "     1 tests/service/test_restarts.py" in lines
    of_quarter = due([RESTARTS], [], Turn(RESTARTS.quarter)).lines()
    assert f"1 proofs are due: 1 {IN_TURN}" in of_quarter


def test_a_test_is_named_without_its_xdist_group() -> None:
    assert id_of("tests/a.py::test_a[x@y]@group of b") == "tests/a.py::test_a[x@y]"
    assert id_of("tests/a.py::test_a[x@y]") == "tests/a.py::test_a[x@y]"
    assert id_of("tests/a.py::test_a@group") == "tests/a.py::test_a"


@given(
    st.builds(
        Turn, st.integers(0), st.text("0123456789abcdef"), st.text("0123456789abcdef"), st.lists(st.text()).map(tuple)
    )
)
def test_a_turn_is_read_as_it_was_written(turn: Turn) -> None:
    printable = Turn(turn.number, turn.since, turn.raised_at, tuple(test for test in turn.again if test.isprintable()))
    assert Turn.parse(printable.text()) == printable


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("number = ", "make turn"),
        ("number = 1\nsince = 'a'\nraised_at = 'b'", "again must be a list, not None"),
        ("number = '1'\nsince = 'a'\nraised_at = 'b'\nagain = []", "number must be a int, not '1'"),
        ("number = 1\nsince = 'a'\nraised_at = 'b'\nagain = [1]", "again must list ids of tests"),
        ("number = 1\nsince = 'a'\nraised_at = 'b'\nagain = []\nmore = 1", "unknown key more"),
    ],
)
def test_a_turn_that_cannot_be_read_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadTurn, match=why):
        Turn.parse(text)


LAST_CHANGE = "commit .ci/turn.toml as the last change"


class Repository:
    """A clone with two commits, of which the first has landed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (".gitignore", ".ci/raise_turn.py", "tests/support/proofs.py", "tests/support/import_graph.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
        self.git("init", "--quiet", "--initial-branch=main")
        self.landed = self.commit("landed")
        self.commit("a change")

    def git(self, *arguments: str) -> str:
        own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        person = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        command = ["git", "-C", str(self.folder), *person, *arguments]
        return subprocess.run(command, env=os.environ | own, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, subject: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", subject)
        return self.git("rev-parse", "HEAD")

    def turn(self, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-P", str(self.folder / ".ci" / "raise_turn.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        return done.returncode, done.stdout + done.stderr


def test_a_turn_is_raised_by_each_submission(tmp_path: Path) -> None:
    clone = Repository(tmp_path)
    file = tmp_path / ".ci" / "turn.toml"
    assert clone.turn(clone.landed) == (0, f"turn 1, quarter 1, since {clone.landed[:12]}: {LAST_CHANGE}\n")
    clone.commit("turn")
    raised_turn = Turn.parse(file.read_text())
    assert with_quarter(raised_turn, tmp_path) == (raised_turn, [])

    # The submission was rejected: the number is the same, and what is listed to run again is kept.
    clone.commit("a correction")
    file.write_text(file.read_text().replace("again = []", 'again = ["tests/a.py::b"]'))
    assert clone.turn(clone.landed)[0] == 0
    assert (Turn.parse(file.read_text()).number, Turn.parse(file.read_text()).again) == (1, ("tests/a.py::b",))
    landed = clone.commit("turn again")

    # The next one has the next number, and begins with nothing to run again.
    clone.commit("another change")
    assert clone.turn(landed)[0] == 0
    assert Turn.parse(file.read_text()) == Turn(2, landed, clone.git("rev-parse", "HEAD"))


def test_a_turn_that_was_not_raised_is_replaced_by_the_count_of_commits(tmp_path: Path) -> None:
    clone = Repository(tmp_path)
    assert with_quarter(Turn(1, clone.landed), tmp_path)[0].number == 2, "it names no commit"
    assert clone.turn(clone.landed)[0] == 0
    clone.commit("turn")
    (tmp_path / "a correction").touch()
    clone.commit("a correction")
    turn, (note,) = with_quarter(Turn.parse((tmp_path / ".ci" / "turn.toml").read_text()), tmp_path)
    assert turn.number == 4
    assert note.startswith(".ci/turn.toml is older than 1 commits")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("none",), "no commit 'none': name the one that landed last, make turn LANDED=COMMIT"),
        (("HEAD",), "HEAD is HEAD, so nothing is to be submitted"),
        ((), "name the commit that landed last"),
    ],
)
def test_a_turn_cannot_be_raised_without_the_landed_commit(
    tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    code, said = Repository(tmp_path).turn(*arguments)
    assert code == 1
    assert f"raise_turn: {why}" in said


def test_each_proof_of_an_environment_is_listed() -> None:
    using = {"gym_python": "gym", "verl_runs": "trainers"}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        found = {
            environment
            for module, environment in using.items()
            if re.search(rf"^(import|from) {module}\b", text, re.MULTILINE)
        }
        found |= set(re.findall(r'framework_python\("(\w+)"\)', text))
        found |= {"harness"} if '".harnesses"' in text else set()
        if path != Path(__file__):
            assert found <= {NEEDS.get(name)}, name
    assert all((ROOT / name).is_file() for name in NEEDS)
    assert set(NEEDS.values()) <= ENVIRONMENTS.keys()


def test_the_code_of_a_proof_is_all_that_it_imports() -> None:
    files = {str(path.relative_to(ROOT)) for path in closure(TESTS / "brokers/rollout/test_job_table_machine.py")}
    assert {"brokers/rollout/job_table.py", "prorl_zmq/errors.py"} <= files
    assert "prorl_zmq/gateway/server.py" not in files


def test_what_the_tables_list_are_tests() -> None:
    assert set(tiers.OF_PATH.values()) == set(tiers.TIERS)
    for beginning in (*tiers.OF_PATH, *bare.TESTS):
        path, _, test = beginning.partition("::")
        assert (ROOT / path).exists(), beginning
        name = test.partition("[")[0]
        assert not name or re.search(rf"(def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8")), beginning


def test_the_longest_beginning_decides_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "tests/": "unit",
        "tests/a/": "process",
        "tests/a/test_b.py": "unit",
        "tests/a/test_b.py::test_c": "system",
    }
    monkeypatch.setattr(tiers, "OF_PATH", table)
    monkeypatch.setattr(tiers, "_beginnings", tiers._beginnings.__wrapped__)  # which remembers nothing
    of = tiers.tier_of_id
    assert [of("tests/x.py"), of("tests/a/x.py::y"), of("tests/a/test_b.py::y")] == ["unit", "process", "unit"]
    assert [of("tests/a/test_b.py::test_c[1]"), of("tests/a/test_b.py::test_c_too")] == ["system", "unit"]
    assert tiers.tiers_of_file("tests/a/test_b.py") == {"unit", "system"}


def test_a_limit_that_is_exceeded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiers.LIMITS, "process", tiers.Limit(processes=4, interpreters=2))
    costs = {"a": Cost("process", processes=3, interpreters=1), "b": Cost("process", processes=2, interpreters=1)}
    (line,) = exceeded(costs)
    assert line.startswith("the tests of tier process started 5 processes; the limit is 4: ")
    assert exceeded({"a": costs["a"]}) == []


def test_a_test_that_asks_for_a_sandbox_program_must_be_marked() -> None:
    (line,) = bare.unmarked({"a": {"bwrap"}, "b": {"HOME", "bwrap"}}, {"a"})
    assert line.startswith(
        "b makes the package look for HOME, bwrap, and is neither listed in tests/support/bare.py nor skipped "
    )


INNER = """
import subprocess, sys, time
from prorl_zmq.tools.containers.kinds import problem_with

def test_starts():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_hides_what_it_starts():
    try:
        subprocess.run(["true"], check=True)
    except AssertionError:
        pass

def test_sleeps():
    time.sleep(0.01)

def test_is_a_unit():
    time.sleep

def test_asks():
    problem_with("bubblewrap")
"""
TABLE = """
from support import tiers
tiers.OF_PATH["tests/test_inner.py::test_asks"] = "process"
tiers.LIMITS["process"] = tiers.Limit(processes=0, interpreters=0)
"""


class Collected:
    """As much of a collected test as marks need."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.marks = nodeid, [one.mark for one in marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


@pytest.mark.parametrize(("number", "kept"), [(1, "0"), (3, "024"), (6, "012345"), (9, "0123456")])
def test_few_parameters_of_a_test_run_and_the_rest_are_quick_proofs(number: int, kept: str) -> None:
    few, proof = pytest.mark.few(number), pytest.mark.proof
    matrix = [Collected(f"tests/test_a.py::test_few[{index}]", few) for index in range(7)]
    own, other = Collected("tests/test_a.py::test_few[7]", few, proof), Collected("tests/test_a.py::test_other")
    items: list[Any] = [*matrix, own, other]
    mark_all_but_few(items)
    assert "".join(str(index) for index, one in enumerate(matrix) if tier_of(one) != PROOF) == kept  # type: ignore[arg-type]
    assert [bool(item.marks[-1].kwargs.get("quick")) for item in items if tier_of(item) == PROOF] == [
        *[True] * (7 - len(kept)),
        False,
    ]
    assert other.marks == []


def test_a_run_that_breaks_its_rules_fails(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_inner.py").write_text(INNER)
    (tmp_path / "conftest.py").write_text(TABLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  proof: a\n  vllm: b\n  bare: c\n  few: d\n")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "xdist", "-n2", "-p", "support.costs", "--limits", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    assert "3 failed, 2 passed" in said
    broken = {"starts": "started a process", "hides_what_it_starts": "started a process", "sleeps": "slept for 0.01 s"}
    for test, what in broken.items():
        assert f"tests/test_inner.py::test_{test} {what}" in said
    assert re.search(r"FAILED: the tests of tier process started [1-9]\d* processes; the limit is 0", said)
    assert "FAILED: tests/test_inner.py::test_asks makes the package look for bwrap, and is neither listed" in said
