"""Real harnesses, led by a scripted policy through what goes wrong in life: no token is lost or there twice.

The scripts are those of what harnesses were seen to do: parallel calls, cut arguments, unknown tools, sub-agents,
engines that fail, streams that are cut, turns without an end, histories that become too long.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import rootfs
from captured import segments_of
from needed import lacking, usable
from scripted_policy import CHAT, ScriptedPolicy

from prorl_zmq import EpisodeLimits, Job, Sampling
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import EngineFailed, HarnessFailed
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.model_proxy import event_writer, server
from prorl_zmq.model_proxy.calls import CallRefused, Problem
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.harness.adapter import load_adapter
from prorl_zmq.stages.harness.chosen_harness import ChosenHarness
from prorl_zmq.stages.harness.harness_model import HarnessModel
from prorl_zmq.testing import tool_call
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.jobs import Harness

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.model_proxy.calls import ModelRequest
    from prorl_zmq.stages.harness.adapter import Adapter, ScriptedTurn
    from prorl_zmq.stages.harness.harness_model import HarnessCall

pytestmark = pytest.mark.proof  # they need the environment of `make harnesses`
MADE = Path(__file__).resolve().parents[3] / ".harnesses"
QUICK = ("claude-code", "codex", "pi")
SLOW = ("opencode", "qwen-code", "mini-swe-agent", "openhands")
PROMPT = "Write hello to out.txt."
LIMIT_S = 200.0
TASK = "List the files that are here and say how many there are of them."
SPAWN = {
    "claude-code": tool_call("Agent", description="count files", prompt=TASK, subagent_type="general-purpose"),
    "codex": tool_call("multi_agent_v1__spawn_agent", message=TASK),
    "opencode": tool_call("task", description="count files", prompt=TASK, subagent_type="general"),
    "qwen-code": tool_call("agent", description="count files", prompt=TASK, subagent_type="general-purpose"),
}
SUMMARY = "<summary>SUMMARY-OF-IT: the numbers were printed, and hello must still be written to out.txt.</summary>"
ASKS_FOR_SUMMARY = ("CHECKPOINT COMPACTION", "TEXT ONLY", "context summarization", "state_snapshot")
NARROW = {"claude-code": 30_000, "codex": 45_000, "opencode": 45_000}
"""Tokens of a context in which these have to shorten their history, after some turns."""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if MADE.is_dir() and "PRORL_HARNESSES" not in os.environ:
        monkeypatch.setenv("PRORL_HARNESSES", str(MADE))


def spoken(turn: ScriptedTurn) -> str:
    return turn.text + (tool_call(turn.tool, **dict(turn.arguments)) if turn.tool else "")


def lead(
    name: str,
    folder: Path,
    script: list[str | EngineFailed] | Callable[[str], str] | ScriptedPolicy,
    *,
    kind: Any = "bubblewrap",
    limit_s: float = LIMIT_S,
    max_tokens: int = 4096,
    context: int = 200_000,
) -> Episode:
    """Run a rollout; check that all that the policy said is captured once as it was said, or counted as an orphan."""
    usable(kind)
    policy, episode = script if isinstance(script, ScriptedPolicy) else ScriptedPolicy(script), Episode()
    job = Job(
        task="t",
        instance={},
        sampling=Sampling(max_tokens=max_tokens),
        episode=EpisodeLimits(max_turns=40, max_tokens=context),
    )

    async def main() -> None:
        try:
            chosen = ChosenHarness.find(Harness(name, train_on=("all",)))
        except HarnessFailed as error:
            lacking("harness", error.message)
        image = str(rootfs.root_filesystem()) if kind == "apptainer" else ""
        sandboxes = Sandboxes(kind, folder / "sandboxes", image=image)
        sandbox = await sandboxes.create("one", chosen.prepared(SandboxSpec()))
        try:
            async with asyncio.timeout(limit_s):
                task = [ChatMessage(Role.USER, PROMPT)]
                await chosen.lead(JobPolicy(policy, CHAT, 0, job, episode), task, sandbox)
        finally:
            done = await sandbox.exec(["bash", "-c", "cat out.txt"], 20)
            episode.notes["written"] = done.stdout.decode().strip()
            await sandbox.close()
            sandboxes.close()

    asyncio.run(main())
    segments = segments_of(episode.trajectory)
    policy.check(segments)
    orphans = sum(count for what, count in episode.metrics.items() if what.endswith("_orphan_tokens"))
    generated = sum(len(one.generation.token_ids) for one in policy.said)
    assert sum(int(one.loss_mask.sum()) for one in segments) + orphans == generated
    return episode


def parallel(adapter: Adapter) -> list[str]:
    both = spoken(adapter.shell_turn("echo hel > a")) + spoken(adapter.shell_turn("echo lo > b"))
    return [both, spoken(adapter.shell_turn("cat a b | tr -d '\\n' > out.txt")), spoken(adapter.final_turn())]


def cut_arguments(adapter: Adapter) -> list[str]:
    whole = spoken(adapter.shell_turn("echo hello > out.txt"))
    return [whole[: whole.index("hello") + 3], whole, spoken(adapter.final_turn())]


def unknown_tool(adapter: Adapter) -> list[str]:
    return [tool_call("no_such_tool", x=1), *plain(adapter)]


def endless_turn(adapter: Adapter) -> list[str]:
    return ["x " * 5000, *plain(adapter)]


def failing_engine(adapter: Adapter) -> list[str | EngineFailed]:
    first, last = plain(adapter)
    return [EngineFailed("one"), first, EngineFailed("two"), last]


def plain(adapter: Adapter) -> list[str]:
    return [spoken(adapter.shell_turn("echo hello > out.txt")), spoken(adapter.final_turn())]


SCRIPTS = (parallel, cut_arguments, unknown_tool, failing_engine)
CASES = [pytest.param(name, script, id=f"{name}-{script.__name__}") for name in (*QUICK, *SLOW) for script in SCRIPTS]


@pytest.mark.timeout(250)
@pytest.mark.parametrize(("name", "script"), CASES)
def test_what_goes_wrong_costs_no_token(name: str, script: Callable[[Adapter], list[Any]], tmp_path: Path) -> None:
    episode = lead(name, tmp_path, script(load_adapter(name)))
    assert episode.notes["written"] == "hello", episode.notes
    assert (episode.stop_reason, len(segments_of(episode.trajectory))) == ("done", 1)


@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_turn_that_does_not_end(name: str, tmp_path: Path) -> None:
    """Some go on, some end, some ask again: what was sampled is kept or counted."""
    episode = lead(name, tmp_path, endless_turn(load_adapter(name)), max_tokens=600)
    assert episode.metrics["generated_tokens"] >= 600


@pytest.mark.timeout(250)
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_stream_that_is_cut(name: str, which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks in the middle of a reply: the harness asks again, and one of both samples counts."""
    replies: Counter[str] = Counter()
    finish, finished = event_writer.EventWriter.finish, server.finished

    async def cut_stream(writer: event_writer.EventWriter, events: bytes) -> bool:
        replies["all"] += 1
        if replies["all"] != which:
            return await finish(writer, events)
        await writer.write(events[: len(events) // 2])
        assert writer._request.transport is not None
        writer._request.transport.abort()
        return False

    async def cut_whole(request: Any, response: Any) -> bool:
        replies["all"] += 1
        if replies["all"] != which:
            return await finished(request, response)
        request.transport.abort()
        return False

    monkeypatch.setattr(event_writer.EventWriter, "finish", cut_stream)
    monkeypatch.setattr(server, "finished", cut_whole)
    adapter = load_adapter(name)
    writes, last = plain(adapter)
    episode = lead(name, tmp_path, lambda text: last if "out.txt" in text.partition("assistant\n")[2] else writes)
    assert replies["all"] >= 3
    assert episode.notes["written"] == "hello"
    assert sum(count for what, count in episode.metrics.items() if what.endswith("_orphan_turns")) <= 1


@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode", "qwen-code"])
def test_a_sub_agent_has_a_segment_of_its_own(name: str, tmp_path: Path) -> None:
    adapter = load_adapter(name)
    counts: Counter[str] = Counter()
    writes, last = plain(adapter)
    lists, waits = spoken(adapter.shell_turn("ls")), spoken(adapter.shell_turn("sleep 1"))

    def script(text: str) -> str:
        who = "main" if PROMPT in text.partition("assistant\n")[0] else "sub"
        counts[who] += 1
        if who == "sub":
            return lists if counts[who] == 1 else "There are none at all here, as far as I can see."
        if counts[who] <= 2:
            return (SPAWN[name], writes)[counts[who] - 1]
        return waits if counts["sub"] < 2 else last  # a sub-agent ends with its harness, where that does not wait

    episode = lead(name, tmp_path, script)
    assert episode.notes["written"] == "hello"
    assert episode.metrics["subagent_turns"] == 2
    assert episode.metrics["main_turns"] >= 3
    assert len(segments_of(episode.trajectory)) == 2


@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode"])
def test_a_history_that_became_too_long_is_a_new_segment(name: str, tmp_path: Path) -> None:
    adapter = load_adapter(name)
    numbers = spoken(adapter.shell_turn("seq 1 1500"))
    steps: Counter[str] = Counter()

    def script(text: str) -> str:
        if any(words in text[-8000:] for words in ASKS_FOR_SUMMARY) and "SUMMARY-OF-IT" not in text:
            return SUMMARY
        if "SUMMARY-OF-IT" not in text:
            return numbers
        steps["after"] += 1
        return plain(adapter)[min(steps["after"] - 1, 1)]

    episode = lead(name, tmp_path, script, max_tokens=1000, context=NARROW[name])
    assert episode.notes["written"] == "hello", episode.notes
    assert episode.metrics["compaction_turns"] == 1
    assert len(segments_of(episode.trajectory)) >= 3


SILENCE_S = float(os.environ.get("PRORL_SILENCE_S", "20"))
"""How long the engine says nothing, such as while weights are updated; 320 is beyond what any harness waits for."""
PATIENT = (*QUICK, *SLOW) if "PRORL_SILENCE_S" in os.environ else ("codex", "qwen-code")
"""By default those that count events of the API only, no comments."""


class Slow(ScriptedPolicy):
    async def __call__(self, *arguments: Any) -> Any:
        await asyncio.sleep(SILENCE_S)
        return await super().__call__(*arguments)


@pytest.mark.timeout(3 * SILENCE_S + 200)
@pytest.mark.parametrize("name", PATIENT)
def test_an_engine_that_is_silent_for_long_is_waited_for(name: str, tmp_path: Path) -> None:
    episode = lead(name, tmp_path, Slow(plain(load_adapter(name))), limit_s=3 * SILENCE_S + 100)
    assert episode.notes["written"] == "hello", episode.notes
    assert (episode.stop_reason, episode.metrics["main_turns"]) == ("done", 2)
    assert not any(what.endswith("_orphan_turns") for what in episode.metrics)
    assert not episode.metrics["calls_without_reply"]


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param(name, problem, id=f"{name}-{problem.value}")
        for name in (*QUICK, *SLOW)
        for problem in (Problem.BUSY, Problem.INTERNAL)
        if problem == Problem.BUSY or name in QUICK  # the others wait for up to a minute between their tries
    ],
)
def test_an_error_of_the_proxy_is_tried_again(
    name: str, problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 and 529 are those of an engine that fails, above."""
    calls: Counter[str] = Counter()
    taken = HarnessModel.open

    async def opened(model: HarnessModel, request: ModelRequest) -> HarnessCall:
        calls["all"] += 1
        if calls["all"] in (1, 3):
            raise CallRefused(problem, "internal server error" if problem == Problem.INTERNAL else "too many requests")
        return await taken(model, request)

    monkeypatch.setattr(HarnessModel, "open", opened)
    episode = lead(name, tmp_path, plain(load_adapter(name)))
    assert episode.notes["written"] == "hello", episode.notes
    assert (calls["all"], episode.metrics["main_turns"]) == (4, 2)
