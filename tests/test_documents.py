"""The examples and commands of README.md and docs/, run as they are there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chat_families import FAMILIES, save_tokenizer
from documents import (
    CLEAN_COMMANDS,
    DASHBOARD_COMMAND,
    DEMO_COMMANDS,
    DOCUMENTS,
    ENGINE_COMMANDS,
    ENVIRONMENT_COMMANDS,
    ENVIRONMENT_INSTALLS,
    HARBOR_COMMANDS,
    MAKE_SWE_COMMANDS,
    NEMO_GYM_COMMANDS,
    OPENENV_COMMANDS,
    OWN_TASK_COMMANDS,
    PAGES,
    REAL_ENVIRONMENT_COMMANDS,
    ROOT,
    SLURM_COMMANDS,
    TAU2_COMMANDS,
    blocks,
)
from needed import lacking, usable
from rootfs import tiny_root_filesystem
from support.commands import run, script
from support.ports import free_port
from support.waiting import until

from prorl_zmq import Job, RolloutClient, Sampling
from prorl_zmq.cluster.cluster_file import ClusterFile, load_cluster_file
from prorl_zmq.config import Topology, load_topology
from prorl_zmq.tools.images.definition import load_definition

from .inference.http.saying_server import server_that_says
from .trackers import readback

sys.path.append(str(Path(__file__).parent / "tasks"))
from swe_rows import SWE_BENCH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

    from support.services import SharedService

PROGRAMS = ("prorl", "prorl-stage", "prorl-engine")
SERVED_BY_CI = ("make demo", "make test", "make docs", "make vllm")
"""Run by `.ci/run`."""
FIXED_ENGINE = 'kind = "fixed"'
"""In the table of an engine kind that is installed in one test only."""


def command_lines() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("pip install", *SERVED_BY_CI))]


def test_every_extra_that_pip_is_told_to_install_is_offered() -> None:
    named = re.findall(r"pip install '?[\w.-]+\[([^\]]+)\]", DOCUMENTS)
    assert len(named) >= 4
    offered = metadata("prorl-zmq").get_all("Provides-Extra") or []
    assert {extra.strip() for extras in named for extra in extras.split(",")} <= set(offered)


def test_the_readme_is_short() -> None:
    assert len(PAGES[ROOT / "README.md"].splitlines()) <= 200


def test_links_of_the_readme_lead_somewhere() -> None:
    """Those of docs/ are checked by `make docs`."""
    links = re.findall(r"\]\(([^):]+)\)", PAGES[ROOT / "README.md"])
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_what_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:prorl_zmq|brokers|stages|tools|tests|docs|bench|\.ci)/[\w/.]*)`", text))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    drawn = text.partition("```\nprorl_zmq/")[2].partition("```")[0]
    folders = [line.split()[0] for line in f"prorl_zmq/{drawn}".splitlines()]
    for name in ("prorl_zmq", "brokers", "stages", "tools"):
        inside = {path.name for path in (ROOT / name).iterdir() if (path / "__init__.py").exists()}
        begin = folders.index(f"{name}/") + 1
        assert {folder.rstrip("/") for folder in folders[begin : begin + len(inside)]} == inside


def test_what_an_addition_touches_is_where_contributing_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("### What an addition touches")[2].partition("\n###")[0]
    rows = [line for line in table.splitlines() if line.startswith("| a")]
    assert len(rows) >= 5
    for row in rows:
        files = re.findall(r"`([\w/.]+/[\w.]+)` \(([^)]+)\)", row)
        assert 1 <= len(files) <= 3, row
        for path, names in files:
            content = (ROOT / path).read_text(encoding="utf-8")
            assert [name for name in re.findall(r"`([^`]+)`", names) if name not in content] == [], path


@pytest.mark.parametrize(("page", "part"), [("quick-start.md", "client"), ("concepts.md", "picture")])
def test_pages_that_are_read_in_a_clone_have_the_readmes_parts_in_full(page: str, part: str) -> None:
    marks = rf"<!-- --8<-- \[start:{part}\] -->\n(.*?)<!-- --8<-- \[end:{part}\] -->"
    found = re.search(marks, PAGES[ROOT / "README.md"], re.DOTALL)
    assert found is not None
    assert found[1] in PAGES[ROOT / "docs" / page]


@pytest.mark.parametrize("block", [block for block in blocks("toml") if FIXED_ENGINE not in block])
def test_tables_are_right(block: str, tmp_path: Path) -> None:
    tables = tomllib.loads(block)
    if "project" in tables:
        assert set(tables["project"]) == {"entry-points"}
        return
    if "ubuntu:24.04" in tables:
        assert all(isinstance(source, str) for source in tables.values())
        return
    if "nodes" in tables:
        (sandboxes,) = [block for block in blocks("toml") if "prorl-images-me" in block and "[sandbox]" in block]
        (tmp_path / "sandboxes.toml").write_text(sandboxes)
        for name in ("topology.toml", "tools.sif"):
            (tmp_path / name).touch()
        (tmp_path / "cluster.toml").write_text(block.replace("/shared/images", str(tmp_path)))
        assert isinstance(load_cluster_file(tmp_path / "cluster.toml"), ClusterFile)
        return
    (tmp_path / "topology.toml").write_text(block)
    assert isinstance(load_topology(tmp_path / "topology.toml"), Topology)


@pytest.mark.parametrize("block", blocks("singularity"))
def test_definitions_are_right(block: str, tmp_path: Path) -> None:
    definition = tmp_path / "project.def.j2"
    definition.write_text(block)
    (tmp_path / "requirements.txt").touch()
    filled = load_definition(definition, {}, tmp_path / "requirements.txt")
    assert filled.bases == (("docker", "python:3.11-slim-bookworm"),)
    assert f"{tmp_path}/requirements.txt /opt/requirements.txt" in filled.text


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as path:
        yield Path(path)


def run_line(line: str, folder: Path, environment: dict[str, str]) -> CompletedProcess[str]:
    """Run a command of the documents that ends, in this process."""
    program, *arguments = shlex.split(line)
    assert program in PROGRAMS
    return run(program, *arguments, cwd=folder, environment=environment)


@contextmanager
def started(line: str, folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A command of the documents, which is killed if it outlives the test."""
    program, *arguments = shlex.split(line)
    assert program in PROGRAMS
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "prorl_zmq.cli", program, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_every_command_is_run_here_or_by_ci() -> None:
    ci = (Path(__file__).resolve().parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    assert all(command in ci for command in SERVED_BY_CI)
    serves = {"prorl serve", "prorl serve --config topology.toml", SERVE_APPTAINER, SERVE_DATA}
    elsewhere = {
        *CLEAN_COMMANDS,
        *ENGINE_COMMANDS,
        *MAKE_SWE_COMMANDS,
        *SLURM_COMMANDS,
        *HARBOR_COMMANDS,
        *OWN_TASK_COMMANDS,
        *DEMO_COMMANDS,
        *ENVIRONMENT_COMMANDS,
        *ENVIRONMENT_INSTALLS,
        *NEMO_GYM_COMMANDS,
        *OPENENV_COMMANDS,
        *TAU2_COMMANDS,
        *REAL_ENVIRONMENT_COMMANDS,
        DASHBOARD_COMMAND,
    }
    elsewhere |= {IMAGE_BUILD, ENGINE, WATCHED, *serves}
    assert set(command_lines()) == {*QUICK_COMMANDS, *SERVERS, *EVALUATION, *HARNESS, *elsewhere}


HARNESS = (
    "prorl harness install pi",
    "prorl harness test pi --sandbox bubblewrap",
    "prorl eval swe-mini.jsonl --harness pi --url http://gpu-7:8000 --max-tokens 8192 --context 131072 --max-turns 100",
)
"""In this order."""
EVALUATION = (
    "prorl eval data.jsonl --samples 4 --k 1,4 --out run",
    "prorl view run",
    "prorl regrade run --out run-regraded",
    "prorl view run run-regraded",
    "prorl cheats run",
    "prorl eval data.jsonl --samples 4 --out run --log tensorboard",
)
"""In this order."""
QUICK_COMMANDS = {
    "prorl doctor": (0, 1),
    "prorl doctor --model ./model": (0,),
    "prorl submit tasks.jsonl --out results": (0,),
    "prorl job JOB": (2,),
    "prorl job JOB --follow": (2,),
    "prorl explain results": (0,),
    "prorl explain": (0,),
    "prorl explain JOB": (2,),
    "prorl cancel JOB": (1,),
    "prorl init": (0,),
    "prorl image list": (0,),
    "prorl harness list": (0,),
    "prorl keys bearer alice --role trainer --keys keys": (0,),
    "prorl backends list --config topology.toml": (0,),
    "prorl backends weights": (0,),
    "prorl backends weights --json": (0,),
    "prorl tasks list": (0,),
    "prorl tasks validate data.jsonl": (0,),
    "prorl tasks show shell": (0,),
    "prorl tasks images swe.jsonl": (1,),
    "prorl k8s render --image prorl:0.1 --nodes 8": (0,),
    "prorl k8s render --image prorl:0.1 --daemon-set --drain-s 1800": (0,),
}
"""Commands that end, and the exit codes that are right for them here."""
WATCHED = "prorl status --watch"
SERVERS = (
    "prorl broker backend --config topology.toml",
    "prorl broker rollout --config topology.toml",
    "prorl-stage --role init --connect tcp://127.0.0.1:5556 --node gpu-7",
    "prorl-stage --role run --slots 32 --connect tcp://127.0.0.1:5556 --node gpu-7",
    "prorl-stage --role eval --slots 16 --connect tcp://127.0.0.1:5556 --node gpu-7",
    "prorl-engine --engine embedded --connect tcp://127.0.0.1:5557",
    "prorl gateway --front-door tcp://127.0.0.1:5555 --bind 127.0.0.1:8080",
)
"""Commands that serve until they are told to end."""


IMAGE_BUILD = "prorl image build ./rootfs --name tools"
ENGINE = "prorl-engine --engine fixed --option 'answer=\"The answer is 42.\"'"
SERVE_DATA = "prorl serve --sandbox data"
SERVE_APPTAINER = "prorl serve --sandbox apptainer --image tools"


@pytest.mark.parametrize("line", QUICK_COMMANDS)
def test_command(line: str, folder: Path, served: SharedService) -> None:
    place = folder / line.replace(" ", "-").replace(
        "/", "-"
    )  # its own: the commands run in any order, and on several workers
    place.mkdir()
    (place / "tasks.jsonl").write_text(
        '{"task": "math", "instance": {"problem": "1", "ground_truth": "1"}, "sampling": {"max_tokens": 4}}\n'
    )
    (place / "data.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
    (place / "swe.jsonl").write_text(json.dumps(SWE_BENCH) + "\n")
    if "./model" in line:
        save_tokenizer(FAMILIES["qwen3"], place / "model")
    (place / "results").mkdir()
    (place / "results" / "results.jsonl").write_text('{"job_id": "1", "task": "math", "outcome": "completed"}\n')
    if "topology.toml" in line:
        assert run_line("prorl init", place, served.environment).returncode == 0
    done = run_line(line, place, served.environment)
    assert done.returncode in QUICK_COMMANDS[line], done.stdout + done.stderr


def test_a_command_that_is_watched_until_an_interrupt(folder: Path, served: SharedService) -> None:
    with started(WATCHED, folder, served.environment) as process:
        until(lambda: uses_zmq(process.pid), "a client")  # or the interrupt would come while it is imported
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err


def uses_zmq(pid: int) -> bool:
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            names.append((task / "comm").read_text())
    return any("ZMQbg" in name for name in names)


@pytest.mark.proof
def test_pieces_that_are_started_alone_make_a_service(folder: Path) -> None:
    """The documents' topology over TCP, on ports that are free: a job passes, and each piece ends in good order."""
    (tables,) = [block for block in blocks("toml") if block.startswith("[rollout_broker]\nfront_door")]
    alone = folder / "alone"
    alone.mkdir()
    ports = {number: str(free_port()) for number in ("5555", "5556", "5557", "8080")}

    def moved(text: str) -> str:
        return re.sub("|".join(ports), lambda match: ports[match[0]], text)

    (alone / "topology.toml").write_text(moved(tables))
    environment = {**os.environ, "PRORL_RUN_DIR": str(alone / "run")}
    with ExitStack() as stack:
        processes = [stack.enter_context(started(moved(line), alone, environment)) for line in SERVERS]
        with RolloutClient(f"tcp://127.0.0.1:{ports['5555']}", timeout_s=60) as client:
            client.submit(
                Job(task="math", instance={"problem": "1", "ground_truth": "1"}, sampling=Sampling(max_tokens=4))
            )
            assert [trajectory.outcome for trajectory in client.stream(timeout_s=60)] == ["completed"]
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
            assert process.returncode == 0, out + err


@pytest.mark.proof
def test_an_image_is_built_and_served(folder: Path) -> None:
    usable("apptainer")
    tiny_root_filesystem(folder / "rootfs")
    environment = {**os.environ, "PRORL_RUN_DIR": str(folder / "apptainer"), "HOME": str(folder)}
    environment.pop("XDG_CACHE_HOME", None)
    built = run_line(IMAGE_BUILD, folder, environment)
    assert built.returncode == 0, built.stderr
    assert "images/tools" in built.stdout
    with started(SERVE_APPTAINER, folder, environment) as serve:
        job = Job(
            task="shell",
            instance={"instruction": "", "check": "cat /etc/word"},
            sampling=Sampling(max_tokens=4),
        )
        with RolloutClient(f"ipc://{folder}/apptainer/front_door", timeout_s=60) as client:
            client.submit(job)
            assert [(each.outcome, each.reward) for each in client.stream(timeout_s=60)] == [("completed", 1.0)]
        serve.send_signal(signal.SIGTERM)
        _, err = serve.communicate(timeout=40)
    assert serve.returncode == 0, err


def test_client_example(folder: Path, served: SharedService) -> None:
    (example,) = {block for block in blocks("python") if "client.submit(Job(" in block and "range(8)" in block}
    printed = script(example, cwd=folder, environment=served.environment)
    assert len(re.findall(r"^completed [01]\.0 \(\d+,\) ", printed, re.MULTILINE)) == 8


def test_batch_example(folder: Path, served: SharedService) -> None:
    (example,) = [block for block in blocks("python") if "list(batch)" in block]
    (adapters,) = [block for block in blocks("python") if "integrations import" in block]
    show = "print(len(agent_loop_outputs), len(generator_output['rewards']))"
    code = f"{example}\n{adapters}\n{show}"
    printed = script(code, cwd=folder, environment=served.environment)
    met, report, made = printed.splitlines()
    assert re.match(r"met \[\(4,\), \(4,\)\] \(8, \d+\)", met)
    assert "kept_groups=2" in report
    assert made == "8 8"


def test_tracker_example(folder: Path, served: SharedService) -> None:
    (example,) = [block for block in blocks("python") if "open_tracker(" in block]
    place = folder / "trackers"
    place.mkdir()
    printed = script(example, cwd=place, environment=served.environment)
    assert printed == f"{{'tensorboard': '{place}/trackers/tensorboard/first'}}\n"
    points, tables = readback.tensorboard(place / "trackers", "first")
    assert points["batch/kept_groups"] == [(0, 4.0), (1, 4.0)]
    assert points["rollouts/completed"] == [(0, 16.0), (1, 16.0)]
    assert len(tables) == 2


def test_asyncio_batch_example(folder: Path, served: SharedService) -> None:
    (example,) = [block for block in blocks("python") if "async for group" in block]
    printed = script(example, cwd=folder, environment=served.environment)
    *groups, state = printed.splitlines()
    assert len(groups) == 2
    assert state == "met"


@pytest.mark.xdist_group("SDKs of models")
def test_examples_of_programs_outside(folder: Path, served: SharedService) -> None:
    """Those of the clients of OpenAI and Anthropic; that of a framework is run in an environment of its own."""
    by_openai, by_anthropic = (
        next(block for block in blocks("python") if f"from {package} import" in block and ".endpoint(" in block)
        for package in ("openai", "anthropic")
    )
    printed = script(by_openai, cwd=folder, environment=served.environment)
    assert re.fullmatch(r"completed [01]\.0 \(\d+,\)\n", printed)
    printed = script(by_anthropic, cwd=folder, environment=served.environment)
    assert re.fullmatch(r"\[[01]\.0(, [01]\.0){3}\]\n", printed)


def test_sandbox_example(folder: Path) -> None:
    usable("bubblewrap")
    (example,) = [block for block in blocks("python") if "Sandboxes(" in block]
    first, second, third = script(example, cwd=folder).splitlines()
    assert first == "0"
    assert "output='/tmp\\n42\\n', exit_code=1" in second
    assert third == "b'total 0\\n'"


def test_jobs_of_a_data_file(folder: Path, served: SharedService) -> None:
    (example,) = [block for block in blocks("python") if "load_jobs(" in block]
    place = folder / "load-jobs"
    place.mkdir()
    (place / "data.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n' * 2)
    printed = script(example, cwd=place, environment=served.environment)
    assert len(re.findall(r"^completed [01]\.0 ", printed, re.MULTILINE)) == 2


def installed(package: str, module: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Install a file of the documents with its entry points; return its folder, and the environment that has it."""
    (points,) = [block for block in blocks("toml") if f"{package}:" in block]
    site = folder / package
    information = site / f"{package}-1.dist-info"
    information.mkdir(parents=True)
    (site / f"{package}.py").write_text(module)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    ((group, entries),) = tomllib.loads(points)["project"]["entry-points"].items()
    lines = "".join(f"{name} = {place}\n" for name, place in entries.items())
    (information / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return site, {**os.environ, "PYTHONPATH": path, "PRORL_RUN_DIR": str(site / "service")}


def outcome_of(job: Job, site: Path) -> tuple[str, float | None]:
    """Run a job in the service of a package's environment."""
    with RolloutClient(f"ipc://{site}/service/front_door", timeout_s=90) as client:
        client.submit(job)
        (trajectory,) = client.stream(timeout_s=90)
    return trajectory.outcome, trajectory.reward


def said_by(line: str, site: Path, environment: dict[str, str]) -> str:
    """Return what a command prints whose process finds what is installed in its environment."""
    with started(line, site, environment) as process:
        return " ".join(process.communicate(timeout=60)[0].split())


def said_of(line: str, site: Path, environment: dict[str, str]) -> str:
    """Return what a command prints about a service."""
    return " ".join(run_line(line, site, environment).stdout.split())


@pytest.mark.proof(quick=True)
def test_engine_of_ones_own(folder: Path) -> None:
    """The documents' file and entry point, installed: it serves a job, takes weights, and registers from a shell."""
    (module,) = [block for block in blocks("python") if "EngineKind" in block]
    assert len(module.splitlines()) < 60
    (table,) = [block for block in blocks("toml") if FIXED_ENGINE in block]
    site, environment = installed("my_engine", module, folder)
    (site / "topology.toml").write_text(f'[sandbox]\nkind = "process"\n{table}')
    (site / "weights.txt").write_text("\\boxed{7}")
    assert "fixed │ ok │ Answers every prompt with the same text." in said_by("prorl doctor", site, environment)
    question = {"problem": "What is it?", "ground_truth": "42"}
    with started("prorl serve --config topology.toml", site, environment) as serve:
        assert outcome_of(Job(task="math", instance=question), site) == ("completed", 1.0)
        update = "prorl backends update-weights weights.txt 1"
        assert "1 backend(s) serve version 1" in said_of(update, site, environment)
        assert outcome_of(Job(task="math", instance=question), site) == ("completed", 0.0)
        assert outcome_of(Job(task="math", instance={**question, "ground_truth": "7"}), site) == ("completed", 1.0)
        with started(ENGINE, site, environment) as engine:
            listed = "prorl backends list --details"
            until(lambda: said_of(listed, site, environment).count("fixed text") == 2, "the engine to register")
            engine.send_signal(signal.SIGTERM)
            assert engine.wait(30) == 0
        serve.send_signal(signal.SIGTERM)
        _, err = serve.communicate(timeout=40)
    assert serve.returncode == 0, err


@pytest.mark.proof(quick=True)
def test_sandbox_kind_of_ones_own(folder: Path) -> None:
    """The documents' file and entry point, installed: the doctor names it, and a job's sandbox is of that kind."""
    usable("bubblewrap")
    (module,) = [block for block in blocks("python") if "BubblewrapContainer" in block]
    site, environment = installed("my_sandbox", module, folder)
    environment["SANDBOX_DATA"] = str(site / "data")
    assert "optional │ /" in said_by("prorl doctor", site, environment).partition("sandboxes: data │ ")[2]
    (site / "data").mkdir()
    (site / "data" / "reward").write_text("1")
    seen = said_by("prorl doctor", site, environment).partition("sandboxes: data │ ")[2]
    assert seen.startswith("ok │ bubblewrap")
    job = Job(
        task="shell",
        instance={"instruction": "", "check": "test -w /data/reward && echo 0 || cat /data/reward"},
        sampling=Sampling(max_tokens=4),
    )
    with started(SERVE_DATA, site, environment) as serve:
        assert outcome_of(job, site) == ("completed", 1.0)
        serve.send_signal(signal.SIGTERM)
        _, err = serve.communicate(timeout=40)
    assert serve.returncode == 0, err


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_task_of_ones_own(folder: Path) -> None:
    """The documents' file and entry point, installed: its data is validated, evaluated and graded."""
    usable("bubblewrap")
    (module,) = [block for block in blocks("python") if "class CountHandler" in block]
    assert len(module.splitlines()) < 60
    site, environment = installed("my_task", module, folder)
    rows = [json.dumps({"document": "to be or not to be", "term": term}) for term in ("be", "not")]
    (site / "data.jsonl").write_text("\n".join(rows))

    def use(url: str) -> None:
        evaluate = f"prorl eval data.jsonl --samples 2 --out run --max-tokens 128 --url {url}"
        for line, said in (("prorl tasks validate data.jsonl", "documents"), (evaluate, "pass@1")):
            with started(line, site, environment) as process:
                out, err = process.communicate(timeout=100)
            assert process.returncode == 0, out + err
            assert said in out

    call = json.dumps({"name": "finish", "arguments": {"message": "2"}})
    with server_that_says(f"<tool_call>\n{call}\n</tool_call>", site / "model") as server:
        use(server.url)
    samples = [json.loads(line) for line in (site / "run" / "results.jsonl").read_text().splitlines()]
    assert [sample["result"]["notes"] for sample in samples] == [{"answer": "2"}] * 4
    assert sorted((sample["line"], sample["result"]["reward"]) for sample in samples) == [(1, 1.0)] * 2 + [(2, 0.0)] * 2


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_data_is_evaluated_and_viewed(folder: Path) -> None:
    place = folder / "evaluate"
    place.mkdir()
    (place / "data.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
    for line in EVALUATION:
        with started(line, place, {**os.environ}) as process:
            out, err = process.communicate(timeout=100)
        assert process.returncode == 0, out + err
    assert (place / "run" / "report.html").exists()


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_an_agent_program_is_installed_tried_and_evaluated(folder: Path) -> None:
    usable("bubblewrap")
    if shutil.which("npm") is None:
        lacking("harness", "npm is not installed")
    place = folder / "harness"
    place.mkdir()
    row = {"task": "shell", "instance": {"instruction": "Say that you are done.", "check": "true"}}
    (place / "swe-mini.jsonl").write_text(json.dumps(row) + "\n")
    environment = {**os.environ, "PRORL_HARNESSES": str(place / "harnesses")}

    def use(url: str) -> None:
        for line in HARNESS:
            with started(line.replace("http://gpu-7:8000", url), place, environment) as process:
                out, err = process.communicate(timeout=500)
            assert process.returncode == 0, out + err
        assert "100.0%" in out

    with server_that_says("I am done.", place / "model") as server:
        use(server.url)
    (sample,) = [json.loads(line) for line in (place / "eval/swe-mini/results.jsonl").read_text().splitlines()]
    assert sample["result"]["metrics"]["main_turns"] == 1.0
