"""The `math` task: which answers are right, and its three phases."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from phases import eval_phase

from prorl_zmq import Job
from prorl_zmq.errors import GraderFailed, HandlerFailed
from prorl_zmq.stages.episode import Episode
from prorl_zmq.stages.handler import InitPhase, RunPhase, failure_of
from prorl_zmq.stages.handlers.math import GRADE_S, SYSTEM_MESSAGE, MathHandler
from prorl_zmq.stages.handlers.math_answers import answer_of, right_answer
from prorl_zmq.stages.handlers.math_answers import usable as usable_truth
from prorl_zmq.stages.handlers.math_expressions import errors_logged
from prorl_zmq.tasks.math import MathInstance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.graders import Graders
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.inference.chat import ChatMessage
    from prorl_zmq.stages.handler import Evaluation
    from prorl_zmq.tools.tool import Tool

sys.path.append(str(Path(__file__).parent))
from answer_pairs import BOXED, EQUAL, MESSAGES


def wrongly_judged(graders: Graders, pairs: list[tuple[str, str, bool]]) -> list[tuple[str, str, Any]]:
    """Judge answers as EVAL does; give those whose judgement is another one, or is none within the limit."""

    async def one(truth: str, answer: str) -> Any:
        try:
            return await graders.pool.call(right_answer, truth, answer, timeout_s=GRADE_S, returns=bool)
        except GraderFailed as error:
            return error.message

    async def run() -> list[tuple[str, str, Any]]:
        found = await asyncio.gather(*(one(truth, answer) for truth, answer, _ in pairs))
        return [
            (truth[:80], answer[:80], got)
            for (truth, answer, right), got in zip(pairs, found, strict=True)
            if got is not right
        ]

    return graders.run(run())


def test_answers_in_a_box(graders: Graders) -> None:
    assert len(BOXED) >= 200
    assert wrongly_judged(graders, [(truth, f"\\boxed{{{answer}}}", right) for truth, answer, right in BOXED]) == []


def test_answers_of_whole_messages(graders: Graders) -> None:
    assert wrongly_judged(graders, [(truth, answer_of(None, text), right) for truth, text, right in MESSAGES]) == []


def test_every_ground_truth_is_equal_to_itself(graders: Graders) -> None:
    truths = {truth for truth, _ in EQUAL}
    assert wrongly_judged(graders, [(truth, f"\\boxed{{{truth}}}", True) for truth in truths]) == []


def test_order_of_a_comparison_of_values_does_not_matter(graders: Graders) -> None:
    """But for names, units and choices, which the ground truth alone may leave open."""
    values = [(truth, answer) for truth, answer in EQUAL if not set("=<>BACDE\\%$") & set(truth + answer)]
    assert len(values) > 20
    assert wrongly_judged(graders, [(answer, f"\\boxed{{{truth}}}", True) for truth, answer in values]) == []


@pytest.mark.parametrize(
    ("message", "text", "answer"),
    [
        (None, "It is \\boxed{5}.", "\\boxed{5}"),
        (None, "It is 5.", "It is 5."),
        ("5", "I call finish.", "5"),
        ("\\boxed{5}", "\\boxed{6}", "\\boxed{5}"),
        ("It is in the box.", "So \\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{2}}"),
        ("  ", "It is 5.", "It is 5."),
        (None, "\\boxed{5", "\\boxed{}"),
        (None, "", ""),
    ],
)
def test_what_is_judged(message: str | None, text: str, answer: str) -> None:
    assert answer_of(message, text) == answer


def test_what_is_kept_of_a_long_answer_is_bounded() -> None:
    for text in ("\\boxed{" + "x" * 10**6 + "}", "x" * 10**6):
        assert len(answer_of(None, text)) < 5000
    assert answer_of(None, "\\boxed{5}" + "x" * 10**6) == "\\boxed{5}"


@pytest.mark.parametrize("truth", ["", "  ", "$$", "\\boxed{}", "."])
def test_empty_ground_truth_is_the_tasks_fault(truth: str) -> None:
    assert not usable_truth(truth)

    async def init() -> None:
        await MathHandler().init(InitPhase(job(), MathInstance("?", truth), no_sandbox))

    async def judge() -> None:
        async with eval_phase(job(), MathInstance("?", truth), {"answer": "\\boxed{}"}) as phase:
            await MathHandler().eval(phase)

    for phase in (init, judge):
        with pytest.raises(HandlerFailed, match="ground_truth is empty") as caught:
            asyncio.run(phase())
        assert failure_of(caught.value).outcome == "failed"


def test_an_unreadable_ground_truth_is_compared_as_text(graders: Graders) -> None:
    truth = "\\weird{?!} as $ it \\is"
    assert wrongly_judged(graders, [(truth, f"\\boxed{{{truth}}}", True), (truth, "\\boxed{5}", False)]) == []


def test_a_job_without_tools_needs_no_sandbox(graders: Graders) -> None:
    async def converse(messages: Sequence[ChatMessage], tools: Sequence[Tool[Any]]) -> Episode:
        assert [message.content for message in messages] == [SYSTEM_MESSAGE, "What is a half of one?"]
        assert not tools
        return Episode(last_text="\\boxed{0.5}")

    async def run() -> Evaluation:
        handler, instance = MathHandler(), MathInstance("What is a half of one?", "1/2")
        data = await handler.init(InitPhase(job(), instance, no_sandbox))
        data = await handler.run(RunPhase(job(), instance, data, None, converse))
        async with eval_phase(job(), instance, data, pool=graders.pool) as phase:
            return await handler.eval(phase)

    evaluation = graders.run(run())
    assert (evaluation.reward, evaluation.notes) == (1.0, {"answer": "\\boxed{0.5}", "ground_truth": "1/2"})


def test_thinking_and_finishing_need_no_sandbox() -> None:
    async def converse(messages: Sequence[ChatMessage], tools: Sequence[Tool[Any]]) -> Episode:
        assert [tool.name for tool in tools] == ["think", "finish"]
        assert "finish" in messages[0].content
        return Episode(last_text="", final_message=await tools[1]({"message": "7"}, 5.0))

    async def run() -> dict[str, Any]:
        handler, instance = MathHandler(), MathInstance("?", "7", tools=("think", "finish"))
        data = await handler.init(InitPhase(job(), instance, no_sandbox))
        return await handler.run(RunPhase(job(), instance, data, None, converse))

    assert asyncio.run(run()) == {"answer": "7"}


def test_tools_work_in_a_sandbox_from_the_session_that_init_started(sandboxes_of: SharedSandboxes) -> None:
    async def converse(messages: Sequence[ChatMessage], tools: Sequence[Tool[Any]]) -> Episode:
        by_name = {tool.name: tool for tool in tools}
        assert list(by_name) == ["ipython", "bash", "finish"]
        found = await by_name["ipython"]({"code": "sum(range(101))"}, 30.0)
        assert "5050" in found
        assert "5050" in await by_name["bash"]({"command": "echo $((5050 + 0))"}, 30.0)
        return Episode(last_text="", final_message=await by_name["finish"]({"message": "It is \\boxed{5050}."}, 5.0))

    async def run() -> dict[str, Any]:
        sandboxes = sandboxes_of("bubblewrap")
        handler, instance = MathHandler(), MathInstance("?", "5050", tools=("ipython", "bash", "finish"))
        made = []

        async def create(spec: Any) -> Any:
            made.append(await sandboxes.create("job.1", spec))
            return made[0]

        try:
            data = await handler.init(InitPhase(job(), instance, create))
            return await handler.run(RunPhase(job(), instance, data, made[0], converse))
        finally:
            for sandbox in made:
                await sandbox.close()

    assert asyncio.run(run()) == {"answer": "\\boxed{5050}"}


def job() -> Job:
    return Job(task="math", instance={})


async def no_sandbox(spec: Any) -> Any:
    raise AssertionError("no sandbox is needed")


def test_an_error_while_comparing_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="prorl.grader"), errors_logged("reading a unit"):
        raise AssertionError("no unit")
    assert "reading a unit failed" in caplog.text
    assert "AssertionError: no unit" in caplog.text


BETWEEN = [
    r"\approx",
    r"\sim",
    r"\simeq",
    r"\cong",
    r"\doteq",
    r"\equiv",
    r"\propto",
    r"\to",
    r"\mapsto",
    r"\Rightarrow",
    r"\implies",
    r"\iff",
    r"\neq",
    r"\leq",
    r"\geq",
    r"<",
    r">",
    r"=",
    r":=",
    r"==",
    r"=>",
    r"->",
    r"~",
    r"≈",
    r"≡",
    r"→",
    r"±",
    r"\pm",
    r",",
    r";",
    r"|",
    r"||",
    r"/",
    r"\mid",
    r"\lor",
    r"\cup",
    r"\cap",
    r"\in",
    r":",
    r"\quad",
    r"\\",
    r"...",
    r"\ldots",
    r"?",
    r"!",
    r"&",
    r"\bmod",
    r"\mod",
    r"%",
    r"^\circ",
    r".",
    r"\times",
    r"(not)",
    r"or",
    r"and",
    r"to",
    r"not",
    r"vs",
    r"is",
]
AROUND = (
    "{}",
    "${}$",
    "\\boxed{{{}}}",
    "The answer is {}.",
    "x = {}",
    "({})",
    "[{}]",
    "**{}**",
    "\\({}\\)",
    "\\{{{}\\}}",
)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a limit that fell into a callback
@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.proof)])
def test_no_answer_is_right_for_two_values(each: int) -> None:
    r"""`17 \approx 42` was right for 17 by one way to read it, and for 42 by another."""
    forms = [
        form
        for between in BETWEEN
        for around in AROUND
        for form in (
            around.format(f"17 {between} 42"),
            around.format(f"17{between}42"),
            f"{around.format(17)} {between} {around.format(42)}",
        )
    ]
    answers = [answer_of(None, form) for form in forms[::each]]
    both = [answer for answer in answers if right_answer("17", answer) and right_answer("42", answer)]
    assert both == []
    for truth, text, right in (
        ("\\pi", "\\boxed{\\pi \\approx 3.14}", True),
        ("3.14", "x \\approx 3.14", True),
        ("17", "\\boxed{17 \\approx 42}", False),
        ("42", "17 \\approx 42", False),
        ("x \\equiv 3", "\\boxed{x \\equiv 3}", True),
    ):
        assert right_answer(truth, answer_of(None, text)) == right, text


@pytest.mark.parametrize("joint", ["", ",", ", and", "\\text{"])
def test_blanks_between_boxes_take_no_time(joint: str) -> None:
    """RUN takes the answer where no grader's limit holds: the cube of their number would stop its whole process."""
    assert answer_of(None, f"\\boxed{{1}}{joint}{' ' * 20_000}!\\boxed{{2}}") == "\\boxed{2}"
    assert answer_of(None, f"\\boxed{{1}}, {' ' * 20_000}\\boxed{{2}}") == "\\boxed{1, 2}"
