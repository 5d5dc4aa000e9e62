from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

import pytest
from pythons import LIMIT_S, interpreter, use

from prorl_zmq.tools.ipython import IPythonTool, render
from prorl_zmq.tools.sessions.cell_session import PNG_SIGNATURE, CellResult, Images, png_dimensions
from prorl_zmq.tools.sessions.ipython_driver import best_text, png_bytes
from prorl_zmq.tools.sessions.ipython_session import IPythonSession
from prorl_zmq.tools.tool import ToolArgumentsInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.tools.containers.container import Container

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

PNG = PNG_SIGNATURE + struct.pack("!I4sII", 13, b"IHDR", 640, 480) + b"\0" * 12_000
RESTARTED = "[Python was restarted; variables and imports are lost, files are kept]"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (CellResult("2\n"), "2\n"),
        (CellResult(""), "[no output]"),
        (CellResult("", error="SystemExit"), "[SystemExit]"),
        (CellResult("Error: x\n", error="Error"), "Error: x\n"),
        (CellResult("<Figure>", images=(PNG,)), "<Figure>\n[image: PNG, 640x480, 12 kB]"),
        (CellResult("", images=(PNG,), dropped_images=2), "[image: PNG, 640x480, 12 kB]\n[images left out: 2]"),
        (
            CellResult("a\n", error="KeyboardInterrupt", timed_out=True),
            "a\n[timed out after 1.5 s; the code was stopped]",
        ),
        (
            CellResult("a", timed_out=True, restarted=True, ended="it was killed by signal 9 (SIGKILL)"),
            f"a\n[timed out after 1.5 s; the code was stopped]\n{RESTARTED}",
        ),
        (
            CellResult("", restarted=True, ended="it was killed by signal 11 (SIGSEGV)"),
            f"[the Python process ended: it was killed by signal 11 (SIGSEGV)]\n{RESTARTED}",
        ),
        (CellResult("1\n", restarted=True), f"1\n{RESTARTED}"),
    ],
)
def test_what_the_model_reads(result: CellResult, text: str) -> None:
    assert render(result, 1.5) == text


def test_images_are_bounded() -> None:
    images = Images()
    for image in (b"GIF89a" + b"\0" * 99, PNG_SIGNATURE, PNG, PNG + b"\0" * 2**25):
        images.append(image)
    assert (images.content(), images.dropped) == ((PNG,), 3)
    for _ in range(20):
        images.append(PNG)
    assert (len(images.content()), images.dropped) == (16, 8)
    images.clear()
    assert (images.content(), images.dropped) == ((), 0)
    assert png_dimensions(PNG) == (640, 480)


@pytest.mark.parametrize(
    ("bundle", "text"),
    [
        ({}, ""),
        ({"text/plain": "2"}, "2"),
        ({"text/plain": " a\n0 1", "text/html": "<table>"}, " a\n0 1"),
        ({"text/plain": "<x.HTML object>", "text/html": "<p>a &amp; b</p><script>no</script>"}, "a & b"),
        ({"text/plain": "<x.Markdown object>", "text/markdown": "# a", "text/html": "b"}, "# a"),
        ({"text/plain": "<x.JSON object>", "application/json": {"a": 1}}, '{"a": 1}'),
        ({"text/plain": "<x.Image object>", "text/html": "b", "image/png": "aGk="}, "<x.Image object>"),
        ({"text/plain": "<x.Odd object at 0x1>"}, "<x.Odd object at 0x1>"),
    ],
)
def test_the_text_that_says_most(bundle: dict[str, object], text: str) -> None:
    assert best_text(bundle) == text
    assert png_bytes("aGk=") == png_bytes(b"hi") == b"hi"


def test_a_tool_call(tmp_path: Path) -> None:
    async def body(container: Container) -> None:
        tool = IPythonTool(IPythonSession(container, python=interpreter("process")))
        assert await tool({"code": "x = 20\nx + 1"}, LIMIT_S) == "21\n"
        assert await tool({"code": "x = 1"}, LIMIT_S) == "[no output]"
        assert (await tool({"code": "exit()"}, LIMIT_S)).endswith(f"code 0]\n{RESTARTED}")
        for arguments, message in (
            ({}, 'missing required field `code`; it takes {"code": string}'),
            ({"code": "#" * 2**23}, "at most"),
        ):
            with pytest.raises(ToolArgumentsInvalid, match="wrong arguments for ipython") as caught:
                await tool(arguments, LIMIT_S)
            assert message in str(caught.value)
        await tool.close()

    use("process", tmp_path, body, asyncio.run)
