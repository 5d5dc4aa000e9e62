"""`PackageStore`: installed packages on this machine's disk, which are harnesses or environments.

Each version of a package has a folder:

    ROOT/NAME/lock             held by the process that installs or removes (see `images.kept_folder`)
    ROOT/NAME/building-ID/     an installation in progress; a leftover if the lock is free
    ROOT/NAME/VERSION/         complete: it was renamed at the end
    ROOT/NAME/VERSION/bin/     what is started: links to programs, `node`, `python`
    ROOT/NAME/VERSION/installation.json

Sandboxes show a harness's folder read-only, under its own path. A package may be removed while it is in use; its
programs then lose their files.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

from ..errors import ConfigError, SandboxFailed
from ..tools.containers.specification import Bind
from ..tools.images.fingerprint import size_bytes
from ..tools.images.image import default_root as images_root
from ..tools.images.kept_folder import BUILDING, TRASH, locked
from .harness.adapter import Npm
from .package_installer import PackageInstaller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..tools.images.kept_folder import KeptFolder
    from .harness.adapter import PyPI

RECORD = "installation.json"
VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
SYSTEM = Path("/usr")
"""Host folders that sandboxes without an image see anyway; those with one see the image's."""
WAIT_LIMIT_S = 3600.0
INSTALL_LIMIT_S = 1800.0


class Installation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete installation of a harness or an environment."""

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
    adapter: str = ""
    """Where an environment's adapter is, unless its name says it."""

    @property
    def binds(self) -> tuple[Bind, ...]:
        """The folders that a sandbox must show, under the same paths as here."""
        shown = [self.folder]
        if self.base and not Path(self.base).is_relative_to(SYSTEM):
            shown.append(self.base)
        return tuple(Bind(path, path) for path in shown)


class PackageName(NamedTuple):
    """What NAME or NAME==VERSION stands for."""

    name: str
    package: Npm | PyPI
    version: str
    """Empty: not given."""


class PackageStore(ABC):
    """A folder of packages of one kind, made with the first one; any number of processes may use it."""

    kind: ClassVar[str]
    """What errors call one of them."""
    command: ClassVar[str]
    """The command that installs one."""
    variable: ClassVar[str]
    """The environment variable that names the default folder."""
    default_folder: ClassVar[str]
    """The default folder's name next to the images, without that variable."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (self.default_root() if root is None else root).absolute()

    @classmethod
    def default_root(cls) -> Path:
        """Return the folder that is used unless another one is named."""
        named = os.environ.get(cls.variable, "")
        return Path(named) if named else images_root().parent / cls.default_folder

    def parse(self, text: str) -> PackageName:
        """Return what NAME or NAME==VERSION stands for.

        Raises:
            ConfigError: the name is unknown, nothing is installed for it, or the version is invalid.
        """
        name, separator, version = text.partition("==")
        if separator and not VERSION.fullmatch(version):
            raise ConfigError(f"{version!r} is not a version; write NAME==VERSION", key=self.kind)
        return PackageName(name, self._package(name, version), version)

    @abstractmethod
    def _package(self, name: str, version: str) -> Npm | PyPI:
        """Return the package of a name; raise `ConfigError` as `parse` does."""

    def install(
        self,
        name: str,
        *,
        say: Callable[[str], None],
        heard: Callable[[str], None],
        wait_s: float = WAIT_LIMIT_S,
        timeout_s: float = INSTALL_LIMIT_S,
    ) -> Installation:
        """Install NAME or NAME==VERSION of a known package, unless it is installed and complete.

        `say` is called with lines for a person, `heard` with each line that npm and pip print. `timeout_s` limits each
        of these, `wait_s` the wait for another process that installs it.

        Raises:
            ConfigError: the name is unknown, or this machine lacks an installer.
            SandboxFailed: npm or pip failed, or the disk rejected it.
        """
        named = self.parse(name)
        return self._install(named, "", say=say, heard=heard, wait_s=wait_s, timeout_s=timeout_s)

    def _install(
        self,
        named: PackageName,
        adapter: str,
        *,
        say: Callable[[str], None],
        heard: Callable[[str], None],
        wait_s: float,
        timeout_s: float,
        again: bool = False,
    ) -> Installation:
        name, package = named.name, named.package
        version = named.version or package.version
        installer = PackageInstaller(package, version, timeout_s, heard)
        with self._explained(), self._locked(name, wait_s, say) as folder:
            target = folder.path / version
            there = self._read(target)
            if there is not None and not again and there.package == package.package:
                say(f"{name} {version} is installed already")
                return there
            source = f" {version} from {'npm' if isinstance(package, Npm) else 'PyPI'}" if package.package else ""
            say(f"installing {name}{source}")
            started = time.monotonic()
            with folder.building() as build:
                base = installer.install(build, folder.descriptor)
                installation = Installation(
                    name=name,
                    version=version,
                    folder=str(target),
                    package=package.package,
                    base=base,
                    installed_at_s=time.time(),
                    took_s=round(time.monotonic() - started, 3),
                    size_bytes=size_bytes(build),
                    adapter=adapter or self._adapter(name, build),
                )
                (build / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(installation)) + b"\n")
                if target.exists():
                    folder.throw_away(target)
                build.rename(target)
            return installation

    def _adapter(self, name: str, folder: Path) -> str:
        """Return where the adapter of an installed environment is, if its name does not say it."""
        del name, folder
        return ""

    def find(self, name: str) -> Installation:
        """Return the installation of NAME or NAME==VERSION.

        Without a version, the tested version is preferred, then the one installed last.

        Raises:
            ConfigError: it is missing or incomplete; the message says how to fix that.
        """
        named = self.parse(name)
        there = [each for each in self.list() if each.name == named.name]
        wanted, version = named.version or named.package.version, named.version
        for each in there:
            if each.version == wanted or (not version and not (self.root / named.name / wanted).exists()):
                return each
        state = "is broken" if (self.root / named.name / wanted).exists() else "is not installed"
        option = "" if self.root == self.default_root().absolute() else f" --into {self.root}"
        message = (
            f"{self.kind} {named.name} {wanted} {state} in {self.root}; run: {self.command} install {name}{option}"
        )
        raise ConfigError(message, key=self.kind)

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
            ConfigError: it is not installed.
        """
        named = self.parse(name)
        if not (self.root / named.name / named.version).is_dir():
            raise ConfigError(f"{name} is not installed in {self.root}; see: {self.command} list", key=self.kind)
        with self._explained(), self._locked(named.name, wait_s, say) as folder:
            for each in list(folder.path.iterdir()):
                if each.is_dir() and (not named.version or each.name == named.version):
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
            raise SandboxFailed(f"the packages in {self.root}: {error.strerror or error}{where}") from error


def _unfinished(folder: Path) -> bool:
    return folder.name.startswith((BUILDING, TRASH))
