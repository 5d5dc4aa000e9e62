from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from needed import usable
from rootfs import root_filesystem

from prorl_zmq.errors import SandboxFailed, SandboxUnavailable

if TYPE_CHECKING:
    from prorl_zmq.tools.images.image_store import ImageStore

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can build a root filesystem")


@pytest.mark.timeout(600)
def test_a_debian_is_built_and_runs() -> None:
    root = root_filesystem()
    assert (root / "etc" / "debian_version").exists()
    assert list((root / "dev").iterdir()) == []
    usable("bubblewrap")
    inside = ["bwrap", "--unshare-all", "--ro-bind", str(root), "/", "--dev", "/dev", "--proc", "/proc"]
    done = subprocess.run([*inside, "python3", "-c", "print(6 * 7)"], capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"


@needs_root
@pytest.mark.skipif(shutil.which("debootstrap") is None, reason="debootstrap is not installed")
def test_a_mirror_that_does_not_answer_is_said_without_its_address(store: ImageStore) -> None:
    lines: list[str] = []
    with pytest.raises(SandboxFailed, match="debootstrap failed with exit code 1") as caught:
        store.build(
            "debootstrap://bookworm", "debian", mirror="http://user:secret@127.0.0.1:9/debian", heard=lines.append
        )
    assert "secret" not in caught.value.message + " ".join(lines)
    assert "(mirror)" in caught.value.message + " ".join(lines)
    assert store.find("debian") is None


@needs_root
def test_without_debootstrap(few_programs: None, store: ImageStore) -> None:
    with pytest.raises(SandboxUnavailable, match="debootstrap is not installed"):
        store.build("debootstrap://bookworm", "debian")
