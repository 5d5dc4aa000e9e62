"""`prorl up` and its kin on a real Slurm of two hosts, and what is wrong there said by name."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from documents import ROOT, SLURM_COMMANDS, blocks
from slurm_cluster import LOGIN, SlurmCluster, needed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.xdist_group("one Slurm"), pytest.mark.timeout(300)]
TOPOLOGY = '[sandbox]\nkind = "process"\n'
NODES = '[nodes]\ncount = {count}\ncpus = 8\nmem = "1G"\ntime = "10"\ndrain_s = 5\n'
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    needed()
    with SlurmCluster(nodes=2) as made:
        (made.shared / "topology.toml").write_text(TOPOLOGY)
        yield made
        assert {host: made.processes(host) for host in (LOGIN, *made.nodes)} == {LOGIN: [], "n1": [], "n2": []}


def write(cluster: SlurmCluster, text: str, count: int = 1, before: str = "") -> None:
    content = f'topology = "topology.toml"\npoll_s = 1\n{before}\n{NODES.format(count=count)}{text}'
    (cluster.shared / "cluster.toml").write_text(content)


def bash(cluster: SlurmCluster, line: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return cluster.run(LOGIN, "bash", "-c", line, check=check, timeout_s=120)


def up(cluster: SlurmCluster, name: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return bash(cluster, f"prorl up --slurm cluster.toml --service {name}", check=check)


def queue(cluster: SlurmCluster) -> list[list[str]]:
    rows = bash(cluster, "squeue -h -r -o '%i %T %N %r'").stdout.splitlines()
    return [row.split(maxsplit=3) for row in rows]


def wait(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.2)


# What is wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.proof(quick=True)
def test_slurm_says_itself_what_is_wrong_with_a_script(cluster: SlurmCluster) -> None:
    write(cluster, 'partition = "nowhere"\n')
    done = up(cluster, "refused", check=False)
    assert done.returncode == 1
    assert "sbatch failed: sbatch: error: invalid partition specified: nowhere" in done.stderr
    assert queue(cluster) == []
    assert cluster.processes(LOGIN) == []


def test_a_host_without_slurm_says_so(cluster: SlurmCluster) -> None:
    write(cluster, "")
    done = bash(
        cluster, "export PATH=$(dirname $(which prorl)); prorl up --slurm cluster.toml --service none", check=False
    )
    assert done.returncode == 2
    assert "this host has no sbatch, squeue, scancel, scontrol" in done.stderr
    assert not (cluster.shared / "none").exists()


@pytest.mark.proof(quick=True)
def test_a_folder_that_the_hosts_do_not_see_is_named(cluster: SlurmCluster) -> None:
    write(cluster, "")
    done = up(cluster, "/tmp/only-here", check=False)  # each host has a /tmp of its own
    assert done.returncode == 1
    assert "ended without a log in /tmp/only-here/slurm/logs" in done.stderr
    assert "do the hosts see this folder?" in done.stderr
    assert queue(cluster) == []


@pytest.mark.proof(quick=True)
def test_the_log_of_a_node_that_could_not_start_is_shown(cluster: SlurmCluster) -> None:
    write(cluster, "", before='setup = ["module load apptainer || exit 1"]')
    done = up(cluster, "broken", check=False)
    assert done.returncode == 1
    assert "module: command not found" in done.stderr
    assert queue(cluster) == []


# What works ---------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_the_commands_of_the_page(cluster: SlurmCluster) -> None:
    """Four nodes on two hosts: up does not wait for all; nothing is left in the end."""
    (table,) = [block for block in blocks("toml") if "max_nodes" in block]
    (cluster.shared / "cluster.toml").write_text(
        table.replace("[nodes]", "poll_s = 1\n[nodes]", 1).replace("= 60 ", "= 5 ")
    )
    (example,) = [block for block in blocks("python") if "run-1" in block]
    dry, start, nodes, scale, drain, down = SLURM_COMMANDS
    assert bash(cluster, dry).stdout.count("#!/bin/bash") == 2
    assert queue(cluster) == []
    started = bash(cluster, start)
    assert "of 4 are still to come" in started.stderr
    again = bash(cluster, start, check=False)
    assert again.returncode == 2
    assert "run-1 is up (process" in again.stderr
    done = cluster.run(LOGIN, "python", "-c", example)
    assert done.stdout.splitlines() == ["completed 0.0"] * 8
    table = bash(cluster, nodes).stdout
    assert "pending (Resources)" in table
    assert "4 nodes and 1 engine hosts are wanted" in table
    assert "2 nodes are wanted" in bash(cluster, scale).stdout
    wait(lambda: len(queue(cluster)) == 3)
    told = bash(cluster, drain).stdout
    assert told.count(" on n1 leaves") == 1
    leaving = told.partition(" ")[0]  # by its name: what waited takes its place on n1 at once
    wait(lambda: all(row[0] != leaving for row in queue(cluster)))
    bash(cluster, down)
    assert queue(cluster) == []


@pytest.mark.proof
def test_a_service_goes_on_when_the_process_that_kept_it_was_killed(cluster: SlurmCluster) -> None:
    write(cluster, "")
    up(cluster, "killed")
    before = queue(cluster)
    bash(cluster, "kill -9 $(cut -d ' ' -f 2 killed/slurm/keeper)")
    up(cluster, "killed")
    assert queue(cluster) == before
    bash(cluster, "prorl down --service killed")
    assert queue(cluster) == []


@pytest.mark.proof
def test_brokers_in_a_job_are_found_again_where_they_come_back(cluster: SlurmCluster) -> None:
    before = 'brokers = "job"\n'
    write(cluster, '[broker_job]\ncpus = 1\nmem = "1G"\n', before=before)
    (cluster.shared / "cluster.toml").write_text(
        (cluster.shared / "cluster.toml").read_text().replace("cpus = 8", "cpus = 4")
    )
    up(cluster, "moved")
    again = up(cluster, "moved", check=False)
    assert "moved is up (job" in again.stderr
    brokers = bash(cluster, "squeue -h -n prorl-brokers -o %i").stdout.strip()
    began = (cluster.shared / "moved" / "brokers" / "rollout-0.json").read_bytes()
    bash(cluster, f"scontrol requeue {brokers}")
    wait(lambda: (cluster.shared / "moved" / "brokers" / "rollout-0.json").read_bytes() != began)
    code = (
        "import prorl_zmq as p\nwith p.RolloutClient(service='moved') as c:\n  while len(c.status().stages) < 3: pass"
    )
    cluster.run(LOGIN, "python", "-c", code)
    bash(cluster, "prorl down --service moved")
    assert queue(cluster) == []


@pytest.mark.proof
def test_jobs_of_one_attempt_outlive_preemption_and_all_outlive_a_host(tmp_path: Path) -> None:
    """bench/slurm.py in short; the time limit, scaling and requeue are in its full run."""
    needed()
    command = [sys.executable, str(ROOT / "bench" / "slurm.py"), "--quick", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows if row["holds"] is False and row["unit"] != "s"] == [], done.stdout
    assert sum(row["value"] for row in rows if row["name"].startswith("jobs, one attempt")) >= 20
