from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.sandboxes import SharedSandboxes


def test_closing_finds_a_daemon_that_left_its_session_and_its_environment(
    sandboxes_of: SharedSandboxes, survivors: Callable[[str], list[str]]
) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def main() -> None:
        sandbox = await sandboxes_of("process").create("one")
        result = await sandbox.exec(["sh", "-c", f"env -i setsid -f sleep {mark} </dev/null >/dev/null 2>&1"], 10)
        assert result.exit_code == 0
        await sandbox.close()

    asyncio.run(main())
    assert survivors(mark) == []
