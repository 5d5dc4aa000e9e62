from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from support.sandboxes import on_each_kind

from prorl_zmq.errors import MalformedMessage, SandboxFailed, SandboxLimitExceeded
from prorl_zmq.stages.handler import failure_of
from prorl_zmq.tools.containers import tree
from prorl_zmq.tools.execution import messages
from prorl_zmq.tools.execution.client import ExecutionClient
from prorl_zmq.tools.sandbox.sandbox import CHECK_ENVIRONMENT
from prorl_zmq.tools.toolbox import Toolbox
from prorl_zmq.wire.messages.jobs import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.tools.sandbox.sandbox import Sandbox
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes


def use(sandboxes: Sandboxes, body: Callable[[Sandbox], object], runner: Callable[..., object] = asyncio.run) -> None:
    """Run the coroutine function `body` on a new sandbox, and see that closing it leaves nothing."""

    async def main() -> None:
        sandbox = await sandboxes.create("one")
        try:
            await body(sandbox)  # type: ignore[misc]
        finally:
            await sandbox.close()
            await sandbox.close()
        assert list(sandboxes.root.iterdir()) == []

    runner(main())


@on_each_kind
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_a_command_has_input_outputs_and_exit_code(sandboxes: Sandboxes, runner: Callable[..., object]) -> None:
    async def body(sandbox: Sandbox) -> None:
        data = os.urandom(300_000)
        result = await sandbox.exec(["cat"], 10, stdin=data, output_limit_bytes=10**6)
        assert (result.exit_code, result.stdout, result.stderr) == (0, data, b"")
        result = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 7"], 10)
        assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
        assert not result.timed_out
        assert (await sandbox.exec(["sh", "-c", "kill -TERM $$"], 10)).exit_code == 143
        assert (await sandbox.exec(["true"], 10, stdin=data)).exit_code == 0
        assert (await sandbox.exec(["cat"], 10)).stdout == b""
        assert (await sandbox.exec(["no-such-program"], 10)).exit_code == 127

    use(sandboxes, body, runner)


@on_each_kind
def test_commands_see_the_workspace_and_a_clean_environment(
    own_sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_TEST_SECRET", "secret")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("a/b.sh", b"#!/bin/sh\npwd; echo $HOME; env; awk 'BEGIN {print 6 * 7}'\n", 0o755)
        result = await sandbox.exec(["a/b.sh"], 10)
        lines = result.stdout.decode().splitlines()
        assert lines[:2] == [sandbox.directory] * 2
        assert "42" in lines
        assert "secret" not in result.stdout.decode()
        assert "PAGER=cat" in lines

    use(own_sandboxes, body)


def test_output_beyond_the_limit_is_cut_in_the_middle(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "echo first; yes | head -c 3000000; echo last"], 20, b"", 1000)
        assert result.stdout.startswith(b"first\ny\n")
        assert result.stdout.endswith(b"y\nlast\n")
        assert len(result.stdout) < 1100
        assert result.dropped_bytes == 3_000_011 - 1000

    use(sandboxes, body)


@on_each_kind
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_the_time_limit_and_cancellation_kill_the_whole_tree(
    sandboxes: Sandboxes, survivors: Callable[[str], list[str]], runner: Callable[..., object]
) -> None:
    mark = f"3600.{uuid.uuid4().int}"
    command = ["bash", "-c", f"trap '' INT TERM; sleep {mark} & setsid sleep {mark} & echo on; sleep {mark}; true"]

    async def body(sandbox: Sandbox) -> None:
        started = time.monotonic()
        result = await sandbox.exec(command, 0.3)
        assert result.timed_out
        assert result.stdout == b"on\n"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.exec(command, 60), 0.3)
        assert time.monotonic() - started < 10
        assert survivors(mark) == []

    use(sandboxes, body, runner)


def test_a_job_in_the_background_does_not_hold_the_caller(
    sandboxes: Sandboxes, survivors: Callable[[str], list[str]]
) -> None:
    mark = f"3600.{uuid.uuid4().int}"

    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", f"sleep {mark} & echo done"], 30)
        assert (result.exit_code, result.stdout, result.timed_out) == (0, b"done\n", False)
        assert survivors(mark) == []

    use(sandboxes, body)


@on_each_kind
def test_files_are_written_and_read(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("deep/er/file", b"1")
        await sandbox.write_file("deep/er/file", b"\0" * 10, 0o600)
        assert await sandbox.read_file("deep//er/./file") == b"\0" * 10
        assert (await sandbox.exec(["stat", "-c", "%a %s", "deep/er/file"], 10)).stdout == b"600 10\n"
        with pytest.raises(SandboxFailed, match="larger than the 9 bytes"):
            await sandbox.read_file("deep/er/file", limit_bytes=9)
        with pytest.raises(SandboxFailed) as caught:
            await sandbox.read_file("deep/none")
        assert caught.value.reason == "missing"

    use(sandboxes, body)


def test_arguments_of_wrong_types_are_the_tasks_own_errors(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(TypeError, match=r"a: the content must be bytes, such as text.encode\(\), and not str"):
            await sandbox.write_file("a", "text")  # type: ignore[arg-type]
        with pytest.raises(
            MalformedMessage, match="a call of the sandbox has an invalid argument: Expected `int`, got `str`"
        ) as caught:
            await sandbox.write_file("a", b"text", "644")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"unknown tools: 'bsh'; names is a list of bash, ipython"):
            Toolbox(sandbox, ["bsh", "finish"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="unknown tools: 'bash'; names is a list"):
            Toolbox(sandbox, "bash")  # type: ignore[arg-type]
        failure = failure_of(caught.value)
        assert (failure.outcome, failure.retry) == (Outcome.FAILED, False)
        await sandbox.write_file("a", b"text")

    use(sandboxes, body)


@pytest.mark.parametrize("path", ["/../etc/passwd", "../etc/passwd", "a/../../b", "", ".", "a\0b"])
def test_paths_out_of_the_workspace_are_refused(sandboxes: Sandboxes, path: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFailed, match="not a path inside"):
            await sandbox.read_file(path)
        with pytest.raises(SandboxFailed, match="not a path inside"):
            await sandbox.write_file(path, b"")

    use(sandboxes, body)


@on_each_kind
def test_an_absolute_path_is_the_sandboxs_own(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the host's")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file(f"{sandbox.directory}/a/file", b"1")
        assert await sandbox.read_file("a/file") == b"1"
        with pytest.raises(SandboxFailed):
            await sandbox.read_file(f"{tmp_path}/secret")
        with pytest.raises(SandboxFailed):
            await sandbox.write_file("/usr/bin/new", b"")
        if sandbox.kind != "process":
            await sandbox.exec(["ln", "-s", "/etc", "link"], 20)
            assert b"agent" in await sandbox.read_file("/workspace/link/passwd") or sandbox.kind == "apptainer"

    use(sandboxes, body)


def test_a_folder_is_uploaded(sandboxes: Sandboxes, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "a" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("a/run.sh")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.upload(source)
        assert (await sandbox.exec(["./link"], 20)).stdout == b"ran\n"
        await sandbox.upload(source / "a" / "run.sh", "deep/er")
        assert (await sandbox.exec(["deep/er/run.sh"], 20)).stdout == b"ran\n"
        with pytest.raises(SandboxFailed, match="cannot be uploaded"):
            await sandbox.upload(tmp_path / "none")
        with pytest.raises(SandboxFailed, match="not a path inside"):
            await sandbox.upload(source, "../up")

    use(sandboxes, body)


@on_each_kind
def test_planted_links_and_fifos_are_refused(sandboxes: Sandboxes, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("the host's")
    script = f"""
        ln -s {outside} folder; ln -s {outside}/file file; ln -s ../../../outside up; ln -s file inner; ln -s loop loop
        ln -s {outside}/new new; mkfifo fifo; mkdir plain
    """

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-ec", script], 10)).exit_code == 0
        for path in ("folder/file", "file", "up/file", "inner", "loop", "new", "new/below", "fifo", "plain"):
            with pytest.raises(SandboxFailed):
                await sandbox.read_file(path)
            with pytest.raises(SandboxFailed):
                await sandbox.write_file(path, b"ours")
        assert [each.name for each in outside.iterdir()] == ["file"]
        assert (outside / "file").read_text() == "the host's"

    use(sandboxes, body)


@on_each_kind
def test_a_copy_is_a_sandbox_of_its_own(sandboxes: Sandboxes, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    script = f"""
        mkdir -p a/b closed; echo 1 > a/b/file; chmod 750 a/b/file; ln -s {secret} link; ln -s a/b inner
        mkfifo fifo; echo 2 > closed/file; chmod 000 closed/file closed; touch -d 2001-02-03 a/old; ln a/old hard
    """

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-ec", script], 10)).exit_code == 0
        copy = await sandbox.copy("two")
        try:
            assert not (copy.workspace / "link").is_symlink()
            assert (copy.workspace / "inner").readlink() == Path("a/b")
            assert not (copy.workspace / "fifo").exists()
            assert await copy.read_file("a/b/file") == b"1\n"
            listing = await copy.exec(["stat", "-c", "%a %Y", "a/b/file", "closed", "a/old"], 10)
            modes = [line.split() for line in listing.stdout.decode().splitlines()]
            assert [mode for mode, _ in modes] == ["750", "0", "644"]
            assert modes[2][1] == str(int((sandbox.workspace / "a/old").stat().st_mtime))
            await copy.write_file("a/b/file", b"changed")
            assert await sandbox.read_file("a/b/file") == b"1\n"
            with pytest.raises(SandboxFailed, match="exists already"):
                await sandbox.copy("two")
        finally:
            await copy.close()

    use(sandboxes, body)


@pytest.mark.parametrize("own", [True, False], ids=["it filled the disk", "others did"])
def test_a_sandbox_that_a_full_disk_ended_says_so_to_whoever_judges_it(sandboxes: Sandboxes, *, own: bool) -> None:
    """EVAL found a folder without files, and took it for a loss of the infrastructure: no reward instead of 0."""

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("answer", b"42")
        server = await ExecutionClient.connect(sandbox.path)
        await server.ask(messages.FreeDisk(2**30, 10, own=own))
        server.close()
        assert not sandbox.workspace.exists()
        judged = await sandboxes.attach(sandbox.handle)
        with pytest.raises(SandboxLimitExceeded if own else SandboxFailed, match="disk of the sandboxes") as caught:
            await judged.copy("fresh")
        assert caught.value.fields.get("limit" if own else "reason") == ("disk_bytes" if own else "disk")
        await judged.close()

    use(sandboxes, body)


def test_what_is_larger_than_the_limit_is_not_copied(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.tools.sandbox.sandboxes.COPY_LIMIT_BYTES", 1000)

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("small", b"x" * 600)
        await (await sandbox.copy("two")).close()
        await sandbox.write_file("more", b"x" * 600)
        with pytest.raises(SandboxFailed, match="more than may be copied") as caught:
            await sandbox.copy("three")
        assert caught.value.reason == "tree"

    use(sandboxes, body)


@on_each_kind
def test_whatever_is_left_in_it_a_sandbox_closes(sandboxes: Sandboxes) -> None:
    script = """
        mkdir -p shut/inner; touch shut/inner/file; chmod 000 shut/inner shut
        mkdir bare; touch bare/file; chmod 500 bare
        mkfifo fifo; ln -s / root; name=$(printf 'd%.0s' {1..100}); for i in {1..60}; do mkdir $name; cd $name; done
        touch bottom
    """

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["bash", "-ec", script], 30)).exit_code == 0
        copy = await sandbox.copy("two")
        await copy.close()

    use(sandboxes, body)


def test_a_sandbox_whose_folder_is_gone_fails_and_says_so(sandboxes: Sandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.close()
        with pytest.raises(SandboxFailed):
            await sandbox.exec(["true"], 10)
        with pytest.raises(SandboxFailed):
            await sandbox.read_file("file")

    use(sandboxes, body)


def test_what_an_agent_planted_in_its_home_takes_no_part_in_a_check(sandboxes: Sandboxes) -> None:
    """A `usercustomize.py` or `json.py` of the agent's could write the check's verdict."""
    folder = f"python3.{sys.version_info.minor}"  # bubblewrap shows the host's /usr: its Python may be another
    script = f"""
        for version in {folder} $(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); do
            mkdir -p .local/lib/$version/site-packages
            echo 'print("planted")' > .local/lib/$version/site-packages/usercustomize.py
        done
        echo 'print("planted")' > json.py; echo 'echo planted' | tee .bashrc .bash_profile > .profile
        printf '[alias]\n\tplanted = !echo planted\n' > .gitconfig
    """
    check = "python3 -c 'import json'; python3 c/check.py; bash -lc true; git planted; echo $HOME $ADDED"

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("c/check.py", b"import random")
        await sandbox.write_file("c/random.py", b"print('planted')")
        assert (await sandbox.exec(["bash", "-c", check], 20)).stdout.count(b"planted") > 0
        assert (await sandbox.exec(["bash", "-ec", script], 20)).exit_code == 0
        result = await sandbox.exec(["bash", "-c", check], 20, environment={**CHECK_ENVIRONMENT, "ADDED": "1"})
        assert result.stdout == b"/nonexistent 1\n"

    use(sandboxes, body)


def test_a_workspace_without_permissions_is_run_in_and_copied(sandboxes: Sandboxes) -> None:
    """After `chmod 000 /workspace` a service that is not root could neither enter nor copy it."""

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("file", b"1")
        for again in (
            lambda: sandbox.exec(["cat", "file"], 10),
            lambda: sandbox.copy("two"),
            lambda: sandbox.read_file("file"),
        ):
            sandbox.workspace.chmod(0)
            result = await again()
            assert sandbox.workspace.stat().st_mode & 0o777 == 0o700
            if hasattr(result, "close"):
                await result.close()

    use(sandboxes, body)


def test_a_very_deep_tree_is_refused_at_once_and_a_deep_one_copied(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder was opened from the root: 5,000 nested ones took more than the copy's 60 s."""
    nest = "import os\nfor _ in range({}): os.mkdir('d'); os.chdir('d')\nopen('bottom', 'w').write('1')"

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["python3", "-c", nest.format(tree.DEPTH_LIMIT)], 30)).exit_code == 0
        copy = await sandbox.copy("two")
        listing = await copy.exec(["find", ".", "-name", "bottom"], 30)
        assert listing.stdout.count(b"/") == tree.DEPTH_LIMIT + 1
        await copy.close()
        assert (await sandbox.exec(["bash", "-c", "mkdir top; mv d top"], 30)).exit_code == 0
        with pytest.raises(SandboxFailed, match="levels deep") as caught:
            await sandbox.copy("four")
        assert caught.value.reason == "tree"
        monkeypatch.setattr(tree, "ENTRY_LIMIT", 100)
        with pytest.raises(SandboxFailed, match="more entries") as caught:
            await sandbox.copy("four")
        assert caught.value.reason == "tree"
        monkeypatch.setattr("prorl_zmq.tools.sandbox.sandbox.COPY_LIMIT_S", -1.0)
        with pytest.raises(SandboxFailed, match="took longer") as caught:
            await sandbox.copy("four")
        assert caught.value.reason == "time"

    use(sandboxes, body)


def test_holes_of_a_sparse_file_stay_holes_in_a_copy(sandboxes: Sandboxes) -> None:
    """`truncate -s 300M a` took 4 KiB in the workspace and 301 MiB in its copy."""
    script = "truncate -s 300M a b empty; truncate -s 0 empty; printf x | dd of=b bs=1 seek=150000000 conv=notrunc"

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["bash", "-ec", script], 30)).exit_code == 0
        copy = await sandbox.copy("two")
        try:
            for name in ("a", "b", "empty"):
                ours, theirs = (copy.workspace / name).stat(), (sandbox.workspace / name).stat()
                assert ours.st_size == theirs.st_size
                assert ours.st_blocks * 512 < 2**20
            with (copy.workspace / "b").open("rb") as file:
                file.seek(149_999_999)
                assert file.read(3) == b"\0x\0"
        finally:
            await copy.close()

    use(sandboxes, body)
