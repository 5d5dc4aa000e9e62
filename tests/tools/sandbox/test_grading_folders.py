"""What a grader needs of a sandbox that an agent used: new folders, users, files for another sandbox, processors."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import SandboxFailed
from prorl_zmq.tools.containers.specification import Limits, SandboxSpec
from prorl_zmq.tools.editor.arguments import EditorArguments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.sandboxes import SharedSandboxes

    from prorl_zmq.tools.sandbox.sandbox import Sandbox

LIMIT_S = 60.0
SPEC = SandboxSpec(writable="disk", fakeroot=True, limits=Limits(cpus=1))


def use(sandboxes_of: SharedSandboxes, body: Callable[[Sandbox], Awaitable[None]], spec: SandboxSpec = SPEC) -> None:
    async def run() -> None:
        sandbox = await sandboxes_of("apptainer").create("job.1", spec)
        try:
            await body(sandbox)
        finally:
            await sandbox.close()

    asyncio.run(run())


async def said(sandbox: Sandbox, line: str, user: str = "") -> str:
    result = await sandbox.exec(["bash", "-c", line], LIMIT_S, user=user)
    return (result.stdout + result.stderr).decode().strip()


def archive(**files: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as packed:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size, member.mode = len(text), 0o755
            packed.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


@pytest.mark.parametrize(
    "left",
    [
        "mkdir -p /tests /logs/verifier; echo cheat > /tests/conftest.py; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /workspace/v; ln -s /workspace/v /tests; ln -s /workspace /logs",
        "echo 1 > /tests; echo 1 > /logs",
        "mkdir -p /logs; mkfifo /logs/verifier; ln -s /nowhere /tests; chmod 000 /logs",
    ],
)
@pytest.mark.proof
def test_nothing_that_a_command_left_stays_or_redirects(left: str, sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert await said(sandbox, left) == ""
        await sandbox.replace_folders({"/tests": archive(data__x="7\n", test="echo 1"), "/logs/verifier": b""})
        assert await said(sandbox, "cd /; find tests logs -not -name .replaced-* | sort; stat -c %F /logs /tests") == (
            "logs\nlogs/verifier\ntests\ntests/data\ntests/data/x\ntests/test\ndirectory\ndirectory"
        )
        assert await said(sandbox, "ls -A /workspace") in {"", "v"}

    use(sandboxes_of, body)


@pytest.mark.proof
def test_a_folder_of_the_image_is_replaced(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        for content in ("first", "second"):
            await sandbox.replace_folders({"/etc/apt": archive(x=content)})
            assert await said(sandbox, "find /etc/apt -type f | xargs grep .") == content

    use(sandboxes_of, body)


@pytest.mark.proof
def test_paths_that_leave_the_root_are_refused(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        for path in ("/", "/a/../b", ""):
            with pytest.raises(SandboxFailed, match="not a path inside"):
                await sandbox.replace_folders({path: b""})

    use(sandboxes_of, body)


@pytest.mark.proof
def test_packing_leaves_out_what_another_sandbox_would_resolve(sandboxes_of: SharedSandboxes) -> None:
    async def body(sandbox: Sandbox) -> None:
        await said(
            sandbox,
            "mkdir -p /out/sub/cache /tests; cd /out; echo a > a; ln -s a inside; ln -s ../out/a across; "
            "ln -s /tests/expected answer; ln -s ../tests/expected other; "
            "ln -s sub/../../tests/expected back; mkfifo pipe; echo c > sub/cache/c; "
            "ln a sub/hard",
        )
        packed = await sandbox.pack(["/out", "/missing"], ["cache"])
        with tarfile.open(fileobj=io.BytesIO(packed)) as content:
            names = {member.name: member.linkname for member in content}
        assert names == {
            "out": "",
            "out/a": "",
            "out/inside": "a",
            "out/across": "../out/a",
            "out/sub": "",
            "out/sub/hard": "",
        }
        with pytest.raises(SandboxFailed, match="more than 1024 bytes") as raised:
            await sandbox.pack(["/out"], limit_bytes=1024)
        assert raised.value.fields["reason"] == "size"
        await sandbox.replace_folders({"/out": b""})
        await sandbox.unpack(packed)
        assert await said(sandbox, "cat /out/inside /out/sub/hard; ls /out") == "a\na\nacross\na\ninside\nsub".replace(
            "across\na\n", "a\nacross\n"
        )

    use(sandboxes_of, body)


@pytest.mark.proof
def test_commands_are_of_the_users_that_the_image_has(sandboxes_of: SharedSandboxes) -> None:
    if os.geteuid() != 0:
        pytest.skip("only a service of root, or with subordinate ids, has other users")

    async def body(sandbox: Sandbox) -> None:
        assert await said(sandbox, "id -un; echo $HOME $USER") == "nobody\n/nonexistent nobody"
        assert await said(sandbox, "id -un; echo $HOME", user="root") == "root\n/root"
        assert await said(sandbox, "id -u; id -g; grep CapEff /proc/self/status | cut -f2", user="1234") == (
            "1234\n1234\n0000000000000000"
        )
        missing = await sandbox.exec(["true"], LIMIT_S, user="wizard")
        assert (missing.exit_code, missing.stderr) == (126, b"true: the sandbox's image has no user wizard\n")
        bash = await sandbox.bash()
        assert (await bash.run("id -un", LIMIT_S)).output.strip() == "nobody"
        planted = EditorArguments("create", "/usr/lib/python3/sitecustomize.py", file_text="import os\n")
        assert not (await sandbox.edit(planted, LIMIT_S)).ok
        await said(sandbox, "echo hidden > /secret; chmod 600 /secret", user="root")
        assert not (await sandbox.edit(EditorArguments("view", "/secret"), LIMIT_S)).ok
        await sandbox.replace_folders({"/logs/verifier": b""}, "1234")
        assert await said(sandbox, "touch /logs/verifier/reward.txt", user="1234") == ""

    use(sandboxes_of, body, SandboxSpec(writable="disk", fakeroot=True, user="nobody"))


@pytest.mark.proof
def test_a_sandbox_with_one_user_names_it(sandboxes_of: SharedSandboxes) -> None:
    async def run() -> None:
        sandbox = await sandboxes_of("bubblewrap").create("job.1")
        try:
            result = await sandbox.exec(["true"], LIMIT_S, user="0")
            assert result.exit_code == 126
            assert b"this sandbox cannot have the user root (0)" in result.stderr
        finally:
            await sandbox.close()

    asyncio.run(run())


@pytest.mark.proof
def test_processors_are_limited(sandboxes_of: SharedSandboxes) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one processor is all that this machine has")

    async def body(sandbox: Sandbox) -> None:
        cgroup = await said(sandbox, "cat /proc/self/cgroup")
        if "prorl-" in cgroup:
            return  # the kernel's own limit; see test_cgroups
        assert await said(sandbox, "nproc") == "1"

    use(sandboxes_of, body)
