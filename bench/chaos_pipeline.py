"""The service of bench/chaos.py: `prorl serve` on the node `hub`, and pieces on the node `far` that this process keeps.

Each node has one stage process per role and one engine; both brokers and the supervisor are on `hub`. Between the nodes
both sides prove keys. What the supervisor starts it starts again; this process is what an init system would be: it
starts the supervisor, the pieces on `far` and the trainer again when they die. It is also the subreaper of everything
below it, so a process that is left behind cannot hide by being adopted.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from chaos_nodes import make_nodes

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.inference.base_policy import build_base_policy
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.system.processes import ISOLATED, die_with_parent
from prorl_zmq.tools.processes import become_subreaper, descendants
from prorl_zmq.wire.messages.base import KeyRole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chaos_nodes import Nodes

START_S = 60.0
STOP_S = 60.0
RESTART_S = 0.5
"""Before a piece is started again, as long as the supervisor waits at first."""
ROLES = ("init", "run", "eval")
SLOTS = 8
TOPOLOGY = """\
[service]
node = "hub"

[security]
keys = "{keys}"

[rollout_broker]
stage_events = "{stage_events}"

[backend_broker]
endpoint = "{backend_broker}"

[sandbox]
kind = "{sandbox}"
image = "{image}"

[backends]
model = "{model}"
"""
VICTIMS = {
    "supervisor": ("prorl serve",),
    "rollout broker": ("prorl broker rollout",),
    "backend broker": ("prorl broker backend",),
    "init": ("--role init",),
    "run": ("--role run",),
    "eval": ("--role eval",),
    "engine": ("prorl-engine",),
    "trainer": ("chaos_client.py",),
}
"""What the command line of each kind of process holds; `spawner` and `execution server` are told apart by parents."""
SPAWNER = "execution.spawner"


class Process(NamedTuple):
    """A process of the service."""

    pid: int
    kind: str
    """A key of `VICTIMS`, or `spawner`, or `execution server`."""


class Keeper:
    """Starts a command again whenever it dies."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._command = command
        self._log = log
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._task = asyncio.create_task(self._keep())
        self.codes: list[int] = []
        """How it ended, each time."""
        self.wanted = True
        """Start it again when it ends."""

    async def _keep(self) -> None:
        while self.wanted:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            self.codes.append(await self._process.wait())
            if self.wanted and self.codes[-1] >= 0:
                self.wanted = self.codes[-1] != 0
            if self.wanted:
                await asyncio.sleep(RESTART_S)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the last end, at most so long; give whether it came."""
        return bool((await asyncio.wait([self._task], timeout=timeout_s))[0])

    async def end(self) -> bool:
        """End the process in good order, or with a SIGKILL; give whether the first was enough."""
        self.wanted = False
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
        if await self.wait(STOP_S):
            return True
        if self._process is not None:
            self._process.kill()
        await self._task
        return False


class Pipeline:
    """The pipeline, with a folder of its own; `start` it, and `close` it.

    Args:
        sandbox: `bubblewrap`, `apptainer` or `process`.
        image: the root filesystem of sandboxes; empty: none, as the kind allows.
        link: how the nodes are joined (see `make_nodes`).
    """

    def __init__(self, sandbox: str, image: str, link: str) -> None:
        become_subreaper()
        self._sandbox = sandbox
        self._image = image
        self._link = link
        self._temporary = tempfile.TemporaryDirectory(prefix="prorl-chaos-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.run_dirs = {node: self.folder / node for node in ("hub", "far")}
        self.temporary = self.folder / "tmp"
        """Where the service makes temporary files."""
        self.logs = self.folder / "logs"
        self.front_door = f"ipc://{self.run_dirs['hub']}/front_door"
        self._keepers: list[Keeper] = []
        self._model = self.folder / "policy.npz"
        self.nodes: Nodes

    async def start(self) -> None:
        """Start everything, and wait until it has reported."""
        for folder in (self.temporary, self.logs):
            folder.mkdir()
        (await asyncio.to_thread(build_base_policy)).save(self._model)
        self.nodes = nodes = await make_nodes(self._link)
        hub_keys, far_keys = self._make_keys()
        topology = self.folder / "topology.toml"
        topology.write_text(
            TOPOLOGY.format(
                stage_events=nodes.stage_events,
                backend_broker=nodes.backend_broker,
                keys=hub_keys,
                sandbox=self._sandbox,
                image=self._image,
                model=self._model,
            )
        )
        self._keep("serve", "hub", "prorl", "serve", "--config", str(topology), "--log-dir", str(self.logs))
        shared = ["--node", "far", "--keys", str(far_keys), *(["--bind", nodes.far_bind] if nodes.far_bind else [])]
        place = ["--sandbox", self._sandbox, "--image", self._image, "--connect", nodes.far_stage_events]
        for role in ROLES:
            self._keep(f"far-{role}", "far", "prorl-stage", "--role", role, "--slots", str(SLOTS), *place, *shared)
        engine = ["--name", "far-engine", "--model", str(self._model), "--connect", nodes.far_backend_broker]
        self._keep("far-engine", "far", "prorl-engine", *engine, *shared)
        async with asyncio.timeout(START_S), AsyncRolloutClient(self.front_door, timeout_s=START_S) as client:
            while len((await client.status()).stages) < 2 * len(ROLES):
                await client.collect(1, wait_s=0.1)

    def keep_trainer(self, *arguments: str) -> Keeper:
        """Start the trainer, and again whenever it is killed; it is on neither node."""
        script = str(Path(__file__).with_name("chaos_client.py"))
        keeper = Keeper(
            "trainer",
            [sys.executable, script, self.front_door, *arguments],
            self.logs / "trainer.log",
            self._environment,
        )
        self._keepers.append(keeper)
        return keeper

    def processes(self) -> list[Process]:
        """List the service's processes by kind, oldest first."""
        commands = {pid: _command(pid) for pid in descendants(os.getpid())}
        spawners = {pid for pid, command in commands.items() if SPAWNER in command}
        found = []
        for pid, command in sorted(commands.items()):
            if pid in spawners:
                found.append(Process(pid, "execution server" if _parent(pid) in spawners else "spawner"))
            for kind, (words,) in VICTIMS.items():
                if words in command and "unshare" not in command:
                    found.append(Process(pid, kind))
        return found

    async def close(self) -> list[str]:
        """End everything; give what did not end in good order."""
        stuck = [keeper.name for keeper in reversed(self._keepers) if not await keeper.end()]
        await self.nodes.close()
        return stuck

    def remove(self) -> None:
        """Remove the folder."""
        self._temporary.cleanup()

    def _make_keys(self) -> tuple[Path, Path]:
        """Make the key folders of hub and far."""
        hub, far = KeyFolder(self.folder / "hub-keys"), KeyFolder(self.folder / "far-keys")
        hub.new("service", KeyRole.SERVICE)
        far.new("far", KeyRole.STAGE)
        hub.allow(far.path / "far.pub", KeyRole.STAGE)
        shutil.copy(hub.path / "service.pub", far.path)
        return hub.path, far.path

    def _keep(self, name: str, node: str, *arguments: str) -> None:
        command = [*self.nodes.prefix(node), sys.executable, *ISOLATED, "-m", "prorl_zmq.cli", *arguments]
        command += ["--run-dir", str(self.run_dirs[node])]
        self._keepers.append(Keeper(name, command, self.logs / f"{name}.log", self._environment))

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary)}


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0
