from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_zmq.cluster.cluster_file import ClusterFile, NodeSettings
from prorl_zmq.cluster.cluster_folder import ClusterFolder, Wanted
from prorl_zmq.errors import ConfigError, EndpointInUse

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder(tmp_path)
    made.begin(ClusterFile(nodes=NodeSettings(count=3)))
    return made


def test_what_was_begun_is_read_by_another_process(folder: ClusterFolder) -> None:
    again = ClusterFolder(folder.service)
    assert again.cluster().nodes.count == 3
    assert again.wanted() == Wanted(nodes=3)


def test_no_change_of_another_process_is_lost(folder: ClusterFolder) -> None:
    def more() -> None:
        for _ in range(50):
            ClusterFolder(folder.service).change(lambda old: msgspec.structs.replace(old, nodes=old.nodes + 1))

    # Locks of this kind are a process's: a thread would not be kept out.
    code = (
        "import sys, msgspec; from pathlib import Path; from prorl_zmq.cluster.cluster_folder import ClusterFolder\n"
        "for _ in range(50): ClusterFolder(Path(sys.argv[1])).change("
        "lambda old: msgspec.structs.replace(old, nodes=old.nodes + 1))"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code, str(folder.service)]) as other:
        thread = threading.Thread(target=more)
        thread.start()
        thread.join()
    assert other.returncode == 0
    assert folder.wanted().nodes == 103


def test_jobs_are_known_by_what_they_run(folder: ClusterFolder) -> None:
    folder.note_job("104", "nodes")
    folder.note_job("105", "brokers")
    assert folder.jobs() == {"104": "nodes", "105": "brokers"}
    folder.forget_job("105")
    folder.forget_job("105")
    assert folder.jobs() == {"104": "nodes"}


def test_a_keeper_is_known_while_it_lives(folder: ClusterFolder) -> None:
    other = ClusterFolder(folder.service)
    assert other.keeper() == ""
    with folder.kept() as held:
        assert other.keeper().startswith(f"process {os.getpid()} on ")
        with pytest.raises(EndpointInUse), other.kept():
            pass
        with other.kept(take_over=True):
            assert held.is_lost()
    assert other.keeper() == ""


def test_a_service_without_a_cluster_says_how_its_nodes_start_and_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not started with `prorl up --slurm FILE`: .* SIGTERM or Ctrl-C drains"):
        ClusterFolder(tmp_path).wanted()


def test_a_damaged_file_is_named(folder: ClusterFolder) -> None:
    (folder.path / "wanted.json").write_text("{")
    with pytest.raises(ConfigError, match=r"wanted.json is damaged"):
        folder.wanted()
