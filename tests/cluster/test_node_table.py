from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_zmq.cluster.node_table import NodeRecord, read_records, with_slurm
from prorl_zmq.cluster.slurm import Allocation
from prorl_zmq.service.node_rows import NodeRow

if TYPE_CHECKING:
    from pathlib import Path


def test_slurm_nodes_and_brokers_are_joined() -> None:
    jobs = [
        Allocation("104_1", "105", "104", "RUNNING", "n1", 600.0, "None"),
        Allocation("104_2", "106", "104", "RUNNING", "n2", 600.0, "None"),
        Allocation("104_3", "104", "104", "PENDING", "", 3600.0, "Resources"),
    ]
    records = [
        NodeRecord("n1-105_1", "n1", "105_1"),
        NodeRecord("n9-99_1", "n9", "99_1"),  # it was killed before it could remove its file
        NodeRecord("here-x", "here"),
    ]
    known = [NodeRow(node="here-x", host="here", state="ready"), NodeRow(node="n1-105_1", state="silent", held=6)]
    rows = with_slurm(known, jobs, records, {"104_2"})
    assert [(row.node, row.host, row.slurm_job, row.slurm_state, row.state, row.held) for row in rows] == [
        ("n1-105_1", "n1", "104_1", "running", "silent", 6),
        ("", "n2", "104_2", "leaving", "", 0),
        ("", "", "104_3", "pending (Resources)", "", 0),
        ("here-x", "here", "", "", "ready", 0),
    ]
    assert [row.left_s for row in rows] == [600.0, 600.0, 3600.0, None]


def test_a_file_that_is_half_there_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"name": "a", "host": "n1", "pid": 7}')
    (tmp_path / "b.json").write_text('{"name": "b",')
    assert read_records(tmp_path) == [NodeRecord("a", "n1")]
    assert read_records(tmp_path / "none") == []
