"""`prorl clean`: it lists what there is, and removes nothing that is used, another account's, or behind a link."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from documents import CLEAN_COMMANDS
from rootfs import tiny_root_filesystem
from support.commands import prorl
from support.waiting import WAIT_S

from prorl_zmq.inference.weights.copy_folder import SYNC, used_copy
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.system.run_folder import own_run_dir
from prorl_zmq.tools.images.image import lock_image
from prorl_zmq.tools.images.image_store import ImageStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess


class Machine:
    """A folder for temporary files and a home of their own, so that a clean reaches nothing else."""

    def __init__(self, root: Path) -> None:
        self.temporary = root / "t"
        self.cache = root / "home" / ".cache" / "prorl"
        self.temporary.mkdir()
        self.cache.mkdir(parents=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(root / "home"),
            "COLUMNS": "300",
        }

    def clean(self, *words: object) -> CompletedProcess[str]:
        return prorl("clean", *words, environment=self.environment)

    def run_folder(self, name: str) -> Path:
        folder = own_run_dir(self.temporary / name)
        (folder / "sandboxes" / "one").mkdir(parents=True)
        (folder / "sandboxes" / "one" / "file").write_bytes(bytes(2_000_000))
        (folder / "serve.lock").touch()
        return folder


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:  # short, for sockets
        made = Machine(Path(name))
        monkeypatch.setattr(tempfile, "tempdir", str(made.temporary))
        yield made


def row(done: CompletedProcess[str], path: Path) -> str:
    (line,) = [line for line in done.stdout.splitlines() if f"{path} " in line]
    return line


def test_an_empty_machine(machine: Machine) -> None:
    assert machine.clean().stdout == "nothing of this account is left here\n"


def test_it_lists_first_and_removes_only_if_asked(machine: Machine) -> None:
    default = machine.run_folder(f"prorl-{os.getuid()}")
    (machine.temporary / "prorl-mine").mkdir()  # no run folder: a user's own
    (machine.cache / "harnesses" / "codex").mkdir(parents=True)
    (machine.cache / "unpacked" / "one").mkdir(parents=True)
    store = ImageStore(machine.cache / "images")
    store.build(str(tiny_root_filesystem(machine.temporary / "root")), "tools")
    listing, removing, all_of_it = (command.removeprefix("prorl clean").split() for command in CLEAN_COMMANDS)
    listed = machine.clean(*listing)
    assert "2.0" in row(listed, default)
    assert listed.stdout.endswith("would be free again; --yes removes it\n")
    assert (default / "sandboxes" / "one" / "file").exists()
    done = machine.clean(*removing)
    assert done.returncode == 0, done.stderr
    assert not default.exists()
    assert not (machine.cache / "unpacked").exists()
    assert "--images removes it too" in row(done, store.root / "tools")
    assert "--programs removes it too" in row(done, machine.cache / "harnesses")
    assert [image.name for image in store.list()] == ["tools"]
    assert (machine.cache / "harnesses" / "codex").exists()
    assert machine.clean(*all_of_it).returncode == 0
    assert store.list() == []
    assert not (machine.cache / "harnesses").exists()
    assert (machine.temporary / "prorl-mine").exists()


def test_run_folders_of_named_services_are_found(machine: Machine) -> None:
    """Beside the folder of `PRORL_RUN_DIR`; others that only begin like it are not ours."""
    elsewhere = machine.cache / "runs"
    machine.environment["PRORL_RUN_DIR"] = str(elsewhere)
    for folder in (elsewhere, elsewhere.with_name("runs-math")):
        own_run_dir(folder)
    elsewhere.with_name("runs-of-mine").mkdir()
    assert machine.clean("--yes").returncode == 0
    assert [each.name for each in machine.cache.iterdir()] == ["runs-of-mine"]


def test_journals_stay_unless_they_are_named(machine: Machine) -> None:
    folder = machine.run_folder(f"prorl-{os.getuid()}-abcd")
    (folder / "rollout.journal").write_bytes(bytes(1_000_000))
    done = machine.clean("--yes")
    assert "--journals removes it too" in done.stdout
    assert [each.name for each in folder.iterdir()] == ["rollout.journal"]
    own_run_dir(folder)  # a service may take it up again
    assert machine.clean("--yes", "--journals").returncode == 0
    assert not folder.exists()


def test_what_a_live_process_uses_stays(machine: Machine) -> None:
    locked, listening = machine.run_folder("prorl-one"), machine.run_folder("prorl-two")
    (machine.cache / "harnesses" / "codex").mkdir(parents=True)
    with (locked / "serve.lock").open("w") as lock, socket.socket(socket.AF_UNIX) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server.bind(str(listening / "engine-1"))
        server.listen()
        done = machine.clean("--yes", "--journals", "--programs")
        for folder in (locked, listening, machine.cache / "harnesses"):
            assert "no: a process of a service uses it" in row(done, folder)
        assert (locked / "sandboxes" / "one" / "file").exists()
        assert (listening / "sandboxes" / "one" / "file").exists()
        assert (machine.cache / "harnesses" / "codex").exists()


def test_the_sockets_of_an_engine_that_was_killed_go(machine: Machine) -> None:
    code = "import sys; from prorl_zmq.inference.vllm.vllm_kv_events import VllmKvEvents\n"
    code += "made = VllmKvEvents(); print('made', flush=True); sys.stdin.read()"
    ways = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | {"TMPDIR": str(machine.temporary)}}
    for ending in ("closed", "killed"):
        with subprocess.Popen([sys.executable, "-P", "-c", code], **ways) as process:
            assert process.stdout.readline() == b"made\n"
            (folder,) = machine.temporary.glob("prorl-kv-*")
            assert "no: a process of a service uses it" in row(machine.clean("--yes"), folder)
            if ending == "killed":
                process.kill()
            process.communicate(b"", WAIT_S)
        assert folder.exists() == (ending == "killed")
    assert "yes" in row(machine.clean("--yes"), folder)
    assert not folder.exists()


def test_links_are_not_followed(machine: Machine) -> None:
    kept = machine.temporary / "mine"
    own_run_dir(kept)
    (kept / "file").write_text("precious")
    default = machine.temporary / f"prorl-{os.getuid()}"
    default.symlink_to(kept)
    (machine.cache / "harnesses").symlink_to(kept)
    (machine.cache / "images").symlink_to(kept)
    folder = machine.run_folder("prorl-other")
    (folder / "sandboxes" / "one" / "away").symlink_to(kept)
    done = machine.clean("--yes", "--journals")
    for path in (default, machine.cache / "harnesses", machine.cache / "images"):
        assert "it is a link, which is not followed" in row(done, path)
    assert not folder.exists()
    assert (kept / "file").read_text() == "precious"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another account")
def test_what_another_account_owns_stays(machine: Machine) -> None:
    default, other = machine.run_folder(f"prorl-{os.getuid()}"), machine.run_folder("prorl-1234")
    for folder in (default, other):
        os.chown(folder, 1234, 1234)
    done = machine.clean("--yes", "--journals")
    assert "it belongs to another account (uid 1234)" in row(done, default)
    assert str(other) not in done.stdout
    assert (default / "sandboxes").exists()
    assert (other / "sandboxes").exists()


def test_images_that_a_sandbox_uses_stay(machine: Machine) -> None:
    store = ImageStore(machine.cache / "images")
    for name in ("used", "idle"):
        store.build(str(tiny_root_filesystem(machine.temporary / name)), name)
    with lock_image(store.root / "used"):
        done = machine.clean("--yes", "--images")
    assert "no: a sandbox uses it" in row(done, store.root / "used")
    assert "yes" in row(done, store.root / "idle")
    assert [image.name for image in store.list()] == ["used"]


def test_a_service_that_is_named_goes_with_its_journals_only(machine: Machine) -> None:
    folder = ServiceFolder.create(machine.temporary / "service")
    assert "keys and journals" in machine.clean(folder.path, "--yes").stdout
    with folder.held():
        assert f"used by process {os.getpid()}" in machine.clean(folder.path, "--yes", "--journals").stdout
    assert folder.path.exists()
    assert machine.clean(folder.path, "--yes", "--journals").returncode == 0
    assert not folder.path.exists()


def test_copies_of_weights_go_when_no_engine_uses_them(machine: Machine) -> None:
    run_dir = machine.run_folder(f"prorl-{os.getuid()}")
    copies = [machine.temporary / "disk" / "weights" / name for name in ("policy", "user")]
    with used_copy(run_dir / "weights" / "judge", "", run_dir):
        pass
    with used_copy(copies[1], "", run_dir):
        with used_copy(copies[0], "", run_dir):
            (copies[0] / "model.safetensors").write_bytes(bytes(3_000_000))
        listed = machine.clean()
        assert "copy of weights" in row(listed, copies[0])
        assert "3.0" in row(listed, copies[0])
        named = machine.clean(machine.temporary / "disk", "--yes")
        assert "no: a process of a service uses it" in row(named, copies[1])
        assert not copies[0].exists()
        assert copies[1].exists()
        assert run_dir.exists()
    assert machine.clean("--yes").returncode == 0
    assert not copies[1].exists()
    assert not run_dir.exists()


def test_copies_in_the_run_folder_of_a_live_service_stay(machine: Machine) -> None:
    """Its hosts lock them only while they read or change them."""
    run_dir = machine.run_folder(f"prorl-{os.getuid()}")
    copy = run_dir / "weights" / "policy"
    (copy / SYNC).mkdir(parents=True)
    (machine.temporary / "way").symlink_to(run_dir)
    with (run_dir / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in ((), (run_dir,), (copy,)):
            assert "no: a process of a service uses it" in row(machine.clean(*words, "--yes"), copy)
        by_link = machine.temporary / "way" / "weights" / "policy"
        assert "no: a process of a service uses it" in row(machine.clean(by_link, "--yes"), by_link)
        assert (copy / SYNC).is_dir()
    assert machine.clean("--yes").returncode == 0
    assert not copy.exists()


def test_the_size_of_a_copy_counts_once(machine: Machine) -> None:
    run_dir = machine.run_folder(f"prorl-{os.getuid()}")
    copy, elsewhere = run_dir / "weights" / "policy", machine.temporary / "disk" / "weights" / "judge"
    with used_copy(copy, "", run_dir), used_copy(elsewhere, "", run_dir):
        (copy / "model.safetensors").write_bytes(bytes(3_000_000))
        (elsewhere / "model.safetensors").write_bytes(bytes(1_000_000))
    done = machine.clean("--yes")
    assert [row(done, each).split("│")[3].strip() for each in (run_dir, copy, elsewhere)] == ["2.0", "3.0", "1.0"]
    assert done.stdout.endswith("6.0 MB are free again\n")


def test_a_folder_that_is_named_is_cleaned_alone(machine: Machine) -> None:
    usual = machine.run_folder(f"prorl-{os.getuid()}")
    (machine.cache / "unpacked" / "one").mkdir(parents=True)
    (machine.cache / "harnesses" / "codex").mkdir(parents=True)
    named = machine.run_folder("elsewhere")
    assert str(usual) not in machine.clean(named).stdout
    assert machine.clean(named, "--yes", "--programs").returncode == 0
    assert not named.exists()
    assert not (machine.cache / "harnesses").exists()  # an option named them
    assert (usual / "sandboxes" / "one" / "file").exists()
    assert (machine.cache / "unpacked" / "one").exists()


def test_any_other_folder_is_refused(machine: Machine) -> None:
    done = machine.clean(machine.cache, "--yes", "--journals")
    assert done.returncode == 2
    assert f"{machine.cache} is neither a run folder nor a service's folder, and has no copy of weights" in done.stderr
    assert machine.cache.exists()
