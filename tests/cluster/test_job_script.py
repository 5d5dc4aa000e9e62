from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from prorl_zmq.cluster.cluster_file import ClusterFile, GroupSettings, NodeSettings, Section
from prorl_zmq.cluster.job_script import JobScripts
from prorl_zmq.errors import ConfigError
from prorl_zmq.wire.messages.jobs import Phase

DIR = Path("/shared/my service")
CLUSTER = ClusterFile(
    nodes=NodeSettings(
        count=4,
        partition="cpu",
        time="4:00:00",
        cpus=32,
        mem="64G",
        sbatch=("--account=rl",),
        slots={Phase.RUN: 32},
        images=("/lustre/big image.sif",),
        image_folder="/tmp/images",
    ),
    engines=GroupSettings(count=2, partition="gpu", gres="gpu:8", requeue=True, drain_s=120),
    broker_job=Section(partition="service", cpus=2),
    setup=("module load apptainer",),
    python="/shared/venv/bin/python",
)
PRORL = "/shared/venv/bin/python -P -m prorl_zmq.cli prorl"

NODE = f"{PRORL} node --service '/shared/my service'"


def options(script: str) -> list[str]:
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [option for line in lines for option in line.split(" --")]


@pytest.mark.parametrize("kind", ["nodes", "engines", "brokers"])
def test_a_script_is_bash_without_empty_lines(kind: str) -> None:
    scripts = JobScripts(CLUSTER, DIR)
    script = scripts.brokers() if kind == "brokers" else scripts.group(kind, 3)  # type: ignore[arg-type]
    assert script.startswith("#!/bin/bash\n")
    assert "" not in script.splitlines()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_nodes_are_an_array_of_jobs_of_one_host_each() -> None:
    script = JobScripts(CLUSTER, DIR).group("nodes", 3)
    assert {"--array=1-3", "--nodes=1", "ntasks=1", "cpus-per-task=32", "--partition=cpu", "--time=4:00:00"} <= {
        *options(script)
    }
    assert {"--mem=64G", "--account=rl", "--signal=USR1@75", "no-requeue"} <= {*options(script)}
    assert '--output="/shared/my service/slurm/logs/nodes-%A_%a.log"' in options(script)
    lines = script.splitlines()
    commands = [
        "module load apptainer",
        f"{PRORL} image stage '/lustre/big image.sif' --to /tmp/images || exit 1",
        f"srun --ntasks=1 --cpus-per-task=32 {NODE} --drain-s 60 --no-engines --slots run=32",
    ]
    assert [line for line in lines if line in commands] == commands
    assert "scontrol requeue" not in script


def test_engine_hosts_have_gpus_and_no_stages_and_requeue_themselves_if_asked() -> None:
    script = JobScripts(CLUSTER, DIR).group("engines", 2)
    assert {"--gres=gpu:8", "--signal=USR1@135", "requeue"} <= {*options(script)}
    assert "--slots init=0 --slots run=0 --slots eval=0 --slots score=0\n" in script
    assert "image stage" not in script
    assert '[ $code -eq 0 ] && scontrol requeue "$SLURM_JOB_ID"' in script


def test_the_brokers_job_comes_back() -> None:
    script = JobScripts(CLUSTER, DIR).brokers()
    assert {"--partition=service", "requeue"} <= {*options(script)}
    assert f"{PRORL} keep --service '/shared/my service' --take-over" in script


def test_a_site_brings_its_own_template(tmp_path: Path) -> None:
    cluster = msgspec.structs.replace(CLUSTER, templates=str(tmp_path))
    (tmp_path / "group.sbatch.j2").write_text("#!/bin/bash\n#SBATCH --qos={{ job.partition }}\n{{ command }}\n")
    script = JobScripts(cluster, DIR).group("nodes", 3)
    assert script.splitlines()[1] == "#SBATCH --qos=cpu"
    assert JobScripts(cluster, DIR).brokers() == JobScripts(CLUSTER, DIR).brokers()
    (tmp_path / "group.sbatch.j2").write_text("{{ job.colour }}")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/group.sbatch.j2 cannot be filled in: .*colour"):
        JobScripts(cluster, DIR).group("nodes", 3)
