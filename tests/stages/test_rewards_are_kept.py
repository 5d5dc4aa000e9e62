"""Whatever an agent says or writes, its job ends with a reward: in every handler that reads the agent's texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from phases import eval_phase
from support.sandboxes import main_and_proofs

from prorl_zmq import Job
from prorl_zmq.errors import HandlerFailed, SandboxLimitExceeded
from prorl_zmq.stages.episode import Episode
from prorl_zmq.stages.handler import RunPhase, failure_of
from prorl_zmq.stages.handlers.code import CodeHandler
from prorl_zmq.stages.handlers.code_source import SOURCE_LIMIT_BYTES
from prorl_zmq.stages.handlers.harness import HarnessHandler
from prorl_zmq.stages.handlers.math import MathHandler
from prorl_zmq.stages.handlers.stem import StemHandler
from prorl_zmq.stages.phase_ends import DATA_LIMIT_BYTES, checked, notes_of, passed_on, reward_of
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import PhaseDone

if TYPE_CHECKING:
    from support.graders import Graders
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.stages.handler import AgentHandler
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

EVENT: dict[str, Any] = {"stage_id": "s", "job_id": "j", "attempt": 1}
INSTANCES: dict[str, tuple[type[AgentHandler[Any]], dict[str, Any]]] = {
    "math": (MathHandler, {"problem": "?", "ground_truth": "5", "tools": []}),
    "stem, a number": (StemHandler, {"problem": "?", "ground_truth": "5 m", "judge": "never", "tools": []}),
    "stem, a choice": (StemHandler, {"problem": "?", "ground_truth": "B", "choices": ["a", "b"], "tools": []}),
    "stem, words": (StemHandler, {"problem": "?", "ground_truth": "the nucleus", "judge": "never", "tools": []}),
    "code": (CodeHandler, {"problem": "?", "tests": [{"input": "", "output": "5"}], "tools": [], "time_s": 1}),
    "harness, graded by math": (
        HarnessHandler,
        {"prompt": "?", "harness": "pi", "grader": {"task": "math", "instance": {"problem": "?", "ground_truth": "5"}}},
    ),
}
LARGE = 3 * 2**20
HOSTILE = {
    "nothing": "",
    "half a surrogate": "\\boxed{\ud800}",
    "half a surrogate in code": "```python\nprint('\udfff')\n```",
    "a NUL": "```python\n\0\n```",
    "a large block": f"```python\n{'#' * LARGE}\n```",
    "a large block of large characters": f"```python\n{chr(0x1F600) * (LARGE // 4)}\n```",
    "a block at the limit": f"```python\n{'é' * (SOURCE_LIMIT_BYTES // 2)}\n```",
    "a large box": f"\\boxed{{{'9' * LARGE}}}",
    "many boxes": "\\boxed{1}, " * 100_000,
    "many boxes in boxes": "\\boxed{" * 100_000,
    "a large text": "\ud800" * (LARGE // 3),
    "many fences": "```\n" * 200_000,
    "many announcements": "the answer is **" * 100_000,
    "a huge power": "The answer is 10**10**10.",
    "marks of direction": "\u202e\u2066 6 \ufeff\u2028",
}


@pytest.fixture(params=main_and_proofs("bubblewrap"))
def sandboxes(request: pytest.FixtureRequest, sandboxes_of: SharedSandboxes) -> Sandboxes:
    return sandboxes_of(request.param)


def rewarded(graders: Graders, name: str, text: str, message: str | None, sandboxes: Sandboxes | None) -> float:
    """Run and evaluate an agent that says a text, and a message with `finish`, over what crosses the wire."""
    kind, about = INSTANCES[name]

    async def converse(*_: Any) -> Episode:
        return Episode(last_text=text, final_message=message)

    async def run() -> float:
        handler = kind()
        job = Job(task=handler.task, instance=about, job_id="j")
        instance = handler.parse_instance(job)
        data = await handler.run(RunPhase(job, instance, {}, None, converse))
        done = checked(PhaseDone(**EVENT, phase=Phase.RUN, phase_data=passed_on(data)))
        async with eval_phase(job, instance, done.phase_data, sandboxes, pool=graders.pool) as phase:
            evaluation = await handler.eval(phase)
        event = PhaseDone(
            **EVENT,
            phase=Phase.EVAL,
            reward=reward_of(evaluation),
            metrics=dict(evaluation.metrics),
            notes=notes_of(dict(evaluation.notes)),
        )
        reward = checked(event).reward
        await handler.close()
        assert reward is not None
        return reward

    return graders.run(run())


@pytest.mark.few(18)
@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_output_earns_nothing(name: str, what: str, graders: Graders, sandboxes: Sandboxes) -> None:
    assert rewarded(graders, name, HOSTILE[what], None, sandboxes) == 0.0
    if len(HOSTILE[what]) < 1000:
        assert rewarded(graders, name, "", HOSTILE[what] or None, sandboxes) == 0.0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters() | st.sampled_from("\ud800\udfff\0"), max_size=40),
    form=st.sampled_from(["{}", "\\boxed{{{}}}", "The answer is {}.", "#### {}", "\\boxed{{{0}}} and \\boxed{{{0}}}"]),
    name=st.sampled_from(sorted(INSTANCES.keys() - {"code"})),
)
def test_any_text_earns_something(graders: Graders, text: str, form: str, name: str) -> None:
    assert rewarded(graders, name, form.format(text), None, None) in (0.0, 1.0)


def test_data_that_are_too_large_earn_nothing() -> None:
    """Of a handler that sets its agent no limit."""
    assert passed_on({"text": "x" * (DATA_LIMIT_BYTES - 100)})
    for data in ({"text": "é" * DATA_LIMIT_BYTES}, {"texts": ["x" * 1000] * 2000}, {"bytes": b"x" * DATA_LIMIT_BYTES}):
        with pytest.raises(SandboxLimitExceeded, match="at most 1572864 are passed on to EVAL") as caught:
            passed_on(data)
        assert failure_of(caught.value).reward == 0.0


def test_data_that_are_no_plain_data_are_the_handlers_fault() -> None:
    with pytest.raises(HandlerFailed):
        passed_on({"set": {1}})


def test_halves_of_surrogates_are_replaced() -> None:
    assert passed_on({"a\ud800": ["é\udfff", ("x", 1, None)]}) == {"a?": ["é?", ["x", 1, None]]}
