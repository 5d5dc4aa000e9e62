"""MCP servers of the real package, in a sandbox and over HTTP."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from documents import PAGES, ROOT
from framework_python import framework_python
from mcp_servers import FAST, add, served
from support.waiting import until

from prorl_zmq import Job
from prorl_zmq.errors import ToolSessionLost
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.testing import LocalService, say, tool_call
from prorl_zmq.tools.containers.specification import Bind
from prorl_zmq.tools.tool import AnyTool, ToolArgumentsInvalid
from prorl_zmq.wire.messages.jobs import McpServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def python() -> str:
    return framework_python("mcp")


def home_of(python: str) -> tuple[Bind, ...]:
    """Show a virtual environment and its interpreter in the sandbox."""
    folders = {str(Path(python).parents[1]), str(Path(python).resolve().parents[1])}
    return tuple(Bind(folder, folder) for folder in sorted(folders) if not folder.startswith("/usr"))


async def use_all(tools: dict[str, AnyTool], sandbox: Sandbox) -> None:
    """Try what servers of the real package do; the same over both transports."""
    del sandbox
    assert tools["add"].schema()["function"]["description"] == "Add two numbers."
    assert await tools["add"]({"a": 1, "b": 2}, 30) == "3"
    wrong = await tools["add"]({"a": "x", "b": 2}, 30)
    assert wrong.startswith("Error: 1 validation error for call[add]")
    assert "https://" not in wrong
    assert await tools["fail"]({"text": "boo"}, 30) == "Error calling tool 'fail': boo"
    late = await tools["sleep"]({"seconds": 60}, 0.5)
    assert late == "[sleep did not answer within 0.5 s; the call was cancelled]"
    assert await tools["was_cancelled"]({}, 30) == "true"
    assert await tools["elicit"]({}, 30) == "refused: this client does not support elicitation/create"
    with pytest.raises(ToolArgumentsInvalid, match="cannot be sent"):
        await tools["fail"]({"text": "\udfff"}, 30)


def test_a_server_of_the_real_package(sandboxes_of: SharedSandboxes, python: str) -> None:
    async def use(tools: dict[str, AnyTool], sandbox: Sandbox) -> None:
        await use_all(tools, sandbox)
        grown = await tools["grow"]({}, 30)
        assert grown.startswith("grown\n[New tool: extra: Shouts. Its arguments: ")
        assert await tools["extra"]({"text": "abc"}, 30) == "ABC"
        with pytest.raises(ToolSessionLost, match="shop ended: it exited with 3"):
            await tools["die"]({}, 30)

    server = McpServer(name="shop", command=(python, "fast_mcp_server.py"))
    served(sandboxes_of, server, use, *home_of(python))


@pytest.fixture(scope="module")
def url(python: str) -> Iterator[str]:
    """Run a server of the real package on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(FAST), str(port)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: _answers(port), "the server")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_of_the_real_package_over_http(sandboxes_of: SharedSandboxes, url: str) -> None:
    served(sandboxes_of, McpServer(name="shop", url=url), use_all, url_key="a-key")


def test_the_servers_page(python: str, tmp_path: Path) -> None:
    """Run the job of docs/mcp.md with its server, where the image is this machine."""
    page = PAGES[ROOT / "docs" / "mcp.md"]
    source, row = (
        re.search(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for language in ("python", "json")
    )
    assert source is not None
    assert row is not None
    (tmp_path / "shop.py").write_text(source[1])
    written = json.loads(row[1])
    assert written["mcp"][0]["command"] == ["python3", "/opt/shop.py"]
    written["mcp"][0]["command"] = [python, str(tmp_path / "shop.py")]
    turns = (tool_call("price", item="book"), tool_call("bash", command="echo 12.0 > answer.txt"), "Done.")
    with LocalService(engine=say(*turns), sandbox="process") as service, service.client() as client:
        client.submit(msgspec.convert(written, Job))
        (trajectory,) = client.collect(1, wait_s=100)
    assert (trajectory.result.error, trajectory.result.reward) == (None, 1.0)
    assert "\n12.0" in EmbeddedChatFormat().decode(trajectory.token_ids)


def test_addresses_that_do_not_answer(sandboxes_of: SharedSandboxes, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nothing = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
    with pytest.raises(ToolSessionLost, match="the MCP server shop cannot be reached: ClientConnectorError"):
        served(sandboxes_of, McpServer(name="shop", url=nothing), add)
    with pytest.raises(ToolSessionLost, match="answered with status 404"):
        served(sandboxes_of, McpServer(name="shop", url=url.replace("/mcp", "/other")), add)
