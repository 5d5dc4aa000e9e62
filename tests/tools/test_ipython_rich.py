from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pythons import LIMIT_S, Run, runner_of
from support.sandboxes import main_and_proofs

from prorl_zmq.tools.sessions.cell_session import PNG_SIGNATURE, CellResult

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.tools.sessions.ipython_session import IPythonSession

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(params=main_and_proofs("process", "bubblewrap"))
def ipython(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run a body on a session that has IPython."""
    return runner_of(request.param, tmp_path)


@pytest.mark.proof(quick=True)
def test_magics_and_commands(ipython: Run) -> None:
    async def body(session: IPythonSession) -> None:
        for code, text in (
            ("!echo hi; echo err >&2", "hi\nerr\n"),
            ("!false\n_exit_code", "1\n"),
            ("name = 'x'\n!echo $name {1 + 1}", "x 2\n"),
            ("lines = !echo a; echo b\nlines", "['a', 'b']\n"),
            ("%%bash\necho in bash\necho more", "in bash\nmore\n"),
            ("%cd -q /usr\n%pwd", "'/usr'\n"),
            ("1;", ""),
        ):
            assert await session.run(code, LIMIT_S) == CellResult(text), code
        assert "per loop" in (await session.run("%timeit -n1 -r1 1", LIMIT_S)).text
        assert "Wall time" in (await session.run("%%time\n1", LIMIT_S)).text

    ipython(body)


def test_rich_output_is_text_and_png(ipython: Run) -> None:
    async def body(session: IPythonSession) -> None:
        frame = "class F:\n  __repr__ = lambda self: ' a\\n0 1'\n  _repr_html_ = lambda self: '<table>a lot</table>'"
        for code, text in (
            (f"{frame}\nF()", " a\n0 1\n"),
            ("from IPython.display import *\ndisplay(F(), 2)", " a\n0 1\n2\n"),
            ("HTML('<style>p {}</style><p>a &lt; b<br>c</p>')", None),
            ("Markdown('# Title')", "# Title\n"),
            ("display({'text/plain': 'raw'}, raw=True)", "raw\n"),
            ("clear_output()", ""),
        ):
            result = await session.run(code, LIMIT_S)
            assert result == CellResult(result.text if text is None else text), code
            if text is None:
                assert result.text.split() == ["a", "<", "b", "c"]
        pixel = (
            "import struct, zlib\n"
            "def chunk(n, d): return struct.pack('!I', len(d)) + n + d + struct.pack('!I', zlib.crc32(n + d))\n"
            "png = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('!IIBBBBB', 1, 1, 8, 0, 0, 0, 0)) + "
            "chunk(b'IDAT', zlib.compress(b'\\0\\0')) + chunk(b'IEND', b'')\n"
            "display(Image(png))\nImage(png)"
        )
        result = await session.run(pixel, LIMIT_S)
        assert len(result.images) == 2
        assert all(image.startswith(PNG_SIGNATURE) for image in result.images)
        result = await session.run("for _ in range(99): display(Image(png))", LIMIT_S)
        assert len(result.images) == 16
        assert result.dropped_images == 83
        assert (await session.run("1", LIMIT_S)).images == ()
        result = await session.run("display({'image/png': b'\\0' * 2**24, 'text/plain': 'huge'}, raw=True)", LIMIT_S)
        assert result == CellResult("huge\n", dropped_images=1)

    ipython(body)


@pytest.mark.proof(quick=True)
def test_figures_are_images(ipython: Run) -> None:
    async def body(session: IPythonSession) -> None:
        result = await session.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]);", 120)
        assert result.ok, result.text
        assert len(result.images) == 1
        assert "<Figure size" in result.text
        result = await session.run("plt.figure(); plt.plot([2]); plt.show(); plt.plot([3]); print('on')", LIMIT_S)
        assert len(result.images) == 2
        assert (await session.run("1", LIMIT_S)).images == ()

    ipython(body)
