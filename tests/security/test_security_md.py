"""SECURITY.md's commands, run as they stand there: 127.x addresses are the nodes, home folders the machines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from needed import usable

from prorl_zmq import Job, RolloutClient, Sampling
from prorl_zmq.commands.app import program_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text(encoding="utf-8")
MACHINES = {"# on the service's node, 10.0.0.1": "10.0.0.1", "# on the node gpu-7, 10.0.0.7": "gpu-7"}
TRAINER = "# where the trainer runs"
SERVERS = ("prorl serve", "prorl-stage", "prorl-engine")
WAIT_S = 90.0


class Machines:
    """Home folders, and what runs in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Of this process alone: other tests may use the same ports at the same time.
        network = f"127.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}"
        self._addresses = {"10.0.0.1": f"{network}.1", "10.0.0.7": f"{network}.7"}

    def here(self, text: str) -> str:
        """Give a text with the addresses that there are."""
        return re.sub("|".join(map(re.escape, self._addresses)), lambda match: self._addresses[match[0]], text)

    def home(self, machine: str) -> Path:
        path = self._folder / machine
        path.mkdir(exist_ok=True)
        return path

    def copy(self, line: str, machine: str) -> None:
        """Do what `scp` would do."""
        *sources, target = shlex.split(line)[1:]
        for source in sources:
            host, _, path = source.partition(":")
            shutil.copy(self.home(host) / path, self.home(machine) / target)

    @contextmanager
    def started(self, line: str, machine: str) -> Iterator[subprocess.Popen[bytes]]:
        home = self.home(machine)
        program, *arguments = shlex.split(self.here(line).replace("~", str(home)))
        environment = {**os.environ, "HOME": str(home), "PRORL_RUN_DIR": str(home / "run")}
        environment.pop("PRORL_KEYS", None)
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "prorl_zmq.cli", program, *arguments],
                cwd=home,
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, line: str, machine: str) -> None:
        """Run a command in this process: starting an interpreter for each would take most of the test's time."""
        home = self.home(machine)
        program, *arguments = shlex.split(self.here(line).replace("~", str(home)))
        before = Path.cwd()
        os.chdir(home)
        os.environ["HOME"] = str(home)
        try:
            typer.main.get_command(program_of(program, arguments)).main(
                arguments, prog_name=program, standalone_mode=False
            )
        finally:
            os.chdir(before)


@pytest.mark.proof
@pytest.mark.timeout(300)  # it starts eleven processes
def test_two_nodes_and_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    usable("bubblewrap")
    monkeypatch.setenv("HOME", os.environ["HOME"])  # to be restored
    monkeypatch.delenv("PRORL_KEYS", raising=False)
    (tables,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, ExitStack() as stack:
        machines = Machines(Path(folder))
        for name in ("10.0.0.1", "gpu-7", "trainer"):
            machines.home(name)
        (machines.home("10.0.0.1") / "topology.toml").write_text(machines.here(tables))
        for block in blocks:
            where, *lines = block.splitlines()
            assert where in {*MACHINES, TRAINER}
            machine = MACHINES.get(where, "trainer")
            for line in lines:
                if line.startswith("scp "):
                    machines.copy(line, machine)
                elif line.startswith(SERVERS):
                    stack.enter_context(machines.started(line, machine))
                    if line.startswith("prorl serve"):
                        _ready(machines.home(machine) / "log")
                else:
                    machines.run(line, machine)
        (call,) = re.findall(r"`(RolloutClient\([^`]*\))`", TEXT)
        keys = str(machines.home("trainer") / ".config/prorl/keys")
        endpoint, said_keys = re.findall(r'"(.*?)"', call)
        assert said_keys.replace("~", str(machines.home("trainer"))) == keys
        with RolloutClient(machines.here(endpoint), keys=keys, timeout_s=WAIT_S) as client:
            deadline = time.monotonic() + WAIT_S
            while not _joined(client):
                assert time.monotonic() < deadline, (machines.home("gpu-7") / "log").read_text()
                time.sleep(0.1)
            client.submit(
                Job(task="math", instance={"problem": "1", "ground_truth": "1"}, sampling=Sampling(max_tokens=4))
                for _ in range(8)
            )
            assert [each.outcome for each in client.stream(timeout_s=WAIT_S)] == ["completed"] * 8


def _joined(client: RolloutClient) -> bool:
    """Tell whether the second node's stage process and engine are there."""
    nodes = {stage.node for stage in client.status().stages}
    return "gpu-7" in nodes and len({status.backend.node for status in client.backends.list()}) == 2


def _ready(log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while "ready at" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
