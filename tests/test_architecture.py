"""Who may import whom, that no files import each other in a circle, and how long a file may be."""

from __future__ import annotations

import importlib
import inspect

import pytest
from support.import_graph import ROOT, imports, modules

pytestmark = pytest.mark.xdist_group("import graph")
LINES_LIMIT = 500
GENERATED = "# Generated"
"""How the first line of a generated file begins."""

BASE = {"errors", "system", "wire", "config", "security", "data", "service_folder", "metrics"}
"""What every process may have."""
MAY_IMPORT = {
    "errors": set(),
    "system": {"errors"},
    "wire": {"errors", "system"},
    "metrics": {"errors", "wire"},
    "config": {"errors", "system", "wire"},
    "security": {"errors", "system", "wire", "config"},
    "data": {"errors", "system", "wire"},
    "service_folder": {"errors", "system", "wire", "config", "security"},
    "client": BASE,
    "integrations": BASE | {"client", "weights_publisher"},
    "trackers": BASE,
    "inference": BASE,
    "tasks": {"errors", "system", "wire"},
    "brokers": BASE,
    "tools": BASE - {"data"},
    "model_proxy": {"data", "wire"},
    "stages": BASE | {"tools", "tasks", "inference", "model_proxy"},
    "make_swe": {"errors", "system", "tools"},
    "service": BASE | {"client", "tools", "inference"},
    "explain": {"errors", "system", "wire"},
    "watching": BASE | {"client", "service", "explain"},
    "cluster": BASE | {"client", "service"},
    "evaluation": BASE | {"client", "service", "inference", "tasks", "stages", "tools", "trackers", "explain"},
    "gateway": BASE
    | {"client", "service", "inference", "tasks", "stages", "tools", "evaluation", "integrations"}
    | {"watching"},
    "testing": BASE | {"brokers", "client", "inference", "stages", "tools"},
    "demo": BASE | {"client", "service", "inference", "trackers"},
    "weights_publisher": BASE | {"client", "inference"},
    "examples": BASE
    | {"client", "service", "inference", "tools", "stages", "demo", "commands", "cli"}
    | {"integrations", "prorl_zmq", "trackers"},
}
"""Rooms, and the rooms that their files may import; commands, which bring all together, are not listed."""
ALL_TOGETHER = {"commands", "cli", "prorl_zmq"}
"""`prorl_zmq` itself re-exports what trainers need, when it is first asked for."""


def room(module: str) -> str:
    if module == "prorl_zmq.service.service_folder":
        return "service_folder"  # every process may look into it: a room of its own among the service's other files
    return module.split(".")[1] if "." in module else module


def test_every_file_is_found() -> None:
    assert len(modules()) > 300
    assert "prorl_zmq.wire.codec" in imports("prorl_zmq.brokers.rollout.front_door")
    assert {room(module) for module in modules()} == {*MAY_IMPORT, *ALL_TOGETHER}


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_room_imports_what_it_may(name: str) -> None:
    arrows = {(module, other) for module in modules() if room(module) == name for other in imports(module)}
    wrong = {arrow for arrow in arrows if room(arrow[1]) not in MAY_IMPORT[name] | {name}}
    assert sorted(wrong) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {module: set(imports(module)) for module in modules()}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    # What is left lies on a circle or imports one; take off the latter from the other side.
    while unused := left.keys() - {other for others in left.values() for other in others}:
        left = {module: others for module, others in left.items() if module not in unused}
    assert sorted(left) == []


def test_no_file_is_too_long() -> None:
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in modules().values()}
    long = {str(path.relative_to(ROOT)): len(text) for path, text in lines.items() if len(text) > LINES_LIMIT}
    assert {name: n for name, n in long.items() if not lines[ROOT / name][0].startswith(GENERATED)} == {}


def public() -> list[object]:
    """What users import."""
    import prorl_zmq

    named = [getattr(prorl_zmq, name) for name in prorl_zmq.__all__]
    elsewhere = {
        "stages.handler": ("AgentHandler", "InitPhase", "RunPhase", "EvalPhase", "Evaluation", "Failure"),
        "inference.engine": ("Engine", "Generation", "EngineDescription"),
        "tools.sandbox.sandboxes": ("Sandboxes",),
        "tools.sandbox.sandbox": ("Sandbox",),
        "tools.sandbox.specification": ("SandboxSpec", "Bind", "Limits"),
        "tools.toolbox": ("Toolbox",),
        "tools.tool": ("Tool",),
        "tasks.loading": ("load_jobs",),
        "tasks.row_format": ("RowFormat",),
        "testing": ("BrokerThreads", "LocalService", "ScriptedEngine", "say", "tool_call"),
    }
    for name, members in elsewhere.items():
        module = importlib.import_module(f"prorl_zmq.{name}")
        named += [getattr(module, member) for member in members]
    return [one for one in named if inspect.isclass(one) or inspect.isfunction(one)]


@pytest.mark.parametrize("thing", public(), ids=lambda thing: thing.__qualname__)
def test_what_users_import_has_a_docstring(thing: object) -> None:
    assert thing.__doc__
    if inspect.isclass(thing) and thing.__module__.startswith("prorl_zmq"):
        members = {name: member for name, member in vars(thing).items() if not name.startswith("_")}
        functions = {name: m for name, m in members.items() if inspect.isfunction(m) or isinstance(m, property)}
        assert [name for name, member in functions.items() if not inspect.getdoc(member)] == []
