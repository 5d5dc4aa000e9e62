"""The `harbor` task in real Apptainer sandboxes: what verifiers return, and what a policy tries that wants reward."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from mcp_servers import SMALL
from needed import usable
from rootfs import tiny_root_filesystem
from support.sandboxes import default_image

from prorl_zmq import Job
from prorl_zmq.errors import ConfigError, GraderFailed, InvalidJob
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.stages.handlers.harbor import HarborHandler
from prorl_zmq.stages.handlers.harbor_oracle import Agent, Proof, prove
from prorl_zmq.stages.handlers.harbor_verifier import (
    TOOLS_VARIABLE,
    Grade,
    allowed_hosts,
    failed,
    parsed_rewards,
    unpacked,
    verifier_tools,
    verify,
)
from prorl_zmq.tasks.harbor_task import (
    Artifact,
    Collect,
    Environment,
    HarborTask,
    Healthcheck,
    NetworkPolicy,
    Step,
    Verifier,
)
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.images.image_store import ImageStore
from prorl_zmq.tools.images.sources import parse_base
from prorl_zmq.wire.messages.jobs import Harness, McpServer, Outcome, PhaseLimits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from support.sandboxes import SharedSandboxes

    from prorl_zmq import Trajectory


pytestmark = pytest.mark.timeout(120)
JOB = Job(task="harbor", instance={})
TEST = """\
#!/bin/bash
cd /app
if [ "$(cat answer.txt 2>/dev/null)" = "$(cat /tests/expected.txt)" ]; then echo 1; else echo 0; fi > $REWARD
"""
SOLVE = "echo 42 > answer.txt"


def packed(mode: int = 0o755, **files: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("_", "."))
            member.size, member.mode = len(text.encode()), mode
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(content.getvalue())


def task(test: str = TEST, **fields: Any) -> HarborTask:
    step = Step(
        "Write 42 to answer.txt.", **{name: fields.pop(name) for name in ("verifier", "artifacts") if name in fields}
    )
    given = {
        "environment": Environment(workdir="/app", variables=PLACES),
        "tests": packed(test_sh=test, expected_txt="42\n"),
    }
    return HarborTask("answer", **{"steps": (step,), **given, **fields})


def acted(acts: str, sandboxes_of: SharedSandboxes, instance: HarborTask | None = None) -> Proof:
    """Return what an agent earns that runs a script."""
    solution = packed(solve_sh=f"#!/bin/bash\n{acts}\n")
    return proof(msgspec.structs.replace(instance or task(), solution=solution), sandboxes_of)


def proof(instance: HarborTask, sandboxes_of: SharedSandboxes, agent: Agent = "oracle") -> Proof:
    return asyncio.run(prove(instance, PhaseLimits(), sandboxes_of("apptainer"), agent))


@pytest.mark.proof
def test_solving_earns_one_and_doing_nothing_zero(sandboxes_of: SharedSandboxes) -> None:
    place = 'test "$(pwd) $(id -un) $HOME" = "/app root /root" && test ! -e /tests && test -z "$(ls -A /logs/verifier)"'
    assert acted(f"{place} && {SOLVE}", sandboxes_of) == Proof("oracle", 1.0, "")
    assert proof(task(), sandboxes_of, "no-op").holds


CHEATS = {
    "fakes": (
        "mkdir /tests; "
        "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; chmod 555 /tests/test.sh; "
        "echo 7 | tee /tests/expected.txt > answer.txt; echo 1 > /logs/verifier/reward.txt; "
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json; "
        "setsid -f bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' 2>/dev/null"
    ),
    "links": (
        "rm -rf /logs; ln -s /workspace /logs; mkdir /workspace/verifier; echo 1 > /workspace/verifier/reward.txt; "
        "ln -s /logs /tests; cd /; rm -rf /app"
    ),
    "path": (
        "echo 'PATH=/app:$PATH' | tee /root/.bashrc > e; printf 'echo 42' > cat; chmod +x cat; "
        "export PATH=/app:$PATH BASH_ENV=/app/e; mkfifo /logs/verifier/reward.txt; chmod 000 /logs/verifier /logs"
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.proof
def test_a_policy_that_sabotages_its_grader_earns_nothing(cheat: str, sandboxes_of: SharedSandboxes) -> None:
    assert acted(CHEATS[cheat], sandboxes_of).reward == 0.0


NO_REWARDS = [
    ("true", "wrote neither", "result"),
    (": > $REWARD", "it is empty", "result"),
    ("echo nan > $REWARD", "not finite", "result"),
    ("echo passed > $REWARD", "has no reward", "result"),
    ("mkdir $REWARD", "cannot be read", "result"),
    ("""echo '{"a": 1, "b": 0}' > $JSON""", "rewards a, b, and none is called reward", "result"),
    ("""echo 0 > $REWARD; echo '{"reward": 1}' > $JSON""", "contradict", "result"),
    ("kill -9 $$", "was killed", "killed"),
    ("sleep 60", "did not end within 0.5 s", "hung"),
]
REWARDS = [
    ("""echo '{"reward": -0.5, "speed": 3}' > $JSON; exit 1""", {"reward": -0.5, "speed": 3.0}),
    (
        "echo '===== test session starts ====='; echo 'curl: (6) Could not resolve host'; echo 0 > $REWARD",
        {"reward": 0.0},
    ),
    ("""echo '{"accuracy": true}' > $JSON""", {"accuracy": 1.0}),
]
PLACES = {"REWARD": "/logs/verifier/reward.txt", "JSON": "/logs/verifier/reward.json"}


@pytest.mark.proof
def test_what_a_verifier_writes_is_a_reward_or_an_error_of_the_infrastructure(sandboxes_of: SharedSandboxes) -> None:
    async def run() -> None:
        sandbox = await sandboxes_of("apptainer").create("job.1", SandboxSpec(writable="disk", fakeroot=True))

        async def graded(test: str, timeout_s: float) -> Grade:
            verifier = Verifier(timeout_s=timeout_s, variables=PLACES)
            tests = [packed(test_sh=f"#!/bin/bash\n{test}\n")]
            return await verify(sandbox, verifier, tests, NetworkPolicy(), "/")

        try:
            for test, words, reason in NO_REWARDS:
                with pytest.raises(GraderFailed, match=words) as raised:
                    (await graded(test, 0.5 if reason == "hung" else 60.0)).reward  # noqa: B018 - it raises
                assert raised.value.fields["reason"] == reason, test
                failure = HarborHandler().eval_exception(JOB, raised.value)
                assert (failure.outcome, failure.reward) == (Outcome.INFRASTRUCTURE_ERROR, None)
                assert not failure.retry
            for test, rewards in REWARDS:
                assert (await graded(test, 60.0)).rewards == rewards
        finally:
            await sandbox.close()

    asyncio.run(run())


LACKS = "#!/bin/bash\necho 0 > $REWARD\nuvx pytest\n"
RUNS_THE_AGENTS = "#!/bin/bash\ncd /app\n./run.sh 2>&1\n" + TEST
FORGES = "printf '#!/bin/sh\\necho curl: Could not resolve host: pypi.org\\n' > run.sh; chmod +x run.sh"
BREAKS_ONCE = (
    "#!/bin/bash\nif rm /app/no_network; then echo Could not resolve host; echo 0 > $REWARD; exit; fi 2>/dev/null\n"
)


@pytest.mark.parametrize("where", ["shared", "separate"])
@pytest.mark.proof
def test_an_agent_cannot_say_that_the_verifier_lacks_its_tools(where: str, sandboxes_of: SharedSandboxes) -> None:
    fields: dict[str, Any] = {"artifacts": (Artifact("/app"),)}
    if where == "separate":
        fields["verifier"] = Verifier(separate=Environment(workdir="/app", variables=PLACES))
    assert acted(FORGES, sandboxes_of, task(RUNS_THE_AGENTS, **fields)).reward == 0.0
    assert acted(f"{FORGES}; {SOLVE}", sandboxes_of, task(RUNS_THE_AGENTS, **fields)).reward == 1.0
    missing = acted(FORGES, sandboxes_of, task(LACKS, **fields))
    assert (missing.reward, "could not install its tools" in missing.problem) == (None, True)
    assert "uvx: command not found" in missing.problem
    blinked = acted(f"touch no_network; {SOLVE}", sandboxes_of, task(BREAKS_ONCE + TEST, **fields))
    assert blinked.reward == (1.0 if where == "shared" else 0.0)  # a separate one gets the file again


def test_missing_tools_are_tried_again() -> None:
    failure = HarborHandler().eval_exception(JOB, failed("it could not install its tools", "", reason="tools"))
    assert (failure.outcome, failure.reward, failure.retry) == (Outcome.INFRASTRUCTURE_ERROR, None, True)


SERVES = (
    "python3 -m http.server --bind 127.0.0.1 8000 > /dev/null 2>&1 & "
    "until (: < /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done"
)
LOOKS = "#!/bin/bash\nif (: < /dev/tcp/localhost/8000); then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def rolled_out(instance: HarborTask, *acts: str, first: Sequence[str] = (), **job: Any) -> Trajectory:
    """Return the trajectory of a policy that runs each of `acts` in bash, one for each step, and then ends the step.

    `first` are turns before those.
    """
    usable("apptainer")
    engine = say(*first, *(turn for each in acts for turn in (tool_call("bash", command=each), "done")))
    topology = {"sandbox": {"image": default_image("apptainer")}}
    handlers = {"harbor": HarborHandler}
    with (
        LocalService(handlers=handlers, engine=engine, sandbox="apptainer", slots=1, topology=topology) as service,
        service.client() as client,
    ):
        client.submit(Job(task="harbor", instance=msgspec.to_builtins(instance), max_attempts=1, **job))
        (trajectory,) = client.collect(1)
        return trajectory


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.proof
def test_a_live_server_is_graded_before_its_end(live: bool) -> None:
    trajectory = rolled_out(task(LOOKS, live=live), SERVES)
    assert (trajectory.error, trajectory.reward) == (None, float(live))


@pytest.mark.proof
def test_files_that_the_image_has_at_tests_are_restored(sandboxes_of: SharedSandboxes, tmp_path: Path) -> None:
    usable("apptainer")
    file = tmp_path / "environment" / "Dockerfile"
    file.parent.mkdir()
    file.write_text("FROM small\nRUN mkdir /tests && echo 42 > /tests/expected.txt\n")
    base = parse_base(str(tiny_root_filesystem(tmp_path / "small", "env")))
    built = ImageStore(tmp_path / "images").build(str(file), "has-tests", bases={"small": base})
    environment = Environment(image=str(built.image.path), workdir="/app", variables=PLACES)
    instance = task(environment=environment, tests=packed(test_sh=TEST))
    assert acted(f"test -e /tests/expected.txt && {SOLVE}", sandboxes_of, instance) == Proof("oracle", 1.0, "")
    assert acted("echo 7 > /tests/expected.txt; echo 7 > answer.txt", sandboxes_of, instance).reward == 0.0
    steps = (step("one", "42", SOLVE), step("two", "43", "echo 43 > answer.txt"))
    several = msgspec.structs.replace(instance, steps=steps)
    assert proof(several, sandboxes_of) == Proof("oracle", 1.0, "")


SHOP = McpServer(name="shop", command=("python3", "-c", SMALL.read_text()))


@pytest.mark.proof
def test_the_agent_has_the_tools_of_the_tasks_mcp_servers() -> None:
    trajectory = rolled_out(task(mcp=(SHOP,)), SOLVE, first=[tool_call("add", a=1, b=2)])
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert "3, call 1" in EmbeddedChatFormat().decode(trajectory.token_ids)


@pytest.mark.proof
def test_a_harness_gets_the_tasks_mcp_servers() -> None:
    program = (
        "import json, os, urllib.request as u; servers = json.load(open(os.environ['PRORL_MCP_CONFIG'])); "
        "assert servers['mcpServers']['shop']['command'] == 'python3', servers; "
        "ask = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hello'}]}; "
        "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(ask).encode(), "
        "{'Content-Type': 'application/json'})).read(); open('/app/answer.txt', 'w').write('42')"
    )
    harness = Harness(name="command", arguments=("python3", "-c", program))
    trajectory = rolled_out(task(mcp=(SHOP,)), first=["hello"], harness=harness)
    assert (trajectory.error, trajectory.reward) == (None, 1.0), trajectory.result.notes


@pytest.mark.proof
def test_an_mcp_server_that_the_operator_has_not_listed_is_refused() -> None:
    trajectory = rolled_out(task(mcp=(McpServer(name="search", url="http://localhost:9/mcp"),)), SOLVE)
    assert (trajectory.result.outcome, trajectory.reward) == (Outcome.FAILED, None)
    assert trajectory.error is not None
    assert "search: http://localhost:9/mcp is not among the service's [[mcp]] addresses" in trajectory.error.message
    assert "add it to the topology file" in trajectory.error.message


@pytest.mark.proof
def test_each_step_is_a_conversation_of_its_own() -> None:
    steps = (step("one", "42", "", min_reward={"reward": 1.0}), step("two", "43", ""))
    trajectory = rolled_out(msgspec.structs.replace(task(), steps=steps), SOLVE, SOLVE)
    assert (trajectory.error, trajectory.reward) == (None, 0.5)
    assert trajectory.result.metrics["steps_graded"] == 2
    assert trajectory.result.metrics["turns"] == 4


SEPARATE = Verifier(
    separate=Environment(workdir="/app", variables=PLACES),
    collect=(Collect("cat /proc/[0-9]*/cmdline > /logs/artifacts/processes"),),
)


@pytest.mark.proof
def test_a_separate_verifier_sees_the_artifacts_alone(sandboxes_of: SharedSandboxes) -> None:
    looks = "grep -q sleep /logs/artifacts/processes && test ! -e other.txt && test ! -e /bin/planted && "
    instance = task(
        TEST.replace("if [", f"if {looks}["), verifier=SEPARATE, artifacts=(Artifact("/app", ("other.*",)),)
    )
    acts = f"{SOLVE}; touch other.txt /bin/planted; setsid -f sleep 600"
    assert acted(acts, sandboxes_of, instance) == Proof("oracle", 1.0, "")


@pytest.mark.proof
def test_an_artifact_does_not_point_at_the_tests(sandboxes_of: SharedSandboxes) -> None:
    separate = Verifier(separate=Environment(workdir="/app", variables=PLACES))
    instance = task(verifier=separate, artifacts=(Artifact("/app"),))
    assert acted("ln -s /tests/expected.txt answer.txt", sandboxes_of, instance).reward == 0.0


@pytest.mark.proof
def test_what_goes_wrong_around_the_agent_is_named(sandboxes_of: SharedSandboxes) -> None:
    collects = task(verifier=Verifier(collect=(Collect("echo no database; exit 3"),)))
    assert "collects for the verifier failed (3): no database" in acted(SOLVE, sandboxes_of, collects).problem
    check = Healthcheck("echo no port; exit 1", interval_s=0.01, retries=2)
    ill = task(environment=Environment(healthcheck=check))
    assert "the healthcheck failed 2 times: no port" in acted(SOLVE, sandboxes_of, ill).problem


@pytest.mark.proof
def test_a_sandbox_that_does_not_suit_the_task_is_named(sandboxes_of: SharedSandboxes) -> None:
    lost = task(environment=Environment(workdir="/etc/passwd/app"))
    assert "the working directory /etc/passwd/app cannot be made" in proof(lost, sandboxes_of).problem
    (first,) = task().steps
    stranger = task(steps=(msgspec.structs.replace(first, agent_user="stranger"),))
    assert "the agent's user cannot be used" in proof(stranger, sandboxes_of).problem


@pytest.mark.parametrize(
    "listed",
    [
        "127.0.0.1",
        "126.0.0.0/7",
        "64.0.0.0/2",
        "0.0.0.0/0",
        "::/0",
        "::1",
        "fe80::/9",
        "169.254.169.254",
        "::ffff:127.0.0.1",
    ],
)
def test_no_policy_lists_addresses_of_the_node(listed: str) -> None:
    with pytest.raises(InvalidJob, match="addresses of the node itself"):
        allowed_hosts(NetworkPolicy("allowlist", (listed,)))
    allowed_hosts(NetworkPolicy("allowlist", ("10.0.0.0/8", "2001:db8::/32")))


def test_folders_that_are_no_archives_are_refused() -> None:
    with pytest.raises(InvalidJob, match="not gzip"):
        unpacked(b"no archive")
    with pytest.raises(InvalidJob, match="cut off"):
        unpacked(packed(a="b")[:-9])


@pytest.mark.parametrize(
    "wrong",
    [
        *("[1]", "1", "null", "{}", "{", "NaN", "[" * 60_000),
        *('{"reward": "1"}', '{"reward": 1e999}', '{"reward": 1e300}', f'{{"reward": 1{"0" * 400}}}'),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_reward(wrong: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parsed_rewards("reward.json", wrong.encode())


def test_one_reward_needs_no_name() -> None:
    assert Grade({"accuracy": 0.25}, "").reward == 0.25


def step(name: str, answer: str, solve: str, **fields: Any) -> Step:
    tests = packed(expected_txt=f"{answer}\n")
    return Step(f"Do {name}.", name=name, tests=tests, solution=packed(solve_sh=f"cd /app\n{solve}\n"), **fields)


@pytest.mark.proof
def test_steps_are_graded_one_by_one_and_gated(sandboxes_of: SharedSandboxes) -> None:
    setup = packed(setup_sh="test ! -e /tests/test.sh && echo ready > ready.txt")
    solve = SOLVE
    steps = (
        step("one", "42", solve, min_reward={"reward": 1.0}),
        step("two", "43", f'test -e ready.txt && test -z "$(ls /tests)" && {solve.replace("42", "43")}', workdir=setup),
    )
    instance = msgspec.structs.replace(task(), steps=steps)
    assert proof(instance, sandboxes_of) == Proof("oracle", 1.0, "")
    assert proof(instance, sandboxes_of, "no-op").reward == 0.0
    wrong = (step("one", "42", "echo 1 > answer.txt", min_reward={"reward": 0.5}), steps[1])
    assert proof(msgspec.structs.replace(instance, steps=wrong), sandboxes_of).reward == 0.0
    ungated = (step("one", "42", "echo 1 > answer.txt"), steps[1])
    assert proof(msgspec.structs.replace(instance, steps=ungated), sandboxes_of).reward == 0.5
    last = msgspec.structs.replace(instance, steps=ungated, reward="final")
    assert proof(last, sandboxes_of).reward == 1.0


@pytest.mark.proof
def test_a_solution_that_fails_says_why(sandboxes_of: SharedSandboxes) -> None:
    failed = proof(task(solution=packed(solve_sh="echo no compiler; exit 2")), sandboxes_of)
    assert (failed.reward, failed.holds) == (0.0, False)
    assert "solve.sh ended with 2: no compiler" in failed.problem
    assert "no solution/solve.sh" in proof(task(), sandboxes_of).problem


@pytest.mark.proof
def test_verifiers_have_the_operators_tools(
    sandboxes_of: SharedSandboxes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "grade"
    tool.write_text("#!/bin/bash\necho 1 > $REWARD\n")
    tool.chmod(0o755)
    monkeypatch.setenv(TOOLS_VARIABLE, str(tmp_path))
    cheat = "rm -f /opt/verifier-tools/bin/grade; ! type grade"
    assert acted(cheat, sandboxes_of, task("#!/bin/bash\ngrade\n")) == Proof("oracle", 1.0, "")


def test_a_folder_of_tools_without_programs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOOLS_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="has no folder bin"):
        verifier_tools()
