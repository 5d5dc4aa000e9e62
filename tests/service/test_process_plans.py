"""Plans of processes: what a file keeps, who can read it, and what a wrong one gets."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.commands import complaint, run

from prorl_zmq import cli
from prorl_zmq.commands import children
from prorl_zmq.commands.children import run_child
from prorl_zmq.config import BackendSettings, GatewaySettings, ServiceSettings, StageSettings, Topology
from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.hosting import host_process
from prorl_zmq.service.child_plans import plan_brokers, plan_children, plan_node
from prorl_zmq.service.process_plans import PLAN_LIMIT_BYTES, EnginePlan, read_plan
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.system.run_folder import own_run_dir
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from prorl_zmq.inference.hosting.host import HostOptions
    from prorl_zmq.service.process_plans import AnyPlan

OTHER_ACCOUNT = 54_321


def whole(run_dir: Path) -> Topology:
    return Topology(
        service=ServiceSettings(run_dir=str(run_dir), node="n", task_modules=("/tasks/one.py",)),
        stage=(StageSettings(Phase.RUN, processes=2, slots=3), StageSettings(Phase.EVAL)),
        backends=(BackendSettings(kind="http", urls=("http://a:1", "http://b:1"), weight=2.0, cores=(0, 1, 2, 3)),),
        gateway=GatewaySettings("127.0.0.1:8080"),
    )


def plans_of(tmp_path: Path) -> list[AnyPlan]:
    folder = ServiceFolder.create(tmp_path / "service", None)
    topology = whole(own_run_dir(tmp_path / "run"))
    alone = plan_children(topology)
    return [*alone, *plan_brokers(topology, folder, "127.0.0.1"), *plan_node(topology, folder, "127.0.0.1")]


def test_a_file_keeps_the_whole_plan_for_its_user_alone(tmp_path: Path) -> None:
    plans = plans_of(tmp_path)
    assert len(plans) == 17
    for plan in plans:
        plan.write()
        assert read_plan(plan.file) == plan
        assert plan.file.stem.endswith(f".{plan.process}")
        assert stat.S_IMODE(plan.file.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(plan.file.stat().st_mode) == 0o600


def test_each_engine_has_its_own_part(tmp_path: Path) -> None:
    engines = [plan for plan in plan_children(whole(own_run_dir(tmp_path / "run"))) if isinstance(plan, EnginePlan)]
    assert [(one.name, one.backend.urls, one.backend.cores) for one in engines] == [
        ("engine-0", ("http://a:1",), (0, 1)),
        ("engine-1", ("http://b:1",), (2, 3)),
    ]
    assert {one.backend.weight for one in engines} == {2.0}


@pytest.mark.parametrize("given", [True, False])
def test_where_an_engine_has_its_copy_of_the_weights(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[HostOptions] = []
    monkeypatch.setattr(host_process, "run_engine_host", lambda _, options: started.append(options))
    run_dir, disk = own_run_dir(tmp_path / "run"), tmp_path / "disk"
    topology = Topology(service=ServiceSettings(run_dir=str(run_dir)))
    backend = BackendSettings(name="b", weights_dir=str(disk) if given else "")
    children.run(EnginePlan(name="engine-0", topology=topology, backend=backend, connect=f"ipc://{run_dir}/broker"))
    assert started[0].weights == (disk if given else run_dir) / "weights" / "b"
    assert started[0].copies_all is given


@pytest.mark.parametrize("frozen", [True, False])
def test_an_engine_does_not_start_without_room_for_its_copy(
    frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[HostOptions] = []
    monkeypatch.setattr(host_process, "run_engine_host", lambda _, options: started.append(options))
    run_dir = own_run_dir(tmp_path / "run")
    (tmp_path / "file").touch()
    backend = BackendSettings(name="b", weights_dir=str(tmp_path / "file"), frozen=frozen)
    plan = EnginePlan(
        name="engine-0",
        topology=Topology(service=ServiceSettings(run_dir=str(run_dir))),
        backend=backend,
        connect=f"ipc://{run_dir}/broker",
    )
    with nullcontext() if frozen else pytest.raises(ConfigError, match="give another `weights_dir`"):
        children.run(plan)
    assert len(started) == frozen, "an engine that keeps its weights needs no copy"


def stage_plan(**changed: object) -> bytes:
    plan = {"process": "stage", "name": "run-0", "topology": {}, "role": "run", "connect": "ipc:///none"}
    return msgspec.json.encode({**plan, **changed})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "truncated", id="empty"),
        pytest.param(b"{", "truncated", id="cut off"),
        pytest.param(b"[" * 100_000, "Expected `object`", id="nested"),
        pytest.param(b"{}", "missing required field `process`", id="half a plan"),
        pytest.param(stage_plan(name="\0").replace(b"\\u0000", b"\xff"), "can't decode byte", id="no UTF-8"),
        pytest.param(stage_plan(topology={"x": 1})[:-1] + b', "y": ' + b"[" * 100_000, "recursion", id="nested inside"),
        pytest.param(msgspec.msgpack.encode({"process": "stage"}), "JSON is malformed", id="msgpack"),
        pytest.param(b'{"process": "chess"}', "Invalid value 'chess'", id="role"),
        pytest.param(stage_plan(nome="run-0"), "unknown field `nome`", id="field"),
        pytest.param(stage_plan(slots="many"), "`$.slots`", id="type"),
    ],
)
def test_a_wrong_file_is_refused(content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run-0.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="write plans, for an interpreter with the same version") as caught:
        read_plan(file)
    assert said in caught.value.message
    assert run_child(file) == 2
    assert str(file) in capsys.readouterr().err


def test_a_plan_of_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "run-0.json"
    file.write_bytes(stage_plan(protocol=PROTOCOL_VERSION + 1, unknown="to this version"))
    with pytest.raises(ConfigError, match=f"version {PROTOCOL_VERSION + 1}, .* has {PROTOCOL_VERSION};"):
        read_plan(file)


def test_a_plan_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """It names the interpreter and the modules that run as this user."""
    file = tmp_path / "run-0.json"
    file.write_bytes(stage_plan())
    assert read_plan(file).name == "run-0"
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=r"others may write to .* \(chmod go-w"):
        read_plan(file)
    file.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody may write to"):
        read_plan(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another account")
def test_another_users_plan_is_refused(tmp_path: Path) -> None:
    file, link = tmp_path / "run-0.json", tmp_path / "link.json"
    file.write_bytes(stage_plan())
    link.symlink_to(file)
    assert read_plan(link).name == "run-0"
    os.chown(link, OTHER_ACCOUNT, OTHER_ACCOUNT, follow_symlinks=False)
    with pytest.raises(ConfigError, match="is a link of another user's"):
        read_plan(link)
    os.chown(file, OTHER_ACCOUNT, OTHER_ACCOUNT)
    with pytest.raises(ConfigError, match=f"belongs to another user .uid {OTHER_ACCOUNT}"):
        read_plan(file)


def test_only_a_regular_file_of_limited_size_is_read(tmp_path: Path) -> None:
    """A FIFO would block for ever, and /dev/zero fill the memory."""
    fifo, large = tmp_path / "fifo", tmp_path / "large.json"
    os.mkfifo(fifo)
    large.write_bytes(b" " * (PLAN_LIMIT_BYTES + 1))
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="not a regular file"):
            read_plan(path)
    with pytest.raises(ConfigError, match="larger than the 4194304 bytes"):
        read_plan(large)


@pytest.mark.parametrize("arguments", [(), ("one.json", "two.json")])
def test_a_child_takes_one_plan(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli._run("prorl-child", list(arguments))
    assert ended.value.code == 2
    assert "usage: prorl-child PLAN" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_plan(tmp_path / "none.json")


@pytest.mark.parametrize("flag", ["--cores", "--gpus"])
def test_ids_are_numbers(flag: str, tmp_path: Path) -> None:
    said = complaint(run("prorl-engine", flag, "0;1", "--run-dir", str(tmp_path / "run")))
    assert f"{flag} takes numbers with commas between them, such as 0,1; not '0;1'" in said


def test_a_model_has_a_name_that_jobs_can_ask_for(tmp_path: Path) -> None:
    said = complaint(run("prorl-engine", "--model-name", "a/b", "--run-dir", str(tmp_path / "run")))
    assert "--model-name takes letters, digits and `._-`, at most 64 of them, not 'a/b'" in said
