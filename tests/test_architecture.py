"""Who may import whom, that no files import each other in a circle, and how many lines a room may have."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support.import_graph import imports, modules

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("import graph")
GENERATED = "# Generated"
"""How the first line of a generated file begins."""
SPLIT = {"brokers", "tools", "inference"}
"""Rooms whose sub-packages are rooms of their own."""

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
    "integrations": BASE | {"client", "weights_publisher", "tasks", "tools.containers", "tools.sandbox"},
    "trackers": BASE,
    "inference": BASE,
    "inference.tool_calls": set(),
    "inference.chat": BASE | {"inference", "inference.tool_calls"},
    "inference.embedded": BASE | {"inference", "inference.chat"},
    "inference.vllm": BASE | {"inference", "inference.chat"},
    "inference.http": BASE | {"inference", "inference.chat", "inference.tool_calls"},
    "inference.weights": {"errors", "system", "inference"},
    "inference.relay": {"errors", "system", "wire", "security", "inference", "inference.weights"},
    "inference.hosting": BASE
    | {"inference", "inference.weights", "inference.relay", "inference.chat"}
    | {"inference.embedded", "inference.vllm", "inference.http"},
    "dockerfile": {"errors"},
    "tasks": {"errors", "system", "wire", "dockerfile"},
    "brokers": BASE,
    "brokers.journal": BASE,
    "brokers.batches": BASE | {"brokers"},
    "brokers.rollout": BASE | {"brokers", "brokers.journal", "brokers.batches"},
    "brokers.backends": BASE | {"brokers", "brokers.journal"},
    "brokers.node": BASE | {"brokers", "brokers.rollout"},
    "tools.processes": {"errors", "system"},
    "tools.editor": {"errors", "system"},
    "tools.images": {"errors", "system", "dockerfile", "tools.processes"},
    "tools.containers": {"errors", "system", "wire", "tools.processes", "tools.images"},
    "tools.sessions": {"errors", "system", "tools.processes", "tools.containers"},
    "tools.execution": BASE - {"data"} | {"tools.processes", "tools.editor", "tools.containers", "tools.sessions"},
    "tools.sandbox": BASE - {"data"}
    | {"tools.processes", "tools.editor", "tools.containers", "tools.sessions", "tools.execution"},
    "tools.kinds": {"errors", "system", "tools.processes", "tools.images", "tools.containers"},
    "tools.mcp": {"errors", "system", "wire", "tools", "tools.processes", "tools.execution", "tools.sandbox"},
    "tools": BASE - {"data"}
    | {"tools.processes", "tools.images", "tools.editor", "tools.sessions", "tools.execution", "tools.sandbox"},
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
    | {"watching", "model_proxy"},
    "testing": BASE | {"brokers", "client", "inference", "stages", "tools"},
    "demo": BASE | {"client", "service", "inference", "trackers"},
    "group_transfer": BASE | {"client"},
    "weights_publisher": BASE | {"client", "inference", "group_transfer"},
    "examples": BASE | {"inference", "stages", "integrations", "prorl_zmq"},
}
"""Rooms, and the rooms that their files may import; commands, which bring all together, are not listed."""
OWED: set[tuple[str, str]] = set()
"""Arrows that run up, and are to go: without them the rooms have floors."""
ALL_TOGETHER = {"commands", "cli", "prorl_zmq"}
"""`prorl_zmq` itself re-exports what trainers need, when it is first asked for."""
BUDGET = {
    "brokers": 300,
    "brokers.backends": 4400,
    "brokers.batches": 1900,
    "brokers.journal": 1650,
    "brokers.node": 1450,
    "brokers.rollout": 7050,
    "cli": 150,
    "client": 3100,
    "cluster": 1000,
    "commands": 7600,
    "config": 550,
    "data": 2000,
    "demo": 750,
    "dockerfile": 1000,
    "errors": 350,
    "evaluation": 3350,
    "examples": 500,
    "explain": 1850,
    "gateway": 5400,
    "group_transfer": 300,
    "inference": 3100,
    "inference.chat": 2700,
    "inference.embedded": 250,
    "inference.hosting": 3200,
    "inference.http": 2650,
    "inference.tool_calls": 1600,
    "inference.vllm": 1500,
    "integrations": 4400,
    "make_swe": 2550,
    "metrics": 600,
    "model_proxy": 2500,
    "prorl_zmq": 100,
    "security": 1350,
    "service": 2800,
    "service_folder": 400,
    "stages": 15700,
    "system": 2800,
    "tasks": 3050,
    "testing": 850,
    "tools": 900,
    "tools.containers": 2600,
    "tools.editor": 1000,
    "tools.execution": 1800,
    "tools.images": 2050,
    "tools.kinds": 350,
    "tools.mcp": 950,
    "tools.processes": 350,
    "tools.sandbox": 1250,
    "tools.sessions": 2250,
    "trackers": 1000,
    "watching": 750,
    "weights_publisher": 500,
    "wire": 4200,
}
"""Lines that the files of a room may have together; lowered as it shrinks."""
STAND_ALONE = {
    "prorl_zmq.brokers.backends.backend_gauges",
    "prorl_zmq.brokers.backends.context_means",
    "prorl_zmq.brokers.backends.group_memory",
    "prorl_zmq.brokers.node.slot_shares",
    "prorl_zmq.brokers.rollout.action_queue",
    "prorl_zmq.brokers.rollout.broker_gauges",
    "prorl_zmq.client.blocking.endpoint",
    "prorl_zmq.client.blocking.views",
    "prorl_zmq.client.blocking.weights",
    "prorl_zmq.inference.relay.relay_address",
    "prorl_zmq.inference.vllm.vllm_kv_logger",
    "prorl_zmq.integrations.skyrl",
    "prorl_zmq.integrations.trl.on_cpu",
    "prorl_zmq.service.notify",
    "prorl_zmq.stages.handlers.math",
    "prorl_zmq.system.free_memory",
    "prorl_zmq.system.used_memory",
    "prorl_zmq.testing",
}
"""Small modules that one file imports, and that are a thing of their own nevertheless."""


def room(module: str) -> str:
    """Return the room of a module: its first package below `prorl_zmq`, or the first two where a room is split."""
    if module == "prorl_zmq.service.service_folder":
        return "service_folder"  # every process may look into it: a room of its own among the service's other files
    _, *parts = module.split(".")
    if not parts:
        return module
    folder = parts if modules()[module].name == "__init__.py" else parts[:-1]
    return ".".join(folder[:2]) if folder[1:] and parts[0] in SPLIT else parts[0]


def allows(name: str, other: str) -> bool:
    """Return whether a room may import another: one that is named, or a part of it."""
    return other in MAY_IMPORT[name] | {name} or (
        other.split(".")[0] in MAY_IMPORT[name] and name.split(".")[0] != other.split(".")[0]
    )


def test_every_file_is_found() -> None:
    assert len(modules()) > 300
    assert "prorl_zmq.wire.codec" in imports("prorl_zmq.brokers.rollout.front_door")
    assert {room(module) for module in modules()} == {*MAY_IMPORT, *ALL_TOGETHER}


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_room_imports_what_it_may(name: str) -> None:
    arrows = {(module, other) for module in modules() if room(module) == name for other in imports(module)}
    assert sorted(arrow for arrow in arrows if not allows(name, room(arrow[1]))) == []


def test_rooms_have_floors() -> None:
    """Each room imports rooms below it alone, but for the arrows that are owed."""
    arrows = {(room(module), room(other)) for module in modules() for other in imports(module)}
    assert sorted(OWED - arrows) == [], "paid: take it off the list"
    left = {name: {other for at, other in arrows - OWED if at == name != other} for name in MAY_IMPORT}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert left == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {module: set(imports(module)) for module in modules()}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    # What is left lies on a circle or imports one; take off the latter from the other side.
    while unused := left.keys() - {other for others in left.values() for other in others}:
        left = {module: others for module, others in left.items() if module not in unused}
    assert sorted(left) == []


def lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    return 0 if text.startswith(GENERATED) else len(text.splitlines())


@pytest.mark.parametrize("name", BUDGET)
def test_a_room_keeps_its_budget(name: str) -> None:
    used = sum(lines(path) for module, path in modules().items() if room(module) == name)
    assert used <= BUDGET[name], "make it simpler, or say in the change why it grows"
    assert used > BUDGET[name] - 100, "it has shrunk: lower its budget"


def test_a_small_module_has_more_than_one_importer() -> None:
    """A file of less than 60 lines with one importer belongs into that file, unless it is listed."""
    importers = Counter(other for module in modules() for other in imports(module))
    small = {module for module, path in modules().items() if importers[module] == 1 and lines(path) < 60}
    assert small == STAND_ALONE


def public() -> list[object]:
    """What users import."""
    import prorl_zmq

    named = [getattr(prorl_zmq, name) for name in prorl_zmq.__all__]
    elsewhere = {
        "stages.handler": ("AgentHandler", "InitPhase", "RunPhase", "EvalPhase", "Evaluation", "Failure"),
        "inference.engine": ("Engine", "Generation", "EngineDescription"),
        "tools.sandbox.sandboxes": ("Sandboxes",),
        "tools.sandbox.sandbox": ("Sandbox",),
        "tools.containers.specification": ("SandboxSpec", "Bind", "Limits"),
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
