"""`Project`: the project whose code gets bugs, as a clean git repository.

A source is a folder, a git URL, or `NAME==VERSION`, whose source archive pip fetches. pip runs the archive's build
backend, after the checksum was compared. Archives with a checksum are cached.

The repository has one commit, which is the same for the same files. Build residue, caches and virtual environments are
left out. Metadata are read from `PKG-INFO`, else from `pyproject.toml`, else from `setup.cfg`, without running code.
"""

from __future__ import annotations

import configparser
import fnmatch
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..errors import ConfigError, SandboxFailed, SandboxUnavailable
from ..system.processes import ISOLATED
from ..tools.images.fingerprint import file_digest
from ..tools.images.image import default_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RELEASE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!]+)")
GIT_URL = re.compile(r"git\+|[a-z+]+://|[\w.-]+@[\w.-]+:")
LEFT_OUT = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", "*.pyo", "*.egg-info", "*.dist-info", ".eggs", ".tox", ".nox"),
    *(".venv", "venv", "node_modules", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".coverage"),
)
LEFT_OUT_AT_TOP = ("build", "dist", "PKG-INFO")
"""Only at the top, since a package may have such a name."""
IGNORED = ("__pycache__/", "*.pyc", ".pytest_cache/", ".hypothesis/", "*.egg-info/", ".coverage")
"""Residue of test runs, which must not get into an agent's patch."""
SIZE_LIMIT_BYTES = 500 * 2**20
FILE_TIME_S = 946684800
"""Modification time of all files, so that the same project yields the same image."""
EXTRACTION: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python before 3.11.4 has no filter."""
TEST_EXTRAS = ("test", "tests", "testing")
PERMISSIVE = re.compile(
    r"\b(MIT|MIT-0|MIT License|BSD|0BSD|BSD-[234]-Clause|Apache|Apache-2\.0|ISC|ISCL|PSF-2\.0|Python-2\.0|"
    r"Python Software Foundation|Unlicense|Zlib|CC0-1\.0|Public Domain)\b",
    re.IGNORECASE,
)
RESTRICTED = re.compile(r"\b[AL]?GPL|General Public License|Mozilla|MPL|EUPL|proprietary|\bAND\b", re.IGNORECASE)
NATIVE_BACKENDS = ("maturin", "mesonpy", "scikit_build_core", "setuptools_rust", "sipbuild", "enscons")
NATIVE_SETUP = re.compile(r"\b(ext_modules|cffi_modules|rust_extensions|cythonize)\b")
GIT_LIMIT_S = 300.0
PIP_LIMIT_S = 900.0
LAST_WORDS = 600
WRITTEN_AT = "2000-01-01T00:00:00+00:00"
GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "prorl",
    "GIT_AUTHOR_EMAIL": "prorl@localhost",
    "GIT_AUTHOR_DATE": WRITTEN_AT,
    "GIT_COMMITTER_NAME": "prorl",
    "GIT_COMMITTER_EMAIL": "prorl@localhost",
    "GIT_COMMITTER_DATE": WRITTEN_AT,
    "LC_ALL": "C.UTF-8",
}
"""No user settings, and the same commit for the same files."""


@dataclass(frozen=True)
class Metadata:
    name: str
    version: str
    license: str
    """As written, several texts joined; empty: unknown."""
    requirements: tuple[str, ...]
    """Requirements with markers, extras `test`, `tests` and `testing` included."""
    entry_points: str

    @property
    def permissive(self) -> bool:
        return PERMISSIVE.search(self.license) is not None and RESTRICTED.search(self.license) is None

    def requirements_for(self, python: str) -> tuple[str, ...]:
        """Return the requirements for a version of Python, such as `3.11`, without markers and the project itself."""
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        found = []
        for text in self.requirements:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            marker, requirement.marker = requirement.marker, None
            wanted = marker is None or any(
                marker.evaluate({**environment, "extra": extra}) for extra in ("", *TEST_EXTRAS)
            )
            if wanted and canonicalize_name(requirement.name) != canonicalize_name(self.name):
                found.append(str(requirement))
        return tuple(dict.fromkeys(found))


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a folder; unknown values are empty, the default name is the folder's."""
    if (folder / "PKG-INFO").is_file():
        return _from_archive(folder)
    table = _toml(folder / "pyproject.toml")
    project = table.get("project", {}) if isinstance(table.get("project"), dict) else {}
    config = configparser.ConfigParser(interpolation=None)
    if (folder / "setup.cfg").is_file():
        config.read_string((folder / "setup.cfg").read_text("utf-8", "replace"))
    license_ = project.get("license", config.get("metadata", "license", fallback=""))
    return Metadata(
        name=str(project.get("name", config.get("metadata", "name", fallback=folder.name))),
        version=_plain_version(str(project.get("version", config.get("metadata", "version", fallback="0")))),
        license=" ".join(
            [str(license_.get("text", "")) if isinstance(license_, dict) else str(license_)]
            + [each for each in project.get("classifiers", ()) if str(each).startswith("License")]
        ).strip(),
        requirements=tuple(map(str, (*_of_pyproject(table, project), *_of_setup(config)))),
        entry_points="",
    )


def not_pure(folder: Path) -> str:
    """Return why a project is not pure Python; empty: it is."""
    system = _toml(folder / "pyproject.toml").get("build-system")
    backend = str(system.get("build-backend", "")) if isinstance(system, dict) else ""
    if backend.split(".", maxsplit=1)[0] in NATIVE_BACKENDS:
        return f"it is built by {backend}"
    setup = folder / "setup.py"
    if setup.is_file() and (found := NATIVE_SETUP.search(setup.read_text("utf-8", "replace"))):
        return f"its setup.py has {found[0]}"
    return ""


def _from_archive(folder: Path) -> Metadata:
    headers = HeaderParser().parsestr((folder / "PKG-INFO").read_text("utf-8", "replace"))
    licenses = [headers.get("License-Expression", ""), (headers.get("License") or "").split("\n")[0]]
    licenses += [each for each in headers.get_all("Classifier", []) if each.startswith("License")]
    points = sorted(folder.glob("**/*.egg-info/entry_points.txt"))
    return Metadata(
        name=headers.get("Name", folder.name),
        version=headers.get("Version", "0"),
        license=" ".join(filter(None, licenses)),
        requirements=tuple(headers.get_all("Requires-Dist", [])),
        entry_points=points[0].read_text("utf-8", "replace") if points else "",
    )


def _of_pyproject(table: dict[str, Any], project: dict[str, Any]) -> Iterable[str]:
    yield from project.get("dependencies", ())
    for extra in TEST_EXTRAS:
        yield from project.get("optional-dependencies", {}).get(extra, ())
        yield from (each for each in table.get("dependency-groups", {}).get(extra, ()) if isinstance(each, str))


def _of_setup(config: configparser.ConfigParser) -> Iterable[str]:
    texts = [config.get("options", "install_requires", fallback="")]
    texts += [config.get("options.extras_require", extra, fallback="") for extra in TEST_EXTRAS]
    return (line.strip() for text in texts for line in text.splitlines() if line.strip())


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _plain_version(version: str) -> str:
    """Return a version; `0` for a directive such as `attr: package.__version__`."""
    return version if re.fullmatch(r"[0-9A-Za-z.+!-]+", version) else "0"


@dataclass(frozen=True)
class Project:
    folder: Path
    """The git repository; changed only while a patch is made."""
    metadata: Metadata
    commit: str
    import_paths: tuple[str, ...]
    """Folders of its modules, relative to the repository, such as `src` and `.`."""

    @property
    def modules(self) -> frozenset[str]:
        folders = [self.folder / path for path in self.import_paths]
        found = [each for folder in folders for each in (*folder.glob("*/__init__.py"), *folder.glob("*.py"))]
        return frozenset(each.parent.name if each.name == "__init__.py" else each.stem for each in found)

    @property
    def label(self) -> str:
        """Name and version, as in ids and image names."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{self.metadata.name}-{self.metadata.version}").strip("-.")[:60]


def check_source(source: str) -> None:
    """Raise `ConfigError` if a source cannot exist."""
    if not (RELEASE.fullmatch(source) or GIT_URL.match(source) or Path(source).is_dir()):
        raise ConfigError(f"{source}: there is no such folder; give a folder, a git URL or NAME==VERSION", key="repo")


def fetch(source: str, work: Path, *, sha256: str = "", path: str = "") -> Project:
    """Fetch a project and make its repository in `work`. Blocks for seconds."""
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
    """Return a release's source archive; one with a known checksum is cached."""
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
        raise ConfigError(f"{archive.name} is not a source archive: {error}", key="repo") from error
    tops = [each for each in folder.iterdir() if each.is_dir()]
    if len(tops) != 1:
        raise ConfigError(f"{archive.name} is not a source archive: it has not one folder at its top", key="repo")
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
    """Name a clone by its address, if its metadata have no name."""
    if metadata.name != "clone":
        return metadata
    name = re.sub(r"[^A-Za-z0-9._-]", "", address.rstrip("/").removesuffix(".git").rsplit("/", 1)[-1]) or "project"
    return replace(metadata, name=name)


def git(*arguments: str, folder: Path, problem: str) -> str:
    """Run git; return its output."""
    if shutil.which("git") is None:
        raise SandboxUnavailable("git is not installed; install its package", kind="git")
    # What a surrounding git command has set would lead to another repository.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    argv = ["git", "-c", "core.hooksPath=/dev/null", *arguments]
    code, output = _run(argv, folder, GIT_LIMIT_S, {**inherited, **GIT_ENVIRONMENT})
    if code:
        raise ConfigError(f"{problem}: {_last_words(output)}", key="repo")
    return output


def pip(*arguments: str, folder: Path, problem: str) -> None:
    argv = [sys.executable, *ISOLATED, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    code, output = _run(argv, folder, PIP_LIMIT_S, {**os.environ, "LC_ALL": "C.UTF-8"})
    if code == 0:
        return
    if "No module named pip" in output:
        raise SandboxUnavailable(
            f"pip is not installed for {sys.executable}; install it: {sys.executable} -m ensurepip", kind="pip"
        )
    if "DO NOT MATCH THE HASHES" in output:
        raise ConfigError(f"{problem}: its checksum is not the one that was asked for", key="sha256")
    if any(words in output for words in ("Failed to establish a new connection", "NewConnectionError", "Max retries")):
        raise SandboxFailed(f"{problem}: no network, or the package index does not answer")
    if "No matching distribution" in output:
        raise ConfigError(f"{problem}: {_last_words(output)}", key="repo")
    raise SandboxFailed(f"{problem}: {_last_words(output)}")


def _run(argv: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"it took longer than {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="surrogateescape")


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("WARNING")]
    return " / ".join(lines[-6:])[-LAST_WORDS:].encode(errors="replace").decode() or "it said nothing"
