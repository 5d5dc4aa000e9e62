"""Install an npm or PyPI package, with its runtime, into a folder that is moved afterwards.

npm scripts are not run. Node is installed too, so neither sandboxes nor the host's npm have to provide it. Scripts of a
virtual environment contain its old path, so adapters start them with `bin/python`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError, SandboxFailed
from ..tools.images.program import run_program
from .harness.adapter import Npm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .harness.adapter import PyPI

ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
"""npm's names of architectures, by the kernel's."""
NEWEST_PYTHON = 20
PROBE = "import sys, venv, ensurepip; print(*sys.version_info[:3], sys.base_prefix)"
PROBE_LIMIT_S = 10.0
NPM_FLAGS = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
PIP_FLAGS = ("--disable-pip-version-check", "--no-input", "--progress-bar=off", "--no-warn-script-location")


class Python(NamedTuple):
    version: tuple[int, ...]
    """Three numbers."""
    prefix: str
    program: str


class PackageInstaller:
    """Installs one package.

    Args:
        package: the package to install.
        version: its version.
        timeout_s: limit of each program that is run.
        heard: called with each line that these print.

    Raises:
        ConfigError: this machine lacks an installer.
    """

    def __init__(self, package: Npm | PyPI, version: str, timeout_s: float, heard: Callable[[str], None]) -> None:
        self._package = package
        self._version = version
        self._timeout_s = timeout_s
        self._heard = heard
        self._npm = self._python = ""
        if isinstance(package, Npm):
            self._npm = _find_npm(package.package)
            self._architecture = _architecture(package.package)
        else:
            found = find_python(package.python, package.newest)
            self._python, self._base = found.program, found.prefix

    def install(self, folder: Path, lock: int) -> str:
        """Install it into an empty folder; return the folder of the Python that it needs, or nothing.

        Started programs inherit `lock`.

        Raises:
            SandboxFailed: npm or pip failed, or the package does not match the adapter.
        """
        package = self._package
        if isinstance(package, Npm):
            self._install_npm(package, folder, lock)
            return ""
        named = (f"{package.package}=={self._version}",) if package.package else ()
        requirements = (*named, *package.also)
        pip = () if requirements else ("--without-pip",)
        self._run((self._python, "-m", "venv", *pip, str(folder)), folder, lock)
        if not requirements:
            return self._base
        install = (str(folder / "bin" / "python"), "-m", "pip", "install", *PIP_FLAGS)
        self._run((*install, *(each.format(version=self._version) for each in requirements)), folder, lock)
        return self._base

    def _install_npm(self, package: Npm, folder: Path, lock: int) -> None:
        node = f"node-linux-{self._architecture}"
        wanted = [f"{package.package}@{self._version}", *([f"{node}@{package.node}"] if package.node else [])]
        self._run((self._npm, "install", *NPM_FLAGS, "--prefix", str(folder), *wanted), folder, lock)
        (folder / "bin").mkdir()
        self._link(folder, package.command, package.program)
        for each in package.executables:
            self._program(folder, each).chmod(0o755)
        if package.node:
            self._link(folder, "node", "node-linux-{arch}/bin/node")

    def _link(self, folder: Path, command: str, pattern: str) -> None:
        program = self._program(folder, pattern)
        (folder / "bin" / command).symlink_to(os.path.relpath(program, folder / "bin"))

    def _program(self, folder: Path, pattern: str) -> Path:
        pattern = pattern.format(arch=self._architecture)
        found = sorted((folder / "node_modules").glob(pattern))
        if not found:
            raise SandboxFailed(
                f"{self._package.package} {self._version} has no {pattern}; version {self._package.version} was tried"
            )
        return found[0]

    def _run(self, argv: tuple[str, ...], folder: Path, lock: int) -> None:
        run_program(
            argv, folder=folder, environment=os.environ, timeout_s=self._timeout_s, heard=self._heard, inherited=(lock,)
        )


def find_python(least: tuple[int, int], newest: tuple[int, ...] = ()) -> Python:
    """Return this machine's Python: this one, or the oldest that fits; one below /usr only as a last resort.

    Sandboxes with an image do not show /usr of the host.

    Raises:
        ConfigError: there is none.
    """

    def fits(python: Python | None) -> bool:
        return (
            python is not None and python.version >= least and (not newest or python.version[: len(newest)] <= newest)
        )

    own = _probe(sys.executable)
    if own is not None and fits(own) and not own.prefix.startswith("/usr"):
        return own
    found = [each for each in {own, *map(_probe, _python_programs())} if each is not None and fits(each)]
    if not found:
        oldest = ".".join(map(str, least))
        wanted = f"Python {oldest} to {'.'.join(map(str, newest))}" if newest else f"Python {oldest} or newer"
        raise ConfigError(
            f"this machine has no {wanted} with venv; install one (pyenv, or the Debian packages "
            f"python{oldest} and python{oldest}-venv)",
            key="harness",
        )
    return min(found, key=lambda each: (each.prefix.startswith("/usr"), each))


def _python_programs() -> Iterator[str]:
    yield from (f"python3.{minor}" for minor in range(NEWEST_PYTHON))
    pyenv = Path(os.environ.get("PYENV_ROOT", "") or Path("~/.pyenv").expanduser())
    yield from map(str, pyenv.glob("versions/3.*/bin/python"))


def _probe(program: str) -> Python | None:
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run([program, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor, patch, prefix = done.stdout.strip().split(" ", 3)
    return Python((int(major), int(minor), int(patch)), prefix, f"{prefix}/bin/python{major}.{minor}")


def _find_npm(package: str) -> str:
    if (npm := shutil.which("npm")) is None:
        raise ConfigError(
            f"npm, which installs {package}, is not on this machine; install Node.js with npm (the Debian package npm, "
            "or nodejs.org); sandboxes need neither",
            key="harness",
        )
    return npm


def _architecture(package: str) -> str:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise ConfigError(f"{package} has programs for {known}; this machine is {machine}", key="harness")
    return ARCHITECTURES[machine]
