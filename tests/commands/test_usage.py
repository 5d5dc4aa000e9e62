"""What the commands say to wrong flags, files and settings: one clear line, and exit code 2."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import complaint, run
from support.ports import free_port

from prorl_zmq.commands import tables, target
from prorl_zmq.commands.target import Target
from prorl_zmq.config import McpSettings, Topology, parse_topology
from prorl_zmq.errors import RequestTimeout
from prorl_zmq.service import doctor
from prorl_zmq.service.run_dir import LOCK
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.system.held_file import held
from prorl_zmq.system.installation import how_to_install


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[service]\nnod = 'a'\n", "unknown field `nod` in service"),
        ("[servise]\n", "unknown field `servise`"),
        ("[[stage]]\nrole = 'judge'\n", "Invalid enum value 'judge' in stage[0].role"),
        ("[[stage]]\nrole = 'run'\nslots = 0\n", "stage[0].slots"),
        ("[service]\nrun_dir = '/tmp/" + "x" * 120 + "'\n", "the system allows 107"),
        ("[rollout_broker]\nfront_door = 'http://localhost'\n", "is not ipc://PATH or tcp://HOST:PORT"),
        ("[service\n", "is not TOML"),
    ],
)
def test_wrong_topology(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(content)
    assert said in complaint(run("prorl", "serve", "--config", str(file)))


def test_topology_file_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in complaint(run("prorl", "serve", "--config", str(tmp_path / "none.toml")))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("prorl", "serve", "--sandbox", "docker"), "'docker' is not one of 'apptainer', 'bubblewrap', 'process'"),
        (("prorl", "serve", "--sandbox", "process", "--image", "nothere"), "there is no image nothere"),
        (("prorl", "serve", "--metrics", "99999"), "--metrics '99999' is not HOST:PORT"),
        (("prorl", "serve", "--metrics", "127.0.0.1:99999"), "(ports: 1 to 65535)"),
        (("prorl", "train"), "No such command 'train'"),
        (("prorl", "sevre"), "No such command 'sevre'; did you mean `serve`?"),
        (("prorl", "status", "--wach"), "No such option"),
        (("prorl", "submit"), "Missing argument 'TASKS.jsonl'"),
        (("prorl", "submit", "--session", "a b"), "a session's name is 1 to 128 letters"),
        (("prorl", "status", "--connect", "localhost:5555"), "is not ipc://PATH or tcp://HOST:PORT"),
        (("prorl-stage", "--slots", "4"), "Missing option '--role'"),
        (("prorl-stage", "--role", "judge"), "'judge' is not one of 'init', 'run', 'eval'"),
        (("prorl-stage", "--role", "run", "--slots", "none"), "should be a valid integer"),
        (("prorl-stage", "--role", "run", "--task", "chess"), "no installed package offers task chess"),
        (("prorl-stage", "--role", "run", "--connect", "tcp://nowhere"), "is not ipc://PATH or tcp://HOST:PORT"),
        (("prorl-stage", "--role", "run", "--bind", "tcp://0.0.0.0:*"), "--insecure"),
        (("prorl-stage", "--role", "run", "--connect", "tcp://10.0.0.9:5556"), "say with --bind"),
        (("prorl-engine", "--connect", "tcp://10.0.0.9:5557"), "say with --bind"),
        (("prorl-engine", "--engine", "gpt"), "'gpt' is not"),
    ],
)
def test_wrong_flags(arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_RUN_DIR", str(tmp_path / "run"))  # this account's own may have a training in it
    assert said in complaint(run(*arguments, cwd=tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"task": "math"}\n', "line 1: Object missing required field `instance`"),
        ('\n{"task": "math", "instance": {}}\n{"task": "math", "instance": []}\n', "line 3: Expected `object`"),
        ('{"task": "math", "instance": {}, "prio": 1}\n', "unknown field `prio`; a job has task, instance, job_id"),
        ("not json\n", "line 1: JSON is malformed"),
        ("\n\n", "has no jobs in it"),
    ],
)
def test_wrong_task_file(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(content)
    assert said in complaint(run("prorl", "submit", str(file)))


@pytest.mark.parametrize("program", [("prorl-stage", "--role", "run"), ("prorl-engine",)])
def test_endpoint_that_others_may_bind(program: tuple[str, ...], tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "others may write to" in complaint(run(*program, "--connect", f"ipc://{shared}/broker", cwd=tmp_path))


@pytest.mark.parametrize("command", ["status", "nodes", "job any", "explain any", "cancel any", "backends list"])
def test_a_service_that_does_not_run_is_reported_before_it_is_asked(command: str, tmp_path: Path) -> None:
    door = f"ipc://{tmp_path}/door"
    with socket.socket(socket.AF_UNIX) as left:  # by a broker that was killed
        left.bind(f"{tmp_path}/door")
    said = complaint(run("prorl", *command.split(), "--connect", door), 1)
    assert f"no process listens at {door}; is the service running? (`prorl serve`)" in said


@pytest.mark.parametrize("ports", [range(1), range(0)], ids=["announced", "new"])
def test_a_service_folder_without_a_service_is_reported(
    ports: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "AWAY_S", 0.2)
    folder = ServiceFolder.create(tmp_path / "service")
    for _ in ports:
        folder.announce("rollout", "rollout-0", {"front_door": f"tcp://127.0.0.1:{free_port()}"})
    said = complaint(run("prorl", "status", "--service", str(folder.path)), 1)
    assert "is the service running?" in said
    assert f"prorl serve --service {folder.path}" in said


def test_a_command_waits_for_a_service_that_starts(tmp_path: Path) -> None:
    with (
        held(tmp_path / LOCK),
        Target(connect=f"ipc://{tmp_path}/door").client() as client,
        pytest.raises(RequestTimeout, match=r"no reply from .* within"),
    ):
        client.status(timeout_s=0.1)


def test_init_writes_every_default(tmp_path: Path) -> None:
    done = run("prorl", "init", "here.toml", cwd=tmp_path)
    assert done.returncode == 0
    text = (tmp_path / "here.toml").read_text()
    content = tomllib.loads(text)
    assert parse_topology(content, "here.toml") == Topology()
    assert set(tomllib.loads(text.partition("# [[mcp]]")[2].replace("\n# ", "\n"))) == set(
        McpSettings.__struct_fields__
    )
    defaults = {name: getattr(Topology(), name) for name in Topology.__struct_fields__ if name != "mcp"}
    for section, value in defaults.items():
        written = content[section][0] if isinstance(value, tuple) else content[section]
        struct = value[0] if isinstance(value, tuple) else value
        absent = {name for name in struct.__struct_fields__ if getattr(struct, name) is None}
        assert set(written) == set(struct.__struct_fields__) - absent, section
        for name in absent:  # TOML has no value for it, so a comment shows one
            (shown,) = re.findall(rf"^# ({name} = .*)", text, re.MULTILINE)
            assert parse_topology({section: [{"kind": "vllm", "model": "m", **tomllib.loads(shown)}]}, "here.toml")


AGENT = ("app.py", "requirements.txt", "configs/prorl_agent.yaml")
TINY = ("letters.py", "make_model.py")
TRAINERS = {
    "trl": {"grpo.py", "async_grpo.py", *TINY},
    "verl": {"prorl.yaml", "make_data.py", "train.sh", *TINY},
    "skyrl": {"make_data.py", "train.sh", *TINY},
    "nemo-gym": {"make_data.py", *(f"responses_api_agents/prorl_agent/{name}" for name in AGENT)},
    "slime": {"prorl.yaml", "make_data.py", "train.sh"},
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_init_writes_a_trainers_example_once(trainer: str, tmp_path: Path) -> None:
    done = [run("prorl", "init", "--trainer", trainer, "new", cwd=tmp_path) for _ in range(2)]
    assert [one.returncode for one in done] == [0, 2], done
    assert "begin with new/README.md" in done[0].stdout
    assert "is there already; --force writes over it" in done[1].stderr
    written = {str(file.relative_to(tmp_path / "new")) for file in (tmp_path / "new").rglob("*") if file.is_file()}
    assert written == {"README.md", "topology.toml"} | TRAINERS[trainer]
    assert 10 <= len((tmp_path / "new" / "README.md").read_text().splitlines()) <= 25
    for script in (tmp_path / "new").rglob("*.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    forced = run("prorl", "init", "--trainer", trainer, "--force", "new", cwd=tmp_path)
    assert forced.returncode == 0


def test_init_names_the_trainers_that_there_are(tmp_path: Path) -> None:
    assert "'tlr' is not one of nemo-gym, skyrl, slime, trl, verl" in complaint(
        run("prorl", "init", "--trainer", "tlr", cwd=tmp_path)
    )


def test_init_does_not_write_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "topology.toml").write_text("mine")
    assert "--force" in complaint(run("prorl", "init", cwd=tmp_path))
    assert (tmp_path / "topology.toml").read_text() == "mine"
    assert run("prorl", "init", "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "topology.toml").read_text() != "mine"


def test_doctor_names_what_it_found() -> None:
    done = run("prorl", "doctor")
    assert done.returncode in (0, 1)
    for kind in ("apptainer", "bubblewrap", "process"):
        assert f"sandboxes: {kind}" in done.stdout
    for subject in ("user namespaces", "vLLM", "loopback TCP", "space for sandboxes", "weight deltas"):
        assert subject in done.stdout


def test_doctor_names_missing_packages_of_weight_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._weight_deltas().state == "ok"
    monkeypatch.setattr(doctor, "DELTA_PACKAGES", ("zstandard", "xxhash-that-is-not-installed"))
    found = doctor._weight_deltas()
    assert found.state == "optional"
    assert found.detail == f"xxhash-that-is-not-installed not found: {how_to_install('server')}"


def test_text_of_others_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tables.console().print("served: [red]math[/red] :smile: 12")
    assert capsys.readouterr().out == "served: [red]math[/red] :smile: 12\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = Path(sys.executable).with_name("prorl")
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run([program, "--help"], stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
