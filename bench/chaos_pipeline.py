"""The service of bench/chaos.py: `prorl serve` on the node `hub`, and processes on the node `far` that this one keeps.

Each node has one stage process per role and one engine; both brokers and the supervisor are on `hub`. Between the nodes
both sides prove keys. The supervisor restarts its own processes; this process acts as an init system: it restarts the
supervisor, the processes on `far` and the trainer when they die. It is also the subreaper of all its descendants, so
that no leftover process escapes. The run folders are on a small disk of their own, where this process may mount one;
ledger and logs are not.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import chaos_client
import msgspec
from chaos_client import Options
from chaos_nodes import make_nodes

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.security.keys import KeyFolder
from prorl_zmq.system.processes import ISOLATED, become_subreaper, die_with_parent
from prorl_zmq.tools.processes.process_tree import descendants
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
OPEN_FILES = 4096
"""Most that a process of the service may have."""
DISK = "1g"
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
kind = "saboteur"
model = "{model}"
"""
VICTIMS = {
    "supervisor": ("prorl serve",),
    "rollout broker": ("rollout_broker.json",),
    "backend broker": ("backend_broker.json",),
    "node broker": ("node_broker.json",),
    "node supervisor": ("prorl node",),
    "init": ("stage_init.json", "--role init"),
    "run": ("stage_run.json", "--role run"),
    "eval": ("stage_eval.json", "--role eval"),
    "engine": ("engine.json", "prorl-engine"),
    "far engine": ("--name far-engine",),
    "trainer": ("chaos_client.py",),
}
"""Command lines of each kind of process hold one of these; parents tell `spawner` and `execution server` apart."""
SPAWNER = "execution.spawner"


class Process(NamedTuple):
    """A process of the service."""

    pid: int
    kind: str
    """A key of `VICTIMS`, or `spawner`, or `execution server`."""


class Keeper:
    """Starts a command again whenever it dies."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: dict[str, str], node: str = "hub"
    ) -> None:
        self.name = name
        self.node = node
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
                    preexec_fn=partial(_begin, os.getpid()),
                )
            self.codes.append(await self._process.wait())
            if self.wanted and self.codes[-1] >= 0:
                self.wanted = self.codes[-1] != 0
            if self.wanted:
                await asyncio.sleep(RESTART_S)

    @property
    def pid(self) -> int:
        """The process's; 0: there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

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
        self.disk = self.folder / "disk"
        self.disk_is_small = False
        """It has a file system of its own, which may be filled."""
        self.far_nodes: tuple[str, ...] = ("far",)
        self.run_dirs = {node: self.disk / node for node in ("hub", "far")}
        self.temporary = self.disk / "tmp"
        """Where the service makes temporary files."""
        self.logs = self.folder / "logs"
        self.ledger = self.folder / "ledger"
        self.front_door = f"ipc://{self.run_dirs['hub']}/front_door"
        self._keepers: list[Keeper] = []
        self._packages = self.folder / "packages"
        self._hub_keys = Path()
        self.weights = self.folder / "policy.npz"
        self.nodes: Nodes

    async def start(self) -> None:
        """Start everything, and wait until it has reported."""
        self.disk.mkdir()
        self.disk_is_small = os.geteuid() == 0 and _mount(self.disk)
        for folder in (self.temporary, self.logs, self._packages):
            folder.mkdir()
        _install_engine(self._packages)
        base_policy().save(self.weights)
        await self._start_service()

    async def _start_service(self) -> None:
        self.nodes = nodes = await make_nodes(self._link)
        self._hub_keys, far_keys = self._make_keys()
        topology = self.folder / "topology.toml"
        topology.write_text(
            TOPOLOGY.format(
                stage_events=nodes.stage_events,
                backend_broker=nodes.backend_broker,
                keys=self._hub_keys,
                sandbox=self._sandbox,
                image=self._image,
                model=self.weights,
            )
        )
        self._keep("serve", "hub", "prorl", "serve", "--config", str(topology), "--log-dir", str(self.logs))
        shared = ["--node", "far", "--keys", str(far_keys)]
        place = ["--sandbox", self._sandbox, "--image", self._image, "--connect", nodes.far_stage_events]
        place += ["--bind", nodes.far_bind] if nodes.far_bind else []
        for role in ROLES:
            self._keep(f"far-{role}", "far", "prorl-stage", "--role", role, "--slots", str(SLOTS), *place, *shared)
        engine = ["--name", "far-engine", "--engine", "saboteur", "--model", str(self.weights)]
        engine += ["--connect", nodes.far_backend_broker, "--bind", nodes.far_engine]
        self._keep("far-engine", "far", "prorl-engine", *engine, *shared)
        async with asyncio.timeout(START_S), AsyncRolloutClient(self.front_door, timeout_s=START_S) as client:
            while len((await client.status()).stages) < 2 * len(ROLES):
                await client.collect(1, wait_s=0.1)

    def keep_trainers(self, seed: int, in_flight: int, until: float, hang_s: float) -> list[Keeper]:
        """Start the trainers on the node `hub`, and again whenever they are killed."""
        return [self._keep_trainer(f"chaos-{seed}", 0, 1, seed, in_flight, until, hang_s)]

    def _keep_trainer(
        self, session: str, first: int, step: int, seed: int, in_flight: int, until: float, hang_s: float
    ) -> Keeper:
        options = Options(
            place=self._place(),
            session=session,
            first=first,
            step=step,
            ledger=str(self.ledger),
            weights=str(self.weights),
            seed=seed,
            in_flight=in_flight // step,
            until=until,
            hang_s=hang_s,
            saboteurs=self._sandbox != "process",
        )
        command = [
            *self.nodes.prefix("hub"),
            sys.executable,
            chaos_client.__file__,
            msgspec.json.encode(options).decode(),
        ]
        keeper = Keeper(f"trainer-{first}", command, self.logs / f"trainer-{first}.log", self._environment)
        self._keepers.append(keeper)
        return keeper

    def _place(self) -> dict[str, str]:
        return {"endpoint": self.front_door, "keys": str(self._hub_keys)}

    def on_node(self, node: str) -> list[int]:
        """List all processes below those that this process keeps on a node."""
        kept = [keeper.pid for keeper in self._keepers if keeper.node == node]
        return [each for pid in kept if pid for each in (pid, *descendants(pid))]

    def processes(self) -> list[Process]:
        """List the service's processes by kind, oldest first."""
        commands = {pid: _command(pid) for pid in descendants(os.getpid())}
        spawners = {pid for pid, command in commands.items() if SPAWNER in command}
        found = []
        for pid, command in sorted(commands.items()):
            if pid in spawners:
                found.append(Process(pid, "execution server" if _parent(pid) in spawners else "spawner"))
            for kind, words in VICTIMS.items():
                if any(word in command for word in words) and "unshare" not in command:
                    found.append(Process(pid, kind))
        return found

    async def close(self) -> list[str]:
        """End everything; give what did not end in good order."""
        stuck = [keeper.name for keeper in reversed(self._keepers) if not await keeper.end()]
        await self.nodes.close()
        return stuck

    def remove(self) -> None:
        """Remove the folder."""
        if self.disk_is_small:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=False)
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
        self._keepers.append(Keeper(name, command, self.logs / f"{name}.log", self._environment, node))

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(self._packages)}


def _begin(parent: int) -> None:
    """Make a new child one that ends with its parent, and has few descriptors."""
    die_with_parent(parent)
    most = min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _mount(folder: Path) -> bool:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "none", str(folder)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def _install_engine(packages: Path) -> None:
    """Install the engine kind of chaos_engine.py, as a package of another maker would be."""
    shutil.copy(Path(__file__).with_name("chaos_engine.py"), packages)
    information = packages / "chaos_engine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos-engine\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[prorl_zmq.engines]\nsaboteur = chaos_engine:SaboteurKind\n")


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0
