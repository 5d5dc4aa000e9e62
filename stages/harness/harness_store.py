"""`HarnessStore`: the agent programs that are installed on this machine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ..package_store import PackageStore
from .adapter import Npm, load_adapter

if TYPE_CHECKING:
    from .adapter import PyPI

NPM_VERSION = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?")
"""npm reads everything else as a range or a tag, and installs what it finds."""


class HarnessStore(PackageStore):
    """A folder of harnesses."""

    kind, command, variable, default_folder = "harness", "prorl harness", "PRORL_HARNESSES", "harnesses"

    def _package(self, name: str, version: str) -> Npm | PyPI:
        package = load_adapter(name).package
        if version and isinstance(package, Npm) and not NPM_VERSION.fullmatch(version):
            raise ConfigError(f"npm needs a whole version, such as 1.2.3, and not {version!r}", key=self.kind)
        if package is None:
            raise ConfigError(f"harness {name} is a program of the sandbox: nothing is installed for it", key=self.kind)
        return package
