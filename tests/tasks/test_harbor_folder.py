"""Harbor task folders as jobs: what is read, and what is rejected by name."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.harbor_tasks import DOCKERFILE, make_task

from prorl_zmq.errors import ConfigError, InvalidRecord
from prorl_zmq.stages.handlers.harbor import HarborHandler
from prorl_zmq.tasks.harbor_folder import find_task_folders, published_name, read_task_folder
from prorl_zmq.tasks.harbor_task import Artifact, Collect, HarborTask, Healthcheck, NetworkPolicy
from prorl_zmq.tasks.loading import Row, load_jobs, load_rows
from prorl_zmq.tools.images.image import check_name
from prorl_zmq.wire.messages.jobs import Job, McpServer

if TYPE_CHECKING:
    from pathlib import Path

NO_FILE: dict[str, str | None] = {"instruction.md": None, "tests/test.sh": None}
"""Of the usual files of a task, those that its steps have."""


STEPS = 'steps = [{name = "a"}, {name = "b"}]\n'


def members(packed: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return {member.name: member for member in tar}


def test_a_small_task_is_read_whole(tmp_path: Path) -> None:
    read = read_task_folder(make_task(tmp_path / "hello"))
    (step,) = read.task.steps
    assert (read.task.name, step.name, step.instruction) == ("hello", "", "Write hello into /app/hello.txt.\n")
    assert {name: member.mode for name, member in members(read.task.tests).items()} == {"test.sh": 0o755}
    assert read.task.solution == b""
    assert read.task.environment.network == NetworkPolicy("public")
    (image,) = read.images
    assert image.name == read.task.environment.image
    assert image.dockerfile == tmp_path / "hello" / "environment" / "Dockerfile"
    assert image.build_s == 600.0


def test_the_oracle_gets_the_solution(tmp_path: Path) -> None:
    task = read_task_folder(make_task(tmp_path / "hello"), with_solution=True).task
    assert set(members(task.solution)) == {"solve.sh"}


def test_every_key_has_its_place(tmp_path: Path) -> None:
    toml = """
    source = "a set"
    artifacts = ["/app/out", {source = "/var/log/x", destination = "x", exclude = ["*.tmp"]}]
    [task]
    name = "org/hello"
    [metadata]
    anything = [1, {b = 2}]
    [agent]
    timeout_sec = 3600.5
    user = 1000
    network_mode = "no-network"
    [verifier]
    timeout_sec = 1200
    user = "grader"
    network_mode = "allowlist"
    allowed_hosts = ["PyPI.org.", "*.example.com"]
    env = {KEY = "${KEY:-none}", WORD = "a"}
    collect = [{command = "pg_dump", timeout_sec = 5, user = "postgres"}]
    [solution]
    env = {X = "1"}
    [environment]
    build_timeout_sec = 90
    cpus = 2
    memory = "2G"
    storage_mb = 10240
    gpus = 0
    mcp_servers = []
    workdir = "/srv"
    env = {MODE = "test"}
    allow_internet = false
    os = "Linux"
    [environment.healthcheck]
    command = "curl localhost"
    retries = 9
    """
    read = read_task_folder(make_task(tmp_path / "hello", toml))
    task = read.task
    (step,) = task.steps
    assert (step.agent_s, step.agent_user, step.agent_network) == (3600.5, "1000", NetworkPolicy("no-network"))
    verifier = step.verifier
    assert (verifier.timeout_s, verifier.user, verifier.variables) == (1200, "grader", {"KEY": "none", "WORD": "a"})
    assert verifier.network == NetworkPolicy("allowlist", ("pypi.org", "*.example.com"))
    assert verifier.collect == (Collect("pg_dump", 5.0, "postgres"),)
    assert task.artifacts == (Artifact("/app/out"), Artifact("/var/log/x", ("*.tmp",)))
    assert task.solution_variables == {"X": "1"}
    environment = task.environment
    assert (environment.cpus, environment.memory_bytes, environment.workdir) == (2.0, 2 * 2**30, "/srv")
    assert (environment.variables, environment.network) == ({"MODE": "test"}, NetworkPolicy("no-network"))
    assert environment.healthcheck == Healthcheck("curl localhost", retries=9)
    assert read.images[0].build_s == 90
    limits = read.limits()
    assert (limits.run_s, limits.eval_s) == (3600.5 + 3 * 1200 + 60, 3 * 1200 + 60)


def test_steps_inherit_what_they_do_not_say(tmp_path: Path) -> None:
    toml = """
    multi_step_reward_strategy = "final"
    [agent]
    timeout_sec = 50
    [verifier]
    env = {A = "1"}
    [[steps]]
    name = "scaffold"
    min_reward = 0.5
    [[steps]]
    name = "finish"
    agent = {timeout_sec = 70}
    min_reward = {style = 1.0}
    verifier = {timeout_sec = 9, env = {B = "2"}}
    artifacts = ["/out"]
    """
    files = NO_FILE | {
        "tests/test.sh": "echo shared",
        "steps/scaffold/instruction.md": "First",
        "steps/scaffold/workdir/setup.sh": "true",
        "steps/finish/instruction.md": "Then",
        "steps/finish/tests/test.sh": "echo own",
        "steps/finish/solution/solve.sh": "true",
    }
    task = read_task_folder(make_task(tmp_path / "t", toml, files), with_solution=True).task
    first, second = task.steps
    assert [step.name for step in task.steps] == ["scaffold", "finish"]
    assert (first.min_reward, second.min_reward, task.reward) == ({"reward": 0.5}, {"style": 1.0}, "final")
    assert (first.agent_s, second.agent_s, second.verifier.timeout_s) == (50, 70, 9)
    assert (first.verifier.variables, second.verifier.variables) == ({"A": "1"}, {"A": "1", "B": "2"})
    assert (first.tests, set(members(second.tests)), set(members(task.tests))) == (b"", {"test.sh"}, {"test.sh"})
    assert set(members(first.workdir)) == {"setup.sh"}
    assert set(members(second.solution)) == {"solve.sh"}
    assert second.artifacts == (Artifact("/out"),)


@pytest.mark.parametrize(
    ("toml", "files", "image", "tests_in_image"),
    [
        ('environment_mode = "separate"', {}, "environment", False),
        ('environment_mode = "separate"', {"tests/Dockerfile": "FROM debian:12\n", "tests/test.sh": None}, "", True),
        ('environment = {docker_image = "python:3.13"}', {"tests/test.sh": None}, published_name("python:3.13"), True),
        ("environment = {cpus = 1}", {}, "environment", False),
    ],
)
def test_a_separate_verifier(
    toml: str, files: dict[str, str | None], image: str, tests_in_image: bool, tmp_path: Path
) -> None:
    read = read_task_folder(make_task(tmp_path / "t", f"[verifier]\n{toml}\n", files))
    verifier = read.task.steps[0].verifier
    assert verifier.separate is not None
    assert verifier.tests_in_image == tests_in_image
    own = read.task.environment.image
    assert (verifier.separate.image == own) == (image == "environment")
    assert image in ("", "environment", verifier.separate.image)
    assert [each.name for each in read.images] == [own, *([verifier.separate.image] if tests_in_image else [])]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('schema_version = "1.5"', "later than 1.4"),
        ('schema_version = "2.0"', "later than 1.4"),
        ("schema_version = 1.4", "not a text"),
        ("[environment]\ngpus = 1", r"\[environment\] gpus: sandboxes have no GPU"),
        ('[environment]\ngpu_types = ["H100"]', "gpu_types: sandboxes have no GPU"),
        ('[environment.tpu]\ntype = "v6e"', "no TPU"),
        ('[environment]\nos = "windows"', "sandboxes run Linux"),
        (
            '[[environment.mcp_servers]]\nname = "a"\nurl = "http://x/sse"',
            "mcp_servers: a: the transport sse, the default",
        ),
        ('[[environment.mcp_servers]]\nname = "a"\ntransport = "stdio"', "a: stdio needs a command, and no url"),
        (
            '[[environment.mcp_servers]]\nname = "a"\ntransport = "http"\ncommand = "x"',
            "a: http needs a url, and no comm",
        ),
        ('[[environment.mcp_servers]]\nname = "a b"\ntransport = "stdio"\ncommand = "x"', "mcp_servers: a b: .*name"),
        (
            '[[environment.mcp_servers]]\nname = "a"\ntransport = "http"\nurl = "http://x"\nheaders = {K = "v"}',
            "a: headers are not sent; the operator names a variable",
        ),
        (
            "[environment]\nmcp_servers = [" + 2 * '{name = "a", transport = "stdio", command = "x"}, ' + "]",
            "a: two servers have this name",
        ),
        (
            '[[verifier.environment.mcp_servers]]\nname = "a"\ntransport = "stdio"\ncommand = "x"',
            r"\[verifier.environment\] mcp_servers: only the agent has",
        ),
        (
            STEPS + '[[environment.mcp_servers]]\nname = "m"\ntransport = "stdio"\ncommand = "x"',
            "the MCP server m would end with the agent's processes",
        ),
        ('[environment]\nskills_dir = "/skills"', "skills are not copied"),
        ('[environment]\nmemory = "many"', "not a size such as"),
        ('[environment]\nmemory = "1G"\nmemory_mb = 4', "is not memory_mb = 4"),
        ('[environment]\nallowed_hosts = ["a"]', "needs network_mode"),
        ('[agent]\nallowed_hosts = ["a"]', "needs network_mode"),
        ("[environment]\ncpu = 4", "unknown field `cpu`.*did you mean `cpus`"),
        ("[environment]\ncpus = -1", "cpus"),
        ("[environment]\ncpus = nan", "cpus"),
        ('[environment]\ncpus = "two"', "cpus"),
        ('[environment]\nworkdir = "app"', "workdir"),
        ('[verifier.env]\nKEY = "${OPENAI_API_KEY}"', "every job would carry"),
        ('[verifier]\nenvironment_mode = "shared"\nenvironment = {}', 'environment_mode is "shared"'),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"', "docker-compose.yaml"),
        ('artifacts = ["relative"]', "absolute path"),
        ('artifacts = ["/a/../b"]', "without '..'"),
        ('artifacts = [{source = "/a", service = "db"}]', "docker-compose.yaml"),
        ('multi_step_reward_strategy = "mean"', "the task has no steps"),
        ('[[steps]]\nname = "../../etc"', "not the name of a folder"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"', "same name"),
        ("[agent]\ntimeout_sec = inf", "agent_s"),
        ("x = [", "not TOML"),
        pytest.param("x = " + "[" * 100_000, "not TOML", id="deep"),
    ],
)
def test_what_cannot_run_is_rejected_by_name(toml: str, words: str, tmp_path: Path) -> None:
    files = NO_FILE | {f"steps/{name}/{each}": "x" for name in "aAb" for each in ("instruction.md", "tests/test.sh")}
    folder = make_task(tmp_path / "t", files=files if "steps" in toml else {})
    (folder / "task.toml").write_text(toml)
    with pytest.raises(InvalidRecord, match=words):
        read_task_folder(folder)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"task.toml": None}, "it has no task.toml"),
        ({"instruction.md": None}, "it has no instruction.md"),
        ({"instruction.md": " \n"}, "instruction.md is empty"),
        ({"tests/test.sh": None}, "it has no tests/test.sh"),
        ({"environment/Dockerfile": None}, "neither environment/Dockerfile nor docker_image"),
        ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml have no equivalent"),
        ({"trajectory.json": "{}"}, "earlier turns"),
        ({"tests/.harborignore": "*"}, "harborignore"),
    ],
)
def test_files_that_are_missing_or_not_supported(files: dict[str, str | None], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRecord, match=words):
        read_task_folder(make_task(tmp_path / "t", files=files))


@pytest.mark.parametrize("place", ["instruction.md", "tests", "tests/test.sh", "environment/Dockerfile", "task.toml"])
def test_nothing_outside_the_folder_is_read(place: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_task(secret)
    folder = make_task(tmp_path / "t")
    (folder / place).rename(tmp_path / "taken away")
    (folder / place).symlink_to(secret / place)
    with pytest.raises(InvalidRecord, match=f"{place}.*(leads out of|is a symbolic link to)"):
        read_task_folder(folder)


@pytest.mark.parametrize("target", ["/etc/passwd", "../solution/solve.sh", "nowhere/../../x"])
def test_a_link_in_tests_that_leaves_them_is_rejected(target: str, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t")
    (folder / "tests" / "data").symlink_to(target)
    with pytest.raises(InvalidRecord, match="tests/data is a symbolic link to"):
        read_task_folder(folder)


def test_links_inside_of_tests_stay_links(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t", files={"tests/data/a": "a"})
    (folder / "tests" / "b").symlink_to("data/a")
    assert members(read_task_folder(folder).task.tests)["b"].linkname == "data/a"


@pytest.mark.parametrize("name", ["task.toml", "instruction.md"])
def test_a_text_that_never_ends_is_not_read(name: str, tmp_path: Path) -> None:
    for place in ("pipe", "huge"):
        folder = make_task(tmp_path / place)
        if place == "pipe":
            (folder / name).unlink()
            os.mkfifo(folder / name)
        else:
            os.truncate(folder / name, 2**40)
        with pytest.raises(InvalidRecord, match=rf"{name} is no file of at most 1048576 bytes"):
            read_task_folder(folder)


def test_a_pipe_in_tests_is_rejected(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t")
    os.mkfifo(folder / "tests" / "pipe")
    with pytest.raises(InvalidRecord, match="tests/pipe is no file"):
        read_task_folder(folder)


def test_tests_that_no_job_can_carry_are_rejected(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t")
    (folder / "tests" / "noise").write_bytes(os.urandom(4 * 2**20))
    with pytest.raises(InvalidRecord, match="packed folders have"):
        read_task_folder(folder)
    os.truncate(folder / "tests" / "noise", 2**30)
    with pytest.raises(InvalidRecord, match="put large files into the image"):
        read_task_folder(folder)


def test_marks_against_contamination_are_not_shown_to_the_agent(tmp_path: Path) -> None:
    text = "<!-- benchmark canary 1 -->\n# a Canary\n\nDo it.\n# canary\n"
    task = read_task_folder(make_task(tmp_path / "t", files={"instruction.md": text})).task
    assert task.steps[0].instruction == "Do it.\n# canary\n"


def test_equal_environments_share_an_image_and_changed_ones_do_not(tmp_path: Path) -> None:
    names = {}
    for name, files in {
        "one": {},
        "same": {"instruction.md": "another"},
        "other": {"environment/Dockerfile": DOCKERFILE + "RUN true\n"},
        "more": {"environment/data/x": ""},
    }.items():
        names[name] = read_task_folder(make_task(tmp_path / name, files=dict(files))).task.environment.image
    assert names["one"] == names["same"]
    assert len(set(names.values())) == 3


def test_a_published_image_has_a_name_of_its_own(tmp_path: Path) -> None:
    read = read_task_folder(make_task(tmp_path / "t", '[environment]\ndocker_image = "ghcr.io/a/b:1"\n'))
    (image,) = read.images
    assert (image.name, image.reference) == (
        "ghcr.io_a_b_1-" + hashlib.sha256(b"ghcr.io/a/b:1").hexdigest()[:16],
        "ghcr.io/a/b:1",
    )
    assert read.task.environment.image_source == "docker://ghcr.io/a/b:1"


@pytest.mark.parametrize(
    "references",
    [
        ("a:b", "a/b", "a_b", "a@b", "_a_b"),
        ("a" * 90 + "/" * 30 + "b", "a" * 90 + "/" * 30 + "c"),
        ("harbor-0123456789abcdef", "harbor:0123456789abcdef", "harbor_0123456789abcdef"),
        ("a:1.sif", "a:1"),
    ],
)
def test_published_images_share_no_name(references: tuple[str, ...]) -> None:
    names = [published_name(reference) for reference in references]
    assert [check_name(name) for name in names] == names
    assert published_name("own_image") == "own_image"
    assert len({name.removesuffix(".sif") for name in names} - {"harbor-0123456789abcdef"}) == len(references)


def test_commands_start_where_the_dockerfile_ends(tmp_path: Path) -> None:
    files = {
        "environment/Dockerfile": DOCKERFILE + "WORKDIR src\nUSER agent:staff\n",
        "tests/Dockerfile": "FROM debian:12\nCOPY . /tests/\nUSER root\n",
    }
    task = read_task_folder(make_task(tmp_path / "t", files=dict(files))).task
    (step,) = task.steps
    assert (task.environment.workdir, step.agent_user, step.verifier.user) == ("/app/src", "agent", "agent")
    toml = '[environment]\nworkdir = "/x"\n[agent]\nuser = "me"\n[verifier]\nenvironment_mode = "separate"\n'
    task = read_task_folder(make_task(tmp_path / "t", toml, files=dict(files))).task
    (step,) = task.steps
    assert (task.environment.workdir, step.agent_user, step.verifier.user) == ("/x", "me", "")


def test_what_cannot_be_built_is_named_with_line_and_instruction(tmp_path: Path) -> None:
    files: dict[str, str | None] = {"environment/Dockerfile": DOCKERFILE + "RUN true\nCOPY nothing /\n"}
    with pytest.raises(InvalidRecord, match=r"^environment/Dockerfile, line 4: COPY: there is no nothing"):
        read_task_folder(make_task(tmp_path / "t", files=files))
    files = {"environment/.dockerignore": "a\n[z-a]\n"}
    with pytest.raises(InvalidRecord, match=r"^environment/Dockerfile, \.dockerignore, line 2: '\[z-a\]' is not"):
        read_task_folder(make_task(tmp_path / "u", files=files))


def test_mcp_servers_are_the_agents(tmp_path: Path) -> None:
    toml = """
    [verifier]
    environment_mode = "separate"
    [[environment.mcp_servers]]
    name = "shop"
    transport = "stdio"
    command = "python3"
    args = ["/opt/shop.py"]
    [[environment.mcp_servers]]
    name = "search"
    transport = "streamable-http"
    url = "https://search.example/mcp"
    """
    (job,) = load_jobs(make_task(tmp_path / "t", toml))
    task = msgspec.convert(job.instance, HarborTask)
    assert task.mcp == (
        McpServer(name="shop", command=("python3", "/opt/shop.py")),
        McpServer(name="search", url="https://search.example/mcp"),
    )
    more = McpServer(name="more", command=("x",))
    assert HarborHandler().mcp_servers(Job(task="harbor", instance={}, mcp=(more,)), task) == (more, *task.mcp)


PUBLIC, NONE = NetworkPolicy("public"), NetworkPolicy()


@pytest.mark.parametrize(
    ("one", "other", "wider"),
    [
        (PUBLIC, NONE, True),
        (NONE, PUBLIC, False),
        (NONE, NONE, False),
        (PUBLIC, PUBLIC, False),
        (PUBLIC, NetworkPolicy("allowlist", ("a",)), True),
        (NetworkPolicy("allowlist", ("a",)), PUBLIC, False),
        (NetworkPolicy("allowlist", ("a", "10.0.0.0/8")), PUBLIC, True),
        (NetworkPolicy("allowlist", ("a",)), NetworkPolicy("allowlist", ("b", "a")), False),
        (NetworkPolicy("allowlist", ("a", "c")), NetworkPolicy("allowlist", ("b", "a")), True),
        (NetworkPolicy("allowlist", ("a",)), NONE, True),
    ],
)
def test_which_network_is_wider(one: NetworkPolicy, other: NetworkPolicy, wider: bool) -> None:
    assert one.is_wider_than(other) == wider


LOOKS: dict[str, str | None] = {"tests/test.sh": "curl localhost:8000\n"}


def test_processes_of_the_agent_do_not_get_the_verifiers_wider_network(tmp_path: Path) -> None:
    closed = '[agent]\nnetwork_mode = "no-network"\n'
    with pytest.raises(InvalidRecord, match=r"the verifier's wider network \(public; the agent's is no-network\)"):
        read_task_folder(make_task(tmp_path / "wider", closed, LOOKS))
    for number, toml in enumerate(
        [
            '[environment]\nnetwork_mode = "no-network"\n',
            closed + '[verifier]\nenvironment_mode = "separate"\n',
            closed + "[metadata]\nlive = false\n",
            closed + '[verifier]\nnetwork_mode = "no-network"\n',
        ]
    ):
        assert read_task_folder(make_task(tmp_path / f"{number}", toml, LOOKS)).task.steps


def test_a_folder_is_read_as_jobs(tmp_path: Path) -> None:
    make_task(tmp_path / "b")
    make_task(tmp_path / "set" / "a", "[environment]\ncpus = 1\n")
    make_task(tmp_path / ".hidden" / "c")
    (tmp_path / "notes").mkdir()
    jobs = list(load_jobs(tmp_path, options={"live": True}))
    assert [job.task for job in jobs] == ["harbor", "harbor"]
    tasks = [msgspec.convert(job.instance, HarborTask) for job in jobs]
    assert [task.name for task in tasks] == ["b", "a"]
    assert all(task.live for task in tasks)
    rows = list(load_rows(tmp_path))
    assert [row.name for row in rows if isinstance(row, Row)] == ["b", "set/a"]
    assert [task.name for task in find_task_folders(tmp_path / "b")] == ["b"]


@pytest.mark.parametrize(
    ("line", "live"),
    [
        *((f"{name} x", True) for name in ("curl localhost:80", "nc 127.0.0.1 1", "bind 0.0.0.0", "ls /proc/1/fd")),
        *((f"{name} x", True) for name in ("import psutil #", "pgrep", "pkill", "pidof", "netstat", "lsof")),
        *((line, True) for line in ("systemctl status", "ps -ef", "ps   -ef", "ps aux", "ss -ltn", "ss  -l")),
        *((line, False) for line in ("class A: -1", "class -x", "steps -n", "maps aux", "update apgreps", "true")),
    ],
)
def test_tests_that_look_at_processes_make_a_task_live(line: str, live: bool, tmp_path: Path) -> None:
    files = {"tests/more/checks.py": f"# A check.\n{line}\n"}
    assert read_task_folder(make_task(tmp_path / "t", files=dict(files))).task.live == live


def test_tables_that_two_folders_share_are_read_for_each(tmp_path: Path) -> None:
    toml = '[environment]\nenv = {A = "1"}\n'
    first, second = (read_task_folder(make_task(tmp_path / name, toml)).task for name in "ab")
    assert (first.name, second.name) == ("a", "b")
    assert first.environment == second.environment
    assert first.environment.variables is not second.environment.variables


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path / "set" / "a")
    monkeypatch.chdir(tmp_path)
    assert [row.name for row in load_rows("set") if isinstance(row, Row)] == ["a"]
    monkeypatch.chdir(tmp_path / "set" / "a")
    assert [row.name for row in load_rows(".") if isinstance(row, Row)] == ["a"]


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    make_task(tmp_path / "a", files={"tests/test.sh": None})
    make_task(tmp_path / "b")
    with pytest.raises(InvalidRecord, match=r"^a: it has no tests/test\.sh"):
        list(load_jobs(tmp_path))
    assert [type(row) for row in load_rows(tmp_path)] == [InvalidRecord, Row]
    with pytest.raises(ConfigError, match="is a folder"):
        list(load_jobs(tmp_path, task="math"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no task folder"):
        list(load_jobs(tmp_path / "empty"))
