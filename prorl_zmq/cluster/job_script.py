"""Renders scripts for sbatch from a cluster file and Jinja2 templates, which a site may replace."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, TemplateError

from ..errors import ConfigError
from ..system.processes import ISOLATED
from ..wire.messages.jobs import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from .cluster_file import ClusterFile

Kind = Literal["nodes", "engines", "brokers"]
"""What a job runs."""
Group = Literal["nodes", "engines"]
GROUPS: tuple[Group, ...] = ("engines", "nodes")
"""In the order of submission: if not all fit, nodes without an engine would be useless."""


class JobScripts:
    """The scripts of one service."""

    def __init__(self, cluster: ClusterFile, folder: Path) -> None:
        own = [FileSystemLoader(cluster.templates)] if cluster.templates else []
        self._cluster = cluster
        self._folder = folder
        self._environment = Environment(
            loader=ChoiceLoader([*own, PackageLoader("prorl_zmq.cluster")]),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # noqa: S701 - a script is no HTML
        )
        self._environment.filters["quoted"] = shlex.quote

    def group(self, kind: Group, count: int) -> str:
        """Return the script of an array of nodes or engine hosts."""
        job = self._cluster.group(kind)
        flags = ["--drain-s", f"{job.drain_s:g}"]
        if kind == "nodes":
            flags.append("--no-engines")
            for role, slots in self._cluster.nodes.slots.items():
                flags += ["--slots", f"{role}={slots}"]
        else:
            flags += [part for role in Phase for part in ("--slots", f"{role}=0")]
        return self._render("group.sbatch.j2", kind, "node", flags, job, count)

    def brokers(self) -> str:
        """Return the script of the brokers' job."""
        return self._render("brokers.sbatch.j2", "brokers", "keep", ["--take-over"], self._cluster.broker_job)

    def _render(self, name: str, kind: Kind, verb: str, flags: list[str], job: Any, count: int = 1) -> str:
        prorl = [self._cluster.python, *ISOLATED, "-m", "prorl_zmq.cli", "prorl"]
        values = {
            "kind": kind,
            "count": count,
            "job": job,
            "setup": self._cluster.setup,
            "folder": str(self._folder),
            "prorl": shlex.join(prorl),
            "command": shlex.join([*prorl, verb, "--service", str(self._folder), *flags]),
            "log": f'"{self._folder}/slurm/logs/{log_name(kind, "%j" if kind == "brokers" else "%A_%a")}"',
        }
        try:
            return self._environment.get_template(name).render(values)
        except TemplateError as error:
            place = f"{self._cluster.templates or 'the package'}/{name}"
            raise ConfigError(f"the template {place} cannot be filled in: {error}") from error


def log_name(kind: Kind, name: str) -> str:
    """Return a job's log file in `slurm/logs`; `name` may be Slurm's pattern for the job's name."""
    return f"{kind}-{name}.log"
