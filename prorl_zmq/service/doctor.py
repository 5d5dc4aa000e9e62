"""`examine`: reports what this machine offers to prorl_zmq and what is missing, by trying it."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import zmq

from ..config import SandboxSettings
from ..errors import ConfigError, ProrlError
from ..inference.engine_kind import examine_kinds
from ..system.installation import how_to_install
from ..system.run_folder import run_dir_problem
from ..system.run_places import default_run_dir
from ..tools.containers.cgroups import make_cgroups
from ..tools.containers.kinds import container_class, known_kinds
from ..tools.containers.specification import Limits
from ..tools.kinds.apptainer import FUSE, NEEDS_FUSE
from ..tools.processes.process_tree import first_line
from ..wire.sockets import check_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIN_TMP_BYTES = 2 * 2**30
MIN_OPEN_FILES = 4096
DELTA_PACKAGES = ("zstandard", "xxhash")

State = Literal["ok", "missing", "optional"]


class Finding(NamedTuple):
    subject: str
    state: State
    """`missing`: the default service cannot work; `optional`: it can do less."""
    detail: str
    """What was found, and how to get what is missing."""


def examine() -> Iterator[Finding]:
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _zeromq,
        _cores,
        *(partial(_sandbox_kind, kind) for kind in known_kinds()),
        _user_namespaces,
        _sandbox_limits,
        _writable_images,
        _weight_deltas,
        _gpu,
        _run_dir,
        _loopback_ports,
        _tmp_space,
        _open_files,
    )
    for check in checks:
        yield check()
    yield from _engines()


def _python() -> Finding:
    packages = ", ".join(
        f"{name} {found}" for name in ("pyzmq", "uvloop", "msgpack", "numpy") if (found := _version(name))
    )
    return Finding("Python", "ok", f"{sys.version.split()[0]}; {packages}")


def _zeromq() -> Finding:
    curve = "with CURVE" if zmq.has("curve") else "without CURVE encryption"
    return Finding("libzmq", "ok", f"{zmq.zmq_version()}, {curve}")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("cores, memory", "ok", f"{cores} cores, {memory_gib:.0f} GiB")


def _sandbox_kind(kind: str) -> Finding:
    try:
        container = container_class(kind)
        if (problem := container.problem()) is None:
            return Finding(f"sandboxes: {kind}", "ok", container.version())
    except Exception as error:  # noqa: BLE001 - from a broken package
        problem = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return Finding(f"sandboxes: {kind}", "missing" if kind == SandboxSettings().kind else "optional", problem)


def _user_namespaces() -> Finding:
    unshare = shutil.which("unshare")
    if unshare is not None and first_line([unshare, "--user", "--map-root-user", "echo", "yes"]) == "yes":
        return Finding("user namespaces", "ok", "an unprivileged user can make them")
    detail = "refused; rootless sandboxes need them: see the sysctl kernel.unprivileged_userns_clone, or AppArmor"
    return Finding("user namespaces", "optional", detail)


def _sandbox_limits() -> Finding:
    cgroups = make_cgroups(0, Limits())
    bounded = ", ".join(sorted(cgroups.limits))
    cgroups.close()
    if bounded:
        return Finding("sandbox limits", "ok", f"by the kernel, with cgroups ({bounded}), and watched 4 times a second")
    detail = (
        "watched 4 times a second only; for limits that the kernel holds, run the service where it may make cgroups "
        "(systemd-run --user --scope -p Delegate=yes prorl serve)"
    )
    return Finding("sandbox limits", "optional", detail)


def _writable_images() -> Finding:
    if os.geteuid() == 0 or os.access(FUSE, os.R_OK | os.W_OK):
        return Finding("writable images", "ok", "jobs of task swe can change theirs, with apptainer")
    return Finding("writable images", "optional", f"no {FUSE}: {NEEDS_FUSE}")


def _weight_deltas() -> Finding:
    found = {name: _version(name) for name in DELTA_PACKAGES}
    if missing := [name for name, version in found.items() if version is None]:
        detail = f"{' and '.join(missing)} not found: {how_to_install('server')}"
        return Finding("weight deltas", "optional", detail)
    return Finding("weight deltas", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def _engines() -> Iterator[Finding]:
    for kind, problem, summary in examine_kinds():
        yield Finding(f"engine {kind}", "optional" if problem else "ok", problem or summary)


def _gpu() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    found = first_line(query) if shutil.which("nvidia-smi") else ""
    return Finding("GPU", "ok" if found else "optional", found or "none found; engines would run on the CPU")


def _run_dir() -> Finding:
    folder = default_run_dir()
    try:
        check_endpoint(f"ipc://{folder}/backend_broker")
    except ProrlError as error:
        return Finding("run folder", "missing", error.message)
    there = folder.exists() or folder.is_symlink()
    problem = run_dir_problem(folder) if there else ""
    if not problem and not os.access(folder if there else folder.parent, os.W_OK):
        problem = f"{folder} is not yours to write"
    if problem:
        return Finding("run folder", "missing", f"{problem}; set PRORL_RUN_DIR")
    return Finding("run folder", "ok", str(folder))


def _loopback_ports() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding("loopback TCP", "ok", f"a port can be bound (got {server.getsockname()[1]})")
    except OSError as error:
        return Finding("loopback TCP", "optional", f"no port can be bound: {error.strerror}; ipc endpoints still work")


def _tmp_space() -> Finding:
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if free >= MIN_TMP_BYTES:
        return Finding("space for sandboxes", "ok", f"{free / 2**30:.0f} GiB free in {folder}")
    return Finding("space for sandboxes", "missing", f"{free / 2**20:.0f} MiB free in {folder}; set run_dir elsewhere")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or hard >= MIN_OPEN_FILES:
        return Finding("open files", "ok", f"limit {soft}, which services raise as they start")
    detail = f"at most {hard}; hundreds of jobs and clients need more: see LimitNOFILE of systemd, or limits.conf"
    return Finding("open files", "optional", detail)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
