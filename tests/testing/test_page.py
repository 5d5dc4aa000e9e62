"""The examples of docs/testing.md, run as they are there."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from documents import PAGES, ROOT, blocks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.proof(quick=True)
def test_the_examples_pass(tmp_path: Path) -> None:
    (task,) = [block for block in blocks("python") if "class CountHandler" in block]
    (tmp_path / "my_task.py").write_text(task)
    page = PAGES[ROOT / "docs" / "testing.md"]
    files = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert page.count("```python") == len(files) == 5
    for name, code in files:
        (tmp_path / name).write_text(code)
    (tmp_path / "test_shared.py").write_text("def test_shared(service):\n    assert service.run_dir.is_dir()\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
