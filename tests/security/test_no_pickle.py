"""Nothing in the tree unpickles what somebody else sent. What is on the wire: `tests/service/test_wire.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("prorl_zmq", "brokers", "stages", "tools")
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
METHODS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}
PROCESSES = {"multiprocessing", "concurrent.futures.process"}
WORD = re.compile("|".join([*MODULES, *METHODS, "multiprocessing", "concurrent", "allow_pickle", r"\bload\b"]))
"""A module without any of these is not parsed."""
OWN_CHILDREN = {
    "prorl_zmq/inference/vllm/vllm_processes.py": "lists the children that vLLM has started",
}
"""The only users of `multiprocessing`, whose pipes are private to a process and its child."""

if TYPE_CHECKING:
    from collections.abc import Iterator


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def faults(source: str) -> Iterator[str]:
    """Name what could unpickle, in a module."""
    for node in ast.walk(ast.parse(source)) if WORD.search(source) else ():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.split(".")[0] in MODULES:
                yield name
            if any(name == module or name.startswith(f"{module}.") for module in PROCESSES):
                yield "multiprocessing"
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.attr
        if isinstance(node, ast.Call):
            yield from _loads(node)


def _loads(call: ast.Call) -> Iterator[str]:
    given = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
    if "allow_pickle" in given and given["allow_pickle"] is not False:
        yield "allow_pickle"
    function = ast.unparse(call.func)
    if function in ("np.load", "numpy.load") and given.get("allow_pickle", True) is not False:
        yield f"{function} without allow_pickle=False"
    if function == "torch.load" and given.get("weights_only") is not True:
        yield "torch.load without weights_only=True"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "from shelve import open",
        "from cloudpickle import loads",
        "import numpy as np\nnp.load(p)",
        "np.load(p, allow_pickle=True)",
        "np.load(p, allow_pickle=flag)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "socket.recv_pyobj()",
        "from multiprocessing import Queue",
        "import multiprocessing.connection",
        "from concurrent.futures.process import x",
    ],
)
def test_what_is_looked_for_would_be_found(source: str) -> None:
    assert list(faults(source))


def test_nothing_in_the_tree_unpickles() -> None:
    assert len(sources()) > 100
    found = {
        (str(path.relative_to(ROOT)), fault) for path in sources() for fault in faults(path.read_text(encoding="utf-8"))
    }
    assert found == {(name, "multiprocessing") for name in OWN_CHILDREN}
