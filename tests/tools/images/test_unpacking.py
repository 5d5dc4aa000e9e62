from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rootfs import tiny_root_filesystem

from prorl_zmq.errors import SandboxFailed, SandboxUnavailable
from prorl_zmq.tools.images import unpacking
from prorl_zmq.tools.images.image_store import ImageStore
from prorl_zmq.tools.images.unpacking import unpacked

from .conftest import needs_apptainer, needs_root, python_as_user

pytestmark = [needs_apptainer, pytest.mark.xdist_group("SIF file")]


@pytest.fixture(scope="module")
def sif(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sif")
    return (
        ImageStore(folder / "images").build(str(tiny_root_filesystem(folder / "tiny")), "tiny", format="sif").image.path
    )


def test_a_file_is_unpacked_once(sif: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    image = unpacked(sif, root)
    assert (image / "etc" / "word").read_text() == "hello\n"
    assert (image / "bin" / "sh").readlink() == Path("bash")
    (image / "mark").touch()
    assert unpacked(sif, root) == image
    assert (image / "mark").exists()
    assert list(root.iterdir()) == [image]
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_file_that_is_replaced_is_unpacked_anew(sif: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.sif"
    shutil.copy(sif, mine)
    first = unpacked(mine, tmp_path / "cache")
    os.utime(mine, ns=(1, 1))
    assert unpacked(mine, tmp_path / "cache") != first


def test_many_at_one_time_get_one_unpacking(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    builder = unpacking.Builder
    monkeypatch.setattr(unpacking, "Builder", lambda *arguments: builds.append(1) or builder(*arguments))
    with ThreadPoolExecutor(4) as threads:
        images = list(threads.map(lambda _: unpacked(sif, tmp_path / "cache"), range(4)))
    assert len(set(images)) == 1
    assert len(builds) == 1


def damaged(sif: Path, kind: str, target: Path) -> Path:
    data = bytearray(sif.read_bytes())
    match kind:
        case "half":
            del data[len(data) // 2 :]
        case "header only":
            del data[2000:]
        case "empty":
            data.clear()
        case "noise inside":
            data[len(data) // 2 : len(data) // 2 + 20_000] = os.urandom(20_000)
        case "noise at the end":
            data[-3000:-1000] = os.urandom(2000)
        case "a definition":
            data[:] = b"Bootstrap: localimage\nFrom: /\n%post\n  touch /tmp/executed\n"
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("kind", ["half", "header only", "empty", "noise at the end", "a definition"])
def test_a_corrupt_file(kind: str, sif: Path, tmp_path: Path) -> None:
    path = damaged(sif, kind, tmp_path / "bad.sif")
    with pytest.raises(
        SandboxFailed, match=r"bad\.sif (is no SIF file|cannot be unpacked; it may be corrupt)"
    ) as caught:
        unpacked(path, tmp_path / "cache")
    assert len(caught.value.message) < 6000
    assert [each for each in tmp_path.glob("cache/*") if not each.name.startswith(".")] == []
    assert list(tmp_path.glob("cache/.*/building-*")) == []


def test_damage_that_the_compression_does_not_notice(tmp_path: Path, tiny: Path) -> None:
    """zstd in squashfs has no checksums: once, a libc with noise in it was unpacked without a word."""
    sif = ImageStore(tmp_path / "images").build(str(tiny), "mine", format="sif").image.path
    damaged(sif, "noise inside", sif)
    with pytest.raises(SandboxFailed, match="its content is not what was built"):
        unpacked(sif, tmp_path / "cache")


def test_no_file_and_a_full_path(sif: Path, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match="No such file"):
        unpacked(tmp_path / "none.sif", tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxFailed, match="Not a directory"):
        unpacked(sif, tmp_path / "file" / "cache")


def test_without_apptainer(few_programs: None, sif: Path, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="Apptainer is not installed"):
        unpacked(sif, tmp_path / "cache")


@needs_root
def test_files_keep_their_owners_for_root(tmp_path: Path, tiny: Path) -> None:
    """Where root lacks a capability, Apptainer's own unpacking failed at the first file of another owner."""
    os.chown(tiny / "etc" / "word", 42, 43)
    store = ImageStore(tmp_path / "images")
    sif = store.build(str(tiny), "file", format="sif").image.path
    for image in (unpacked(sif, tmp_path / "cache"), store.build(str(sif), "folder").image.path):
        status = (image / "etc" / "word").stat()
        assert (status.st_uid, status.st_gid) == (42, 43)
    copied = store.build(str(sif), "copied", format="sif").image
    assert copied.manifest.sif_digest == store.show("file").manifest.sif_digest


@needs_root
def test_as_an_unprivileged_user(sif: Path, user_folder: Path) -> None:
    shutil.copy(sif, user_folder / "tiny.sif")
    code = "from pathlib import Path as P; from prorl_zmq.tools.images.unpacking import unpacked as u; "
    done = python_as_user(user_folder, "-c", f"{code}print(u(P('tiny.sif'), P('cache')))")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "etc" / "word").read_text() == "hello\n"
    shutil.rmtree(user_folder / "cache")
