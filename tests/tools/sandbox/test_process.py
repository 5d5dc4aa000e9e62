from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from typing import TYPE_CHECKING

from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.kinds.process import ProcessContainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


def test_a_container_leaves_the_other_children_of_its_process_alone(tmp_path: Path) -> None:
    """It killed the services that the tests of a worker share."""

    async def main() -> tuple[list[int], list[int]]:
        container = ProcessContainer(tmp_path, SandboxSpec())
        await container.start()
        nothing = os.open(os.devnull, os.O_RDWR)
        child = container.spawn(["sleep", "3600"], stdin=nothing, stdout=nothing, stderr=nothing)
        os.close(nothing)
        found = container.processes()
        await container.close()
        return found, [child.pid]

    for name in ("workspace", "tmp", "shm"):
        (tmp_path / name).mkdir()
    with subprocess.Popen(["sleep", "3600"]) as other:
        found, own = asyncio.run(main())
        assert found == own
        assert other.poll() is None
        other.kill()
