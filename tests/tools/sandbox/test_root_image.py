"""Which images a job may name, and which nobody may."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from needed import usable
from rootfs import tiny_root_filesystem

from prorl_zmq.errors import ConfigError, SandboxFailed
from prorl_zmq.stages.handler import failure_of
from prorl_zmq.tools.containers.root_image import check_image, check_private, find_image, find_offered
from prorl_zmq.tools.containers.specification import SandboxSpec
from prorl_zmq.tools.images.image import default_root
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.jobs import Outcome


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `prorl image build`, with the image `tools` behind a link, as it makes them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (default_root() / ".versions" / "1" / "rootfs" / "bin").mkdir(parents=True)
    (default_root() / "tools").symlink_to(".versions/1/rootfs")
    return default_root()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of images, with the image `own` and links that lead out of it."""
    path = tmp_path / "images"
    (path / "own" / "bin").mkdir(parents=True)
    (path / "root").symlink_to("/")
    (path / "usr").symlink_to("/usr")
    (path / "circle").symlink_to("circle")
    (path / "itself").symlink_to(".")
    return path


def test_a_job_may_name_what_is_offered(store: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    (folder / "tools-2").symlink_to(store / "tools")
    assert find_offered("tools", ()) == store / "tools"
    assert find_offered(str(store / "tools"), ()) == store / "tools"
    assert find_offered("own", (folder,)) == folder / "own"
    assert find_offered(f"{folder}/./own", (folder,)) == folder / "own"
    assert find_offered(f"{tmp_path}/link/own", (tmp_path / "link",)) == folder / "own"
    assert find_offered(f"{folder}/own", (tmp_path / "link",)) == folder / "own"
    # On the way is a folder of the host's, as behind an image's own links; a sandbox may change what is in it.
    assert find_offered(f"{folder}/root{tmp_path}/link/own", (folder,)) == folder / "own"
    assert find_offered("tools-2", (folder,)) == folder / "tools-2"


@pytest.mark.parametrize(
    "image",
    [
        *("/", "/./", "//", "/proc/self/root", "/proc/self/cwd", "/usr", "~", "~root", "~nobody-of-that-name"),
        *(".", "..", "tools\n", "tools\0", "", "x" * 5000, "/" + "x/" * 5000),
        *("{folder}", "{folder}/", "{folder}/.", "{folder}/..", "{folder}/../images/own", "{folder}/own\0"),
        *("{folder}/root", "root", "{folder}/usr", "usr", "{folder}/circle", "{folder}/itself", "itself"),
        *("{folder}/own/bin/../../root", "{folder}x/own", "{folder}/root/missing"),
        *("{outside}/own", "docker://debian"),
    ],
)
def test_a_job_may_name_nothing_else(store: Path, folder: Path, tmp_path: Path, image: str) -> None:
    """`/` showed a job the host's files, the service's secret key among them."""
    del store
    (tmp_path / "outside").symlink_to(folder)  # a way that a sandbox could write, and change once it was checked
    image = image.replace("{folder}", str(folder)).replace("{outside}", str(tmp_path / "outside"))
    with pytest.raises(SandboxFailed) as caught:
        find_offered(image, (folder,))
    assert caught.value.fields["reason"] == "image"
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("image", ["missing", "bin", "{folder}/missing"])
def test_an_image_that_is_missing_on_one_machine_is_not_the_tasks_failure(
    store: Path, folder: Path, image: str
) -> None:
    """It was staged to the others, or will be there again: the job is tried elsewhere, and nobody is blamed."""
    del store
    with pytest.raises(SandboxFailed, match="on this machine; build it here too") as caught:
        find_offered(image.replace("{folder}", str(folder)), (folder,))
    failure = failure_of(caught.value)
    assert (failure.outcome, failure.retry, failure.reward) == (Outcome.INFRASTRUCTURE_ERROR, True, None)


def test_nobody_may_name_what_is_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, keys = tmp_path / "a" / "home", tmp_path / "b" / "keys"
    for path in (home, keys):
        path.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PRORL_KEYS", str(keys))
    root = tmp_path / "c" / "sandboxes"
    for image in ("/", "/proc/self/root", "~", home, home.parent, keys, keys.parent, root.parent, tmp_path):
        (Path(image).expanduser() / "bin").exists() or (Path(image).expanduser() / "bin").mkdir(parents=True)
        sandboxes = Sandboxes("bubblewrap", root)
        with pytest.raises(SandboxFailed, match="cannot be an image: ") as caught:
            asyncio.run(sandboxes.create("one", SandboxSpec(image=str(image))))
        assert caught.value.fields["reason"] == "image"
        assert not root.exists()
    (home / "images" / "own").mkdir(parents=True)
    check_private(home / "images" / "own", (home, keys))


def test_the_execution_server_itself_refuses_the_hosts_root() -> None:
    with pytest.raises(SandboxFailed, match="the host's own root"):
        check_image("bubblewrap", ["directory"], Path("/proc/self/root"))


def test_an_image_that_cannot_be_looked_for_is_said() -> None:
    for image in ("~nobody-of-that-name/image", "/" + "x" * 5000, "a\0b"):
        with pytest.raises(SandboxFailed, match=r"cannot be found|there is no image"):
            find_image(image)


@pytest.mark.parametrize("folder", ["images", "/", "/proc/self/root", "~", "~nobody-of-that-name", "{root}"])
def test_an_unfit_folder_of_images_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sandboxes("process", tmp_path / "run", image_folders=(Path(folder.replace("{root}", str(tmp_path))),))
    assert caught.value.fields["key"] == "sandbox.image_folders"


def test_specs_are_held_to_the_folders_and_the_default_is_not(tmp_path: Path) -> None:
    usable("bubblewrap")
    default = tiny_root_filesystem(tmp_path / "default")
    offered = tiny_root_filesystem(tmp_path / "images" / "own")
    (offered / "etc" / "word").write_text("offered\n")

    async def main() -> None:
        sandboxes = Sandboxes(
            "bubblewrap", tmp_path / "run" / "boxes", image=str(default), image_folders=(tmp_path / "images",)
        )
        for number, (image, word) in enumerate(
            {"": b"hello\n", "own": b"offered\n", str(offered): b"offered\n"}.items()
        ):
            sandbox = await sandboxes.create(f"box-{number}", SandboxSpec(image=image))
            copy = await sandbox.copy(f"copy-{number}")  # of a default that jobs themselves may not name
            for each in (sandbox, copy):
                assert (await each.exec(["cat", "/etc/word"], 30)).stdout == word
                await each.close()
        for image in (str(default), "/", os.sep + "usr"):
            with pytest.raises(SandboxFailed, match="is offered to jobs"):
                await sandboxes.create("refused", SandboxSpec(image=image))
        assert list(sandboxes.root.iterdir()) == []
        sandboxes.close()

    asyncio.run(main())
