from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prorl_zmq.cluster.node_table import NodeRecord, node_rows, read_records
from prorl_zmq.cluster.slurm import Allocation
from prorl_zmq.wire.messages.front_door import StageStatus
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from pathlib import Path


def stages(node: str, busy: int) -> list[StageStatus]:
    return [StageStatus(f"{node}-{role}", role, node, 8, busy) for role in Phase]


def test_slurm_nodes_and_brokers_are_joined() -> None:
    jobs = [
        Allocation("104_1", "105", "104", "RUNNING", "n1", 600.0, "None"),
        Allocation("104_2", "106", "104", "RUNNING", "n2", 600.0, "None"),
        Allocation("104_3", "104", "104", "PENDING", "", 3600.0, "Resources"),
    ]
    records = [
        NodeRecord("n1-105_1", "n1", "105_1", time.time() - 60),
        NodeRecord("n9-99_1", "n9", "99_1", 1.0),  # it was killed before it could remove its file
        NodeRecord("here-x", "here"),
    ]
    rows = node_rows(jobs, records, [*stages("n1-105_1", 2), *stages("here-x", 1)], {"104_2"})
    assert [(row.node, row.host, row.job, row.state, row.slots, row.held) for row in rows] == [
        ("n1-105_1", "n1", "104_1", "running", "8/8/8", 6),
        ("", "n2", "104_2", "leaving", "", None),
        ("", "", "104_3", "pending (Resources)", "", None),
        ("here-x", "here", "", "no job", "8/8/8", 3),
    ]
    assert rows[0].left_s == 600.0
    assert rows[0].age_s is not None
    assert 60 <= rows[0].age_s < 90
    assert rows[1].age_s is None


def test_a_file_that_is_half_there_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"name": "a", "host": "n1", "pid": 7}')
    (tmp_path / "b.json").write_text('{"name": "b",')
    assert read_records(tmp_path) == [NodeRecord("a", "n1")]
    assert read_records(tmp_path / "none") == []
