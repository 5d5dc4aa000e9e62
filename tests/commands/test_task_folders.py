"""`prorl tasks validate` and `images` of folders of Harbor tasks."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from documents import HARBOR_COMMANDS
from rootfs import tiny_root_filesystem
from support.commands import complaint, prorl
from support.harbor_tasks import DOCKERFILE, make_task

from prorl_zmq.commands.options import sandbox_for
from prorl_zmq.config import SandboxSettings
from prorl_zmq.errors import ConfigError
from prorl_zmq.tasks.harbor_folder import published_name
from prorl_zmq.tools.images.image_store import ImageStore
from prorl_zmq.tools.images.sources import parse_base, parse_source, same_image

if TYPE_CHECKING:
    from pathlib import Path


def plain(table: str) -> str:
    """Return the words of a table."""
    return " ".join(table.replace("│", " ").split())


def test_each_folder_is_shown_with_what_is_wrong(tmp_path: Path) -> None:
    make_task(tmp_path / "good")
    make_task(tmp_path / "bad", files={"environment/Dockerfile": DOCKERFILE + "RUN --network=none true\n"})
    make_task(tmp_path / "gpu", "[environment]\ngpus = 2\n")
    done = prorl("tasks", "validate", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    shown = plain(done.stdout)
    assert "environment/Dockerfile, line 3: RUN: --network=none cannot be obeyed" in shown
    assert "task.toml: [environment] gpus: sandboxes have no GPU" in shown
    assert "good ok" in shown
    assert "1 of 3 task folders can run" in shown
    assert prorl("tasks", "validate", tmp_path / "good").returncode == 0
    assert "has no task folder" in complaint(prorl("tasks", "validate", tmp_path / "good" / "tests"))


def test_an_mcp_server_that_the_operator_must_list_is_named(tmp_path: Path) -> None:
    server = '[[environment.mcp_servers]]\nname = "shop"\ntransport = "http"\nurl = "https://x.example/mcp"\n'
    make_task(tmp_path / "a", server)
    done = prorl("tasks", "validate", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok, if the service has https://x.example/mcp in [[mcp]]" in plain(done.stdout)
    assert "1 of 1 task folders can run" in done.stdout


def test_many_folders_are_shown_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.commands.task_folders.SHOWN_FOLDERS", 2)
    for name in "abc":
        make_task(tmp_path / name, files={"instruction.md": None} if name == "c" else {})
    shown = prorl("tasks", "validate", tmp_path).stdout
    assert "it has no instruction.md" in shown
    assert "1 more folders: --all shows them" in shown
    assert "more folders" not in prorl("tasks", "validate", tmp_path, "--all").stdout


def test_images_are_listed_by_what_needs_them(tmp_path: Path) -> None:
    make_task(tmp_path / "set" / "a")
    make_task(tmp_path / "set" / "b")
    make_task(tmp_path / "set" / "c", '[environment]\ndocker_image = "ghcr.io/x/y:1"\n')
    make_task(tmp_path / "set" / "d", files={"tests/test.sh": None})
    (tmp_path / "map.toml").write_text('"ghcr.io/x/y:1" = "docker://mirror.example/y:1"\n')
    where = ("tasks", "images", tmp_path / "set", "--images", tmp_path / "images")
    done = prorl(*where, "--bases", tmp_path / "map.toml")
    assert done.returncode == 1
    assert "1 folders are wrong" in done.stdout
    rows = {
        name: rest for name, *rest in (plain(line).split() for line in done.stdout.splitlines() if "missing" in line)
    }
    assert rows[published_name("ghcr.io/x/y:1")] == ["missing", "1", "docker://mirror.example/y:1"]
    (built,) = (name for name in rows if name.startswith("harbor-"))
    assert rows[built][:2] == ["missing", "2"]
    assert "2 of 2 images are missing: --build builds them" in done.stdout
    assert "environment/Dockerfile" in prorl(*where, "--dockerfiles").stdout.partition("ghcr.io_x_y_1")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--base", "ubuntu:24.04"), "write NAME=SOURCE"),
        (("--base", "ubuntu=nowhere"), "there is no nowhere"),
        (("--base", "ubuntu=docker-archive:nowhere.tar"), "there is no"),
        (("--base", "ubuntu=debootstrap://bookworm"), "is no image, but what one is built from"),
        (("--bases", "map.toml"), "is not a text"),
    ],
)
def test_wrong_bases(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    make_task(tmp_path / "a")
    (tmp_path / "map.toml").write_text("ubuntu = 1\n")
    done = prorl("tasks", "images", tmp_path, *arguments, "--images", tmp_path / "images", cwd=tmp_path)
    assert words in complaint(done)


def test_bases_are_for_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1", "answer": "1"}) + "\n")
    assert "is no folder" in complaint(prorl("tasks", "images", tmp_path / "rows.jsonl", "--base", "a=b"))


def test_names_of_one_image_are_the_same() -> None:
    assert (
        len({same_image(name) for name in ("ubuntu", "ubuntu:latest", "docker.io/library/ubuntu", "library/ubuntu")})
        == 1
    )
    assert same_image("localhost:5000/a") == "localhost:5000/a:latest"
    assert same_image("a/b@sha256:12") == "docker.io/a/b@sha256:12"


def test_a_dockerfile_is_a_source(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "a") / "environment"
    source = parse_source(str(folder / "Dockerfile"))
    before = source.base()
    (folder / "more").write_text("")
    assert source.base() != before
    with pytest.raises(ConfigError, match="nothing to set"):
        parse_source(str(folder / "Dockerfile"), variables={"a": "b"})
    (folder / "Dockerfile").write_text("FROM a\nONBUILD RUN x\n")
    with pytest.raises(ConfigError, match="Dockerfile, line 2: ONBUILD"):
        parse_source(str(folder / "Dockerfile"))
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_source(str(tmp_path / "Dockerfile"))


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("apptainer") is None, reason="Apptainer is not installed")
def test_missing_images_are_built(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    tiny = tiny_root_filesystem(tmp_path / "tiny", "chmod", "chown", "cp", "env", "ln", "rmdir")
    store.build(str(tiny), "small")
    make_task(tmp_path / "set" / "a", files={"environment/Dockerfile": DOCKERFILE + "RUN echo $PWD > built\n"})
    make_task(tmp_path / "set" / "b", files={"environment/Dockerfile": DOCKERFILE + "RUN echo no && exit 7\n"})
    make_task(tmp_path / "set" / "c", '[environment]\ndocker_image = "debian:12"\n')
    where = ("tasks", "images", tmp_path / "set", "--images", tmp_path / "images", "--build")
    done = prorl(*where, "--base", "ubuntu:24.04=small", "--base", f"debian:12={tiny}")
    assert done.returncode == 1
    shown = plain(done.stdout)
    assert f"{published_name('debian:12')} built 1" in shown
    assert "line 3: RUN echo no && exit 7 failed" in shown
    names = [image.name for image in store.list()]
    (name,) = (name for name in names if name.startswith("harbor-"))
    assert sorted(names) == sorted(["small", published_name("debian:12"), name])
    assert (store.show(name).path / "app" / "built").read_text() == "/app\n"
    assert isinstance(parse_base(str(store.show(name).path)).base(), str)
    assert f"{published_name('debian:12')} there 1" in plain(prorl(*where[:-1]).stdout)


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("apptainer") is None, reason="Apptainer is not installed")
def test_the_commands_of_the_documents(tmp_path: Path) -> None:
    tiny = tiny_root_filesystem(tmp_path / "tiny", "chmod", "chown", "cp", "env", "ln", "rmdir")
    make_task(tmp_path / "tasks" / "a")
    (tmp_path / "bases.toml").write_text(f'"ubuntu:24.04" = "{tiny}"\n')
    codes = []
    for line in HARBOR_COMMANDS:
        done = prorl(*line.split()[1:], cwd=tmp_path, environment={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
        codes.append(done.returncode)
    assert codes == [0, 1, 0]


def test_a_folder_of_tasks_gets_sandboxes_whose_image_an_agent_may_change(tmp_path: Path) -> None:
    rows, default = tmp_path / "rows.jsonl", SandboxSettings().kind
    assert [sandbox_for(None, data) for data in (tmp_path, rows, None)] == ["apptainer", default, default]
    assert sandbox_for("process", tmp_path) == "process"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    done = prorl("tasks", "validate", str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (2, f"prorl: {tmp_path}/none does not exist\n")
