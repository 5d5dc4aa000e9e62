"""How much of a session's output is kept, as a sandbox's specification says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from served import LIMIT_S, use
from support.sandboxes import on_each_kind

from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.processes.output import OUTPUT_LIMIT_BYTES

if TYPE_CHECKING:
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

WRITTEN = 100_000


def keep_as_much(sandboxes: Sandboxes, limit_bytes: int) -> None:
    dropped = max(WRITTEN - limit_bytes, 0)

    async def body(sandbox: Sandbox) -> None:
        bash = await sandbox.bash()
        ran = await bash.run(f"head -c {WRITTEN} /dev/zero | tr '\\0' x", LIMIT_S)
        assert (ran.dropped_bytes, ran.output.count("x")) == (dropped, WRITTEN - dropped)
        python = await sandbox.ipython()
        cell = await python.run(f"print('x' * {WRITTEN}, end='')", LIMIT_S)
        assert (cell.dropped_bytes, cell.text.count("x")) == (dropped, WRITTEN - dropped)

    use(sandboxes, body, SandboxSpec(output_limit_bytes=limit_bytes))


@on_each_kind
def test_bash_and_ipython_keep_as_much_output_as_the_specification_says(sandboxes: Sandboxes) -> None:
    keep_as_much(sandboxes, 1024)


@pytest.mark.parametrize("limit_bytes", [OUTPUT_LIMIT_BYTES, 2 * WRITTEN])
def test_bash_and_ipython_keep_more_output_too(sandboxes: Sandboxes, limit_bytes: int) -> None:
    keep_as_much(sandboxes, limit_bytes)


def test_a_kernel_keeps_as_much_output_as_the_specification_says(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        kernel = await sandbox.kernel([sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
        cell = await kernel.run("print('x' * 5000, end='')", 60)
        assert (cell.dropped_bytes, cell.text.count("x")) == (5000 - 2048, 2048)

    use(sandboxes_of("process"), body, SandboxSpec(output_limit_bytes=2048))


@on_each_kind
def test_a_copy_keeps_the_limit(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        copy = await sandbox.copy("two")
        try:
            ran = await (await copy.bash()).run("head -c 5000 /dev/zero", LIMIT_S)
            assert ran.dropped_bytes == 5000 - 2048
        finally:
            await copy.close()

    use(sandboxes, body, SandboxSpec(output_limit_bytes=2048))


@pytest.mark.parametrize("limit_bytes", [0, 1023, 16 * 2**20 + 1])
def test_a_limit_out_of_bounds_is_refused_with_the_bounds(limit_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"output_limit_bytes.*at least 1024 and at most 16777216"):
        SandboxSpec(output_limit_bytes=limit_bytes)
    with pytest.raises(msgspec.ValidationError, match=r"`\$.output_limit_bytes`"):
        msgspec.convert({"output_limit_bytes": limit_bytes}, SandboxSpec)
