"""Our programs as processes: each starts, ends and complains as its commands do in the process of the other tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.commands import complaint, run

from prorl_zmq.commands.app import COMMANDS, PROGRAMS
from prorl_zmq.service.preloading import begun_fork_server

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("torch", "transformers", "vllm", "scipy", "sympy", "pint", "matplotlib", "math_verify", "IPython")
"""What no command may import to show its help or to refuse its flags."""
HELPS = f"""
import contextlib, io, json, sys
from prorl_zmq.commands import app
said = {{}}
for program, *words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        said[" ".join([program, *words])] = app.run(program, [*words, "--help"])
    assert "Usage:" in out.getvalue(), (program, words)
print(json.dumps([said, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
BLAS = """
import json, sys
from prorl_zmq import cli
sys.argv = ["prorl", "--version"]
try:
    cli.main()
except SystemExit:
    import numpy, threadpoolctl
    print(json.dumps([one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]))
"""
EARLY = """
import sys
from prorl_zmq import cli
from prorl_zmq.system.fork_server import ForkServer

begin = ForkServer.begin

def noted(server):
    print([name for name in ("typer", "zmq", "rich") if name in sys.modules])
    begin(server)

ForkServer.begin = noted
sys.argv = ["prorl", *sys.argv[1:]]
cli.main()
"""
REFUSALS = {
    "prorl": (("status", "--connect", "ipc://DIR/door"), 1, "is the service running?"),
    "prorl-stage": (("--role", "judge"), 2, "'judge' is not one of 'init', 'run', 'eval'"),
    "prorl-engine": (("--engine", "gpt"), 2, "'gpt' is not"),
}
"""Of each program: arguments that it refuses, its exit code, and what it says."""


def process(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, "-P", *command],
        env={**environment, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("program", REFUSALS)
def test_a_program_refuses_as_a_process_what_it_refuses_here(program: str, tmp_path: Path) -> None:
    arguments, code, said = REFUSALS[program]
    words = [word.replace("DIR", str(tmp_path)) for word in arguments]
    done = process("-m", "prorl_zmq.cli", program, *words)
    assert said in complaint(done, code)
    assert done.stdout == ""
    here = run(program, *words)
    assert (here.returncode, here.stdout, here.stderr) == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "begun"),
    [("serve --bogus", "[]\n"), ("node --bogus", "[]\n"), ("serve --bogus --help", ""), ("status --bogus", "")],
)
def test_a_fork_server_begins_before_the_command_is_imported(arguments: str, begun: str) -> None:
    done = process("-c", EARLY, *arguments.split())
    assert "No such option" in complaint(done, 2)
    assert done.stdout == begun


def test_a_process_has_one_fork_server_at_a_time() -> None:
    with begun_fork_server() as first, begun_fork_server() as second:
        assert first is second
        assert first.start(("-m", "platform"), stdout=subprocess.DEVNULL).wait(timeout=60) == 0
    with begun_fork_server() as other:
        assert other is not first


def test_the_help_of_every_command_is_light() -> None:
    commands = [["prorl"], *(["prorl", name] for name in COMMANDS), *([name] for name in PROGRAMS)]
    done = process("-c", HELPS, json.dumps(commands))
    assert (done.returncode, done.stderr) == (0, "")
    codes, heavy = json.loads(done.stdout)
    assert codes == {" ".join(words): 0 for words in commands}
    assert heavy == []


@pytest.mark.parametrize("named", ["", "2"])
def test_a_program_has_no_blas_thread_for_each_core_unless_that_is_asked_for(named: str) -> None:
    done = process("-c", BLAS, **({"OPENBLAS_NUM_THREADS": named} if named else {}))
    assert json.loads(done.stdout.splitlines()[-1]) == [int(named or 1)]
