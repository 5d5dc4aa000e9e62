"""The `stem` task: rules for numbers with units, choices and expressions; a judge for the rest; the tools."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from phases import eval_phase

from prorl_zmq import Job
from prorl_zmq.errors import ConfigError, GraderFailed, HandlerFailed
from prorl_zmq.stages.episode import Episode
from prorl_zmq.stages.handler import InitPhase, RunPhase
from prorl_zmq.stages.handlers.math import GRADE_S
from prorl_zmq.stages.handlers.stem import SEARCH_KEY, SEARCH_URL, TAVILY_KEY, StemHandler
from prorl_zmq.stages.handlers.stem_answers import Verdict, judged_by_rules
from prorl_zmq.tasks.stem import TOLERANCE, StemInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from support.graders import Graders
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.inference.chat import ChatMessage
    from prorl_zmq.stages.handler import Evaluation
    from prorl_zmq.tools.tool import Tool

URL, MODEL, KEY = "PRORL_MODEL_JUDGE_URL", "PRORL_MODEL_JUDGE_MODEL", "PRORL_MODEL_JUDGE_KEY"

JOB = Job(task="stem", instance={})

NUMBERS = [
    # the same unit, written in different ways
    ("1.5 km", "1500 m", "right"),
    ("1500 m", "1.5 \\text{ km}", "right"),
    ("9.8 m/s^2", "9.8 \\mathrm{m/s^2}", "right"),
    ("9.8 m/s^2", "9.81\\,\\mathrm{m\\,s^{-2}}", "right"),
    ("9.8 \\mathrm{~m} / \\mathrm{s}^{2}", "9.8 m/s²", "right"),
    ("9.8 m/s^2", "9.8 m/s", "wrong"),
    ("10 m/s", "36 km/h", "right"),
    ("10 m/s", "10 \\frac{\\text{m}}{\\text{s}}", "right"),
    ("10 meters per second", "10 m/s", "right"),
    ("3.0 \\times 10^{8} \\text{ m/s}", "3e8 m/s", "right"),
    ("3.0 \\times 10^8 m/s", "2.998 \\times 10^{8} \\mathrm{m\\,s^{-1}}", "right"),
    ("3.0 \\times 10^8 m/s", "3.0 \\times 10^{5} km/s", "right"),
    ("3.0 \\times 10^8 m/s", "3.0 \\times 10^{7} m/s", "wrong"),
    ("13.6 eV", "2.18 \\times 10^{-18} J", "right"),
    ("13.6 eV", "-13.6 eV", "wrong"),
    ("1 eV", "1.602e-19 J", "right"),
    ("1 eV", "1.602e-16 J", "wrong"),
    ("0.511 MeV", "511 keV", "right"),
    ("1 kcal/mol", "4.184 kJ/mol", "right"),
    ("-285.8 kJ/mol", "-285.8 \\mathrm{kJ\\,mol^{-1}}", "right"),
    ("-285.8 kJ/mol", "285.8 kJ/mol", "wrong"),
    ("8.314 J/(mol K)", "8.314 \\text{ J mol}^{-1}\\text{ K}^{-1}", "right"),
    ("8.314 J/(mol K)", "8.314 J/mol/K", "right"),
    ("8.314 J/(mol K)", "1.987 cal/(mol K)", "right"),
    ("1 atm", "101325 Pa", "right"),
    ("1 atm", "760 mmHg", "right"),
    ("1 atm", "1.013 bar", "right"),
    ("1 atm", "1 Pa", "wrong"),
    ("25 °C", "298.15 K", "right"),
    ("298.15 K", "25 ^\\circ C", "right"),
    ("25 ^{\\circ}\\mathrm{C}", "25 °C", "right"),
    ("25 °C", "25 C", "right"),
    ("25 °C", "25 K", "wrong"),
    ("100 °C", "212 °F", "right"),
    ("373 K", "100 °C", "right"),
    ("500 nm", "0.5 \\mu m", "right"),
    ("500 nm", "5.0 \\times 10^{-7} m", "right"),
    ("500 nm", "5000 Å", "right"),
    ("500 nm", "500 µm", "wrong"),
    ("4.7 k\\Omega", "4700 Ω", "right"),
    ("2.2 \\mu F", "2.2 \\times 10^{-6} \\text{ F}", "right"),
    ("0.10 M", "0.10 mol/L", "right"),
    ("0.10 M", "0.1 \\text{ mol dm}^{-3}", "right"),
    ("1 h", "3600 s", "right"),
    ("2 hours", "120 min", "right"),
    ("5 N m", "5 J", "right"),
    ("1.0 g/cm^3", "1000 kg/m^3", "right"),
    ("22.4 L", "22400 cm^3", "right"),
    ("22.4 L", "0.0224 \\text{ cubic meters}", "right"),
    ("30^\\circ", "0.5236 rad", "right"),
    ("30^\\circ", "\\frac{\\pi}{6} \\text{ rad}", "right"),
    ("3.14 rad", "\\pi \\text{ rad}", "right"),
    # one of them without a unit
    ("9.8 m/s^2", "9.8", "right"),
    ("9.8", "9.8 \\text{ m/s}^2", "right"),
    ("9.8 m/s^2", "98", "wrong"),
    ("50 %", "0.5", "right"),
    ("0.5", "50\\%", "right"),
    ("50\\%", "50", "right"),
    ("0.5", "0.5\\%", "wrong"),
    # tolerance, rounding, counts
    ("100 m", "100.9 m", "right"),
    ("100 m", "102 m", "wrong"),
    ("0.13", "0.1347", "right"),
    ("0.13", "0.1363", "wrong"),
    ("21", "22", "wrong"),
    ("118", "117", "wrong"),
    ("118", "118.0", "right"),
    ("0", "0", "right"),
    ("0", "0.001", "wrong"),
    ("2.5", "-2.5", "wrong"),
    ("1,200 kg", "1200 kg", "right"),
    ("v = 5.0 m/s", "5 m/s", "right"),
    ("5.0 m/s", "v = 5.0 \\ \\text{m/s}", "right"),
    ("\\approx 42 m", "42 m", "right"),
    ("42 m", "approximately 42 m", "right"),
    ("5.0 \\pm 0.1 m", "5.0 m", "right"),
    ("6.02 x 10^23", "6.022 \\times 10^{23}", "right"),
    ("10^{-7} m", "1e-7 m", "right"),
    ("10^{-7} m", "10⁻⁷ m", "right"),
    ("6.63 \\times 10^{-34} J s", "6.63 × 10⁻³⁴ J·s", "right"),
    ("22.4 L/mol", "22.4 L·mol⁻¹", "right"),
    ("10^{-7} m", "10⁻⁸ m", "wrong"),
    ("10", "10 million", "wrong"),
    ("10 million", "10", "wrong"),
    ("4.5 billion years", "4.5e9 \\text{ years}", "right"),
    ("3e6 years", "3 \\text{ million years}", "right"),
    ("\\frac{1}{2} m", "0.5 m", "right"),
    ("3/4", "0.75", "right"),
    ("12 electrons", "12", "right"),
    ("12 electrons", "12 electrons", "right"),
    ("12 electrons", "13 electrons", "wrong"),
    ("12 electrons", "12 protons", "undecided"),
    # expressions, words
    ("\\frac{mv^2}{2}", "\\frac{1}{2} m v^2", "right"),
    ("\\frac{mv^2}{2}", "mv^2", "wrong"),
    ("\\sqrt{2gh}", "\\sqrt{2 g h}", "right"),
    ("F = ma", "ma", "right"),
    ("E = mc^2", "E = \\frac{mc^2}{2}", "wrong"),
    ("x = 2, x = 3", "3, 2", "right"),
    ("mitochondria", "The mitochondria", "right"),
    ("mitochondria", "the nucleus", "undecided"),
    ("It increases because the entropy grows.", "It becomes larger.", "undecided"),
    # hostile and malformed
    ("5 m", "", "wrong"),
    ("5 m", "NaN", "wrong"),
    ("5 m", "nan m", "wrong"),
    ("5 m", "inf", "wrong"),
    ("5 m", "\\infty m", "wrong"),
    ("5 m", "1e999999 m", "wrong"),
    ("5 m", "1e-999999 m", "wrong"),
    ("5 m", "10**10**10 m", "wrong"),
    ("5 m", "5" * 3000 + " m", "wrong"),
    ("5 m", "5 m or 6 m", "wrong"),
    ("5 m", "5 m 6 m", "wrong"),
    ("5 m", "5 m^{999999999}", "wrong"),
    ("5 m", "5 " + "m*" * 1000 + "m", "wrong"),
    ("5 m", "5 " + "m/" * 1000 + "m", "wrong"),
    ("5 m", "5 " + "(" * 1000 + "m" + ")" * 1000, "wrong"),
    ("5 m", "5 m**9**9**9**9", "wrong"),
    ("5 m", "5 __import__('os')", "wrong"),
    ("5 m", "the right answer", "wrong"),
    ("5 m", "x", "wrong"),
    ("1e999999 m", "5 m", "wrong"),
]
"""Ground truth, content of the box, what rules say of it."""

METALS = ("Iron", "Copper", "Gold", "5 m/s")
GROUPS = ("B", "AB", "O", "A")
CHOICES = [
    ("A", "\\boxed{A}", GROUPS, "right"),
    ("A", "\\boxed{D}", GROUPS, "wrong"),
    ("A", "\\boxed{B}", GROUPS, "wrong"),
    ("B", "\\boxed{AB}", GROUPS, "right"),
    ("O", "\\boxed{C}", GROUPS, "right"),
    ("B", "\\boxed{B}", METALS, "right"),
    ("B", "\\boxed{(B)}", METALS, "right"),
    ("B", "\\boxed{b}", METALS, "right"),
    ("B", "\\boxed{\\text{B}}", METALS, "right"),
    ("B", "\\boxed{Copper}", METALS, "right"),
    ("B", "\\boxed{\\text{copper}}", METALS, "right"),
    ("B", "\\boxed{B. Copper}", METALS, "right"),
    ("B", "\\boxed{(B) Copper}", METALS, "right"),
    ("Copper", "\\boxed{B}", METALS, "right"),
    ("D", "\\boxed{5\\,\\mathrm{m/s}}", METALS, "right"),
    ("B", "The answer is (B).", METALS, "right"),
    ("B", "Answer: B", METALS, "right"),
    ("B", "**B**", METALS, "right"),
    ("B", "\\boxed{C}", METALS, "wrong"),
    ("B", "\\boxed{Iron}", METALS, "wrong"),
    ("B", "\\boxed{A, B, C, D}", METALS, "wrong"),
    ("B", "\\boxed{B or C}", METALS, "wrong"),
    ("B", "\\boxed{}", METALS, "wrong"),
    ("B", "\\boxed{E}", METALS, "wrong"),
    ("B", "The answer is A. No, the answer is (C).", METALS, "wrong"),
    ("B", "I choose both.", METALS, "wrong"),
    ("A, C", "\\boxed{A, C}", METALS, "right"),
    ("AC", "\\boxed{C and A}", METALS, "right"),
    ("A, C", "\\boxed{A}", METALS, "wrong"),
    ("C", "\\boxed{C}", (), "right"),
    ("C", "\\boxed{D}", (), "wrong"),
]
"""Ground truth, answer, choices, what rules say of it."""

MESSAGES = [
    ("3.0 m/s", "So the speed is 3.0 m/s.", "right"),
    ("3.0 m/s", "It takes 5 s, and the speed is 300 cm/s in the end.", "right"),
    ("3.0 m/s", "It takes 3.0 s, so the speed is 4.0 m/s.", "wrong"),
    ("3.0 m/s", "I do not know.", "wrong"),
    ("3.0 m/s", "The answer is **3.0 m/s**.", "right"),
    ("3.0 m/s", "It takes 5 s.\n\n**Answer:** $3.0\\ \\text{m/s}$", "right"),
    ("3.0 m/s", "The answer is **3.0 m/s**, not 4.0 m/s.", "right"),
    ("3.0 m/s", "The answer is **4.0 m/s**, though 3.0 m/s is close.", "wrong"),
    ("9.8 m/s^2", "#### 9.8 m/s²", "right"),
    ("50 %", "The answer is 50%.", "right"),
    ("42", "The answer is `42`.", "right"),
    ("42", "The answer is 42.", "right"),
]
"""Ground truth, whole message, what rules say of it."""


def verdicts(graders: Graders, rows: list[tuple[str, str, str, Sequence[str]]]) -> list[Any]:
    """Let rules judge, as EVAL does: rows of kind, ground truth, answer and choices."""

    async def one(kind: str, truth: str, answer: str, choices: Sequence[str]) -> Any:
        arguments = (kind, truth, answer, list(choices), TOLERANCE)
        try:
            return await graders.pool.call(judged_by_rules, *arguments, timeout_s=GRADE_S, returns=Verdict)
        except GraderFailed as error:
            return error.message

    async def run() -> list[Any]:
        return await asyncio.gather(*(one(*row) for row in rows))

    return graders.run(run())


def test_numbers_units_expressions_and_words(graders: Graders) -> None:
    assert len(NUMBERS) >= 60
    found = verdicts(graders, [("auto", truth, f"\\boxed{{{answer}}}", ()) for truth, answer, _ in NUMBERS])
    wrong = [(*row[:2], got) for row, got in zip(NUMBERS, found, strict=True) if got != row[2]]
    assert wrong == []


def test_choices(graders: Graders) -> None:
    found = verdicts(graders, [("auto", truth, answer, choices) for truth, answer, choices, _ in CHOICES])
    assert [(*row[:2], got) for row, got in zip(CHOICES, found, strict=True) if got != row[3]] == []


def test_whole_messages(graders: Graders) -> None:
    found = verdicts(graders, [("auto", truth, answer, ()) for truth, answer, _ in MESSAGES])
    assert [(*row[:2], got) for row, got in zip(MESSAGES, found, strict=True) if got != row[2]] == []


def test_the_kind_can_be_given(graders: Graders) -> None:
    rows = [
        ("text", "5 m", "\\boxed{500 cm}", ()),
        ("number", "5 m", "\\boxed{500 cm}", ()),
        ("expression", "2x", "\\boxed{x+x}", ()),
        ("choice", "C", "\\boxed{C}", ()),
        ("text", "C", "\\boxed{D}", ()),
        ("text", "a" * 3000, "\\boxed{" + "a" * 3000 + "}", ()),
        ("auto", "5 m, since " + "it is so, and " * 30, "\\boxed{5 m}", ()),
    ]
    assert verdicts(graders, rows) == ["undecided", "right", "right", "right", "undecided", "right", "undecided"]


# The three phases -----------------------------------------------------------------------------------------------------


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (URL, MODEL, KEY, SEARCH_URL, SEARCH_KEY, TAVILY_KEY):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def evaluated(graders: Graders, instance: StemInstance, answer: str) -> Evaluation:
    async def run() -> Evaluation:
        handler = StemHandler()
        try:
            async with eval_phase(JOB, instance, {"answer": answer}, pool=graders.pool) as phase:
                evaluation = await handler.eval(phase)
                return replace(evaluation, notes={**phase.judge.notes, **evaluation.notes})
        finally:
            await handler.close()

    return graders.run(run())


@contextmanager
def served(path: str, answer: Callable[[Any], Any]) -> Iterator[str]:
    """Serve answers to posted JSON from a thread of its own; give the address."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    addresses: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_post(path, handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses.append("http://{}:{}".format(*runner.addresses[0][:2]))
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert started.wait(30)
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@pytest.mark.parametrize(("said", "reward"), [("CORRECT", 1.0), ("INCORRECT", 0.0)])
def test_words_are_for_the_judge(said: str, reward: float, unconfigured: pytest.MonkeyPatch, graders: Graders) -> None:
    asked: list[Any] = []

    def answer(question: Any) -> Any:
        asked.append(question)
        return {"choices": [{"message": {"content": f"Well.\nVERDICT: {said}"}}]}

    with served("/v1/chat/completions", answer) as url:
        unconfigured.setenv(URL, url)
        unconfigured.setenv(MODEL, "judge-1")
        evaluation = evaluated(graders, StemInstance("Where?", "the nucleus"), "\\boxed{inside of the cell's core}")
    assert (evaluation.reward, evaluation.metrics) == (reward, {"judged": 1.0})
    assert evaluation.notes["judge_verdict"] == f"Well.\nVERDICT: {said}"
    assert evaluation.notes["judge_model"] == "judge-1"
    assert "inside of the cell's core" in evaluation.notes["judge_prompt"]
    assert len(asked) == 1


def test_judge_that_will_be_missed_is_said_beforehand(unconfigured: pytest.MonkeyPatch) -> None:
    handler = StemHandler()
    words = StemInstance("Where?", "the nucleus", kind="text")
    always = StemInstance("How long?", "1.5 km", judge="always")
    assert all(
        "set PRORL_MODEL_JUDGE_URL and PRORL_MODEL_JUDGE_MODEL" in handler.lacks(JOB, each) for each in (words, always)
    )
    assert handler.lacks(JOB, StemInstance("Where?", "the nucleus", kind="text", judge="never")) == ""
    assert handler.lacks(JOB, StemInstance("How long?", "1.5 km")) == ""
    unconfigured.setenv(URL, "http://localhost:1")
    assert "set PRORL_MODEL_JUDGE_MODEL" in handler.lacks(JOB, words)
    unconfigured.setenv(MODEL, "judge-1")
    assert handler.lacks(JOB, words) == ""
    unconfigured.delenv(URL)
    assert handler.lacks(Job(task="stem", instance={}, models={"judge": "rm"}), words) == "", "the job names a model"


def test_what_rules_decide_asks_no_judge(unconfigured: pytest.MonkeyPatch, graders: Graders) -> None:
    evaluation = evaluated(graders, StemInstance("How long?", "1.5 km"), "\\boxed{1500 m}")
    assert (evaluation.reward, evaluation.metrics) == (1.0, {"judged": 0.0})
    assert evaluation.notes == {"answer": "\\boxed{1500 m}", "ground_truth": "1.5 km"}
    assert evaluated(graders, StemInstance("How long?", "1.5 km"), "\\boxed{1400 m}").reward == 0.0
    assert evaluated(graders, StemInstance("Where?", "the nucleus"), "\\boxed{Nucleus}").reward == 1.0
    assert evaluated(graders, StemInstance("Where?", "the nucleus"), "").reward == 0.0


def test_a_job_may_do_without_the_judge(unconfigured: pytest.MonkeyPatch, graders: Graders) -> None:
    evaluation = evaluated(graders, StemInstance("Where?", "the nucleus", judge="never"), "\\boxed{the core}")
    assert (evaluation.reward, evaluation.metrics) == (0.0, {"judged": 0.0})


@pytest.mark.parametrize("judge", ["undecided", "always"])
def test_no_judge_where_one_is_needed_is_an_infrastructure_error(
    judge: Any, unconfigured: pytest.MonkeyPatch, graders: Graders
) -> None:
    with pytest.raises(GraderFailed, match="set PRORL_MODEL_JUDGE_URL and PRORL_MODEL_JUDGE_MODEL") as caught:
        evaluated(graders, StemInstance("Where?", "the nucleus", judge=judge), "\\boxed{the core}")
    failure = StemHandler().eval_exception(JOB, caught.value)
    assert (failure.outcome, failure.retry) == ("infrastructure_error", False)


def test_empty_ground_truth_is_the_tasks_fault(graders: Graders) -> None:
    with pytest.raises(HandlerFailed, match="ground_truth is empty"):
        evaluated(graders, StemInstance("?", " "), "\\boxed{5}")


def test_search_without_a_provider_fails_in_init(unconfigured: pytest.MonkeyPatch) -> None:
    async def init() -> None:
        await StemHandler().init(InitPhase(JOB, StemInstance("?", "5", tools=("search",)), no_sandbox))

    with pytest.raises(ConfigError, match="set PRORL_SEARCH_KEY") as caught:
        asyncio.run(init())
    failure = StemHandler().init_exception(JOB, caught.value)
    assert (failure.outcome, failure.retry) == ("infrastructure_error", False)


def test_tools_work_beside_a_search_at_the_configured_provider(
    sandboxes_of: SharedSandboxes, graders: Graders, unconfigured: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def found(query: Any) -> Any:
        asked.append(query["query"])
        return {"results": [{"title": "Iron", "url": "https://iron", "content": "It melts at 1811 K."}]}

    async def converse(messages: Sequence[ChatMessage], tools: Sequence[Tool[Any]]) -> Episode:
        assert messages[1].content == "Where does it melt?\n\n(A) 1811 K\n(B) 300 K"
        by_name = {tool.name: tool for tool in tools}
        assert list(by_name) == ["search", "ipython", "bash", "finish"]
        assert "1811 K" in await by_name["search"]({"query": "melting point of iron"}, 30.0)
        assert "1538" in await by_name["ipython"]({"code": "1811 - 273"}, 30.0)
        return Episode(last_text="", final_message=await by_name["finish"]({"message": "(A)"}, 5.0))

    async def run() -> Evaluation:
        sandboxes = sandboxes_of("bubblewrap")
        instance = StemInstance(
            "Where does it melt?", "A", choices=("1811 K", "300 K"), tools=("search", "ipython", "bash", "finish")
        )
        handler, made = StemHandler(), []

        async def create(spec: Any) -> Any:
            made.append(await sandboxes.create("job.1", spec))
            return made[0]

        try:
            data = await handler.init(InitPhase(JOB, instance, create))
            data = await handler.run(RunPhase(JOB, instance, data, made[0], converse))
            async with eval_phase(JOB, instance, data, pool=graders.pool) as phase:
                evaluation = await handler.eval(phase)
                return replace(evaluation, notes={**phase.judge.notes, **evaluation.notes})
        finally:
            await handler.close()
            for sandbox in made:
                await sandbox.close()

    with served("/search", found) as url:
        unconfigured.setenv(SEARCH_URL, url)
        unconfigured.setenv(SEARCH_KEY, "key")
        assert graders.run(run()).reward == 1.0
    assert asked == ["melting point of iron"]


async def no_sandbox(spec: Any) -> Any:
    raise AssertionError("no sandbox is needed")
