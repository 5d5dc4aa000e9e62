"""Plans of processes: what a file keeps, who can read it, and what a wrong one gets."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest
from support.commands import complaint, run

from prorl_zmq.commands.children import run_child
from prorl_zmq.config import BackendSettings, GatewaySettings, ServiceSettings, StageSettings, Topology, own_run_dir
from prorl_zmq.errors import ConfigError
from prorl_zmq.service.child_plans import plan_brokers, plan_children, plan_node
from prorl_zmq.service.process_plans import EnginePlan, read_plan
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.service.process_plans import AnyPlan


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


def test_each_engine_has_its_own_part(tmp_path: Path) -> None:
    engines = [plan for plan in plan_children(whole(own_run_dir(tmp_path / "run"))) if isinstance(plan, EnginePlan)]
    assert [(one.name, one.backend.urls, one.backend.cores) for one in engines] == [
        ("engine-0", ("http://a:1",), (0, 1)),
        ("engine-1", ("http://b:1",), (2, 3)),
    ]
    assert {one.backend.weight for one in engines} == {2.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no plan of a process"),
        ('{"process": "chess"}', "Invalid value 'chess'"),
        ('{"process": "stage", "nome": "run-0"}', "unknown field `nome`"),
    ],
)
def test_a_wrong_file_is_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run-0.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="needs the version of prorl-zmq that wrote it") as caught:
        read_plan(file)
    assert said in caught.value.message
    assert run_child(file) == 2
    assert str(file) in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_plan(tmp_path / "none.json")


@pytest.mark.parametrize("flag", ["--cores", "--gpus"])
def test_ids_are_numbers(flag: str, tmp_path: Path) -> None:
    said = complaint(run("prorl-engine", flag, "0;1", "--run-dir", str(tmp_path / "run")))
    assert f"{flag} takes numbers with commas between them, such as 0,1; not '0;1'" in said
