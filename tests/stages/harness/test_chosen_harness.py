"""Rollouts that a program leads: in each kind of sandbox, with good and bad programs. The policy is scripted."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from captured import segments_of
from otlp_receiver import OtlpReceiver
from scripted_policy import CHAT, ScriptedPolicy
from support.ports import free_port

from prorl_zmq import EpisodeLimits, Job, Sampling
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import EngineFailed, HarnessFailed, InvalidJob, SandboxLimitExceeded
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.stages.episode import Episode, JobPolicy
from prorl_zmq.stages.handler import failure_of
from prorl_zmq.stages.harness import call_limits, chosen_harness
from prorl_zmq.stages.harness.chosen_harness import ChosenHarness
from prorl_zmq.system.traces import current, tracing
from prorl_zmq.testing import tool_call
from prorl_zmq.wire.messages.jobs import Harness

if TYPE_CHECKING:
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

AGENT = Path(__file__).with_name("small_agent.py")
"""An agent in few lines: it calls the model until there is no tool call, and runs what it is told in bash."""


def job(command: list[str], **changes: Any) -> Job:
    options = {"sampling": Sampling(max_tokens=512), "episode": EpisodeLimits(max_turns=8)} | changes
    return Job(task="t", instance={}, harness=Harness("command", arguments=tuple(command)), **options)


def lead(
    sandboxes: Sandboxes,
    policy: ScriptedPolicy,
    wanted: Job,
    prompt: str = "Write a file.",
    parser_url: str = "",
    episode: Episode | None = None,
) -> Episode:
    """Run a rollout, and check that what was captured is what the policy said."""
    episode = episode or Episode()

    async def main() -> None:
        sandbox = await sandboxes.create("one")
        try:
            await sandbox.write_file("agent.py", AGENT.read_bytes())
            messages = [ChatMessage(Role.SYSTEM, "not told"), ChatMessage(Role.USER, prompt)]
            chosen = ChosenHarness.find(Harness.of(wanted.harness))
            await chosen.lead(JobPolicy(policy, CHAT, 0, wanted, episode, parser_url), messages, sandbox)
        finally:
            episode.notes["written"] = await written(sandbox)
            await sandbox.close()

    asyncio.run(main())
    policy.check(segments_of(episode.trajectory))
    return episode


async def written(sandbox: Any) -> str:
    done = await sandbox.exec(["bash", "-c", "cat out.txt 2>/dev/null"], 20)
    return str(done.stdout.decode())


def agent(*options: str, python: str = "python3") -> list[str]:
    return [python, "agent.py", "{url}", "{key}", *options]


def test_a_program_of_the_sandbox_leads_a_rollout(sandboxes: Sandboxes) -> None:
    policy = ScriptedPolicy(["I write." + tool_call("bash", command="echo hello > out.txt"), "Done."])
    episode = lead(sandboxes, policy, job(agent()))
    assert episode.notes["written"] == "hello\n"
    assert (episode.stop_reason, episode.last_text) == ("done", "Done.")
    assert episode.metrics["turns"] == episode.metrics["main_turns"] == 2
    assert len(segments_of(episode.trajectory)) == 1
    generated = sum(len(one.generation.token_ids) for one in policy.said)
    assert int(segments_of(episode.trajectory)[0].loss_mask.sum()) == generated == episode.metrics["main_tokens"]
    assert "not told" not in CHAT.decode(policy.said[0].prompt)
    assert "Write a file." in CHAT.decode(policy.said[0].prompt)
    assert episode.notes["calls"].splitlines()[1].split()[:3] == ["2", "after", "1"]


BASH = tool_call("bash", command="true")
only_process = pytest.mark.parametrize("kind", ["process"], indirect=True)


def test_the_turns_that_were_answered_can_be_looked_at_while_the_program_works(sandboxes: Sandboxes) -> None:
    episode, seen = Episode(), []

    def policy(prompt: str) -> str:
        assert episode.so_far is not None
        arrays = episode.so_far().arrays()
        seen.append([Role(role).name for role in arrays.turns[:, 2]])
        assert CHAT.decode(arrays.token_ids) == prompt[: len(CHAT.decode(arrays.token_ids))]
        return "Done." if len(seen) > 1 else tool_call("bash", command="echo hello > out.txt")

    lead(sandboxes, ScriptedPolicy(policy), job(agent()), episode=episode)
    assert seen == [[], ["SYSTEM", "USER", "ASSISTANT"]]
    assert episode.so_far is None


def test_a_program_that_ignores_the_end_is_killed(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_harness, "GRACE_S", 0.5)
    policy = ScriptedPolicy(lambda _: BASH)
    episode = lead(sandboxes, policy, job(agent("--stubborn"), episode=EpisodeLimits(max_turns=3)))
    assert (episode.stop_reason, episode.metrics["turns"]) == ("max_turns", 3)
    assert episode.metrics["harness_exit_code"] == chosen_harness.KILLED
    assert episode.notes["harness_output"] == chosen_harness.KILLED_NOTE


@only_process
@pytest.mark.parametrize(("characters", "kept"), [(100, "." * 100), (9000, "characters left out) …")])
def test_what_a_program_printed_is_kept_though_it_ended_well(sandboxes: Sandboxes, characters: int, kept: str) -> None:
    episode = lead(sandboxes, ScriptedPolicy(lambda _: "Done."), job(agent(f"--print={characters}")))
    assert (episode.stop_reason, episode.metrics["harness_exit_code"]) == ("done", 0)
    said = episode.notes["harness_output"]
    assert said.startswith("begin .")
    assert said.endswith(". end")
    assert kept in said
    assert len(said) < chosen_harness.NOTE_CHARACTERS + 60


@only_process
def test_a_program_that_stops_at_the_end_is_not(sandboxes: Sandboxes) -> None:
    policy = ScriptedPolicy(lambda _: BASH)
    episode = lead(sandboxes, policy, job(agent(), episode=EpisodeLimits(max_turns=3)))
    assert (episode.stop_reason, episode.metrics["harness_exit_code"]) == ("max_turns", 3)
    assert "refused: 400" in episode.notes["harness_output"]
    assert episode.notes["harness"] == "command"


@only_process
def test_each_call_of_the_model_is_a_span_below_the_phase(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        with tracing("stage", "run-1"), current(f"00-{'a' * 32}-{'b' * 16}-01"):
            lead(sandboxes, ScriptedPolicy([BASH, "Done."]), job(agent()))
        turns = sorted(receiver.spans, key=lambda span: span.start_ns)
    assert [(one.name, one.parent_id, one.attributes) for one in turns] == [
        ("turn", "b" * 16, {"prorl.turn": 0}),
        ("turn", "b" * 16, {"prorl.turn": 1}),
    ]


@only_process
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["bash", "-c", "echo -e '\\033[31mno\\033[0m key' >&2; exit 1"], 1, "ended with 1: no key"),
        (["true"], 0, "ended with 0: it said nothing"),
        (["no-such-program"], 127, "no-such-program"),
    ],
)
def test_a_program_that_calls_no_model(sandboxes: Sandboxes, command: list[str], code: int, said: str) -> None:
    with pytest.raises(HarnessFailed, match=said) as raised:
        lead(sandboxes, ScriptedPolicy([]), job(command))
    assert raised.value.exit_code == code


@only_process
def test_an_error_after_the_policys_turns_is_judged_as_it_is(sandboxes: Sandboxes) -> None:
    """The policy may well be its cause: what it left is judged."""
    policy = ScriptedPolicy([tool_call("bash", command="echo half > out.txt"), tool_call("bash", comand="x")])
    episode = lead(sandboxes, policy, job(agent()))
    assert (episode.stop_reason, episode.metrics["harness_exit_code"]) == ("harness_failed", 1)
    assert "KeyError" in episode.notes["harness_output"]
    assert episode.notes["written"] == "half\n"


@only_process
def test_an_engine_that_failed_last_is_why_a_program_ends(sandboxes: Sandboxes) -> None:
    policy = ScriptedPolicy([BASH, EngineFailed("the engine is gone")])
    with pytest.raises(EngineFailed, match="the engine is gone"):
        lead(sandboxes, policy, job(agent()))


@only_process
def test_a_parser_server_that_is_not_there_is_never_done_without(sandboxes: Sandboxes) -> None:
    with pytest.raises(EngineFailed, match="cannot be reached"):
        lead(sandboxes, ScriptedPolicy(["Done."]), job(agent()), parser_url=f"http://127.0.0.1:{free_port()}")


@only_process
def test_a_call_that_is_tried_again_after_a_failure(sandboxes: Sandboxes) -> None:
    policy = ScriptedPolicy([BASH, EngineFailed("for a moment"), "Done."])
    episode = lead(sandboxes, policy, job(agent("--stubborn")))
    assert episode.stop_reason == "done"
    assert episode.metrics["calls_without_reply"] == 1
    assert episode.metrics["main_turns"] == 2


@only_process
def test_a_prompt_that_became_too_long(sandboxes: Sandboxes) -> None:
    long = tool_call("bash", command="seq 1 400")
    policy = ScriptedPolicy(lambda _: long)
    episode = lead(sandboxes, policy, job(agent(), episode=EpisodeLimits(max_turns=8, max_tokens=600)))
    assert episode.stop_reason == "max_tokens"
    assert "context_length_exceeded" in episode.notes["harness_output"]
    assert episode.trajectory.tokens <= 600


@only_process
def test_a_first_prompt_that_is_too_long_is_the_jobs_fault(sandboxes: Sandboxes) -> None:
    with pytest.raises(InvalidJob, match=r"command cannot begin: the prompt has \d+ tokens, and the limit is 20"):
        lead(sandboxes, ScriptedPolicy(["Done."]), job(agent(), episode=EpisodeLimits(max_tokens=20)))


@only_process
def test_a_limit_that_a_program_got_over_is_not_why_it_ended(sandboxes: Sandboxes) -> None:
    """Its first try is far too long; with a shorter one it comes to its end."""
    both = "yes word | head -c 5000 | python3 agent.py {url} {key}; python3 agent.py {url} {key} <<< short"
    policy = ScriptedPolicy(["Done."])
    episode = lead(sandboxes, policy, job(["bash", "-c", both], episode=EpisodeLimits(max_tokens=600)))
    assert (episode.stop_reason, episode.metrics["main_turns"]) == ("done", 1)
    assert episode.metrics["calls_refused_as_too_long"] == 1
    assert "no reply" in episode.notes["calls"]


@only_process
def test_a_program_that_asks_for_ever(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of its calls is answered: each is too long for the policy."""
    monkeypatch.setattr(call_limits, "FURTHER_CALLS", 5)
    monkeypatch.setattr(call_limits, "CALLS_PER_TURN", 1)
    monkeypatch.setattr(chosen_harness, "GRACE_S", 0.2)
    limits = EpisodeLimits(max_turns=2, max_tokens=20)
    with pytest.raises(InvalidJob, match="cannot begin"):
        lead(sandboxes, ScriptedPolicy(lambda _: BASH), job(agent("--stubborn"), episode=limits), "word " * 4000)


@only_process
def test_a_program_that_sends_more_than_a_rollout_may_earns_nothing(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "BYTES", 20_000)
    monkeypatch.setattr(call_limits, "BYTES_PER_TURN", 0)
    policy = ScriptedPolicy(lambda _: tool_call("bash", command="seq 1000"))
    with pytest.raises(SandboxLimitExceeded, match="sent more than the 0 MiB of model requests") as raised:
        lead(sandboxes, policy, job(agent(), episode=EpisodeLimits(max_turns=100)))
    assert 1 < len(policy.said) < 10
    assert failure_of(raised.value).reward == 0.0


@only_process
def test_a_prompt_that_the_engine_refuses_is_no_failure_of_the_engine(sandboxes: Sandboxes) -> None:
    """A program could provoke it, and end: it must not be tried again for that."""
    policy = ScriptedPolicy([BASH, EngineFailed("a prompt of 9 tokens leaves no room", refused=True)])
    episode = lead(sandboxes, policy, job(agent()))
    assert (episode.stop_reason, episode.metrics["harness_exit_code"]) == ("harness_failed", 3)


@only_process
def test_arguments_that_were_cut_reach_the_program_as_they_are(sandboxes: Sandboxes) -> None:
    policy = ScriptedPolicy([BASH[: BASH.index("true") + 2]])
    episode = lead(sandboxes, policy, job(agent()))
    assert "JSONDecodeError" in episode.notes["harness_output"]
    assert episode.metrics["malformed_tool_calls"] == 1


@only_process
def test_others_on_the_hosts_network_do_not_know_the_key(sandboxes: Sandboxes) -> None:
    policy = ScriptedPolicy(["Done."])
    with pytest.raises(HarnessFailed, match="does not show the key"):
        lead(sandboxes, policy, job(["python3", "agent.py", "{url}", "guessed"]))
    assert policy.said == []


def test_what_a_program_leaves_behind_calls_nobody(sandboxes: Sandboxes) -> None:
    """It outlives the program in a session of its own, and tries for as long as it lives."""
    late = "setsid python3 agent.py {url} {key} --stubborn </dev/null >/dev/null 2>&1 &"
    policy = ScriptedPolicy(lambda _: "Done.")
    first = job(["bash", "-c", f"python3 agent.py {{url}} {{key}}; {late} exit 0"])
    episode = lead(sandboxes, policy, first)
    assert episode.metrics["main_turns"] >= 1
    assert len(policy.said) <= 2


class Slow(ScriptedPolicy):
    def __init__(self, delay_s: float) -> None:
        super().__init__(lambda _: "Done.")
        self.delay_s = delay_s
        self.times: list[tuple[float, float]] = []
        """When each call came and went."""

    async def __call__(self, *arguments: Any) -> Any:
        came = time.monotonic()
        await asyncio.sleep(self.delay_s)
        generation = await super().__call__(*arguments)
        self.times.append((came, time.monotonic()))
        return generation

    def busy_s(self) -> float:
        """For how long there was any call."""
        total, until = 0.0, 0.0
        for came, went in sorted(self.times):
            total += max(0.0, went - max(came, until))
            until = max(until, went)
        return total


STORM = "for i in $(seq 12); do python3 agent.py {url} {key} </dev/null & done; wait"


@only_process
def test_a_storm_of_calls_is_limited(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "CALLS_AT_ONCE", 3)
    policy = Slow(3.0)  # in which all of them have come
    episode = lead(sandboxes, policy, job(["bash", "-c", STORM], episode=EpisodeLimits(max_turns=100)))
    assert episode.metrics["calls_refused_as_too_many"] > 0
    assert episode.metrics["turns"] == len(policy.said) > 0


@only_process
def test_calls_at_one_time_are_no_more_turns_than_allowed(sandboxes: Sandboxes) -> None:
    policy = Slow(0.5)
    episode = lead(sandboxes, policy, job(["bash", "-c", STORM], episode=EpisodeLimits(max_turns=2)))
    assert (len(policy.said), episode.metrics["turns"], episode.stop_reason) == (2, 2, "max_turns")


@only_process
def test_calls_beside_each_other_take_the_engines_time_once(sandboxes: Sandboxes) -> None:
    """What is left of RUN's limit is the agent's own doing, and earns 0: it must not be hidden behind many calls."""
    policy = Slow(0.5)
    episode = lead(sandboxes, policy, job(["bash", "-c", STORM], episode=EpisodeLimits(max_turns=100)))
    assert len(policy.said) == 12
    assert episode.timings["engine"] == pytest.approx(policy.busy_s(), abs=0.3)
    steps = [step for step in episode.steps if step.name == "engine"]
    assert len(steps) == episode.metrics["turns"]  # each call by itself, also where calls overlap
    assert sum(step.seconds for step in steps) >= episode.timings["engine"] - 0.01


@only_process
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"stop": ["x"] * 17}, "stop takes up to 16 texts"),
        ({"stop": ["x" * 300]}, "of 1 to 256 characters"),
        ({"tools": [{"type": "function", "function": {"name": f"{n}"}} for n in range(600)]}, "there are 600 tools"),
    ],
)
def test_what_no_engine_would_take_is_the_calls_fault(sandboxes: Sandboxes, body: dict[str, Any], said: str) -> None:
    """An engine that is sent it fails, and with it other rollouts."""
    message = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **body}
    script = f"""cat > body.json << 'END'
{json.dumps(message)}
END
python3 agent.py {{url}} {{key}} --body=body.json 2> out.txt
python3 agent.py {{url}} {{key}}"""
    policy = ScriptedPolicy(["Done."])
    episode = lead(sandboxes, policy, job(["bash", "-c", script]))
    assert said in episode.notes["written"]
    assert (len(policy.said), episode.stop_reason) == (1, "done")


@only_process
def test_chosen_kinds_are_trained_on(sandboxes: Sandboxes) -> None:
    """Two agents that know nothing of each other: the second one is a side call of no known kind, or main as well."""
    both = "python3 agent.py {url} {key} --system=A <<< One; python3 agent.py {url} {key} --system=B <<< Two"
    for train_on, segments in ((("main",), 1), (("main", "side"), 2), (("all",), 2), (("compaction",), 0)):
        policy = ScriptedPolicy(lambda _: "Done.")
        wanted = job(["bash", "-c", both])
        harness = msgspec.structs.replace(Harness.of(wanted.harness), train_on=train_on)
        episode = lead(sandboxes, policy, msgspec.structs.replace(wanted, harness=harness))
        assert len(segments_of(episode.trajectory)) == segments
        assert (episode.metrics["main_turns"], episode.metrics["side_turns"]) == (1, 1)


def test_an_unknown_harness_and_one_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_HARNESSES", str(tmp_path))
    with pytest.raises(InvalidJob, match="chess"):
        ChosenHarness.find(Harness("chess"))
    with pytest.raises(HarnessFailed, match="prorl harness install codex"):
        ChosenHarness.find(Harness("codex"))
