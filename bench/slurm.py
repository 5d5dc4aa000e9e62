"""A service on a real Slurm, from `prorl up` to `prorl down`: what its users and its hosts live through in a day.

Slurm's controller and four hosts are namespaces of this machine (tests/slurm_cluster.py). While a trainer on the login
host keeps jobs going, the service is scaled, a node is preempted, and nodes reach their time limits: jobs that have
only one attempt do not notice. Then a host loses its power: each job still ends exactly once. A second life has
`requeue = true`. After each life nothing may be left on any host.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness import Incomplete, Row, main

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rootfs import tiny_root_filesystem
from slurm_cluster import LOGIN, SlurmCluster, problem

from prorl_zmq.cluster.slurm import SQUEUE_FORMAT, Allocation, parse_squeue
from prorl_zmq.tools.containers.kinds import problem_with
from prorl_zmq.tools.images.image_store import ImageStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TARGET_S = 20.0
LIMIT_S = 300.0
"""How long anything may take that is waited for."""
IN_FLIGHT = 48
CLUSTER = """
topology = "topology.toml"
poll_s = 2
[nodes]
count = {nodes}
max_nodes = 8
partition = "spot"
time = "{minutes}"
cpus = 6
mem = "2G"
drain_s = 10
requeue = {requeue}
{images}
[engines]
count = 1
partition = "high"
cpus = 2
mem = "1G"
"""
TOPOLOGY = """
[sandbox]
{sandbox}
[[stage]]
role = "init"
slots = 4
[[stage]]
role = "run"
slots = 8
[[stage]]
role = "eval"
slots = 16
[[backends]]
"""


class Account(NamedTuple):
    """What became of the jobs of one trainer."""

    submitted: int
    lost: int
    double: int
    wrong: int
    """Not completed, or with another reward than its own."""
    restarted: int
    """Returned by a node and started on another one."""


class Life:
    """A service on the cluster, and its user's commands."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.service = cluster.shared / "service"
        self._client = ""

    def prorl(self, *arguments: str) -> str:
        """Run a command on the login host."""
        command = ("prorl", *arguments, "--service", str(self.service))
        return self.cluster.run(LOGIN, *command, timeout_s=LIMIT_S).stdout

    def allocations(self, job_name: str = "prorl-nodes") -> list[Allocation]:
        command = ("squeue", "-h", "-r", "-n", job_name, "-o", SQUEUE_FORMAT)
        if (done := self.cluster.run(LOGIN, *command, check=False)).returncode:
            done = self.cluster.run(LOGIN, *command)  # a busy controller closes connections: squeue ends by SIGPIPE
        return parse_squeue(done.stdout)

    def running(self) -> list[Allocation]:
        return [one for one in self.allocations() if one.is_running]

    def wait(self, what: str, there: Callable[[], bool]) -> None:
        """Wait until something is so."""
        until = time.monotonic() + LIMIT_S
        while not there():
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not within {LIMIT_S:g} s\n{self.prorl('nodes')}\n{self.logs()}")
            time.sleep(0.5)

    def scale(self, nodes: int) -> None:
        """Have so many nodes, and wait until they have joined or left."""
        self.prorl("scale", str(nodes))
        self.wait(f"{nodes} nodes", lambda: len(self.allocations()) == len(self.running()) == nodes)
        self.wait(f"{nodes} nodes joined", lambda: self.joined() == nodes)

    def joined(self) -> int:
        code = "import sys, prorl_zmq as p\nwith p.RolloutClient(service=sys.argv[1]) as c: s = c.status().stages\n"
        code += "print(len({one.node for one in s}))"
        return int(self.cluster.run(LOGIN, "python", "-c", code, str(self.service)).stdout)

    def preempt(self, host: str) -> None:
        """Have a job of a higher priority take a host for some seconds."""
        options = ("-p", "high", "-w", host, "--cpus-per-task=6", "--time=1", "-J", "urgent", "-o", "/dev/null")
        self.cluster.run(LOGIN, "sbatch", *options, "--wrap", "sleep 5")
        self.wait("the urgent job ran", lambda: not self.allocations("urgent"))

    @contextmanager
    def trainer(self, name: str, least: int, *, attempts: int, in_flight: int = IN_FLIGHT) -> Iterator[list[Account]]:
        """Keep jobs going while the block runs; afterwards the list has what became of them."""
        script = str(Path(__file__).with_name("slurm_client.py"))
        command = ("python", "-u", script, str(self.service), name, str(least), str(in_flight), str(attempts))
        found: list[Account] = []
        with subprocess.Popen([*self.cluster.enter(LOGIN), *command], stdout=subprocess.PIPE, text=True) as client:
            try:
                self.wait("the first result", lambda: self._results(name) != [])
                yield found
                (self.cluster.shared / f"{name}.stop").touch()
                out, _ = client.communicate(timeout=LIMIT_S + least)
            finally:
                client.kill()
        results = self._results(name)
        times = Counter(result["job_id"] for result in results)
        wrong = [result for result in results if result["outcome"] != "completed" or not result["right"]]
        for result in wrong[:5]:
            print(result, file=sys.stderr)
        restarted = sum(result["attempt"] > 1 for result in results)
        submitted = int(out)
        found.append(Account(submitted, submitted - len(times), len(results) - len(times), len(wrong), restarted))

    def _results(self, name: str) -> list[dict[str, str | int | bool]]:
        path = self.cluster.shared / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self) -> list[str]:
        """List what is on the hosts and in Slurm after `prorl down`."""
        found = [f"job {one.name}" for name in ("prorl-nodes", "prorl-engines") for one in self.allocations(name)]
        for host in (LOGIN, *self.cluster.nodes):
            found += [f"process on {host}: {words}" for words in self.cluster.processes(host)]
            listed = self.cluster.run(host, "find", "/tmp", "-path", "/tmp/prorl-*/sandboxes/*", check=False).stdout
            found += [f"sandbox on {host}: {path}" for path in listed.splitlines()]
        return found

    def logs(self) -> str:
        """Return the ends of the service's logs."""
        paths = sorted((self.service / "slurm" / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in paths)


def prepare(cluster: SlurmCluster, *, nodes: int, minutes: int, requeue: bool, apptainer: bool) -> None:
    """Write the cluster file and the topology; make the image that is staged."""
    image = cluster.shared / "tools.sif"
    if apptainer and not image.exists():
        with_image = ImageStore(cluster.shared.parent / "store")
        built = with_image.build(str(tiny_root_filesystem(cluster.shared.parent / "rootfs")), "tools", format="sif")
        shutil.copy(built.image.path, image)
        image.chmod(0o644)
    copy = "/tmp/prorl-images/tools.sif"
    images = f'images = ["{image}"]\nimage_folder = "/tmp/prorl-images"' if apptainer else ""
    sandbox = f'kind = "apptainer"\nimage = "{copy}"' if apptainer else 'kind = "bubblewrap"'
    text = CLUSTER.format(nodes=nodes, minutes=minutes, requeue=str(requeue).lower(), images=images)
    (cluster.shared / "cluster.toml").write_text(text)
    (cluster.shared / "topology.toml").write_text(TOPOLOGY.format(sandbox=sandbox))


def state_of(cluster: SlurmCluster, raw_id: str) -> dict[str, str]:
    """Return what Slurm says of a job, ended or not."""
    text = cluster.run(LOGIN, "scontrol", "show", "job", raw_id).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def first_life(life: Life, least: int, *, quick: bool) -> list[Row]:
    """Scale, preempt, reach a time limit, lose a host's power; end."""
    started = time.monotonic()
    life.prorl("up", "--slurm", "cluster.toml")
    with life.trainer("first", 1, attempts=1, in_flight=1):
        first_s = time.monotonic() - started
    rows = [
        Row(
            "one command to the first job, 4 hosts", first_s, "s", target=f"≤ {TARGET_S:g} s", holds=first_s <= TARGET_S
        )
    ]
    with life.trainer("orderly", least, attempts=1) as orderly:
        for nodes in () if quick else (2, 4, 1, 4):
            life.scale(nodes)
        chosen = life.running()[0]
        life.preempt(chosen.host)
        preempted = state_of(life.cluster, chosen.raw_id)
        life.wait("a replacement", lambda: len(life.running()) == 4)
        ended = [] if quick else [out_of_time(life)]
    ended = [preempted["JobState"], *ended]
    print(f"nodes that were preempted or out of time ended as {', '.join(ended)}", file=sys.stderr)
    good = set(ended) == {"COMPLETED"}
    rows.append(
        Row("nodes that left in order at preemption and time limit", float(good), "of 1", target="all", holds=good)
    )
    rows += account_rows("one attempt each, through all that", orderly[0])
    with life.trainer("power", 1, attempts=3) as power:
        victim = life.running()[0]
        life.cluster.kill(victim.host)
        life.wait(
            "Slurm gave the dead host up", lambda: victim.raw_id not in {one.raw_id for one in life.allocations()}
        )
        life.cluster.revive(victim.host)
        life.wait("a replacement", lambda: len(life.running()) == 4)
    rows += account_rows("a host without power", power[0])
    life.prorl("down")
    left = life.left()
    print("\n".join(left), file=sys.stderr)
    return [*rows, Row("jobs, processes and sandboxes left", len(left), "left", target="0", holds=not left)]


def out_of_time(life: Life) -> str:
    """Wait until a node has reached its time limit; return how Slurm saw its job end."""
    oldest = min(life.running(), key=lambda one: one.left_s or 0.0)
    life.wait("a time limit", lambda: oldest.raw_id not in {one.raw_id for one in life.running()})
    life.wait("a successor", lambda: len(life.running()) == 4)
    return state_of(life.cluster, oldest.raw_id)["JobState"]


def second_life(life: Life) -> list[Row]:
    """Preempt a node that requeues itself, on the same folder."""
    life.prorl("up", "--slurm", "cluster.toml")
    with life.trainer("requeued", 1, attempts=1) as requeued:
        life.wait("2 nodes", lambda: life.joined() == 2)
        chosen = life.running()[0]
        life.preempt(chosen.host)
        life.wait("the same job again", lambda: chosen.raw_id in {one.raw_id for one in life.running()})
        restarts = int(state_of(life.cluster, chosen.raw_id)["Restarts"])
        life.wait("2 nodes again", lambda: life.joined() == 2)
    life.prorl("down")
    left = life.left()
    print("\n".join(left), file=sys.stderr)
    return [
        Row("times that a preempted node was requeued", restarts, "times", target="1", holds=restarts == 1),
        *account_rows("requeued", requeued[0]),
        Row("left after the second life", len(left), "left", target="0", holds=not left),
    ]


def account_rows(name: str, account: Account) -> list[Row]:
    """Say what became of the jobs of one trainer."""
    bad = account.lost + account.double + account.wrong
    return [
        Row(f"jobs, {name}", account.submitted, "jobs"),
        Row("of these given back and restarted elsewhere", account.restarted, "jobs"),
        Row("of these lost, double or wrong", bad, "jobs", target="0", holds=bad == 0),
    ]


def measure(quick: bool) -> list[Row]:
    """Run both lives."""
    if why := problem():
        raise Incomplete(f"{why}: run as root, with Debian's slurmctld, slurmd, slurm-client and munge", [])
    apptainer = not problem_with("apptainer")
    with SlurmCluster() as cluster:
        life = Life(cluster)
        prepare(cluster, nodes=4, minutes=10 if quick else 4, requeue=False, apptainer=apptainer)
        rows = first_life(life, 20 if quick else 1000, quick=quick)
        if not quick:
            prepare(cluster, nodes=2, minutes=10, requeue=True, apptainer=apptainer)
            rows += second_life(life)
    if not apptainer:
        raise Incomplete("the sandboxes were bubblewrap's: Apptainer is not installed", rows)
    return rows


if __name__ == "__main__":
    main("slurm", __doc__.splitlines()[0], measure)
