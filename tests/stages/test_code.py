"""The `code` task: what it takes as an answer, and what it pays for honest and hostile ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from code_cheats import CHEATS, NUMBERS, RIGHT_FUNCTION, RIGHT_LINE, TIME, Cheat
from code_rows import EXAMPLES, Example
from needed import usable
from phases import eval_phase
from rootfs import root_filesystem

from prorl_zmq import Job
from prorl_zmq.errors import SandboxFailed
from prorl_zmq.stages.episode import Episode
from prorl_zmq.stages.handler import InitPhase, RunPhase
from prorl_zmq.stages.handlers import code_runner
from prorl_zmq.stages.handlers.code import CodeHandler
from prorl_zmq.stages.handlers.code_runner import SolutionRunner, Verdict
from prorl_zmq.stages.handlers.code_source import last_block, needed_imports
from prorl_zmq.tasks.code import CodeInstance, CodeTest
from prorl_zmq.tasks.code_formats import ROW_FORMATS
from prorl_zmq.tasks.row_format import recognise
from prorl_zmq.wire.messages.jobs import PhaseLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.graders import Graders
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.inference.chat import ChatMessage
    from prorl_zmq.stages.handler import Evaluation
    from prorl_zmq.tools.containers.specification import SandboxSpec
    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.tool import Tool

pytestmark = pytest.mark.usefixtures("sandboxes_of")
AT_ONCE = 6
PROGRAM = CodeInstance(
    "Print n squared plus one.", [CodeTest(f"{n}\n", f"{n * n + 1}\n") for n in NUMBERS], time_s=2.0, memory_bytes=2**28
)
FUNCTION = msgspec.structs.replace(
    PROGRAM, entry_point="f", tests=[CodeTest(f"[{n}]", str(n * n + 1)) for n in NUMBERS]
)


@dataclasses.dataclass(frozen=True)
class Shared:
    sandboxes: SharedSandboxes
    graders: Graders


def evaluated(shared: Shared, answers: dict[str, tuple[CodeInstance, str]], kind: Any = "bubblewrap") -> dict[str, Any]:
    """Evaluate answers, some at a time; give what each got, or the error that it met."""

    async def one(instance: CodeInstance, source: str) -> Evaluation:
        job = Job(task="code", instance={})
        async with room, eval_phase(job, instance, {"source": source}, sandboxes, pool=shared.graders.pool) as phase:
            return await CodeHandler().eval(phase)

    async def run() -> dict[str, Any]:
        found = await asyncio.gather(*(one(*answer) for answer in answers.values()), return_exceptions=True)
        assert list(sandboxes.root.iterdir()) == []
        return dict(zip(answers, found, strict=True))

    sandboxes = shared.sandboxes(kind)
    room = asyncio.Semaphore(AT_ONCE)
    return shared.graders.run(run())


@pytest.fixture(scope="module")
def shared(shared_sandboxes: SharedSandboxes, graders: Graders) -> Shared:
    return Shared(shared_sandboxes, graders)


# Hostile answers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("apptainer", marks=pytest.mark.proof)])
def got(request: pytest.FixtureRequest, shared: Shared) -> dict[str, Any]:
    kind: str = request.param
    image = str(root_filesystem()) if kind == "apptainer" else ""
    program, function = (msgspec.structs.replace(each, image=image) for each in (PROGRAM, FUNCTION))
    endless = msgspec.structs.replace(program, time_s=0.5)
    assert not any(cheat.calls for cheat in CHEATS if cheat.kind == TIME)
    assert len({cheat.name for cheat in CHEATS}) == len(CHEATS) >= 30
    chosen = (getattr(item, "callspec", None) for item in request.session.items)  # of which tests run
    cheats = [call.params["cheat"] for call in chosen if call and call.params.get("got") == kind]
    answers = {
        cheat.name: (endless if cheat.kind == TIME else function if cheat.calls else program, cheat.source)
        for cheat in cheats
    }
    return evaluated(shared, answers, kind)


@pytest.mark.few(24)
@pytest.mark.xdist_group("hostile answers")
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_hostile_answer_gets_what_it_has_earned(cheat: Cheat, got: dict[str, Any]) -> None:
    evaluation = got[cheat.name]
    assert not isinstance(evaluation, BaseException), repr(evaluation)
    assert evaluation.reward == cheat.reward, evaluation.notes
    if cheat.kind:
        assert f": {cheat.kind}\n" in evaluation.notes["first_failure"]


# Honest answers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest(shared: Shared) -> dict[str, Any]:
    answers: dict[str, tuple[CodeInstance, str]] = {}
    for example in EXAMPLES:
        instance = recognise(example.row, ROW_FORMATS).convert(example.row)
        assert isinstance(instance, CodeInstance)
        answers |= {
            f"{example.name}-right": (instance, example.right),
            f"{example.name}-wrong": (instance, example.wrong),
        }
    return evaluated(shared, answers)


@pytest.mark.xdist_group("honest answers")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_right_and_wrong_answers_in_every_form(example: Example, honest: dict[str, Any]) -> None:
    right, wrong = honest[f"{example.name}-right"], honest[f"{example.name}-wrong"]
    assert (right.reward, wrong.reward) == (1.0, 0.0), (right, wrong)
    assert right.metrics["tests_passed"] == right.metrics["tests"] >= 3
    assert wrong.metrics["tests_run"] == 1
    assert ": wrong answer\n" in wrong.notes["first_failure"]


@pytest.mark.parametrize("kind", ["apptainer", "process"])
def test_every_kind_of_sandbox_judges_alike(kind: str, shared: Shared) -> None:
    usable(kind)
    image = str(root_filesystem()) if kind == "apptainer" else ""
    program = msgspec.structs.replace(PROGRAM, image=image)
    leaves = "open('kept', 'a').write('x')\nprint(int(input()) ** 2 + 1 if open('kept').read() == 'x' else 0)"
    forks = RIGHT_LINE + "import os; os.fork()"
    answers = {
        "right": (program, RIGHT_LINE),
        "wrong": (program, "print(5)"),
        "leaves a file": (program, leaves),
        "forks": (program, forks),
        "function": (msgspec.structs.replace(FUNCTION, image=image), RIGHT_FUNCTION),
    }
    got = evaluated(shared, answers, kind)
    rewards = {name: getattr(evaluation, "reward", evaluation) for name, evaluation in got.items()}
    assert rewards == {"right": 1.0, "wrong": 0.0, "leaves a file": 1.0, "forks": 0.0, "function": 1.0}


def test_fraction_pays_for_each_test(shared: Shared) -> None:
    tests = [CodeTest(f"{n}\n", str(n)) for n in range(10)]
    instance = CodeInstance("p", tests, reward="fraction")
    source = "n = int(input())\nassert n != 3\nprint(n if n < 8 else -n)"
    evaluation = evaluated(shared, {"one": (instance, source)})["one"]
    assert evaluation.reward == 0.7
    assert evaluation.metrics == {"tests": 10.0, "tests_run": 10.0, "tests_passed": 7.0, "tests_left_out": 0.0}
    assert evaluation.notes["tests"] == "7 of 10 passed, 10 were run"
    assert evaluation.notes["first_failure"].startswith(
        "test 4: runtime error\n\ninput:\n3\n\n\nexpected:\n3\n\nsaid:\n"
    )
    assert "AssertionError" in evaluation.notes["first_failure"]


def test_most_tests_are_those_with_the_longest_inputs(shared: Shared) -> None:
    tests = [CodeTest("1", "wrong"), CodeTest("22", "22"), CodeTest("333", "333")]
    instance = CodeInstance("p", tests, max_tests=2, left_out=5)
    evaluation = evaluated(shared, {"one": (instance, "print(input())")})["one"]
    assert evaluation.reward == 1.0
    assert evaluation.metrics == {"tests": 2.0, "tests_run": 2.0, "tests_passed": 2.0, "tests_left_out": 6.0}


def test_long_outputs_are_compared_in_a_grader_process(shared: Shared) -> None:
    expected = " ".join(map(str, range(100_000)))
    program = CodeInstance("p", [CodeTest("", expected)])
    function = CodeInstance("p", [CodeTest("[]", json.dumps(list(range(100_000))))], entry_point="f")
    answers = {
        "right": (program, "print(*range(100000), sep=chr(10))"),
        "wrong": (program, "print(*range(1, 100001))"),
        "function": (function, "def f(): return list(range(100000))"),
    }
    got = evaluated(shared, answers)
    assert {name: evaluation.reward for name, evaluation in got.items()} == {
        "right": 1.0,
        "wrong": 0.0,
        "function": 1.0,
    }


def test_names_that_the_field_imports_are_there(shared: Shared) -> None:
    source = (
        "def f(n: int) -> List[int]:\n    kept = deque([n, gcd(4, 6)])\n    return [sys.maxsize > 0, *kept, inf > 1]"
    )
    instance = CodeInstance("p", [CodeTest("[1]", "[true,1,2,true]")], entry_point="f")
    assert evaluated(shared, {"one": (instance, source)})["one"].reward == 1.0


# What is not the answer's fault ---------------------------------------------------------------------------------------


def test_sandbox_that_is_lost_between_tests_is_replaced(shared: Shared) -> None:

    async def run() -> tuple[list[Verdict], int]:
        made: list[Sandbox] = []
        sandboxes = shared.sandboxes("bubblewrap")
        async with eval_phase(Job(task="code", instance={}), PROGRAM, {"source": RIGHT_LINE}, sandboxes) as phase:

            async def create(spec: SandboxSpec) -> Sandbox:
                made.append(await phase.create_sandbox(spec))
                return made[-1]

            runner = SolutionRunner(dataclasses.replace(phase, create_sandbox=create), RIGHT_LINE)
            verdicts = [await runner.run(PROGRAM.tests[0], 10.0)]
            await made[0].close()
            verdicts += [await runner.run(test, 10.0) for test in PROGRAM.tests[1:]]
        return verdicts, len(made)

    verdicts, made = asyncio.run(run())
    assert all(verdict.passed for verdict in verdicts)
    assert made == 2


def test_sandbox_that_fails_when_it_is_new_is_an_infrastructure_error(shared: Shared) -> None:

    async def run() -> int:
        made: list[Sandbox] = []
        sandboxes = shared.sandboxes("bubblewrap")
        async with eval_phase(Job(task="code", instance={}), PROGRAM, {"source": RIGHT_LINE}, sandboxes) as phase:

            async def create(spec: SandboxSpec) -> Sandbox:
                made.append(await phase.create_sandbox(spec))
                await made[-1].close()
                return made[-1]

            with pytest.raises(SandboxFailed):
                await CodeHandler().eval(dataclasses.replace(phase, create_sandbox=create))
        return len(made)

    assert asyncio.run(run()) == 2


def test_image_without_python_is_no_fault_of_the_answer(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(code_runner.ENVIRONMENT, "PATH", "/nonexistent")
    error = evaluated(shared, {"one": (PROGRAM, RIGHT_LINE)})["one"]
    assert isinstance(error, SandboxFailed)
    assert error.reason == "image"


def test_tests_for_which_eval_has_no_time_have_not_passed(shared: Shared) -> None:

    async def run() -> Evaluation:
        sandboxes = shared.sandboxes("bubblewrap")
        job = Job(task="code", instance={}, limits=PhaseLimits(eval_s=4.0))
        instance = msgspec.structs.replace(PROGRAM, reward="fraction")
        source = "import time\nn = int(input())\nif n == 2: time.sleep(60)\nprint(n * n + 1)"
        async with eval_phase(job, instance, {"source": source}, sandboxes) as phase:
            return await CodeHandler().eval(phase)

    evaluation = asyncio.run(run())
    assert evaluation.reward == 0.0
    assert evaluation.notes["first_failure"].startswith("test 1: time limit\n")


def test_eval_without_time_for_tests_is_no_fault_of_the_answer(shared: Shared) -> None:
    job = Job(task="code", instance={}, limits=PhaseLimits(eval_s=2.0))

    async def run() -> None:
        sandboxes = shared.sandboxes("bubblewrap")
        async with eval_phase(job, PROGRAM, {"source": RIGHT_LINE}, sandboxes) as phase:
            with pytest.raises(SandboxFailed, match=r"limits\.eval_s"):
                await CodeHandler().eval(phase)

    asyncio.run(run())


# What is taken as an answer -------------------------------------------------------------------------------------------

BLOCK = f"I think.\n```python\n{RIGHT_LINE}```\nThat is it."


def answered(shared: Shared, episode: Episode, leave: str = "", tools: tuple[Any, ...] = ("bash",)) -> tuple[str, str]:
    """Have RUN end so, after a line of bash by the agent; give what goes on to EVAL, and the question."""

    async def run() -> tuple[str, str]:
        asked: list[ChatMessage] = []

        async def converse(messages: Sequence[ChatMessage], given: Sequence[Tool[Any]]) -> Episode:
            asked.extend(messages)
            if leave:
                await given[0]({"command": leave}, 10.0)
            return episode

        instance = msgspec.structs.replace(PROGRAM, tools=tools, starter_code="import sys")
        sandbox: Sandbox | None = None

        async def create(spec: SandboxSpec) -> Sandbox:
            nonlocal sandbox
            sandbox = await shared.sandboxes("bubblewrap").create("job.1", spec)
            return sandbox

        job = Job(task="code", instance={})
        try:
            data = await CodeHandler().init(InitPhase(job, instance, create))
            data = await CodeHandler().run(RunPhase(job, instance, data, sandbox, converse))
        finally:
            if sandbox is not None:
                await sandbox.close()
        assert (sandbox is None) == (not tools)
        return data["source"], str(asked[-1].content)

    return asyncio.run(run())


def test_solution_file_comes_first(shared: Shared) -> None:
    source, asked = answered(shared, Episode(last_text=BLOCK), "echo 'print(1)' > solution.py")
    assert source == "print(1)\n"
    assert "/workspace/solution.py" in asked


@pytest.mark.parametrize(
    "leave",
    ["true", "echo ' ' > solution.py", "ln -s /etc/passwd solution.py", "mkdir solution.py", "mkfifo solution.py",
     "head -c 200000 /dev/zero | tr '\\0' '#' > solution.py", "ln -s solution.py solution.py"],
)  # fmt: skip
def test_without_a_file_that_can_be_read_the_last_block_counts(leave: str, shared: Shared) -> None:
    assert answered(shared, Episode(last_text=BLOCK), leave)[0] == RIGHT_LINE


def test_final_message_comes_before_the_last_text(shared: Shared) -> None:
    episode = Episode(last_text="```\nlast\n```", final_message=BLOCK)
    assert answered(shared, episode)[0] == RIGHT_LINE
    episode = Episode(last_text=BLOCK, final_message="done")
    assert answered(shared, episode)[0] == RIGHT_LINE


def test_job_without_tools_needs_no_sandbox(shared: Shared) -> None:
    source, asked = answered(shared, Episode(last_text=BLOCK), tools=())
    assert source == RIGHT_LINE
    assert "/workspace" not in asked
    assert answered(shared, Episode(last_text="I do not know."), tools=())[0] == ""


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nor\n```py\nb\n\nc\n```\n", "b\n\nc\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("- so:\n  ```python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
        ("````md\n```\na\n```\n````", "```\na\n```\n"),
        ("``` a `b` ```", None),
        ("```python\na\n``` done", "a\n"),
        ("so:\n```python\nif a:\n    b```\nThat is it.", "if a:\n    b\n"),
        ("```python\na\n```python\nb\n```", "a\n```python\nb\n"),
        ("```python\na  # ```\nb\n```", "a  # ```\nb\n"),
        ("```python\na```\nor:\n```python\nb\n```\n", "b\n"),
        ("```python\na```\nor:\n```python\nb", "a\n"),
        ("no code", None),
        ("", None),
    ],
)
def test_last_block(text: str, block: str | None) -> None:
    assert last_block(text) == block


def test_imports_are_what_a_source_names() -> None:
    assert needed_imports("print(1)") == ""
    assert needed_imports("print(math.pi, gcd(1, 2), List)") == "math math:gcd typing:List"
    assert needed_imports("time = 1  # collections") == ""
    assert needed_imports("input().split(); re.sub('a', 'b', s)") == "re"
    assert needed_imports("np.zeros(3), atan2(1, 2), findall('a', s)") == "np=numpy math:atan2 re:findall"
