"""Functions and classes of a training framework, lifted out of its source: importing it takes its GPU stack.

The source is that of an installed distribution, or of its wheel, which is downloaded once per run of the tests.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from needed import lacking

DOWNLOAD_S = 60.0


def lifted(distribution: str, version: str, path: str, names: tuple[str, ...], known: dict[str, Any]) -> dict[str, Any]:
    """Compile the named functions and classes of one file, with nothing else of it in sight than `known`.

    Skips the test where the source is not to be had.
    """
    tree = ast.parse(_source(distribution, version, path))
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    assert {node.name for node in kept} == set(names), f"{path} of {distribution} {version} is not what it was"
    space = dict(known)
    exec(compile(ast.Module(kept, []), path, "exec"), space)  # of a pinned version from the package index
    return space


def _source(distribution: str, version: str, path: str) -> str:
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        pass
    else:
        if installed.version == version:
            return Path(str(installed.locate_file(path))).read_text(encoding="utf-8")
    with zipfile.ZipFile(_wheel(distribution, version)) as wheel:
        return wheel.read(path).decode()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="prorl-wheels-")


@cache
def _wheel(distribution: str, version: str) -> Path:
    folder = _folder().name
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", folder]
    command.append("--ignore-requires-python")  # only its source is read
    try:
        done = subprocess.run(
            [*command, f"{distribution}=={version}"], capture_output=True, text=True, check=False, timeout=DOWNLOAD_S
        )
    except subprocess.TimeoutExpired:
        lacking(distribution, f"no wheel of {distribution} {version} came within {DOWNLOAD_S:.0f} s")
    wheels = list(Path(folder).glob(f"{distribution}-{version}-*.whl"))
    if not wheels:
        lacking(distribution, f"no wheel of {distribution} {version} can be had here: {done.stderr.strip()[-300:]}")
    return wheels[0]
