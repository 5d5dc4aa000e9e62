"""A real Slurm on this machine: a controller with a login host, and nodes, each in namespaces of its own.

A host is a network, mount, UTS, IPC and pid namespace with its own address, name and /tmp; they share `shared`, one
folder, as hosts of a cluster share a file system. Commands run on a host as a user who is not root. A host ends with
all its processes when the first process of its pid namespace is killed, and all hosts end with the context. It needs
root, and Slurm's and munge's programs.

Partitions: `cpu` (default), `high`, which preempts jobs of `spot`, `spot` (preempted with `GRACE_S` to leave), all of
the same nodes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from namespace_hosts import Hosts
from needed import lacking

from prorl_zmq.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "setpriv", "ip")
LOGIN, LOGIN_ADDRESS = "login", "10.77.0.250"
USER, USER_ID = "trainer", 4321
GRACE_S = 30
START_S = 30.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost=login(10.77.0.250)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SwitchType=switch/none
SlurmdParameters=config_overrides
KillWait=15
SlurmdTimeout=15
OverTimeLimit=0
JobRequeue=1
NodeName=n[1-{nodes}] NodeAddr=10.77.0.[1-{nodes}] CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=cpu Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=100 PriorityTier=5
PartitionName=high Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP DefMemPerCPU=100 PriorityTier=10
PartitionName=spot Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP DefMemPerCPU=100 PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={grace_s}
"""
BEGIN_HOST = """\
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/passwd /etc/passwd
if [ -e /dev/fuse ]; then mknod -m 666 /tmp/.fuse c 10 229; mount --bind /tmp/.fuse /dev/fuse; fi  # as on most hosts
"""


def problem() -> str:
    """Return why this machine cannot run the cluster; empty: it can."""
    if os.geteuid() != 0:
        return "namespaces of a Slurm cluster want root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"Slurm's programs are not installed: {', '.join(missing)}" if missing else ""


def needed() -> None:
    """Skip the test where there can be no cluster."""
    if why := problem():
        lacking("slurm", why)


class SlurmCluster:
    """A cluster that runs while the context does."""

    def __init__(self, nodes: int = 4) -> None:
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._stack = ExitStack()

    @property
    def shared(self) -> Path:
        """The user's folder, which all hosts see."""
        return self._folder / "home"

    def __enter__(self) -> Self:
        with self._stack:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-slurm-")))
            self._write_files()
            # Below /tmp or a home that only its owner may enter, the user sees what is shared and nothing else.
            hidden = ["/tmp", *(home for home in ("/root",) if not Path(home).stat().st_mode & stat.S_IXOTH)]
            log, more = self._folder / "hosts.log", BEGIN_HOST.format(folder=self._folder)
            self._hosts = self._stack.enter_context(Hosts(self._folder, hidden=hidden, more=more, log=log))
            self._begin_munge()
            for name in self.nodes:
                self._hosts.begin(name, _address(name))
            self._hosts.begin(LOGIN, LOGIN_ADDRESS)
            self._as_root(LOGIN, "slurmctld")
            for name in self.nodes:
                self._as_root(name, "slurmd", "-N", name)
            self._wait_idle()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def enter(self, host: str) -> tuple[str, ...]:
        """Return what to put before a command that runs on a host as the user."""
        home = f"HOME={self.shared}"
        path = f"PATH={sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        user = ("setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--clear-groups")
        names = (f"SLURM_CONF={self._folder}/slurm.conf", f"USER={USER}", f"LOGNAME={USER}", "LANG=C.UTF-8")
        return (*self._hosts.prefix(host), *user, "env", "-i", "-C", str(self.shared), home, path, *names)

    def run(
        self, host: str, *command: str, timeout_s: float = 60.0, check: bool = True, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host as the user, to its end."""
        done = subprocess.run(
            [*self.enter(host), *command], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{command} on {host} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def kill(self, name: str) -> None:
        """Take a host's power: all its processes end, and its link with it."""
        self._hosts.kill(name)

    def revive(self, name: str) -> None:
        """Bring a node back that was killed."""
        self._hosts.begin(name, _address(name))
        self._as_root(name, "slurmd", "-N", name)

    def processes(self, host: str) -> list[str]:
        """List the user's processes on a host."""
        found = []
        for pid in self._hosts.processes(host):
            with suppress(OSError):
                process = Path(f"/proc/{pid}")
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line and process.stat().st_uid == USER_ID:
                    found.append(line)
        return found

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for a test that failed."""
        texts = {path.name: path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("*.log"))}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())

    def _write_files(self) -> None:
        folder = self._folder
        folder.chmod(0o755)
        for name in ("home", "state", "spool"):
            (folder / name).mkdir()
        (folder / "state").chmod(0o700)
        os.chown(folder / "home", USER_ID, USER_ID)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        settings = CONFIGURATION.format(folder=folder, nodes=len(self.nodes), grace_s=GRACE_S)
        (folder / "slurm.conf").write_text(settings)
        hosts = [f"{_address(name)} {name}\n" for name in self.nodes]
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{LOGIN_ADDRESS} {LOGIN}\n{''.join(hosts)}")
        account = f"{USER}:x:{USER_ID}:{USER_ID}::{folder}/home:/bin/bash\n"
        (folder / "passwd").write_text(Path("/etc/passwd").read_text() + account)

    def _begin_munge(self) -> None:
        names = ("key-file=munge.key", "pid-file=munge.pid", "log-file=munge.log", "seed-file=munge.seed")
        files = [f"--{option}={self._folder}/{file}" for option, file in (name.split("=") for name in names)]
        socket = self._folder / "munge.socket"
        with (self._folder / "programs.log").open("ab") as log:
            munged = subprocess.Popen(
                ("munged", "--foreground", "--force", f"--socket={socket}", *files),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._stack.callback(munged.wait)
        self._stack.callback(munged.kill)
        _wait(socket.exists, "munged has no socket")

    def _as_root(self, host: str, *command: str) -> None:
        """Start a daemon, which ends with its host."""
        environment = {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf")}
        subprocess.run([*self._hosts.prefix(host), *command], env=environment, check=True, timeout=START_S)

    def _wait_idle(self) -> None:
        idle = ["idle"] * len(self.nodes)

        def ready() -> bool:
            return self.run(LOGIN, "sinfo", "-h", "-N", "-p", "cpu", "-o", "%T", check=False).stdout.split() == idle

        try:
            _wait(ready, "the nodes did not come up")
        except TimeoutError as error:
            raise TimeoutError(self.logs()) from error


def _address(node: str) -> str:
    return f"10.77.0.{node.removeprefix('n')}"


def _wait(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


def main(command: Sequence[str]) -> int:
    """Run a command on the login host of a new cluster: python tests/slurm_cluster.py sinfo."""
    with SlurmCluster() as cluster:
        return subprocess.run([*cluster.enter(LOGIN), *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
