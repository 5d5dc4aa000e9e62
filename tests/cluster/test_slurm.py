from __future__ import annotations

import pytest

from prorl_zmq.cluster.slurm import Allocation, Slurm, parse_sbatch, parse_squeue
from prorl_zmq.errors import ConfigError, SlurmFailed

SQUEUE = """\
104_1|105|104|RUNNING|n1|1:59:58|None
104_2|104|104|PENDING||2:00:00|Resources
107|107|107|RUNNING|n3|3-01:00:05|None
108_1|108|108|RUNNING|n4|UNLIMITED|None
109_9|109|109|PENDING||INVALID|ReqNodeNotAvail, UnavailableNodes:n[1|4]
"""


def test_what_squeue_prints_is_read() -> None:
    first, waiting, days, unlimited, odd = parse_squeue(SQUEUE)
    assert first == Allocation("104_1", "105", "104", "RUNNING", "n1", 7198.0, "None")
    assert (first.is_running, waiting.is_running, waiting.host) == (True, False, "")
    assert days.left_s == 3 * 86_400 + 3605
    assert (unlimited.left_s, odd.left_s) == (None, None)
    assert odd.reason == "ReqNodeNotAvail, UnavailableNodes:n[1|4]"
    assert parse_squeue("slurm_load_jobs error\n\n") == []


def test_the_job_id_is_what_sbatch_prints_last() -> None:
    assert parse_sbatch("104\n") == "104"
    assert parse_sbatch("sbatch: your quota is low\n104;cluster\n") == "104"
    with pytest.raises(SlurmFailed, match="no job id, but 'welcome"):
        parse_sbatch("welcome\n")


def test_a_host_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no sbatch, squeue, scancel, scontrol: .* login node"):
        Slurm()
