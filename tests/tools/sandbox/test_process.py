from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_closing_finds_a_daemon_that_left_its_session_and_its_environment(
    tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def main() -> None:
        sandboxes = Sandboxes("process", tmp_path)
        sandbox = await sandboxes.create("one")
        result = await sandbox.exec(["sh", "-c", f"env -i setsid -f sleep {mark} </dev/null >/dev/null 2>&1"], 10)
        assert result.exit_code == 0
        await sandbox.close()
        sandboxes.close()

    asyncio.run(main())
    assert survivors(mark) == []
