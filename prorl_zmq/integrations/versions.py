"""Whether an installed framework is one that its adapter was run with."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version


def check_version(distribution: str, tested: str) -> None:
    """Warn of another minor version than the tested one.

    Raises:
        ImportError: the framework is not installed.
    """
    try:
        found = version(distribution)
    except PackageNotFoundError:
        message = f"{distribution} is not installed: pip install '{distribution}~={tested}.0'"
        raise ImportError(message) from None
    if found.split(".")[:2] != tested.split(".")[:2]:
        words = f"{distribution} {found} is installed; prorl_zmq was tested with {distribution} {tested}"
        warnings.warn(words, stacklevel=3)
