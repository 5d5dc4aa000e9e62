"""SECURITY.md's commands, run as they stand there: 127.x addresses are the nodes, home folders the machines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from needed import usable
from support.commands import run
from support.services import Program, started
from support.waiting import until

from prorl_zmq import Job, RolloutClient, Sampling

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

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

    def started(self, line: str, machine: str) -> AbstractContextManager[Program]:
        return started(*self._words(line, machine), cwd=self.home(machine), environment=self._environment(machine))

    def run(self, line: str, machine: str) -> None:
        done = run(*self._words(line, machine), cwd=self.home(machine), environment=self._environment(machine))
        assert done.returncode == 0, done.stderr

    def _words(self, line: str, machine: str) -> list[str]:
        return shlex.split(self.here(line).replace("~", str(self.home(machine))))

    def _environment(self, machine: str) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name != "PRORL_KEYS"}
        return {**ours, "HOME": str(self.home(machine)), "PRORL_RUN_DIR": str(self.home(machine) / "run")}


@pytest.mark.proof
@pytest.mark.timeout(300)  # it starts eleven processes
def test_two_nodes_and_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    usable("bubblewrap")
    monkeypatch.delenv("PRORL_KEYS", raising=False)
    (tables,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, ExitStack() as stack:
        machines, running = Machines(Path(folder)), list[Program]()
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
                    running.append(stack.enter_context(machines.started(line, machine)))
                    if line.startswith("prorl serve"):
                        running[-1].wait_line("ready at")
                else:
                    machines.run(line, machine)
        (call,) = re.findall(r"`(RolloutClient\([^`]*\))`", TEXT)
        keys = str(machines.home("trainer") / ".config/prorl/keys")
        endpoint, said_keys = re.findall(r'"(.*?)"', call)
        assert said_keys.replace("~", str(machines.home("trainer"))) == keys
        with RolloutClient(machines.here(endpoint), keys=keys, timeout_s=WAIT_S) as client:
            until(lambda: _joined(client), "the second node:\n" + running[-1].log, WAIT_S)
            client.submit(
                Job(task="math", instance={"problem": "1", "ground_truth": "1"}, sampling=Sampling(max_tokens=4))
                for _ in range(8)
            )
            assert [each.outcome for each in client.stream(timeout_s=WAIT_S)] == ["completed"] * 8


def _joined(client: RolloutClient) -> bool:
    """Tell whether the second node's stage process and engine are there."""
    nodes = {stage.node for stage in client.status().stages}
    return "gpu-7" in nodes and len({status.backend.node for status in client.backends.list()}) == 2
