"""Harnesses on this machine's disk: one folder per version, which all sandboxes see read-only, under its own path.

    ROOT/NAME/lock             held by the process that installs or removes (see `images.kept_folder`)
    ROOT/NAME/building-ID/     an installation in progress; a leftover if the lock is free
    ROOT/NAME/VERSION/         complete: it was renamed at the end
    ROOT/NAME/VERSION/bin/     what an adapter starts: links to programs, `node`, `python`
    ROOT/NAME/VERSION/installation.json

Nothing locks against removal: a sandbox whose harness is removed or replaced loses its files.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...errors import ConfigError, SandboxFailed
from ...tools.containers.specification import Bind
from ...tools.images.fingerprint import size_bytes
from ...tools.images.image import default_root as images_root
from ...tools.images.kept_folder import BUILDING, TRASH, locked
from .adapter import Npm, load_adapter
from .package_installer import PackageInstaller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...tools.images.kept_folder import KeptFolder
    from .adapter import Adapter

RECORD = "installation.json"
VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
NPM_VERSION = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?")
"""npm reads everything else as a range or a tag, and installs what it finds."""
SYSTEM = Path("/usr")
"""Host folders that sandboxes without an image see anyway; those with one see the image's."""
WAIT_LIMIT_S = 3600.0
INSTALL_LIMIT_S = 1800.0


class Installation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete installation of a harness."""

    name: str
    version: str
    folder: str
    package: str
    base: str
    """The folder of the Python that it runs on; empty if it includes its own runtime."""
    installed_at_s: float
    """Seconds since 1970."""
    took_s: float
    size_bytes: int

    @property
    def binds(self) -> tuple[Bind, ...]:
        """The folders that a sandbox must show, under the same paths as here."""
        shown = [self.folder]
        if self.base and not Path(self.base).is_relative_to(SYSTEM):
            shown.append(self.base)
        return tuple(Bind(path, path) for path in shown)


def default_root() -> Path:
    """Return the folder of harnesses: $PRORL_HARNESSES, or next to the images."""
    named = os.environ.get("PRORL_HARNESSES", "")
    return Path(named) if named else images_root().parent / "harnesses"


def parse_name(text: str) -> tuple[Adapter, str]:
    """Return the adapter and the version (may be empty) in NAME or NAME==VERSION.

    Raises:
        ConfigError: the harness is unknown or never installed, or the version is invalid.
    """
    name, separator, version = text.partition("==")
    if separator and not VERSION.fullmatch(version):
        raise ConfigError(f"{version!r} is not a version; write NAME==VERSION", key="harness")
    adapter = load_adapter(name)
    if version and isinstance(adapter.package, Npm) and not NPM_VERSION.fullmatch(version):
        raise ConfigError(f"{version!r} is not one version of npm's; write it whole, such as 1.2.3", key="harness")
    if adapter.package is None:
        raise ConfigError(f"harness {name} is a program of the sandbox: nothing is installed for it", key="harness")
    return adapter, version


class HarnessStore:
    """A folder of harnesses, made with the first one; any number of processes may use it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def install(
        self,
        name: str,
        *,
        say: Callable[[str], None],
        heard: Callable[[str], None],
        wait_s: float = WAIT_LIMIT_S,
        timeout_s: float = INSTALL_LIMIT_S,
    ) -> Installation:
        """Install NAME or NAME==VERSION, unless it is installed and complete.

        `say` is called with lines for a person, `heard` with each line that npm and pip print. `timeout_s` limits each
        of these, `wait_s` the wait for another process that installs it.

        Raises:
            ConfigError: the harness is unknown, or this machine lacks an installer.
            SandboxFailed: npm or pip failed, or the disk rejected it.
        """
        adapter, version = parse_name(name)
        package = adapter.package
        assert package is not None
        version = version or package.version
        installer = PackageInstaller(package, version, timeout_s, heard)
        with self._explained(), self._locked(adapter.name, wait_s, say) as folder:
            target = folder.path / version
            if (there := self._read(target)) is not None and there.package == package.package:
                say(f"{adapter.name} {version} is installed already")
                return there
            say(f"installing {adapter.name} {version} from {'npm' if isinstance(package, Npm) else 'PyPI'}")
            started = time.monotonic()
            with folder.building() as build:
                base = installer.install(build, folder.descriptor)
                installation = Installation(
                    name=adapter.name,
                    version=version,
                    folder=str(target),
                    package=package.package,
                    base=base,
                    installed_at_s=time.time(),
                    took_s=round(time.monotonic() - started, 3),
                    size_bytes=size_bytes(build),
                )
                (build / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(installation)) + b"\n")
                if target.exists():
                    folder.throw_away(target)
                build.rename(target)
            return installation

    def find(self, name: str) -> Installation:
        """Return the installation of NAME or NAME==VERSION.

        Without a version, the adapter's tested version is preferred, then the one installed last.

        Raises:
            ConfigError: it is missing or incomplete; the message says how to fix that.
        """
        adapter, version = parse_name(name)
        assert adapter.package is not None
        there = [each for each in self.list() if each.name == adapter.name]
        wanted = version or adapter.package.version
        for each in there:
            if each.version == wanted or (not version and not (self.root / adapter.name / wanted).exists()):
                return each
        state = "is broken" if (self.root / adapter.name / wanted).exists() else "is not installed"
        option = "" if self.root == default_root().absolute() else f" --into {self.root}"
        message = f"harness {adapter.name} {wanted} {state} in {self.root}; run: prorl harness install {name}{option}"
        raise ConfigError(message, key="harness")

    def list(self) -> list[Installation]:
        """Return the complete installations, by name; of each name the latest first."""
        with self._explained():
            if not self.root.exists():
                return []
            found = [self._read(folder) for folder in self.root.glob("*/*") if not _unfinished(folder)]
        return sorted((each for each in found if each is not None), key=lambda each: (each.name, -each.installed_at_s))

    def remove(self, name: str, *, say: Callable[[str], None], wait_s: float = WAIT_LIMIT_S) -> None:
        """Remove NAME==VERSION, or all versions of NAME, complete or broken.

        Raises:
            ConfigError: there is none.
        """
        adapter, version = parse_name(name)
        if not (self.root / adapter.name / version).is_dir():
            raise ConfigError(f"there is no {name} in {self.root}; see: prorl harness list", key="harness")
        with self._explained(), self._locked(adapter.name, wait_s, say) as folder:
            for each in list(folder.path.iterdir()):
                if each.is_dir() and (not version or each.name == version):
                    folder.throw_away(each)
            folder.remove_if_empty()

    @contextmanager
    def _locked(self, name: str, wait_s: float, say: Callable[[str], None]) -> Iterator[KeptFolder]:
        self.root.mkdir(0o755, parents=True, exist_ok=True)
        with locked(self.root / name, wait_s=wait_s, say=say) as folder:
            folder.clear()
            yield folder

    def _read(self, folder: Path) -> Installation | None:
        """Return the installation in a folder; None if it is incomplete, or was moved there."""
        with suppress(OSError, msgspec.MsgspecError):
            installation = msgspec.json.decode((folder / RECORD).read_bytes(), type=Installation)
            programs = list((folder / "bin").iterdir())
            if installation.folder == str(folder) and programs and all(each.exists() for each in programs):
                return installation
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise SandboxFailed(f"the harnesses in {self.root}: {error.strerror or error}{where}") from error


def _unfinished(folder: Path) -> bool:
    return folder.name.startswith((BUILDING, TRASH))
