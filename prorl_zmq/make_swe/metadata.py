"""What a project says of itself: name, version, license, requirements. Read from its files; nothing of it is run.

`PKG-INFO` (of a source archive) comes first, then `pyproject.toml`, then `setup.cfg`. What a `setup.py` computes is
not known here.
"""

from __future__ import annotations

import configparser
import re
import tomllib
from dataclasses import dataclass
from email.parser import HeaderParser
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TEST_EXTRAS = ("test", "tests", "testing")
PERMISSIVE = re.compile(
    r"\b(MIT|MIT-0|MIT License|BSD|0BSD|BSD-[234]-Clause|Apache|Apache-2\.0|ISC|ISCL|PSF-2\.0|Python-2\.0|"
    r"Python Software Foundation|Unlicense|Zlib|CC0-1\.0|Public Domain)\b",
    re.IGNORECASE,
)
RESTRICTED = re.compile(r"\b[AL]?GPL|General Public License|Mozilla|MPL|EUPL|proprietary|\bAND\b", re.IGNORECASE)
NATIVE_BACKENDS = ("maturin", "mesonpy", "scikit_build_core", "setuptools_rust", "sipbuild", "enscons")
NATIVE_SETUP = re.compile(r"\b(ext_modules|cffi_modules|rust_extensions|cythonize)\b")


@dataclass(frozen=True)
class Metadata:
    name: str
    version: str
    license: str
    """As it is written, several texts joined; empty if nothing is said."""
    requirements: tuple[str, ...]
    """What it and its tests need, extras `test`, `tests` and `testing` included; markers not looked at."""
    entry_points: str
    """Content of its `entry_points.txt`, if a source archive has one."""

    @property
    def permissive(self) -> bool:
        """Whether everyone may use, change and pass on its code."""
        return PERMISSIVE.search(self.license) is not None and RESTRICTED.search(self.license) is None

    def requirements_for(self, python: str) -> tuple[str, ...]:
        """Return what is needed with a version of Python, such as `3.11`, without markers and the project itself."""
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
    """Read the metadata of a project's folder; what is said nowhere is empty, the name that of the folder."""
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
        version=_plain(str(project.get("version", config.get("metadata", "version", fallback="0")))),
        license=" ".join(
            [str(license_.get("text", "")) if isinstance(license_, dict) else str(license_)]
            + [each for each in project.get("classifiers", ()) if str(each).startswith("License")]
        ).strip(),
        requirements=tuple(map(str, (*_of_pyproject(table, project), *_of_setup(config)))),
        entry_points="",
    )


def not_pure(folder: Path) -> str:
    """Return why a project is more than Python files; empty if it is not."""
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


def _plain(version: str) -> str:
    """Return a version, or `0` for a directive such as `attr: package.__version__`."""
    return version if re.fullmatch(r"[0-9A-Za-z.+!-]+", version) else "0"
