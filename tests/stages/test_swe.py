"""The `swe` task in real Apptainer sandboxes: what the agent can find, what becomes a patch, what the tests say."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from needed import lacking, usable
from phases import eval_phase

from prorl_zmq import Job
from prorl_zmq.errors import HandlerFailed, SandboxFailed
from prorl_zmq.stages.episode import Episode
from prorl_zmq.stages.handler import Evaluation, InitPhase, RunPhase
from prorl_zmq.stages.handlers.swe import SweHandler
from prorl_zmq.stages.phase_ends import passed_on
from prorl_zmq.tasks.swe import SweInstance
from prorl_zmq.tasks.swe_formats import eval_script
from prorl_zmq.tools.images.image import SIF_MAGIC, SIF_MAGIC_OFFSET_BYTES
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.jobs import Outcome, PhaseLimits

sys.path.append(str(Path(__file__).parent))
from swe_image import RUN_TESTS, TEST_COMMAND, git, make_image

if TYPE_CHECKING:
    from support.graders import Graders
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.inference.chat import ChatMessage

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("image of a project")]
MEND = "sed -i 's/[*] 3/* 2/' calculator.py"
FAIL_TO_PASS, PASS_TO_PASS = ["tests/test_double.py::test_two"], ["tests/test_double.py::test_zero"]
JOB = Job(task="swe", instance={}, limits=PhaseLimits(eval_s=120))
PATCH = "--- a/calculator.py\n+++ b/calculator.py\n@@ -3 +3 @@\n-    return number * 3\n+    return number * 2\n"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    usable("apptainer")
    return make_image(tmp_path_factory.mktemp("images"))


@pytest.fixture
def instance(image: tuple[Path, str]) -> SweInstance:
    """The fault is in a commit of the image's history, as in SWE-bench."""
    path, before = image
    return SweInstance(
        instance_id="calculator-1",
        problem_statement="double(2) is 6",
        image=str(path),
        fail_to_pass=FAIL_TO_PASS,
        pass_to_pass=PASS_TO_PASS,
        base_commit=before,
        test_files=["pytest.ini", "tests", ":(glob)**/conftest.py"],
        eval_script=eval_script(TEST_COMMAND, "/testbed"),
        log_parser="parse_log_pytest",
    )


@pytest.fixture
def injected(image: tuple[Path, str], instance: SweInstance) -> SweInstance:
    """The fault is put into the image's HEAD, as in SWE-smith."""
    bug = git(image[0] / "testbed", "diff", "HEAD", instance.base_commit)
    return msgspec.structs.replace(instance, base_commit="", setup_patch=bug)


@dataclass(frozen=True)
class Shared:
    sandboxes: Sandboxes
    graders: Graders


@pytest.fixture
def shared(sandboxes_of: SharedSandboxes, graders: Graders) -> Shared:
    return Shared(sandboxes_of("apptainer", with_image=False), graders)


def rolled_out(
    instance: SweInstance,
    acts: str,
    shared: Shared,
    told: list[ChatMessage] | None = None,
) -> tuple[dict[str, Any], str]:
    """INIT and RUN with an agent that runs `acts` in bash; give what RUN hands on, and what the agent saw.

    The messages with which it was asked are added to `told`.
    """

    async def run() -> tuple[dict[str, Any], str]:
        made: list[Any] = []

        async def create(spec: Any) -> Any:
            made.append(await shared.sandboxes.create(f"{new_id()[:8]}.1", spec))
            return made[-1]

        seen = ""

        async def converse(messages: Any, tools: Any) -> Episode:
            nonlocal seen
            if told is not None:
                told.extend(messages)
            result = await tools[0]({"command": acts}, 60.0)
            seen = result
            return Episode()

        try:
            handler = SweHandler()
            data = await handler.init(InitPhase(JOB, instance, create))
            return await handler.run(RunPhase(JOB, instance, data, made[0], converse)), seen
        finally:
            for each in made:
                await each.close()
            assert list(shared.sandboxes.root.iterdir()) == []

    return asyncio.run(run())


def judged(instance: SweInstance, data: dict[str, Any], shared: Shared, job: Job = JOB) -> Evaluation:
    async def run() -> Evaluation:
        async with eval_phase(job, instance, data, shared.sandboxes, pool=shared.graders.pool) as phase:
            return await SweHandler().eval(phase)

    return shared.graders.run(run())


@pytest.mark.parametrize("form", ["instance", "injected"])
def test_right_patch_resolves_and_a_wrong_one_does_not(
    form: str, shared: Shared, request: pytest.FixtureRequest
) -> None:
    case: SweInstance = request.getfixturevalue(form)
    right, _ = rolled_out(case, MEND, shared)
    evaluation = judged(case, right, shared)
    assert (evaluation.reward, evaluation.metrics["fail_to_pass"], evaluation.metrics["pass_to_pass"]) == (1.0, 1, 1)
    assert evaluation.notes["patch"] == right["patch"]
    wrong, _ = rolled_out(case, "sed -i 's/[*] 3/* 4/' calculator.py", shared)
    evaluation = judged(case, wrong, shared)
    assert (evaluation.reward, evaluation.metrics["fail_to_pass"], evaluation.metrics["pass_to_pass"]) == (0.0, 0, 1)
    assert evaluation.notes["failed_tests"] == FAIL_TO_PASS[0]


def test_instance_says_how_much_output_the_agent_sees(instance: SweInstance, shared: Shared) -> None:
    limited = msgspec.structs.replace(instance, output_limit_bytes=2048)
    _, seen = rolled_out(limited, "head -c 5000 /dev/zero | tr '\\0' x", shared)
    assert seen.count("x") == 2048
    assert f"[... {5000 - 2048} bytes left out ...]" in seen


@pytest.mark.parametrize("limit_bytes", [1023, 16 * 2**20 + 1])
def test_output_limit_out_of_bounds_is_no_instance(instance: SweInstance, limit_bytes: int) -> None:
    about = {**msgspec.to_builtins(instance), "output_limit_bytes": limit_bytes}
    with pytest.raises(msgspec.ValidationError, match=r"`\$.output_limit_bytes`"):
        msgspec.convert(about, SweInstance)


def test_patch_that_mends_one_test_and_breaks_another_resolves_nothing(instance: SweInstance, shared: Shared) -> None:
    evaluation = judged(instance, {"patch": PATCH.replace("number * 2", "4")}, shared)
    assert (evaluation.reward, evaluation.metrics["fail_to_pass"], evaluation.metrics["pass_to_pass"]) == (0.0, 1, 0)
    assert evaluation.notes["failed_tests"] == PASS_TO_PASS[0]


@pytest.mark.parametrize("form", ["instance", "injected"])
def test_answer_is_nowhere_in_the_sandbox(form: str, shared: Shared, request: pytest.FixtureRequest) -> None:
    case: SweInstance = request.getfixturevalue(form)
    look = (
        "git log --all --oneline | wc -l; git for-each-ref | wc -l; git remote | wc -l; git reflog | wc -l; "
        "git status --porcelain | wc -l; "
        "git cat-file --batch-check --batch-all-objects | cut -d' ' -f1 | git cat-file --batch > /tmp/objects; "
        "grep -c '[*] 3' /tmp/objects; grep -c '[*] 2' /tmp/objects; "
        "grep -rlF '* 2' --include='*.pyc' . | wc -l; "
        "export GIT_DIR=.git/modules/part; git cat-file -p HEAD:part.py | grep -c '[*] 3'; "
        "git cat-file --batch-check --batch-all-objects | cut -d' ' -f1 | git cat-file --batch | grep -c '[*] 2'; "
        "ls .git; cat calculator.py"
    )
    _, seen = rolled_out(case, look, shared)
    commits, references, remotes, reflog, changed, faults, answers, compiled, *parts, _ = seen.splitlines()[:11]
    rest = seen.splitlines()[10:]
    assert faults == "1"
    assert parts == ["1", "0"]
    assert (commits, references, remotes, reflog, changed, answers, compiled) == ("1", "1", "0", "0", "0", "0", "0")
    assert "ORIG_HEAD" not in rest
    assert "    return number * 3" in rest


def test_what_judges_the_patch_is_nowhere_in_the_sandbox(instance: SweInstance, shared: Shared) -> None:
    mark = "what-judges-is-here"
    case = msgspec.structs.replace(
        instance,
        fail_to_pass=[*FAIL_TO_PASS, mark],
        pass_to_pass=[mark],
        test_patch=mark,
        eval_script=f"{instance.eval_script}# {mark}\n",
        expected_output={mark: "PASSED"},
    )
    find = (
        "find() { grep -rlsa '[w]hat-judges-is-here' /testbed /tmp /root /home /var/tmp /dev/shm $HOME | wc -l; "
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | "
        "grep -ca '[w]hat-judges-is-here'; }; find; "
        f"echo {mark} > /tmp/control; mark={mark} sleep 600 & "
        "until tr '\\0' '\\n' < /proc/$!/environ | grep -q ^mark=; do :; done; find"
    )
    told: list[ChatMessage] = []
    _, seen = rolled_out(case, find, shared, told=told)
    files, processes, *control = seen.split()
    assert (files, processes) == ("0", "0")
    assert all(int(count) >= 1 for count in control[-2:])
    assert told
    assert mark not in "".join(message.content or "" for message in told)


def test_history_before_the_base_is_kept(image: tuple[Path, str], instance: SweInstance, shared: Shared) -> None:
    head = git(image[0] / "testbed", "rev-parse", "HEAD").strip()
    _, seen = rolled_out(
        msgspec.structs.replace(instance, base_commit=head),
        "git log --format=%s; git tag; git blame -s calculator.py",
        shared,
    )
    assert seen.splitlines()[:3] == ["mend it", "first", "v2"]


@pytest.mark.parametrize("named", [True, False], ids=["a base", "HEAD"])
def test_what_the_image_changed_and_left_is_no_part_of_the_patch(
    named: bool, instance: SweInstance, shared: Shared, tmp_path: Path
) -> None:
    """As in images of other languages than Python, and of R2E-Gym."""
    path, before = make_image(tmp_path)
    testbed = path / "testbed"
    git(testbed, "checkout", "-q", before)
    with (testbed / ".gitignore").open("a") as ignored:
        ignored.write("build\n")
    for name in ("install.sh", "a [b]*.sh", "!c", "d ", "caf\xe9.sh", 'q"x', "back\\slash", "tab\tx", "two\nlines"):
        (testbed / name).write_text("true\n")
    dirty = msgspec.structs.replace(instance, image=str(path), base_commit=before if named else "")
    data, seen = rolled_out(dirty, f"{MEND}; echo 2 > new.sh; ls; tail -1 .gitignore", shared)
    assert seen.splitlines()[-1] == "build"
    assert "install.sh" in seen.splitlines()[-2]
    assert [line for line in data["patch"].splitlines() if line.startswith("diff")] == [
        "diff --git a/calculator.py b/calculator.py",
        "diff --git a/new.sh b/new.sh",
    ]
    assert judged(dirty, data, shared).reward == 1.0


def test_patch_has_new_and_binary_files_and_no_tests(instance: SweInstance, shared: Shared) -> None:
    acts = (
        f"{MEND}; printf 'a\\0b' > data.bin; mkdir -p more; echo new > more/new.py; echo cheat > tests/run.py; "
        "echo cheat > tests/new.py; git add more; mkdir __pycache__; echo x > __pycache__/a.pyc; "
        "chmod +x calculator.py; git -c user.name=a -c user.email=a@b commit -qam done"
    )
    data, _ = rolled_out(instance, acts, shared)
    patch = data["patch"]
    assert all(each in patch for each in ("b/data.bin", "GIT binary patch", "b/more/new.py", "new mode 100755"))
    assert "tests/" not in patch
    assert ".pyc" not in patch
    assert judged(instance, data, shared).reward == 1.0


def test_patch_that_changes_the_tests_is_undone_there(instance: SweInstance, shared: Shared) -> None:
    """A hostile agent's git may say anything: the rule is enforced where it cannot reach."""
    cheat = (
        "diff --git a/tests/run.py b/tests/run.py\ndeleted file mode 100644\n--- a/tests/run.py\n+++ /dev/null\n"
        f"@@ -1,{len(RUN_TESTS.splitlines())} +0,0 @@\n" + "".join(f"-{line}\n" for line in RUN_TESTS.splitlines())
    )
    evaluation = judged(instance, {"patch": cheat}, shared)
    assert (evaluation.reward, evaluation.metrics["tests_ran"]) == (0.0, 1.0)


@pytest.mark.proof
def test_tests_that_git_does_not_know_are_kept(instance: SweInstance, shared: Shared) -> None:
    case = msgspec.structs.replace(
        instance, test_files=["extra"], eval_script=eval_script("python3 extra/run.py", "/testbed")
    )
    data, _ = rolled_out(case, MEND, shared)
    assert judged(case, data, shared).reward == 1.0
    forged = PATCH.replace("+    return number * 2", "+    return number * 4") + (
        "--- a/extra/run.py\n+++ b/extra/run.py\n@@ -1,2 +1,3 @@\n import sys\n"
        "+print('PASSED tests/test_double.py::test_two\\nPASSED tests/test_double.py::test_zero'); sys.exit()\n"
        " sys.dont_write_bytecode = True\n"
    )
    assert judged(case, {"patch": forged}, shared).reward == 0.0


@pytest.mark.proof
@pytest.mark.parametrize("what", ["index.lock", "HEAD", "config"])
def test_patch_of_the_repositorys_own_folder_earns_nothing(what: str, instance: SweInstance, shared: Shared) -> None:
    """`patch` writes where git refuses to, so that a test could not be restored by git."""
    if shutil.which("patch") is None:
        lacking("patch", "the program patch is not installed")
    cheat = f"--- /dev/null\n+++ b/.git/{what}\n@@ -0,0 +1 @@\n+nonsense\n"
    cheat += "--- a/tests/run.py\n+++ b/tests/run.py\n@@ -1 +1,2 @@\n"
    cheat += "+print('PASSED tests/test_double.py::test_two\\nPASSED tests/test_double.py::test_zero'); exit()\n"
    cheat += " import sys\n"
    assert judged(instance, {"patch": cheat}, shared).reward == 0.0


def test_repository_within_the_repository_hides_no_tests(instance: SweInstance, shared: Shared) -> None:
    """The script of swebench goes on where its test patch does not apply, since its file is there already."""
    new = "".join(f"+{line}\n" for line in RUN_TESTS.replace("passed = right()", "passed = True").splitlines())
    parts = {".git/HEAD": "+ref: refs/heads/main\n", ".git/objects/x": "+\n", ".git/refs/x": "+\n", "run.py": new}
    patch = "".join(
        f"--- /dev/null\n+++ b/newtests/{name}\n@@ -0,0 +1,{text.count(chr(10))} @@\n{text}"
        for name, text in parts.items()
    )
    added = "".join(f"+{line}\n" for line in RUN_TESTS.splitlines())
    test_patch = (
        "diff --git a/newtests/run.py b/newtests/run.py\nnew file mode 100644\n--- /dev/null\n"
        f"+++ b/newtests/run.py\n@@ -0,0 +1,{added.count(chr(10))} @@\n{added}"
    )
    script = eval_script("python3 newtests/run.py", "/testbed", test_patch).replace(" || exit 1", "")
    case = msgspec.structs.replace(
        instance, test_files=["newtests/run.py", ":(glob)**/conftest.py"], test_patch=test_patch, eval_script=script
    )
    evaluation = judged(case, {"patch": patch}, shared)
    assert (evaluation.reward, evaluation.metrics["tests_ran"], evaluation.metrics["fail_to_pass"]) == (0.0, 1.0, 0.0)


@pytest.mark.proof
def test_patch_that_takes_too_long_to_apply_earns_nothing(
    instance: SweInstance, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.stages.handlers.swe.APPLY_S", 1.0)
    lines, context = 600_000, 60_000
    patch = (
        f"--- /dev/null\n+++ b/large\n@@ -0,0 +1,{lines} @@\n"
        + "+\n" * lines
        + f"--- a/large\n+++ b/large\n@@ -9,{context + 4} +9,{context + 4} @@\n"
        + " \n" * context
        + "-b\n+c\n \n \n \n"
    )
    evaluation = judged(instance, {"patch": patch}, shared)
    assert evaluation.reward == 0.0
    assert "the patch does not apply: it took longer than 1 s" in evaluation.notes["problem"]


def test_patch_may_have_any_bytes(instance: SweInstance, shared: Shared) -> None:
    acts = f"{MEND}; printf '# caf\\351\\n' >> calculator.py; sed -i '1i # -*- coding: latin-1 -*-' calculator.py"
    data, _ = rolled_out(instance, acts, shared)
    assert "caf\xe9" in data["patch"]
    assert judged(instance, data, shared).reward == 1.0


def test_code_of_the_agent_cannot_bring_the_answer_back_in_eval(injected: SweInstance, shared: Shared) -> None:
    acts = (
        "printf 'import subprocess\\nsubprocess.run(\"git stash list; git checkout HEAD~1 -- calculator.py; "
        "git checkout ORIG_HEAD -- calculator.py; git checkout -f main -- .\", shell=True)\\n' >> calculator.py"
    )
    data, _ = rolled_out(injected, acts, shared)
    assert judged(injected, data, shared).reward == 0.0


def test_empty_patch_needs_no_sandbox(instance: SweInstance, shared: Shared) -> None:
    data, _ = rolled_out(instance, "true", shared)
    assert data["patch"] == ""
    evaluation = judged(msgspec.structs.replace(instance, image="there-is-none"), data, shared)
    assert (evaluation.reward, evaluation.metrics["empty_patch"]) == (0.0, 1.0)
    assert "empty" in evaluation.notes["problem"]


def test_caches_and_environments_are_no_part_of_the_patch(instance: SweInstance, shared: Shared) -> None:
    acts = (
        f"{MEND}; mkdir -p env/lib/a 'my venv' node_modules/b src/__pycache__; echo home > env/pyvenv.cfg; "
        "echo x > env/lib/a/b.py; echo home > 'my venv/pyvenv.cfg'; echo x > node_modules/b/c.js; "
        "echo x > src/__pycache__/d.pyc; echo x > src/e.py; echo x > f.pyo"
    )
    data, _ = rolled_out(instance, acts, shared)
    assert [line for line in data["patch"].splitlines() if line.startswith("diff")] == [
        "diff --git a/calculator.py b/calculator.py",
        "diff --git a/src/e.py b/src/e.py",
    ]
    evaluation = judged(instance, data, shared)
    assert evaluation.reward == 1.0
    assert {"env/lib/a/b.py", "my venv/pyvenv.cfg", "node_modules/b/c.js"} <= {
        *evaluation.notes["left_out"].split("\n")
    }


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "make",
    [
        "head -c 3000000 /dev/urandom > big.bin",
        "head -c 3000000 /dev/zero | tr '\\0' x > big.txt",
        "for n in $(seq 40); do head -c 60000 /dev/urandom > $n.bin; done",
        "head -c 1048200 /dev/zero | tr '\\0' '\\377' > bytes.txt",
    ],
)
def test_new_files_that_are_too_large_are_left_out(make: str, instance: SweInstance, shared: Shared) -> None:
    data, _ = rolled_out(instance, f"{MEND}; {make}; echo new > small.py", shared)
    assert "b/small.py" in data["patch"]
    assert passed_on(data) == data
    evaluation = judged(instance, data, shared)
    assert evaluation.reward == 1.0
    assert {"big.bin", "big.txt", "1.bin", "bytes.txt"} & {*evaluation.notes["left_out"].split("\n")}


@pytest.mark.parametrize(
    ("acts", "said"),
    [
        ("rm -rf .git", "git"),
        ("head -c 3000000 /dev/urandom > calculator.py", "larger than"),
        ("head -c 1047000 /dev/zero | tr '\\0' '\\377' > calculator.py", "larger than"),
    ],
)
def test_repository_without_a_patch_earns_nothing(acts: str, said: str, instance: SweInstance, shared: Shared) -> None:
    data, _ = rolled_out(instance, acts, shared)
    evaluation = judged(instance, data, shared)
    assert evaluation.reward == 0.0
    assert said in evaluation.notes["problem"]


def test_patch_that_does_not_apply_says_so(instance: SweInstance, shared: Shared) -> None:
    evaluation = judged(instance, {"patch": PATCH.replace("* 3", "* 7").replace("calculator", "abacus")}, shared)
    assert (evaluation.reward, evaluation.metrics["patch_applied"]) == (0.0, 0.0)
    assert "abacus.py" in evaluation.notes["problem"]


def test_image_that_is_missing_is_no_reward(instance: SweInstance, shared: Shared) -> None:
    with pytest.raises(SandboxFailed, match="there-is-none") as caught:
        judged(msgspec.structs.replace(instance, image="there-is-none"), {"patch": PATCH}, shared)
    assert SweHandler().eval_exception(JOB, caught.value).outcome == Outcome.INFRASTRUCTURE_ERROR


def test_sif_file_that_does_not_start_is_said_and_no_reward(
    instance: SweInstance, graders: Graders, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "torn.sif").write_bytes(SIF_MAGIC.rjust(SIF_MAGIC_OFFSET_BYTES + len(SIF_MAGIC), b" ") + b" torn")
    sandboxes = Sandboxes("apptainer", tmp_path / "sandboxes", image_folders=(images,))
    with pytest.raises(SandboxFailed, match=r"torn\.sif") as caught:
        judged(msgspec.structs.replace(instance, image="torn"), {"patch": PATCH}, Shared(sandboxes, graders))
    sandboxes.close()
    assert SweHandler().eval_exception(JOB, caught.value).outcome == Outcome.INFRASTRUCTURE_ERROR


def test_time_that_setting_up_took_is_not_the_patchs_fault(instance: SweInstance, shared: Shared) -> None:
    short = Job(task="swe", instance={}, limits=PhaseLimits(eval_s=15.1))
    with pytest.raises(SandboxFailed, match=r"limits\.eval_s") as caught:
        judged(instance, {"patch": PATCH}, shared, short)
    assert SweHandler().eval_exception(JOB, caught.value).outcome == Outcome.INFRASTRUCTURE_ERROR


@pytest.mark.proof
def test_image_may_be_a_sif_file_of_its_name(
    image: tuple[Path, str], instance: SweInstance, graders: Graders, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    build = ["apptainer", "--silent", "build", str(folder / "calculator.sif"), str(image[0])]
    subprocess.run(build, check=True, capture_output=True)
    named = msgspec.structs.replace(instance, image="calculator")
    sandboxes = Sandboxes("apptainer", tmp_path / "sandboxes", image_folders=(folder,))
    own = Shared(sandboxes, graders)
    data, seen = rolled_out(named, f"git log --all --oneline | wc -l; {MEND}", own)
    assert seen.split() == ["1"]
    assert judged(named, data, own).reward == 1.0
    sandboxes.close()


def test_tests_that_hang_have_not_passed(instance: SweInstance, shared: Shared) -> None:
    slow = msgspec.structs.replace(instance, tests_s=2.0, eval_script=eval_script("sleep 600", "/testbed"))
    evaluation = judged(slow, {"patch": PATCH}, shared)
    assert (evaluation.reward, evaluation.metrics["tests_timed_out"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_commit": "0123456789abcdef"}, "0123456789abcdef"),
        ({"directory": "/nowhere"}, "/nowhere"),
        ({"setup_patch": "nonsense"}, "No valid patches"),
    ],
)
def test_image_without_the_base_is_the_tasks_fault(
    change: dict[str, str], said: str, instance: SweInstance, shared: Shared
) -> None:
    with pytest.raises(HandlerFailed, match=said):
        rolled_out(msgspec.structs.replace(instance, **change), "true", shared)


def test_hidden_files_are_there_in_eval_only(instance: SweInstance, shared: Shared) -> None:
    case = msgspec.structs.replace(instance, hidden=["tests"], test_files=["tests"])
    data, seen = rolled_out(case, f"ls; {MEND}", shared)
    assert "tests" not in seen.split()
    assert judged(case, data, shared).reward == 1.0
