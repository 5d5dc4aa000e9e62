"""The place of a service's run folder: one per user, or one per name.

`PRORL_RUN_DIR` sets the folder of services without a name, and `PRORL_NAME` the name if no flag, argument or topology
file sets one. A named service appends `-NAME` to the folder.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ..errors import ConfigError

FOLDER_VARIABLE = "PRORL_RUN_DIR"
NAME_VARIABLE = "PRORL_NAME"
NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}"

_is_name = re.compile(NAME_PATTERN).fullmatch


def shared_run_dir() -> Path:
    """Return the run folder of all of a user's services, unless another one is set."""
    return Path(tempfile.gettempdir()) / f"prorl-{os.getuid()}"


def base_run_dir() -> Path:
    """Return the run folder of a service without a name."""
    return Path(os.environ.get(FOLDER_VARIABLE) or shared_run_dir())


def default_run_dir(name: str = "") -> Path:
    """Return the run folder of a service by name; empty: of the one in `PRORL_NAME`, or of the unnamed one."""
    return named_run_dir(base_run_dir(), name or name_of_environment())


def named_run_dir(base: Path, name: str) -> Path:
    """Return the run folder of a named service; `base` is the folder without a name."""
    return base.with_name(f"{base.name}-{name}") if name else base


def name_of_environment() -> str:
    """Return the name in `PRORL_NAME`; empty: none.

    Raises:
        ConfigError: it is not a valid name.
    """
    name = os.environ.get(NAME_VARIABLE, "")
    return checked_name(name, f"${NAME_VARIABLE}") if name else ""


def checked_name(name: str, source: str) -> str:
    """Return a service's name.

    Raises:
        ConfigError: it is not valid; the message begins with its `source`.
    """
    if not _is_name(name):
        raise ConfigError(
            f"{source} {name!r} cannot be a service's name: use 1 to 40 letters, digits and . _ - (not . or - first)",
            key="name",
        )
    return name


def is_name(place: str) -> bool:
    """Return whether `place` is a service's name, and not an endpoint."""
    return _is_name(place) is not None


def front_door_at(place: str | None) -> str:
    """Return the front door of an endpoint, a service's name, or None for the default service."""
    if place is None or is_name(place):
        return f"ipc://{default_run_dir(place or '')}/front_door"
    return place
