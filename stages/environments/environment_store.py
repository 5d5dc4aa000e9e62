"""Environments on this machine's disk, as `PackageStore` keeps them, and which ones are known by name.

An environment that is not known by name is installed from requirements of pip, with an adapter: `module:Class`,
`file.py:Class`, or the entry point of its name in the group `prorl_zmq.environments` of an installed package.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ConfigError, EnvironmentFailed, SandboxFailed
from ..harness.adapter import PyPI
from ..package_store import INSTALL_LIMIT_S, WAIT_LIMIT_S, PackageStore
from .environment_template import EnvironmentPlace, stamp_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..package_store import Installation

ENTRY_POINT_GROUP = "prorl_zmq.environments"
ADAPTERS = Path(__file__).with_name("adapters")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
PLACE = re.compile(r"[^:]+:[A-Za-z_][\w.]*")
OWN = "own"
"""The version of an environment that is not known by name."""
PROBE = (
    "import sys; from importlib.metadata import entry_points; "
    f"print(*(one.value for one in entry_points(group={ENTRY_POINT_GROUP!r}, name=sys.argv[1])))"
)
PROBE_LIMIT_S = 60.0


class KnownEnvironment(NamedTuple):
    package: PyPI | None
    """None: its adapter needs no package, and runs on the service's own interpreter."""
    adapter: str
    """`module:name` in its package, or `file.py:Class` in the folder of adapters."""


KNOWN = {
    # Its metadata says <=3.12, which excludes the patches of 3.12.
    "gem": KnownEnvironment(PyPI("gem-llm", "0.1.0", python=(3, 10), newest=(3, 12, 0)), "gem:make"),
    "nemo-gym": KnownEnvironment(None, "nemo_gym.py:NemoGym"),
    "openenv": KnownEnvironment(None, "openenv.py:OpenEnv"),
    "reasoning-gym": KnownEnvironment(PyPI("reasoning-gym", "0.1.25", python=(3, 10)), "reasoning_gym.py:ReasoningGym"),
    "textarena": KnownEnvironment(PyPI("textarena", "0.7.4", python=(3, 10)), "textarena.py:TextArena"),
    "verifiers": KnownEnvironment(PyPI("verifiers", "0.4.0", also=("uv",)), "verifiers.py:Verifiers"),
    "verifiers-v0": KnownEnvironment(PyPI("verifiers", "0.1.14", python=(3, 10)), "verifiers_v0.py:VerifiersV0"),
}
"""The environments that have an adapter here, by name."""


class EnvironmentStore(PackageStore):
    """A folder of environments."""

    kind, command, variable, default_folder = "environment", "prorl env", "PRORL_ENVIRONMENTS", "environments"

    def _package(self, name: str, version: str) -> PyPI:
        del version
        if not NAME.fullmatch(name):
            allowed = "lower-case letters, digits, and after the first also . _ -"
            raise ConfigError(f"{name!r} cannot be the name of an environment; allowed are {allowed}", key=self.kind)
        if (known := KNOWN.get(name)) is None:
            return PyPI("", OWN)
        if known.package is None:
            raise ConfigError(f"environment {name} needs no package: nothing is installed for it", key=self.kind)
        return known.package

    def install(
        self,
        name: str,
        *,
        say: Callable[[str], None],
        heard: Callable[[str], None],
        wait_s: float = WAIT_LIMIT_S,
        timeout_s: float = INSTALL_LIMIT_S,
        requirements: tuple[str, ...] = (),
        adapter: str = "",
    ) -> Installation:
        """Install a known environment, or the user's own, which replaces an older one of the same name.

        Args:
            name: NAME or NAME==VERSION.
            say: called with lines for a person.
            heard: called with each line that pip prints.
            wait_s: limit of the wait for another process that installs it.
            timeout_s: limit of pip.
            requirements: what pip installs for the user's own, such as a folder, a wheel, or `my-package==1.0`.
            adapter: the place of its class; empty: that of the entry point of its name.

        Raises:
            ConfigError: it is unknown, its class cannot be found, or this machine has no suitable Python.
            SandboxFailed: pip failed, or the disk rejected it.
        """
        if not (requirements or adapter):
            if self.parse(name).name not in KNOWN:
                known = ", ".join(sorted(KNOWN))
                raise ConfigError(
                    f"{name!r} is not a known environment ({known}); install one of your own with --from and --adapter",
                    key=self.kind,
                )
            return super().install(name, say=say, heard=heard, wait_s=wait_s, timeout_s=timeout_s)
        named = self.parse(name)
        if named.name in KNOWN or named.version:
            raise ConfigError(
                f"{name!r}: an environment of your own needs another name, without version", key=self.kind
            )
        local = tuple(str(Path(each).absolute()) if Path(each).exists() else each for each in requirements)
        named = named._replace(package=PyPI("", OWN, also=local))
        options = {"wait_s": wait_s, "timeout_s": timeout_s, "again": True}
        return self._install(named, _checked_place(adapter), say=say, heard=heard, **options)  # type: ignore[arg-type]

    def place(self, name: str) -> EnvironmentPlace:
        """Return where an environment is.

        Raises:
            EnvironmentFailed: it is not installed here.
        """
        short = name.partition("==")[0]
        known = KNOWN.get(short)
        adapter = known.adapter if known is not None else ""
        if (ADAPTERS / adapter.partition(":")[0]).is_file():
            adapter = f"{ADAPTERS}/{adapter}"
        if known is not None and known.package is None:
            return EnvironmentPlace(name, sys.executable, adapter, stamp_of(sys.executable))
        try:
            installed = self.find(name)
        except (ConfigError, SandboxFailed) as error:
            message = error.message
            if known is None and NAME.fullmatch(short) and not (self.root / short).exists():
                message = (
                    f"environment {short} is neither known nor installed in {self.root}; see: {self.command} list, "
                    f"or install your own: {self.command} install {short} --adapter FILE.py:CLASS"
                )
            raise EnvironmentFailed(message, environment=name, reason="missing") from error
        python = f"{installed.folder}/bin/python"
        return EnvironmentPlace(name, python, adapter or installed.adapter, stamp_of(python))

    def _adapter(self, name: str, folder: Path) -> str:
        if name in KNOWN:
            return ""
        argv = (str(folder / "bin" / "python"), "-I", "-c", PROBE, name)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
        if not (place := done.stdout.strip()):
            raise ConfigError(
                f"no installed package has an entry point {name} in the group {ENTRY_POINT_GROUP}; "
                "add one, or name the class with --adapter module:Class",
                key=self.kind,
            )
        return _checked_place(place)


def _checked_place(place: str) -> str:
    if not place:
        return ""
    if not PLACE.fullmatch(place):
        raise ConfigError(f"{place!r} is not an adapter; write module:Class or file.py:Class", key="environment")
    module, _, name = place.rpartition(":")
    if not module.endswith(".py"):
        return place
    file = next((one for one in (Path(module), ADAPTERS / module) if one.is_file()), None)
    if file is None:
        known = ", ".join(sorted(one.name for one in ADAPTERS.glob("[a-z]*.py")))
        raise ConfigError(
            f"the adapter's file {module} does not exist; files of this package: {known}", key="environment"
        )
    text = file.read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{name.partition('.')[0]}\b|import \*", text):
        classes = ", ".join(re.findall(r"^class (\w+)", text, re.MULTILINE)) or "none"
        raise ConfigError(f"{file} has no {name}; its classes: {classes}", key="environment")
    return f"{file.absolute()}:{name}"
