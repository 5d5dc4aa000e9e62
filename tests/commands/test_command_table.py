"""The list of commands that `prorl --help` prints without importing them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

from prorl_zmq.commands import app
from prorl_zmq.commands.command_table import COMMANDS, overview

if TYPE_CHECKING:
    from prorl_zmq.commands.command_table import Command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_summary_begins_the_commands_own_help(command: Command) -> None:
    made = app._load(command.place)
    text = made.info.help if isinstance(made, typer.Typer) else inspect.getdoc(made)
    words = " ".join(str(text).split())
    assert words.startswith(command.summary)
    assert words[len(command.summary)] in ".,:; "


def test_the_overview_lists_every_command_that_is_not_hidden() -> None:
    lines = [line.split()[0] for line in overview().partition("Commands")[2].splitlines()[1:]]
    assert lines == [name for name, command in COMMANDS.items() if not command.hidden]
    assert all(len(line) <= 90 for line in overview().splitlines())


def test_the_overview_imports_no_command() -> None:
    code = (
        "import sys\nfrom prorl_zmq import cli\ntry: cli._run('prorl', ['--help'])\nexcept SystemExit as end: "
        "assert not end.code\nassert not {'typer', 'msgspec', 'zmq', 'asyncio', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{overview()}\n"


def test_status_imports_no_numpy() -> None:
    code = (
        "import sys\nfrom prorl_zmq import cli\ntry: cli._run('prorl', ['status', '--connect', 'ipc:///tmp/nowhere'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'pydantic', 'importlib.metadata', 'asyncio'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_no_function_of_a_command_is_long() -> None:
    found = {}
    for file in sorted((ROOT / "prorl_zmq" / "commands").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                found[f"{file.name}: {node.name}"] = node.end_lineno - node.lineno + 1
    assert len(found) > 200
    assert {name: lines for name, lines in found.items() if lines > 80} == {}
