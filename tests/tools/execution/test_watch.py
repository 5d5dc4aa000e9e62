"""What a watch sees of a container that runs nothing but what holds it."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.sandboxes import on_isolated_kinds

from prorl_zmq.errors import ProrlError, SandboxLimitExceeded
from prorl_zmq.tools.containers.namespaced import NICENESS
from prorl_zmq.tools.containers.specification import Limits
from prorl_zmq.tools.execution import memory_files
from prorl_zmq.tools.execution import watch as watch_module
from prorl_zmq.tools.execution.watch import CROWD, Watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from prorl_zmq.tools.containers.container import Container

pytestmark = on_isolated_kinds


async def exceeded(container: Container) -> ProrlError:
    """Give what a watch says of a container."""
    said: asyncio.Future[ProrlError] = asyncio.get_running_loop().create_future()
    watch = Watch(container, lambda: True, said.set_result, lambda: said.cancel("its folder is gone"))
    watch.start()
    try:
        async with asyncio.timeout(20):
            return await said
    finally:
        watch.stop()


@pytest.mark.parametrize("limits", [Limits(processes=0), Limits(memory_bytes=1)], ids=["processes", "memory_bytes"])
def test_what_holds_a_container_is_watched(
    live_container: Callable[[], AbstractAsyncContextManager[Container]],
    limits: Limits,
    request: pytest.FixtureRequest,
) -> None:
    """Root of a fakeroot container may take it over, and have it work for it."""

    async def main() -> None:
        async with live_container() as container:
            assert container.processes() == []
            container.spec = msgspec.structs.replace(container.spec, limits=limits)
            error = await exceeded(container)
            assert isinstance(error, SandboxLimitExceeded)
            assert error.fields["limit"] in request.node.callspec.id

    asyncio.run(main())


def test_more_descriptors_than_can_be_looked_at_end_a_sandbox(
    live_container: Callable[[], AbstractAsyncContextManager[Container]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_files, "DESCRIPTORS", 2)

    async def main() -> None:
        async with live_container() as container:
            error = await exceeded(container)
            assert error.fields["limit"] == "descriptors"

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 100])
def test_a_look_that_fails_is_not_the_last(
    live_container: Callable[[], AbstractAsyncContextManager[Container]], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception ended the watch, and with it all limits of the sandbox."""

    async def main() -> None:
        async with live_container() as container:
            container.spec = msgspec.structs.replace(container.spec, limits=Limits(processes=0))
            look = container.processes
            failures = iter(range(times))

            def fail(at_most: float) -> list[int]:
                if next(failures, None) is not None:
                    raise OSError("too many open files")
                return look(at_most)

            monkeypatch.setattr(container, "processes", fail)
            said = (await exceeded(container)).fields
            assert said == ({"limit": "processes"} if times == 1 else {"reason": "watch"})
            monkeypatch.undo()

    asyncio.run(main())


def test_many_busy_processes_give_way_to_others(
    live_container: Callable[[], AbstractAsyncContextManager[Container]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = watch_module._processor_s
    monkeypatch.setattr(watch_module, "_processor_s", lambda pid: 1000 * used(pid))  # as if nothing else ran here

    async def main() -> None:
        async with live_container() as container:
            container.spec = msgspec.structs.replace(container.spec, limits=Limits())
            watch = Watch(container, lambda: True, lambda _: None, lambda: None)
            watch.start()
            loops = f"for _ in $(seq {CROWD * (os.cpu_count() or 1) + 1}); do (while :; do :; done) & done; wait"
            nothing = os.open(os.devnull, os.O_RDWR)
            child = container.spawn(["bash", "-c", loops], stdin=nothing, stdout=nothing, stderr=nothing)
            os.close(nothing)
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == NICENESS + os.getpriority(os.PRIO_PROCESS, 0)
            try:
                async with asyncio.timeout(20):
                    while any(  # noqa: ASYNC110 - nothing tells of it
                        os.sched_getscheduler(pid) != os.SCHED_IDLE for pid in container.processes()
                    ):
                        await asyncio.sleep(0.1)
            finally:
                watch.stop()
                await container.end(child)

    asyncio.run(main())
