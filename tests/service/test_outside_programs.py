"""The examples of docs/outside-programs.md, run as they are by what a user installs: the client, and no service."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from documents import PAGES, ROOT, blocks
from needed import lacking

from prorl_zmq.testing import LocalService, say, tool_call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.proof

PYTHON = ROOT / ".outside" / "bin" / "python"
EXAMPLES = [block for block in blocks("python") if ".endpoint(" in block]
LIMIT_S = 120.0


def answer(prompt: str) -> str:
    if "prime number" in prompt:
        return "It is 23."
    if "Use your tool." not in prompt:
        return "It is \\boxed{42}."
    return "It is 42." if "42" in prompt else tool_call("multiply", a=6, b=7)


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    if not PYTHON.exists():
        lacking("outside", "the environment of programs outside is not there; run: make outside")
    with LocalService(engine=say(answer)) as running:
        yield running


def printed_by(example: str, service: LocalService, folder: Path) -> str:
    """Run an example in the environment of programs outside; return what it printed."""
    environment = {"PRORL_RUN_DIR": str(service.run_dir), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [PYTHON, "-P", "-c", example], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_an_example_of_each() -> None:
    assert PAGES[ROOT / "docs" / "outside-programs.md"].count(".endpoint(") > len(EXAMPLES) == 3


@pytest.mark.parametrize(
    ("package", "printed"),
    [
        ("from openai import OpenAI", r"completed 1.0 (34,)"),
        ("from anthropic import", "[1.0, 1.0, 1.0, 1.0]"),
        ("from agents import", "completed 1.0 1.0"),
    ],
)
@pytest.mark.timeout(180)
def test_an_example(service: LocalService, tmp_path: Path, package: str, printed: str) -> None:
    (example,) = [block for block in EXAMPLES if package in block]
    assert printed_by(example, service, tmp_path).strip() == printed


@pytest.mark.timeout(180)
def test_nothing_of_the_service_is_needed_for_them(service: LocalService, tmp_path: Path) -> None:
    listed = (
        "import importlib.util as u; print([name for name in ('aiohttp', 'uvloop', 'IPython') if u.find_spec(name)])"
    )
    assert printed_by(listed, service, tmp_path).strip() == "[]"
