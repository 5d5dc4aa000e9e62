from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_zmq.errors import ConfigError, SandboxFailed
from prorl_zmq.tools.images.image import lock_image
from prorl_zmq.tools.images.staging import images_in, stage_image

COPY = "import sys; from pathlib import Path; from prorl_zmq.tools.images.staging import stage_image\n"
COPY += "print(stage_image(Path(sys.argv[1]), Path(sys.argv[2]), lambda _: None))"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "shared" / "tools.sif"
    path.parent.mkdir()
    path.write_bytes(b"x" * 1_000_000)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "images"


def test_an_image_is_copied_once(image: Path, disk: Path) -> None:
    copy = stage_image(image, disk, print)
    assert copy == disk / "tools.sif"
    assert copy.read_bytes() == image.read_bytes()
    assert disk.stat().st_mode & 0o777 == 0o700
    first = copy.resolve().stat()
    assert stage_image(image, disk, print).resolve().stat().st_ino == first.st_ino


def test_a_folder_is_an_image_too(tmp_path: Path, disk: Path) -> None:
    root = tmp_path / "rootfs"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "sh").write_text("#!")
    (root / "bin" / "bash").symlink_to("sh")
    copy = stage_image(root, disk, print)
    assert (copy / "bin" / "sh").read_text() == "#!"
    assert (copy / "bin" / "bash").readlink() == Path("sh")


def test_allocations_of_one_host_share_one_copy(image: Path, disk: Path) -> None:
    commands = [[sys.executable, "-P", "-c", COPY, str(image), str(disk)]] * 3
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 3
    assert said == {f"{disk}/tools.sif\n"}
    assert len([path for path in disk.rglob("tools.sif") if not path.is_symlink()]) == 1


def test_a_newer_image_takes_the_place_of_one_that_no_sandbox_has(image: Path, disk: Path) -> None:
    old = stage_image(image, disk, print).resolve()
    with lock_image(old):
        image.write_bytes(b"y" * 10)
        new = stage_image(image, disk, print).resolve()
        assert new.read_bytes() == b"y" * 10
        assert old.exists()
    stage_image(image, disk, print)
    assert not old.parent.exists()
    assert new.exists()


def test_what_a_killed_process_left_is_taken_away(image: Path, disk: Path) -> None:
    (disk / ".tools.sif" / "building-1").mkdir(parents=True)
    (disk / ".tools.sif" / "building-1" / "tools.sif").write_bytes(b"half")
    assert stage_image(image, disk, print).read_bytes() == image.read_bytes()
    assert not (disk / ".tools.sif" / "building-1").exists()


def test_an_image_that_grows_while_it_is_copied_is_refused(
    image: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter((1_000_001, 1_000_000))
    monkeypatch.setattr("prorl_zmq.tools.images.staging.size_bytes", lambda _: next(sizes))
    with pytest.raises(SandboxFailed, match=r"has 1000000 bytes in place of 1000001"):
        stage_image(image, disk, print)
    assert list((disk / ".tools.sif").iterdir()) == [disk / ".tools.sif" / "lock"]


def test_a_missing_image_and_a_stranger_s_folder_are_named(image: Path, disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.sif: No such file"):
        stage_image(image.with_name("none.sif"), disk, print)
    disk.mkdir(parents=True, exist_ok=True)
    disk.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(disk, 4321, 4321)
        with pytest.raises(ConfigError, match=r"images cannot be copied to .*images"):
            stage_image(image, disk, print)


def test_complete_images_of_a_folder_are_named(image: Path, disk: Path) -> None:
    stage_image(image, disk, print)
    (disk / "gone").symlink_to(disk / "nowhere")
    (disk / "other.txt").touch()
    assert images_in(disk) == ["tools.sif"]
