"""A bash session in a live container of the test's own process, for the tests of bash."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_zmq.tools.sessions.bash_session import BashSession

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Awaitable, Callable

    from prorl_zmq.tools.containers.container import Container

    LiveContainer = Callable[[], contextlib.AbstractAsyncContextManager[Container]]
else:
    LiveContainer = object

LIMIT_S = 20.0
"""For commands that should be done at once, on a machine that may be busy."""


def use(
    live_container: LiveContainer,
    body: Callable[[BashSession], Awaitable[None]],
    runner: Callable[..., object] = asyncio.run,
) -> None:
    """Run `body` on a session in a new container, and see that no descriptor is left open."""

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def main() -> None:
        before = descriptors()
        async with live_container() as container:
            session = BashSession(container)
            try:
                await session.start()
                await body(session)
            finally:
                await session.close()
                await session.close()
        assert descriptors() == before

    runner(main())
