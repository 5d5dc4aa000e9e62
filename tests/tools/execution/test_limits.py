"""What the processes of a sandbox may use, each and together."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
from served import LIMIT_S, use
from support.sandboxes import on_isolated_kinds

from prorl_zmq.errors import SandboxLimitExceeded
from prorl_zmq.tools.containers.specification import Limits, SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes


@on_isolated_kinds
@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param("bomb() { bomb | bomb & }; bomb; sleep 20", id="forks"),
        pytest.param(
            "for i in 1 2 3 4 5 6 7 8; do python3 -c 'import time; x = bytearray(10**8); x[::4096] = x[::4096]; "
            "time.sleep(20)' & done; sleep 20",
            id="memory",
        ),
    ],
)
def test_a_bomb_ends_its_sandbox_and_not_the_node(
    sandboxes: Sandboxes, image: str, bomb: str, survivors: Callable[[str], list[str]]
) -> None:
    """Without a limit for all processes together the first needs the whole table, and the second 800 MB."""
    limits = Limits(memory_bytes=400 * 2**20, processes=64)
    limit = "processes" if "bomb()" in bomb else "memory_bytes"

    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        if limit == "processes" and os.geteuid() != 0:
            # The kernel itself refuses a user's forks, and the session comes back.
            assert (await bash.run(bomb, 3)).timed_out
            return
        with pytest.raises(SandboxLimitExceeded) as caught:
            await bash.run(bomb, 15)
        assert caught.value.limit == limit
        with pytest.raises(SandboxLimitExceeded):
            await sandbox.exec(["true"], LIMIT_S)

    use(sandboxes, body, SandboxSpec(limits=limits))
    assert survivors(str(sandboxes.root)) == []


@on_isolated_kinds
def test_a_single_process_has_limits(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["bash", "-c", "ulimit -v; ulimit -f; ulimit -u; ulimit -c"], LIMIT_S)
        assert result.stdout.split() == [b"4194304", b"1048576", b"512", b"0"]
        result = await sandbox.exec(["python3", "-c", "bytes(8 * 2**30)"], LIMIT_S)
        assert b"MemoryError" in result.stderr
        result = await sandbox.exec(["truncate", "-s", "2G", "file"], LIMIT_S)
        assert result.exit_code == 153 or b"too large" in result.stderr

    use(sandboxes, body)


@on_isolated_kinds
@pytest.mark.parametrize(
    "script",
    [
        "import mmap; m = mmap.mmap(-1, 500 << 20); [m.__setitem__(i, 1) for i in range(0, len(m), 4096)]",
        "import threading as t, time; [t.Thread(target=time.sleep, args=[4], daemon=1).start() for _ in range(300)]",
    ],
    ids=["shared memory", "threads"],
)
def test_what_is_shared_and_threads_count_too(sandboxes: Sandboxes, script: str) -> None:
    spec = SandboxSpec(limits=Limits(memory_bytes=300 * 2**20, processes=100))

    async def body(sandbox: Sandbox) -> None:
        call = sandbox.exec(["python3", "-c", f"{script}; import time; time.sleep(4)"], LIMIT_S)
        try:
            result = await call
        except SandboxLimitExceeded:
            return
        # The kernel refused it: a thread to a user, memory beyond the address space.
        assert b"can't start new thread" in result.stderr or b"Cannot allocate" in result.stderr

    use(sandboxes, body, spec)


@on_isolated_kinds
@pytest.mark.parametrize(
    "hide", ["", "import ctypes; ctypes.CDLL(None).unshare(0x400); "], ids=["open", "one thread's"]
)
def test_memory_files_count(sandboxes: Sandboxes, hide: str) -> None:
    """480 MB of them, mapped by nobody, once were no memory to a sandbox of 128."""
    script = (
        "import os, threading, time\n"
        f"def fill():\n    {hide}file = os.memfd_create('x')\n"
        "    for _ in range(300): os.write(file, bytes(2**20))\n    time.sleep(20)\n"
        "thread = threading.Thread(target=fill); thread.start(); thread.join()"
    )

    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxLimitExceeded) as caught:
            await sandbox.exec(["python3", "-c", script], LIMIT_S)
        assert caught.value.limit == "memory_bytes"

    use(sandboxes, body, SandboxSpec(limits=Limits(memory_bytes=200 * 2**20)))


@pytest.mark.proof
@on_isolated_kinds
def test_honest_work_beside_a_hog_ends_in_time(sandboxes: Sandboxes) -> None:
    """Each of 400 busy processes took as much of the node's time as all that another sandbox had."""
    work = "import time; start = time.process_time()\nwhile time.process_time() - start < 0.5: pass"

    async def main() -> None:
        hog, honest = await asyncio.gather(sandboxes.create("hog"), sandboxes.create("honest"))
        try:
            loops = "for _ in $(seq 400); do (setsid bash -c 'while :; do :; done' &); done; sleep 3"
            await hog.exec(["bash", "-c", loops], LIMIT_S)
            assert not (await honest.exec(["python3", "-c", work], LIMIT_S)).timed_out
        finally:
            await hog.close()
            await honest.close()

    asyncio.run(main())
