"""The cluster file: where a service's brokers, nodes and engines run. One TOML file, checked as a whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..config import load_topology
from ..errors import ConfigError
from ..system.settings_file import checked_settings, read_toml
from ..wire.messages.base import Seconds  # noqa: TC001 - msgspec reads the annotations at run time
from ..wire.messages.jobs import Phase  # noqa: TC001 - msgspec reads the annotations at run time

Word = Annotated[str, Meta(pattern=r"^[^\s#]*\Z")]
"""A value in a line of a script."""
Line = Annotated[str, Meta(pattern=r"^[^\r\n]*\Z")]
SIGNAL_AHEAD_S = 15
"""How long before its end a node is signalled, in addition to its drain."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Resources of a Slurm job."""

    partition: Word = ""
    """Empty: the cluster's default."""
    time: Word = ""
    """The limit in Slurm's format, such as "4:00:00". Empty: the partition's."""
    cpus: Annotated[int, Meta(ge=1)] = 1
    mem: Word = ""
    """Such as "64G". Empty: the cluster's default."""
    sbatch: tuple[Line, ...] = ()
    """Further options of sbatch, such as "--account=rl"."""


class GroupSettings(Section, frozen=True):
    """Equal jobs of one host each."""

    count: Annotated[int, Meta(ge=0, le=10_000)] = 0
    max_nodes: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """Most of them at a time, including those that are about to leave. 0: twice `count`."""
    requeue: bool = False
    """A job that is out of time or preempted returns to Slurm's queue under its id. False: `prorl up` submits another
    one, which avoids Slurm's delay for requeued jobs."""
    drain_s: Seconds = 60.0
    """How long a leaving job continues its work before it returns the rest. Must be less than the `GraceTime` of a
    partition whose jobs are preempted."""
    gres: Word = ""
    """Such as "gpu:8"."""

    @property
    def limit(self) -> int:
        return self.max_nodes or 2 * self.count

    @property
    def signal_s(self) -> int:
        """How long before the end of its time Slurm signals a job, in seconds."""
        return round(self.drain_s) + SIGNAL_AHEAD_S


class NodeSettings(GroupSettings, frozen=True):
    """`[nodes]`: hosts with the topology's stage processes."""

    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    slots: dict[Phase, Annotated[int, Meta(ge=1)]] = {}
    """Slots of a node's stage processes by role. Empty: the topology's."""
    images: tuple[Line, ...] = ()
    """Image files or folders on the shared file system; each host copies them to `image_folder` before it starts."""
    image_folder: Line = f"/tmp/prorl-images-{os.getuid()}"  # noqa: S108 - made private
    """On the hosts' own disks."""


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole cluster file."""

    nodes: NodeSettings = NodeSettings()
    engines: GroupSettings = GroupSettings()
    """Hosts with the topology's engines."""
    broker_job: Section = Section(cpus=2)
    """With `brokers = "job"`."""
    brokers: Literal["here", "job"] = "here"
    """`here`: on the host where `prorl up` runs, such as the login node; `job`: in their own job."""
    address: Word = ""
    """The address at which nodes and clients reach the brokers. Empty: this host's address towards others."""
    topology: str = ""
    """A topology file for what one node runs. Empty: the defaults."""
    setup: tuple[Line, ...] = ()
    """Shell lines at the start of each job, such as "module load apptainer"."""
    python: Line = sys.executable
    """The interpreter with this package, on the hosts."""
    templates: str = ""
    """A folder of templates that replace the package's of the same names."""
    poll_s: Annotated[float, Meta(ge=1, le=3600)] = 15.0
    """Interval at which Slurm is queried for the state of the jobs."""

    def group(self, kind: Literal["nodes", "engines"]) -> GroupSettings:
        return self.nodes if kind == "nodes" else self.engines


def load_cluster_file(path: Path) -> ClusterFile:
    """Read and check a cluster file; paths in it are relative to its folder.

    Raises:
        ConfigError: it cannot be read, is not TOML, or has an unknown key or an invalid value.
    """
    cluster = checked_settings(read_toml(path), ClusterFile, str(path))
    folder = path.absolute().parent
    named = {name: str(folder / value) for name in ("topology", "templates") if (value := getattr(cluster, name))}
    cluster = msgspec.structs.replace(cluster, **named)
    _check(cluster, path)
    return cluster


def _check(cluster: ClusterFile, path: Path) -> None:
    for name, group in (("nodes", cluster.nodes), ("engines", cluster.engines)):
        if group.limit < group.count:
            raise ConfigError(f"{path}: {name}.count is {group.count}, beyond max_nodes, {group.max_nodes}")
    if cluster.templates and not Path(cluster.templates).is_dir():
        raise ConfigError(f"{path}: templates: there is no folder {cluster.templates}")
    sandbox = load_topology(Path(cluster.topology) if cluster.topology else None).sandbox
    for image in cluster.nodes.images:
        copy = f"{cluster.nodes.image_folder}/{Path(image).name}"
        if not Path(image).is_absolute() or not Path(image).exists():
            raise ConfigError(f"{path}: nodes.images: there is no {image}; name absolute paths")
        if sandbox.image == image:
            raise ConfigError(f'{path}: sandboxes would run from {image}; write image = "{copy}" in the topology')
    folders = [*sandbox.image_folders, str(Path(sandbox.image).parent)]
    if cluster.nodes.images and cluster.nodes.image_folder not in folders:
        raise ConfigError(
            f"{path}: no sandbox would find the copies of nodes.images; name {cluster.nodes.image_folder} in "
            "image_folders, or one of them as image, in [sandbox] of the topology file"
        )
