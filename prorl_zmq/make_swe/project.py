"""A project whose code gets bugs: fetched, and made a clean git repository.

A source is a folder, a git URL, or `NAME==VERSION`, whose source archive pip fetches from its index. pip asks an
archive's build backend for its metadata, so it runs code of the project, as any installation does; a checksum is
looked at before that. Archives with a checksum are kept, so that they are fetched once.

The repository has one commit, the same for the same files: no other refs, no remotes, no reflog. Build residue, caches
and virtual environments are left out.
"""

from __future__ import annotations

import configparser
import fnmatch
import os
import re
import shutil
import stat
import tarfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..tools.images.fingerprint import file_digest
from ..tools.images.image import default_root
from .metadata import Metadata, not_pure, read_metadata
from .program import git, pip

RELEASE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!]+)")
GIT_URL = re.compile(r"git\+|[a-z+]+://|[\w.-]+@[\w.-]+:")
LEFT_OUT = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", "*.pyo", "*.egg-info", "*.dist-info", ".eggs", ".tox", ".nox"),
    *(".venv", "venv", "node_modules", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".coverage"),
)
LEFT_OUT_AT_TOP = ("build", "dist", "PKG-INFO")
"""Only there: a package may be called so."""
IGNORED = ("__pycache__/", "*.pyc", ".pytest_cache/", ".hypothesis/", "*.egg-info/", ".coverage")
"""What running tests leaves, which must not become part of an agent's patch."""
SIZE_LIMIT_BYTES = 500 * 2**20
FILE_TIME_S = 946684800
"""Of all files, so that the same project always makes the same image."""
EXTRACTION: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python before 3.11.4 has no filter; an archive's own code is run in any case (see above)."""


@dataclass(frozen=True)
class Project:
    folder: Path
    """The git repository; changed only for as long as a patch is made."""
    metadata: Metadata
    commit: str
    """Hash of its only commit."""
    import_paths: tuple[str, ...]
    """Where its modules are imported from, relative to the repository, such as `src` and `.`."""

    @property
    def modules(self) -> frozenset[str]:
        """Names of its packages and modules, as they are imported."""
        folders = [self.folder / path for path in self.import_paths]
        found = [each for folder in folders for each in (*folder.glob("*/__init__.py"), *folder.glob("*.py"))]
        return frozenset(each.parent.name if each.name == "__init__.py" else each.stem for each in found)

    @property
    def label(self) -> str:
        """Name and version as they stand in ids and image names."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{self.metadata.name}-{self.metadata.version}").strip("-.")[:60]


def check_source(source: str) -> None:
    """Check what can be checked before anything is fetched or built."""
    if not (RELEASE.fullmatch(source) or GIT_URL.match(source) or Path(source).is_dir()):
        raise ConfigError(f"{source}: there is no such folder; give a folder, a git URL or NAME==VERSION", key="repo")


def fetch(source: str, work: Path, *, sha256: str = "", path: str = "") -> Project:
    """Fetch a project and make its repository in `work`. Blocks: seconds."""
    check_source(source)
    raw = work / "raw"
    raw.mkdir()
    if release := RELEASE.fullmatch(source):
        found = _unpacked(_archive(release["name"], release["version"], sha256, work), raw)
    elif Path(source).is_dir() and not _is_bare(Path(source)):
        found = Path(source).resolve()
    else:
        clone = ("clone", "--quiet", "--depth=1", "--", source.removeprefix("git+"), str(raw / "clone"))
        git(*clone, folder=raw, problem=f"{source} cannot be cloned")
        found = raw / "clone"
    try:
        metadata = read_metadata(found)
    except (AttributeError, TypeError, ValueError, configparser.Error) as error:
        raise ConfigError(f"{source}: its metadata is malformed: {error}", key="repo") from error
    if found == raw / "clone":
        metadata = _named_after(metadata, source)
    if problem := not_pure(found):
        raise ConfigError(f"{source} is not pure Python: {problem}; only pure Python projects can be used", key="repo")
    repository = work / "repository"
    _copy(found, repository, source)
    shutil.rmtree(raw)
    _write_ignored(repository / ".gitignore")
    paths = (path,) if path else tuple(each for each in ("src", "lib") if _has_modules(repository / each))
    return Project(repository, metadata, _commit(repository), (*paths, "."))


def _archive(name: str, version: str, sha256: str, work: Path) -> Path:
    """Return a release's source archive, from the folder of those that were fetched before if its checksum is known."""
    kept = default_root().parent / "sources" / sha256
    if sha256 and kept.is_dir():
        for path in kept.iterdir():
            if file_digest(path) == sha256:
                return path
    release, target = f"{name}=={version}", work / "archive"
    target.mkdir()
    requirements = work / "requirements.txt"
    requirements.write_text(f"{release} --hash=sha256:{sha256}\n" if sha256 else f"{release}\n")
    pip(
        *("download", "--quiet", "--no-deps", "--no-binary", name, "--dest", str(target), "-r", str(requirements)),
        folder=work,
        problem=f"the source archive of {release} cannot be fetched",
    )
    found = sorted(target.iterdir())
    if not found:
        raise ConfigError(f"{release} has no source archive", key="repo")
    if sha256 and file_digest(found[0]) != sha256:
        raise ConfigError(f"the source archive of {release} has another checksum than {sha256}", key="sha256")
    if not sha256:
        return found[0]
    kept.mkdir(0o755, parents=True, exist_ok=True)
    partial = kept / f".{os.getpid()}"
    shutil.copyfile(found[0], partial)
    return partial.rename(kept / found[0].name)


def _unpacked(archive: Path, folder: Path) -> Path:
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(folder)  # noqa: S202 - zipfile keeps within the folder
        else:
            with tarfile.open(archive) as tarred:
                tarred.extractall(folder, **EXTRACTION)  # noqa: S202 - see EXTRACTION
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{archive.name} is no source archive: {error}", key="repo") from error
    tops = [each for each in folder.iterdir() if each.is_dir()]
    if len(tops) != 1:
        raise ConfigError(f"{archive.name} is no source archive: it has not one folder at its top", key="repo")
    return tops[0]


def _copy(source: Path, target: Path, name: str) -> None:
    size = 0

    def left_out(folder: str, names: list[str]) -> set[str]:
        nonlocal size
        patterns = LEFT_OUT + (LEFT_OUT_AT_TOP if Path(folder) == source else ())
        out = {each for each in names if any(fnmatch.fnmatchcase(each, pattern) for pattern in patterns)}
        for each in set(names) - out:
            status = (Path(folder) / each).lstat()
            size += status.st_size
            kind = stat.S_IFMT(status.st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) or _leads_out(Path(folder) / each, source):
                out.add(each)
        if size > SIZE_LIMIT_BYTES:
            raise ConfigError(f"{name} has more than {SIZE_LIMIT_BYTES // 2**20} MiB", key="repo")
        return out

    try:
        shutil.copytree(source, target, symlinks=True, ignore=left_out)
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"{name} cannot be read: {str(error)[:200]}", key="repo") from error


def _leads_out(path: Path, source: Path) -> bool:
    """Return whether a path is a symbolic link to what is not in the project."""
    return path.is_symlink() and not path.resolve().is_relative_to(source.resolve())


def _commit(repository: Path) -> str:
    problem = f"no repository can be made of {repository.name}"

    def run(*arguments: str) -> str:
        return git(*arguments, folder=repository, problem=problem)

    for folder, folders, files in os.walk(repository):
        for each in (*folders, *files):
            os.utime(Path(folder) / each, (FILE_TIME_S, FILE_TIME_S), follow_symlinks=False)
    run("init", "--quiet", "--template=", "--initial-branch=main")
    for setting in ("core.logAllRefUpdates=false", "core.checkStat=minimal", "core.trustctime=false", "gc.auto=0"):
        # The index is made here and used in an image: only sizes and times are the same there.
        run("config", *setting.split("="))
    run("add", "--all", "--force")
    run("commit", "--quiet", "--no-verify", "--message=The project as it was released")
    for leftover in ("COMMIT_EDITMSG", "description"):
        (repository / ".git" / leftover).unlink(missing_ok=True)
    return run("rev-parse", "HEAD").strip()


def _write_ignored(path: Path) -> None:
    text = path.read_text("utf-8", "surrogateescape") if path.is_file() else ""
    missing = [line for line in IGNORED if line not in text.splitlines()]
    if missing:
        separator = "" if not text or text.endswith("\n") else "\n"
        path.write_text(text + separator + "\n".join(missing) + "\n", "utf-8", "surrogateescape")


def _has_modules(folder: Path) -> bool:
    return not (folder / "__init__.py").exists() and any((*folder.glob("*/__init__.py"), *folder.glob("*.py")))


def _is_bare(path: Path) -> bool:
    return (path / "HEAD").is_file() and (path / "objects").is_dir()


def _named_after(metadata: Metadata, address: str) -> Metadata:
    """Return a clone the name of its address, if it says none itself."""
    if metadata.name != "clone":
        return metadata
    name = re.sub(r"[^A-Za-z0-9._-]", "", address.rstrip("/").removesuffix(".git").rsplit("/", 1)[-1]) or "project"
    return replace(metadata, name=name)
