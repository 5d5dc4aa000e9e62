"""What a command inside can see, reach and change, and what it cannot."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.sandboxes import on_isolated_kinds

from prorl_zmq.tools.containers.namespaces import INOTIFY_INSTANCES
from prorl_zmq.tools.containers.specification import Limits, SandboxSpec

if TYPE_CHECKING:
    from prorl_zmq.tools.execution.messages import ExecResult
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
    from prorl_zmq.wire.messages.jobs import SandboxKind

pytestmark = on_isolated_kinds


def run_inside(sandboxes: Sandboxes, script: str, spec: SandboxSpec | None = None) -> ExecResult:
    async def main() -> ExecResult:
        sandbox = await sandboxes.create("one", spec)
        try:
            return await sandbox.exec(["bash", "-c", script], 60)
        finally:
            await sandbox.close()

    return asyncio.run(main())


def test_nothing_of_the_host_is_inside(
    own_sandboxes: Sandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TEST_SECRET", "secret")
    (tmp_path / "host").write_text("secret")
    result = run_inside(
        own_sandboxes, f"cat {tmp_path}/host; env; cat /proc/*/environ; ls -A /tmp /root /home; ls /proc; id -u"
    )
    words = result.stdout.decode(errors="replace")
    assert "secret" not in words
    numbers = [word for word in words.split() if word.isdecimal()]
    assert len(numbers) < 20  # its own processes only
    assert os.geteuid() == 0 or "0" not in numbers


def test_there_is_no_network(sandboxes: Sandboxes) -> None:
    result = run_inside(sandboxes, "tail -n +3 /proc/net/dev; exec 3<>/dev/tcp/1.1.1.1/53")
    assert result.stdout.split()[0] == b"lo:"
    assert len(result.stdout.splitlines()) == 1
    assert b"Network is unreachable" in result.stderr


def test_nothing_of_the_system_is_writable_even_for_a_service_of_root(sandboxes: Sandboxes) -> None:
    """Once /proc/sys/kernel/core_pattern was: a way to run programs on the host. Asked here, never written."""
    result = run_inside(
        sandboxes,
        "for place in /proc/*; do case $place in *[0-9]|*/self|*/thread-self) ;; *) echo $place;; esac; done | "
        "xargs -I% find % -type f -writable; find /sys /etc /usr/bin -type f -writable | "
        "grep -vxE '/etc/(passwd|group|resolv.conf|hosts)'; "  # which Apptainer writes for each container
        "grep -i '^Cap[EPBIA]' /proc/self/status; grep NoNewPrivs /proc/self/status",
    )
    lines = [line.split()[-1] for line in result.stdout.decode().splitlines()]
    assert lines == ["0" * 16] * 5 + ["1"]


MEMORY = """
while read -r _ _ _ _ at _; do case "$(stat -f -c %T "$at")" in tmpfs|ramfs)
  touch "$at/x" 2>/dev/null && echo "$at"; esac; done < /proc/self/mountinfo
mkdir -p /tmp/mount; mount -t tmpfs none /tmp/mount 2>/dev/null && echo mounted
echo done
"""


@pytest.mark.parametrize("fakeroot", [False, True])
def test_no_file_is_memory_that_nobody_counts(sandboxes: Sandboxes, image: str, fakeroot: bool) -> None:
    """Apptainer's /dev is a tmpfs of half the node's memory, and root inside could mount more of them."""
    if fakeroot and sandboxes.kind == "bubblewrap":
        pytest.skip("bubblewrap has no root inside")
    spec = SandboxSpec(image=image, fakeroot=fakeroot, writable="disk" if fakeroot else "no")
    assert run_inside(sandboxes, MEMORY, spec).stdout == b"done\n"
    assert run_inside(sandboxes, "echo > /dev/null && head -c 1 /dev/zero | wc -c", spec).stdout == b"1\n"


WATCHERS = """
import ctypes
made = 0
while ctypes.CDLL(None).inotify_init() >= 0: made += 1
print(made)
"""


def test_a_sandbox_does_not_use_up_its_users_watchers(sandboxes: Sandboxes) -> None:
    if sandboxes.kind == "apptainer" and os.geteuid() == 0:
        pytest.skip("Apptainer, started by root, makes no user namespace")
    assert run_inside(sandboxes, f"python3 -c '{WATCHERS}'").stdout == b"%d\n" % INOTIFY_INSTANCES


def test_commands_have_no_descriptors_but_their_own(sandboxes: Sandboxes) -> None:
    assert run_inside(sandboxes, "ls /proc/self/fd | tr '\\n' ' '").stdout == b"0 1 2 3 "


def test_all_processes_inside_have_the_limits_and_the_filter(sandboxes: Sandboxes) -> None:
    """Whoever is without them could work for a command."""
    script = (
        "for process in /proc/[0-9]*; do "
        "grep -s Seccomp: $process/status; grep -sE '^Max (file|core file) size' $process/limits; done | sort | uniq -c"
    )
    result = run_inside(sandboxes, script, SandboxSpec(limits=Limits(file_bytes=20 * 2**20)))
    counted = [line.split() for line in result.stdout.decode().splitlines()]
    core, file, seccomp = counted  # one line of each, or some process differs
    assert core[1:] == ["Max", "core", "file", "size", "0", "0", "bytes"]
    assert file[1:] == f"Max file size {20 * 2**20} {20 * 2**20} bytes".split()
    assert seccomp[1:] == ["Seccomp:", "2"]
    assert int(seccomp[0]) >= 2  # the holder and the command


@pytest.mark.parametrize(("more", "kilobytes"), [(None, 2**18), (2**40, 2**30)])
def test_a_process_may_reserve_more_than_the_sandbox_may_use(
    sandboxes: Sandboxes, more: int | None, kilobytes: int
) -> None:
    limits = Limits(memory_bytes=2**28, address_space_bytes=more)
    assert run_inside(sandboxes, "ulimit -v", SandboxSpec(limits=limits)).stdout == b"%d\n" % kilobytes


def test_root_inside_is_no_root_outside(sandboxes: Sandboxes, image: str) -> None:
    if sandboxes.kind == "bubblewrap":
        pytest.skip("bubblewrap has no root inside")
    script = (
        "id -u; echo 1 > /usr/bin/new && cat /usr/bin/new; chown 0:0 /workspace; "
        "mknod /workspace/disk b 8 0 && echo the disk of the host; test -w /proc/sys/kernel/hostname"
    )
    result = run_inside(sandboxes, script, SandboxSpec(image=image, fakeroot=True, writable="disk"))
    assert result.stdout == b"0\n1\n"
    assert result.exit_code == 1


@pytest.mark.parametrize("writable", ["disk", "no"])
def test_changes_of_the_image_are_the_sandboxs_own(sandboxes: Sandboxes, image: str, writable: str) -> None:
    if sandboxes.kind == "bubblewrap":
        pytest.skip("an image of bubblewrap's is always read-only")
    spec = SandboxSpec(image=image, writable=writable, fakeroot=True)  # type: ignore[arg-type]
    result = run_inside(sandboxes, "echo 1 > /usr/bin/new; cat /usr/bin/new", spec)
    assert result.stdout == (b"" if writable == "no" else b"1\n")
    assert run_inside(sandboxes, "cat /usr/bin/new", spec).exit_code == 1


UNPRIVILEGED = """
import asyncio, os, sys
from pathlib import Path
from prorl_zmq.errors import SandboxLimitExceeded
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.tools.containers.specification import Limits, SandboxSpec

async def main():
    sandboxes = Sandboxes(sys.argv[1], Path(sys.argv[3]) / "sandboxes", image=sys.argv[2])
    specs = [SandboxSpec()]
    if sys.argv[1] == "apptainer":
        specs.append(SandboxSpec(image=sys.argv[4], fakeroot=True, writable="disk"))
    for spec in specs:
        sandbox = await sandboxes.create("one", spec)
        bash = await sandbox.bash()
        result = await bash.run("cd /tmp; X=1; echo $UID; (echo new >/usr/bin/new) 2>&- && cat /usr/bin/new", 60)
        print(result.output.split(), flush=True)
        print((await bash.run("pwd; echo $X; ls /proc/sys/kernel/hostname", 60)).output.split())
        print((await sandbox.exec(["bash", "-c", os.environ["MEMORY"]], 60)).stdout)
        await sandbox.write_file("a/b", b"1")
        print((await sandbox.exec(["cat", "a/b"], 60)).stdout)
        listener, _ = await sandbox.listen()
        hearing = asyncio.create_task(sandbox.exec(["bash", "-c", "cat < /dev/tcp/127.0.0.1/8000"], 60))
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        connection.sendall(b"heard")
        connection.close()
        listener.close()
        print((await hearing).stdout)
        await sandbox.close()
    sandbox = await sandboxes.create("two", SandboxSpec(limits=Limits(processes=40)))
    bash = await sandbox.bash()
    result = await bash.run("for i in {1..100}; do sleep 10 & done", 60)
    print("refused" if "fork" in result.output else result)
    await sandbox.close()
    sandbox = await sandboxes.create("three", SandboxSpec(limits=Limits(memory_bytes=200 * 2**20)))
    try:
        if sys.argv[5]:
            print(await sandbox.exec(["python3", "-c", sys.argv[5]], 60))
    except SandboxLimitExceeded as error:
        print(error.limit)
    await sandbox.close()
    print(os.listdir(sandboxes.root))

asyncio.run(main())
"""


CLOSED_MEMORY_FILE = """
import ctypes, os, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: its folder in /proc is root's from now on
file = os.memfd_create("x")
for _ in range(300): os.write(file, bytes(2**20))
time.sleep(20)
"""


def open_to_all(folder: Path) -> None:
    """Let other users into a folder of pytest's, which are private."""
    for each in (folder, *folder.parents):
        if each == Path(tempfile.gettempdir()):
            return
        each.chmod(0o755)


@pytest.fixture(scope="module")
def as_nobody() -> list[str]:
    """Give the command line of a Python that an unprivileged user can run, with this one's packages."""
    if os.geteuid() != 0:
        pytest.skip("this run is unprivileged: all other tests show it")
    packages = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    for python in (sys.executable, "/usr/bin/python3"):
        command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", python]
        # It must be able to start itself: this first start still has root's rights over folders.
        again = "import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', 'import uvloop'], check=True)"
        probe = [*command, "-P", "-c", f"import prorl_zmq.tools.sandbox.sandboxes; {again}"]
        if subprocess.run(probe, env=packages, capture_output=True, check=False).returncode == 0:
            return command
    pytest.skip("no Python that an unprivileged user can run has these packages")


@pytest.mark.proof
@pytest.mark.parametrize("form", ["directory", "SIF"])
def test_an_unprivileged_user_can_do_it_all(
    kind: SandboxKind,
    image: str,
    tmp_path: Path,
    form: str,
    request: pytest.FixtureRequest,
    as_nobody: list[str],
    small_image: Path,
) -> None:
    """SIF: without /dev/fuse for users it is unpacked, once. Root inside may change what this user owns outside."""
    subprocess.run(["chown", "-R", "65534:65534", small_image], check=True)
    if form == "SIF":
        if kind == "bubblewrap":
            pytest.skip("bubblewrap takes directories only")
        image = request.getfixturevalue("sif")
        open_to_all(Path(image).parent)
    open_to_all(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    closed = CLOSED_MEMORY_FILE if form == "directory" else ""  # the other image has no Python
    done = subprocess.run(
        [*as_nobody, "-P", "-c", UNPRIVILEGED, kind, image, str(home), str(small_image), closed],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={
            "PATH": os.environ["PATH"],
            "MEMORY": MEMORY,
            "HOME": str(home),
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        },
    )
    plain = [
        "['65534']" if kind == "apptainer" else "['1000']",
        "['/tmp', '1', '/proc/sys/kernel/hostname']",
        "b'done\\n'",
        "b'1'",
        "b'heard'",
    ]
    fake = ["['0', 'new']", *plain[1:]] if kind == "apptainer" else []
    assert done.stdout.splitlines() == [*plain, *fake, "refused", *(["memory_bytes"] if closed else []), "[]"], (
        done.stderr
    )


CHANGED = """
import asyncio, sys
from pathlib import Path
from prorl_zmq.errors import SandboxFailed
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.tools.containers.specification import SandboxSpec

async def main():
    sandboxes = Sandboxes("apptainer", Path(sys.argv[1]), image=sys.argv[2])
    try:
        sandbox = await sandboxes.create("one", SandboxSpec(writable="disk"))
        done = await sandbox.exec(["bash", "-c", "echo new > /usr/new && cat /usr/new"], 60)
        print(done.stdout.decode().strip())
        await sandbox.close()
    except SandboxFailed as error:
        print("swe" if "jobs of task swe" in error.message else error)
    sandboxes.close()

asyncio.run(main())
"""


@pytest.mark.proof
@pytest.mark.parametrize(("hidden", "expected"), [(False, "new"), (True, "swe")])
def test_a_user_changes_an_image_by_fuse_where_the_kernel_does_not_let_him(
    kind: SandboxKind, small_image: Path, tmp_path: Path, as_nobody: list[str], hidden: bool, expected: str
) -> None:
    """The kernel takes no overlay for the changes of another; what serves a FUSE mount is no holder."""
    if kind != "apptainer":
        pytest.skip("an image of bubblewrap's is always read-only")
    subprocess.run(["chown", "-R", "65534:65534", small_image], check=True)
    open_to_all(tmp_path)
    for name in ("lower", "upper", "work", "disk"):
        (tmp_path / name).mkdir()
    parts = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
    disk = tmp_path / "disk"
    device = tmp_path / "fuse"  # one of our own: the machine's may be root's alone
    if subprocess.run(["mknod", "--mode=666", device, "c", "10", "229"], check=False).returncode != 0:
        pytest.skip("this root cannot make devices")
    hide = f"mount --bind {'/dev/null' if hidden else device} /dev/fuse"
    script = f'{hide}; mount -t overlay overlay -o {parts} {disk}; chown 65534:65534 {disk}; exec "$@"'
    done = subprocess.run(
        [*("unshare", "--mount", "bash", "-c", script, "bash"), *as_nobody, "-P", "-c", CHANGED, disk, small_image],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"PATH": os.environ["PATH"], "HOME": str(disk), "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.stdout == f"{expected}\n", done.stderr


GIVEN_AWAY = """
import asyncio, os, sys
from pathlib import Path
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.tools.containers.specification import SandboxSpec

async def main():
    sandboxes = Sandboxes("apptainer", Path(sys.argv[1]), image=sys.argv[2])
    sandbox = await sandboxes.create("one", SandboxSpec(fakeroot=True))
    give = "mkdir -p a/b; echo 1 > a/b/c; chown -R 5:5 a; chmod 700 a; stat -c %u a"
    print((await sandbox.exec(["bash", "-c", give], 60)).stdout.decode().strip())
    print(os.stat(Path(sandbox.path, "workspace/a")).st_uid)
    await sandbox.close()
    print(os.listdir(sys.argv[1] + "/"))
    sandboxes.close()

asyncio.run(main())
"""


@pytest.mark.proof
def test_what_a_command_gave_to_a_subordinate_id_is_removed_with_the_sandbox(
    kind: SandboxKind, image: str, tmp_path: Path, as_nobody: list[str]
) -> None:
    """It survived the sandbox, and its user could not remove it."""
    if kind != "apptainer" or shutil.which("newuidmap") is None:
        pytest.skip("only Apptainer with newuidmap has subordinate ids")
    open_to_all(tmp_path)
    home, etc, work = (tmp_path / name for name in ("home", "etc", "work"))
    for folder in (home, etc, work):
        folder.mkdir()
    for name in ("subuid", "subgid"):
        (etc / name).write_text("nobody:100000:65536\n65534:100000:65536\n")
    os.chown(home, 65534, 65534)
    script = f'mount -t overlay overlay -o lowerdir=/etc,upperdir={etc},workdir={work} /etc; exec "$@"'
    done = subprocess.run(
        [*("unshare", "--mount", "bash", "-c", script, "bash"), *as_nobody, "-P", "-c", GIVEN_AWAY, home / "s", image],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.stdout.splitlines() == ["5", "100004", "[]"], done.stderr
