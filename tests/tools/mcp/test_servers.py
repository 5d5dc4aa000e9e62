"""MCP servers as programs in a sandbox: their state, and how they fail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from mcp_servers import SMALL, add, served, small
from support.sandboxes import main_kind

from prorl_zmq.errors import SandboxFailed, ToolSessionLost
from prorl_zmq.tools.mcp.toolset import McpTools
from prorl_zmq.wire.messages.jobs import McpServer

if TYPE_CHECKING:
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.tool import AnyTool

pytestmark = pytest.mark.proof


def test_a_server_in_the_sandbox_has_one_state_for_its_rollout(sandboxes_of: SharedSandboxes) -> None:
    async def twice(tools: dict[str, AnyTool], sandbox: Sandbox) -> list[str]:
        return [await add(tools, sandbox), await add(tools, sandbox)]

    assert served(sandboxes_of, small(""), twice) == ["3, call 1", "3, call 2"]


def test_a_server_may_save_its_state_when_its_input_ends(sandboxes_of: SharedSandboxes) -> None:
    async def whole() -> bytes:
        sandbox = await sandboxes_of(main_kind()).create("job.1")
        try:
            await sandbox.write_file("small_mcp_server.py", SMALL.read_bytes())
            tools = McpTools([small("saves")], sandbox, {})
            await tools.open()
            await add(tools.tools, sandbox)
            await tools.close()
            await tools.close()
            return await sandbox.read_file("saved.txt")
        finally:
            await sandbox.close()

    assert asyncio.run(whole()) == b"1 calls"


def test_a_program_that_is_not_there_is_named(sandboxes_of: SharedSandboxes) -> None:
    with pytest.raises(SandboxFailed, match="no-such-server: no such program") as caught:
        served(sandboxes_of, McpServer(name="shop", command=("no-such-server",)), add)
    assert caught.value.fields["reason"] == "image"


@pytest.mark.parametrize(
    ("server", "words", "reason"),
    [
        (small("hangs", start_s=0.5), r"shop did not start within 0\.5 s", "server"),
        (McpServer(name="shop", command=("sh", "-c", "echo sorry >&2; exit 4")), r"exited with 4; .*: sorry", "server"),
        (small("dies"), r"shop ended: it exited with 1; its last words: out of paper", "server"),
        (small("killed"), r"shop ended: it was killed by signal 9", "killed"),
        (small("floods"), r"shop floods: it sent 10001 messages", "server"),
        (small("endless"), r"shop floods: .* 6\d MiB that answer no request", "server"),
    ],
    ids=["hangs", "exits", "dies", "killed", "floods", "endless"],
)
def test_servers_that_are_lost_say_why(
    sandboxes_of: SharedSandboxes, server: McpServer, words: str, reason: str
) -> None:
    async def call(tools: dict[str, AnyTool], sandbox: Sandbox) -> None:
        text = await add(tools, sandbox)
        assert "8 MiB" in text  # only the endless one answers at all
        await add(tools, sandbox)

    with pytest.raises(ToolSessionLost, match=words) as caught:
        served(sandboxes_of, server, call)
    assert caught.value.fields == {"server": "shop", "reason": reason}


def test_a_huge_answer_is_left_out_and_the_next_one_arrives(sandboxes_of: SharedSandboxes) -> None:
    async def twice(tools: dict[str, AnyTool], sandbox: Sandbox) -> list[str]:
        return [await add(tools, sandbox), await add(tools, sandbox)]

    first, second = served(sandboxes_of, small("huge"), twice)
    assert first == "[the answer has more than 8 MiB and was left out; ask for less]"
    assert second == "3, call 2"


def test_a_server_that_reads_nothing_costs_its_callers_their_limit_only(sandboxes_of: SharedSandboxes) -> None:
    async def call(tools: dict[str, AnyTool], sandbox: Sandbox) -> list[str]:
        first = await add(tools, sandbox, 0.1)
        for _ in range(5):
            assert "did not answer" in await tools["add"]({"a": "x" * 2**20}, 0.1)
        with pytest.raises(ToolSessionLost, match="shop does not read its input: 4 MiB wait"):
            await tools["add"]({"a": "x" * 2**20}, 0.1)
        return [first]

    assert served(sandboxes_of, small("deaf"), call) == ["[add did not answer within 0.1 s; the call was cancelled]"]


def test_a_server_that_ends_with_its_sandbox_is_no_servers_fault(sandboxes_of: SharedSandboxes) -> None:
    async def call(tools: dict[str, AnyTool], sandbox: Sandbox) -> None:
        await add(tools, sandbox)
        await sandbox.close()
        with pytest.raises(SandboxFailed, match="is gone"):
            await add(tools, sandbox)

    served(sandboxes_of, small(""), call)
