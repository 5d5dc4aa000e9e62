from __future__ import annotations

from prorl_zmq.cluster.node_table import with_slurm
from prorl_zmq.cluster.slurm import Allocation
from prorl_zmq.service.node_rows import NodeRow


def test_slurm_nodes_and_brokers_are_joined() -> None:
    jobs = [
        Allocation("104_1", "105", "104", "RUNNING", "n1", 600.0, "None"),
        Allocation("104_2", "106", "104", "RUNNING", "n2", 600.0, "None"),
        Allocation("104_3", "104", "104", "PENDING", "", 3600.0, "Resources"),
    ]
    known = [
        NodeRow(node="here-x", host="here", state="ready"),
        NodeRow(node="n1-105_1", allocation="105_1", state="silent", held=6),
    ]
    rows = with_slurm(known, jobs, {"104_2"})
    assert [(row.node, row.host, row.slurm_job, row.slurm_state, row.state, row.held) for row in rows] == [
        ("n1-105_1", "n1", "104_1", "running", "silent", 6),
        ("", "n2", "104_2", "leaving", "", 0),
        ("", "", "104_3", "pending (Resources)", "", 0),
        ("here-x", "here", "", "", "ready", 0),
    ]
    assert [row.left_s for row in rows] == [600.0, 600.0, 3600.0, None]
