"""The run folder of a service: private to this user, locked by one service at a time, emptied before and after it."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from ..errors import ConfigError, EndpointInUse
from ..system.held_file import held
from ..system.run_folder import own_run_dir
from .process_plans import PLANS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

LOCK = "serve.lock"


@contextlib.asynccontextmanager
async def held_run_dir(path: Path) -> AsyncIterator[None]:
    """Lock a run folder; afterwards it has no sandboxes."""
    with _locked(path):
        await _sweep(path / "sandboxes")  # of a service that was killed
        _clear(path)
        try:
            yield
        finally:
            await _sweep(path / "sandboxes")
            _clear(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(own_run_dir(path) / LOCK))
        except EndpointInUse as error:
            raise EndpointInUse(
                f"another service or node runs in {path} ({error.message}); stop it, or give this service a name "
                "(`prorl serve --name NAME`), or name another folder with --run-dir",
                endpoint=str(path),
            ) from None
        except OSError as error:
            raise ConfigError(f"the run folder {path} cannot be used: {error.strerror}", key="run_dir") from error
        yield


async def _sweep(root: Path) -> None:
    if root.exists():  # noqa: ASYNC240 - of this machine
        from ..tools.sandbox.sweeping import sweep  # imports all that removes sandboxes

        await sweep(root)


def _clear(path: Path) -> None:
    """Remove a service's sockets and plans from its run folder."""
    shutil.rmtree(path / PLANS, ignore_errors=True)
    for left in path.iterdir():
        if left.is_socket() or (left.name.endswith(".lock") and left.name != LOCK):
            left.unlink(missing_ok=True)
