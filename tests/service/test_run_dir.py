"""A run folder is made by us, marked as ours, and never another account's."""

from __future__ import annotations

import os
import socket
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.commands import prorl

from prorl_zmq import Job, RolloutClient
from prorl_zmq.errors import ConfigError, InvalidEndpoint
from prorl_zmq.system.run_folder import RUN_DIR_MARK, own_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from subprocess import CompletedProcess

NOBODY = 65534
needs_accounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another account")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def as_nobody(act: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        finally:
            os._exit(sys.exc_info()[0] is not None)
    assert os.waitpid(pid, 0)[1] == 0


def client_at(folder: Path) -> RolloutClient:
    return RolloutClient(f"ipc://{folder}/front_door", timeout_s=0.5)


def prorl_in(run_dir: Path, *arguments: object) -> CompletedProcess[str]:
    return prorl(*arguments, environment={**os.environ, "PRORL_RUN_DIR": str(run_dir), "COLUMNS": "300"})


@needs_accounts
def test_a_client_gives_a_squatter_nothing(shared: Path) -> None:
    """Another account made the folder first, and posed as the service."""
    folder = shared / f"prorl-{os.getuid()}"
    with socket.socket(socket.AF_UNIX) as door:

        def squat() -> None:
            folder.mkdir(0o755)
            door.bind(str(folder / "front_door"))
            (folder / "front_door").chmod(0o777)

        as_nobody(squat)
        door.listen()
        door.setblocking(False)
        with (
            RolloutClient(f"ipc://{folder}/front_door", timeout_s=2) as client,
            pytest.raises(InvalidEndpoint) as found,
        ):
            client.submit(Job(task="math", instance={"problem": "1+1"}))
        assert f"{folder} belongs to another user (uid {NOBODY})" in str(found.value)
        with pytest.raises(BlockingIOError):
            door.accept()
    for command in ("status", "serve"):
        done = prorl_in(folder, command)
        assert (done.returncode, "belongs to another user" in done.stderr) == (2, True), done.stderr
        assert "PRORL_RUN_DIR" in done.stderr


@needs_accounts
def test_a_client_looks_at_who_answers(shared: Path) -> None:
    """The folder is ours, and the socket was left there by another account."""
    folder = shared / "run"
    folder.mkdir(0o777)
    folder.chmod(0o777)
    ready, told = os.pipe()
    squatter = os.fork()
    if squatter == 0:
        os.setuid(NOBODY)
        door = socket.socket(socket.AF_UNIX)
        door.bind(str(folder / "front_door"))
        door.listen()
        door.set_inheritable(True)
        os.write(told, b"1")
        os.read(ready, 0)
        os.execvp("sleep", ["sleep", "60"])
    os.read(ready, 1)
    try:
        folder.chmod(0o700)
        with (
            RolloutClient(f"ipc://{folder}/front_door", timeout_s=2) as client,
            pytest.raises(InvalidEndpoint) as found,
        ):
            client.status()
        assert f"another user's (uid {NOBODY})" in str(found.value)
    finally:
        os.kill(squatter, 9)
        os.waitpid(squatter, 0)


def test_where_anybody_could_answer_nobody_is_asked(shared: Path) -> None:
    with (
        RolloutClient(f"ipc://{shared}/front_door") as client,
        pytest.raises(InvalidEndpoint, match="others may write"),
    ):
        client.status()


def test_a_missing_folder_is_made_before_others_can(shared: Path) -> None:
    with (
        RolloutClient(f"ipc://{shared}/run/front_door", timeout_s=0.1) as client,
        pytest.raises(Exception, match="no reply"),
    ):
        client.status()
    assert stat.S_IMODE((shared / "run").stat().st_mode) == 0o700


@needs_accounts
@pytest.mark.parametrize("command", ["serve", "status", "doctor"])
def test_no_link_of_another_account_is_followed(shared: Path, tmp_path: Path, command: str) -> None:
    """`prorl serve` changed the mode of what it led to, and removed what lay there."""
    mine = tmp_path / "mine"
    mine.mkdir(0o755)
    (mine / "sandboxes").mkdir()
    (mine / "sandboxes" / "thesis.tex").write_text("years")
    link = shared / f"prorl-{os.getuid()}"
    as_nobody(lambda: link.symlink_to(mine))
    done = prorl_in(link, command)
    assert done.returncode in (1, 2)
    assert f"{link} is a link of another user's (uid {NOBODY})" in done.stdout + done.stderr
    assert (mine / "sandboxes" / "thesis.tex").read_text() == "years"
    assert stat.S_IMODE(mine.stat().st_mode) == 0o755


def test_a_folder_with_other_things_is_no_run_folder(tmp_path: Path) -> None:
    """Its lock files, sockets and a folder `sandboxes` were removed."""
    names = {"uv.lock", "Cargo.lock", "sandboxes"}
    (tmp_path / "sandboxes").mkdir()
    for name in names - {"sandboxes"}:
        (tmp_path / name).write_text(name)
    mode = tmp_path.stat().st_mode
    done = prorl_in(tmp_path, "serve", "--run-dir", tmp_path)
    assert done.returncode == 2
    assert "was not made as one and has other things in it (Cargo.lock, sandboxes, uv.lock)" in done.stderr
    assert "name an empty or new folder" in done.stderr
    assert {each.name for each in tmp_path.iterdir()} == names
    assert tmp_path.stat().st_mode == mode


def test_an_empty_folder_becomes_one_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "rollout.journal").touch()
    for _ in range(2):
        own_run_dir(tmp_path)
        (tmp_path / "log").touch()
    assert (tmp_path / RUN_DIR_MARK).read_text()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    (tmp_path / RUN_DIR_MARK).unlink()
    with pytest.raises(ConfigError, match=r"other things in it \(log\)"):
        own_run_dir(tmp_path)
