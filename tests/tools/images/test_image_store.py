from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.errors import ConfigError, SandboxFailed, SandboxUnavailable
from prorl_zmq.tools.images import image_store, kept_folder
from prorl_zmq.tools.images.image import default_root, lock_image
from prorl_zmq.tools.images.image_store import ImageStore

from .conftest import IMAGE, USER, as_user, leftovers, needs_apptainer, needs_root, python_as_user

if TYPE_CHECKING:
    from collections.abc import Callable


def said_inside(image: Path, *argv: str) -> str:
    # A user may not be allowed to mount a SIF file (/dev/fuse).
    flags = ["--no-privs"] if os.geteuid() == 0 else ["--unsquash"] if image.is_file() else []
    command = ["apptainer", "--quiet", "exec", "--containall", *flags, str(image), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_folder_becomes_a_directory_image(store: ImageStore, tiny: Path) -> None:
    (tiny / "proc" / "version").write_text("the host's")
    built = store.build(str(tiny), "tiny")
    assert not built.reused
    assert (store.root / "tiny").resolve() == built.image.path
    assert (built.image.path / "etc" / "word").read_text() == "hello\n"
    assert list((built.image.path / "proc").iterdir()) == []
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert store.list() == [built.image] == [store.show("tiny")]
    assert built.image.manifest.size_bytes > 1_000_000


@needs_apptainer
def test_images_start(store: ImageStore, tiny: Path) -> None:
    folder = store.build(str(tiny), "folder").image.path
    file = store.build(str(tiny), "file", format="sif").image.path
    back = store.build(str(file), "back").image.path
    assert file.is_file()
    for image in (folder, file, back, store.root / "folder"):
        assert said_inside(image, "/bin/cat", "/etc/word") == "hello\n"


@needs_apptainer
def test_a_definition_is_built_with_its_own_commands(store: ImageStore, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "made.def.j2").write_text(
        "Bootstrap: localimage\nFrom: ./tiny\n%files\n  {{ lock_file }} /lock\n%post\n  echo {{ word }} > /made\n"
    )
    lock = tmp_path / "requirements.txt"
    lock.write_text("numpy==2.0\n")

    def build() -> image_store.Built:
        source = str(tmp_path / "made.def.j2")
        return store.build(source, "made", mode="lock", lock_file=lock, variables={"word": "built"})

    image = build().image.path
    assert (image / "made").read_text() == "built\n"
    assert (image / "lock").read_text() == "numpy==2.0\n"
    (tiny / "etc" / "word").write_text("the base changed\n")
    assert build().reused
    lock.write_text("numpy==2.1\n")
    built = build()
    assert (built.reused, built.reason) == (False, "the lock file changed")
    assert (built.image.path / "lock").read_text() == "numpy==2.1\n"


def test_versioned_follows_the_base_image_and_our_version(
    store: ImageStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.build(str(tiny), "tiny")
    again = store.build(str(tiny), "tiny")
    assert (again.image, again.reused) == (first.image, True)
    (tiny / "etc" / "word").write_text("other\n")
    changed = store.build(str(tiny), "tiny")
    assert (changed.reused, changed.reason) == (False, "the base image changed")
    assert (changed.image.path / "etc" / "word").read_text() == "other\n"
    monkeypatch.setattr(image_store, "version", lambda _: "99")
    assert "(0.1.0 → 99)" in store.build(str(tiny), "tiny").reason.replace(
        changed.image.manifest.recipe.version, "0.1.0"
    )
    assert leftovers(store, "tiny") == set()


def test_scratch_always_builds(store: ImageStore, tiny: Path) -> None:
    first = store.build(str(tiny), "tiny", mode="scratch")
    second = store.build(str(tiny), "tiny", mode="scratch")
    assert not second.reused
    assert not first.image.path.exists()
    assert second.image.path.exists()


def test_an_image_that_lost_a_part_is_built_anew(store: ImageStore, tiny: Path) -> None:
    image = store.build(str(tiny), "tiny").image
    (image.path.parent / "manifest.json").write_text("{}")
    assert store.find("tiny") is None
    assert store.build(str(tiny), "tiny").reason == "there is no image of this name yet"
    shutil.rmtree(store.show("tiny").path)
    assert store.list() == []
    assert not store.build(str(tiny), "tiny").reused
    assert leftovers(store, "tiny") == set()


def test_a_replaced_image_stays_while_it_is_held(store: ImageStore, tiny: Path) -> None:
    store.build(str(tiny), "tiny")
    with lock_image(store.root / "tiny") as held:
        second = store.build(str(tiny), "tiny", mode="scratch")
        assert second.image.path != held.path
        assert (held.path / "etc" / "word").read_text() == "hello\n"
        assert not store.remove("tiny")
        assert (held.path / "etc" / "word").exists()
        assert store.find("tiny") is None
    assert store.remove("tiny")
    assert not held.path.exists()
    assert list(store.root.iterdir()) == []


def test_the_image_of_a_name_stays_where_an_older_one_cannot_be_removed(
    store: ImageStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.build(str(tiny), "tiny").image.path
    with lock_image(first):
        second = store.build(str(tiny), "tiny", mode="scratch").image.path
    failures = iter([OSError(errno.EIO, "the disk fails")])
    lock_alone = kept_folder.lock_alone

    def failing_once(path: Path) -> Any:
        for error in failures:
            raise error
        return lock_alone(path)

    monkeypatch.setattr(kept_folder, "lock_alone", failing_once)
    with pytest.raises(SandboxFailed, match="the disk fails"):
        store.build(str(tiny), "tiny", mode="scratch")
    assert store.show("tiny").path == second
    assert second.exists()


def test_a_hold_is_let_go_of_by_the_kernel(store: ImageStore, tiny: Path) -> None:
    first = store.build(str(tiny), "tiny").image.path
    held = lock_image(first)
    child = subprocess.Popen(["sleep", "600"], pass_fds=(held.descriptor,))
    held.close()
    store.build(str(tiny), "tiny", mode="scratch")
    assert first.exists()
    child.kill()
    child.wait()
    store.build(str(tiny), "tiny", mode="scratch")
    assert not first.exists()


def test_a_file_system_without_locks_keeps_all_images(
    store: ImageStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS is, which locks alone only what is open for writing."""
    real = fcntl.flock

    def flock(descriptor: int, kind: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    first = store.build(str(tiny), "tiny", mode="scratch").image.path
    with lock_image(store.root / "tiny") as held:
        assert held.path == first
    store.build(str(tiny), "tiny", mode="scratch")
    assert first.exists()


def test_hold_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match="there is no image"):
        lock_image(tmp_path / "none")
    (tmp_path / "dangling").symlink_to("none")
    with pytest.raises(SandboxFailed, match="there is no image"):
        lock_image(tmp_path / "dangling")


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", ".a", "-a", "a\n", "a" * 101, "é"])
def test_bad_names(name: str, store: ImageStore, tiny: Path) -> None:
    for act in (lambda: store.build(str(tiny), name), lambda: store.show(name), lambda: store.remove(name)):
        with pytest.raises(ConfigError, match="is not a name for an image"):
            act()
    assert not store.root.exists()


def test_lock_mode_needs_a_lock_file(store: ImageStore, tiny: Path) -> None:
    with pytest.raises(ConfigError, match="--mode lock --lock FILE"):
        store.build(str(tiny), "tiny", mode="lock")
    with pytest.raises(ConfigError, match="--mode lock --lock FILE"):
        store.build(str(tiny), "tiny", lock_file=tiny / "etc" / "word")
    with pytest.raises(ConfigError, match="No such file"):
        store.build(str(tiny), "tiny", mode="lock", lock_file=tiny / "none")


def test_an_image_that_is_not_there(store: ImageStore) -> None:
    for act in (lambda: store.show("none"), lambda: store.remove("none")):
        with pytest.raises(ConfigError, match="there is no image none"):
            act()
    assert store.list() == []


def test_disk_errors(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxFailed, match="Not a directory"):
        ImageStore(tmp_path / "file" / "images").build(str(tiny), "tiny")
    with pytest.raises(SandboxFailed, match="Not a directory"):
        ImageStore(tmp_path / "file").list()
    with pytest.raises(ConfigError, match="keep them elsewhere with --images"):
        ImageStore(tiny / "images").build(str(tiny), "tiny")


def test_a_full_disk(tmp_path: Path, tiny: Path) -> None:
    """A tmpfs of 1 MiB, in namespaces of its own."""
    (tmp_path / "small").mkdir()
    mount = f'mount -t tmpfs -o size=1m none {tmp_path}/small && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user cannot make user namespaces")
    look = 'import os, sys; print(sorted(os.listdir(sys.argv[1] + "/.tiny")))'
    script = '"$1" -P -m prorl_zmq.cli prorl image build "$2" --name tiny --images "$3"; echo $?; "$1" -c "$4" "$3"'
    arguments = [sys.executable, str(tiny), str(tmp_path / "small"), look]
    done = subprocess.run(
        [*command, "sh", "-c", script, "sh", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["1", "['lock']"], done
    assert "No space left on device" in done.stderr


def test_without_apptainer_folders_are_copied(few_programs: None, store: ImageStore, tiny: Path) -> None:
    image = store.build(str(tiny), "tiny").image
    assert image.manifest.recipe.maker == "copy"
    assert (image.path / "bin" / "sh").readlink() == Path("bash")
    for arguments in ({"format": "sif"}, {}):
        with pytest.raises(SandboxUnavailable, match="Apptainer is not installed") as caught:
            store.build(str(tiny) if arguments else "docker://debian:12", "other", **arguments)  # type: ignore[arg-type]
        assert caught.value.kind == "apptainer"


@needs_apptainer
def test_a_registry_that_is_not_there_is_said_in_apptainers_words(store: ImageStore) -> None:
    with pytest.raises(SandboxFailed, match=r"apptainer failed with exit code 255: .*registry\.invalid") as caught:
        store.build("docker://registry.invalid/debian:12", "debian")
    assert caught.value.exit_code == 255
    assert leftovers(store, "debian") == set()
    assert store.find("debian") is None


@needs_apptainer
@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ("Bootstrap: localimage\nFrom: ./tiny\n\n%pst\n  true\n", "invalid section"),
        ("Bootstrap: nosuch\nFrom: a\n", "invalid build source nosuch"),
        ("Bootstrap: localimage\nFrom: ./tiny\n\n%post\n  exit 3\n", "exit status 3"),
        ("Bootstrap: localimage\nFrom: ./none\n", "base image .*none cannot be read"),
    ],
)
def test_wrong_definitions(definition: str, said: str, store: ImageStore, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.def").write_text(definition)
    with pytest.raises((SandboxFailed, ConfigError), match=said):
        store.build(str(tmp_path / "a.def"), "a")
    assert store.find("a") is None
    assert leftovers(store, "a") == set()


@needs_apptainer
def test_a_build_has_a_time_limit(
    store: ImageStore, tiny: Path, tmp_path: Path, survivors: Callable[[str], list[str]]
) -> None:
    (tmp_path / "a.def").write_text("Bootstrap: localimage\nFrom: ./tiny\n%post\n  sleep 86411\n")
    with pytest.raises(SandboxFailed, match="took longer than 4 s"):
        store.build(str(tmp_path / "a.def"), "a", timeout_s=4)
    assert survivors("sleep 86411") == []
    assert leftovers(store, "a") == set()


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "prorl" / "images"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "prorl" / "images"


@pytest.mark.proof
@needs_root
@needs_apptainer
@pytest.mark.parametrize("format_", ["directory", "sif"])
def test_an_unprivileged_user_builds_from_a_folder_with_devices(format_: str, user_folder: Path) -> None:
    os.mknod(user_folder / "tiny" / "dev" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (user_folder / "tiny" / "usr" / "bin").chmod(0o555)
    build = [*IMAGE, "build", "tiny", "--name", "mine", "--images", "images", "--format", format_]
    done = python_as_user(user_folder, *build)
    assert done.returncode == 0, done.stderr
    image = done.stdout.strip()
    assert Path(image).stat().st_uid == USER
    again = python_as_user(user_folder, *build)
    assert (again.stdout.strip(), "again" in again.stderr) == (image, True)
    flags = ["--unsquash"] if format_ == "sif" else []
    inside = as_user(
        user_folder, "apptainer", "--quiet", "exec", "--containall", *flags, image, "/bin/cat", "/etc/word"
    )
    assert inside.stdout == "hello\n", inside.stderr
    done = python_as_user(user_folder, *IMAGE, "remove", "mine", "--images", "images")
    assert (done.returncode, list((user_folder / "images").iterdir())) == (0, [])


@needs_root
def test_debootstrap_as_a_user_is_refused(user_folder: Path) -> None:
    done = python_as_user(user_folder, *IMAGE, "build", "debootstrap://bookworm", "--name", "a", "--images", "images")
    assert done.returncode == 2
    assert "needs root" in done.stderr
