from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_closing_finds_a_daemon_that_left_its_session(tmp_path: Path, survivors: Callable[[str], list[str]]) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def main() -> None:
        sandbox = await Sandboxes("process", tmp_path).create("one")
        result = await sandbox.run(["sh", "-c", f"setsid -f sleep {mark} </dev/null >/dev/null 2>&1"], 10)
        assert result.exit_code == 0
        await sandbox.close()

    asyncio.run(main())
    assert survivors(mark) == []
