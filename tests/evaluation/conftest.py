"""Evaluations made up for tests: plans, results and trajectories of every kind, without a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from prorl_zmq.data.trajectory import Role, Trajectory
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.evaluation.plan import Plan, RolloutIndex, Settings, job_id
from prorl_zmq.evaluation.run_folder import RunFolder, Sample
from prorl_zmq.evaluation.transcript import TextReader, make_transcript
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat, encode_message, generation_prompt
from prorl_zmq.inference.tokenizer import IM_END, TOOL_CALL, TOOL_CALL_END, encode
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]not red[/red] <script>alert(1)</script> | `x` $\\frac$ \u202egnp\x9b31m"
"""What a model or a data file may say to a terminal, to rich, to HTML, to Markdown and to matplotlib."""


def made_plan(problems: int = 2, samples: int = 2, **settings: object) -> Plan:
    return Plan(
        settings=Settings(data_sha256="0" * 64, samples=samples, engine="embedded", **settings),  # type: ignore[arg-type]
        file="problems.jsonl",
        problems=problems,
        version="0",
        created="2026-01-01 00:00:00+00:00",
    )


def made_sample(
    plan: Plan,
    problem: int,
    sample: int = 0,
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    *,
    trial: int = 0,
    code: str = "",
    message: str = "",
    stop_reason: str = "done",
    timings: dict[str, float] | None = None,
    metrics: dict[str, float] | None = None,
    row_format: str = "math",
    name: str = "",
    task: str = "math",
) -> Sample:
    index = RolloutIndex(problem, sample, trial)
    result = Result(
        job_id=job_id(plan, index),
        task=task,
        outcome=outcome,
        reward=reward if outcome == Outcome.COMPLETED else None,
        error=ErrorInfo(code, message) if code else None,
        stop_reason=stop_reason,
        backend="engine-0",
        metrics=metrics or {"turns": 1.0, "prompt_tokens": 100.0, "cached_tokens": 40.0, "generated_tokens": 50.0},
        timings=timings or {"init_queue": 0.5, "init": 1.0, "run": 6.0, "engine": 4.0, "eval": 0.5},
    )
    return Sample(
        problem=name or f"problem-{problem}",
        line=problem + 1,
        row_format=row_format,
        index=index,
        result=result,
        model="tiny",
    )


def made_trajectory(result: Result, said: str = "The answer is 4", tool_says: str | None = None) -> Trajectory:
    """A conversation of the embedded chat format; with a tool's answer, the policy calls bash first."""
    builder = TrajectoryBuilder()
    for role, text in ((Role.SYSTEM, "Solve the problem."), (Role.USER, "What is 2 + 2?")):
        _context(builder, role, encode_message(ChatMessage(role, text)).token_ids)
    if tool_says is not None:
        call = encode('{"name": "bash", "arguments": {"command": "ls"}}').tolist()
        _policy_turn(builder, [TOOL_CALL, *call, TOOL_CALL_END, IM_END])
        _context(builder, Role.TOOL, encode_message(ChatMessage(Role.TOOL, tool_says)).token_ids)
    _policy_turn(builder, [*encode(said).tolist(), IM_END])
    block = builder.block()
    whole = msgspec.structs.replace(result, tokens=builder.tokens, turns=builder.turns)
    return Trajectory.from_frame(whole, block)


def _context(builder: TrajectoryBuilder, role: Role, ids: np.ndarray) -> None:  # type: ignore[type-arg]
    builder.begin_turn(role)
    builder.add_context(ids)


def _policy_turn(builder: TrajectoryBuilder, ids: Sequence[int]) -> None:
    builder.begin_turn(Role.ASSISTANT)
    builder.add_context(generation_prompt())
    count = len(ids)
    logprobs = np.linspace(-3.0, -0.01, count).astype(np.float32)
    builder.add_generated(np.array(ids, np.int32), logprobs, np.full(count, 3, np.int32))


def write_run(
    folder: Path,
    *,
    problems: int,
    samples: int,
    rewards: Sequence[float] = (),
    said: str = "The answer is 4",
    tool_says: str | None = None,
    name: str = "",
    notes: dict[str, str] | None = None,
    outcome: Outcome = Outcome.COMPLETED,
    message: str = "",
) -> Plan:
    """Make a run folder of an evaluation that has ended."""
    plan = made_plan(problems, samples)
    reader = TextReader(EmbeddedChatFormat(), ChatSettings(), "tiny")
    with RunFolder(folder, plan) as run:
        for index in range(problems * samples):
            reward = rewards[index] if rewards else 1.0
            code = "handler_failed" if message else ""
            sample = made_sample(
                plan, index // samples, index % samples, reward, outcome, name=name, code=code, message=message
            )
            result = msgspec.structs.replace(sample.result, notes=notes or {})
            trajectory = made_trajectory(result, said, tool_says)
            whole = msgspec.structs.replace(sample, result=trajectory.result)
            run.add(whole, trajectory, make_transcript(sample.job_id, trajectory, reader))
    return plan
