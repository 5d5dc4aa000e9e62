"""`prorl image`, as a person uses it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rootfs import tiny_root_filesystem
from support.commands import complaint, prorl

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import CompletedProcess


def run(*arguments: str, cwd: Path) -> CompletedProcess[str]:
    return prorl("image", *arguments, cwd=cwd)


def test_build_list_show_remove(tmp_path: Path) -> None:
    tiny_root_filesystem(tmp_path / "tiny[1]")
    where = ("--images", "images")
    built = run("build", "tiny[1]", "--name", "mine", *where, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    assert built.stderr == "building mine: there is no image of this name yet\n"
    again = run("build", "tiny[1]", "--name", "mine", *where, cwd=tmp_path)
    assert again.stdout == built.stdout
    assert again.stderr == "using mine again: source, base image and version are unchanged\n"
    listed = run("list", *where, cwd=tmp_path).stdout
    assert "mine" in listed
    assert f"{tmp_path}/tiny[1]" in listed
    shown = json.loads(run("show", "mine", *where, cwd=tmp_path).stdout)
    assert shown["path"] == built.stdout.strip()
    assert shown["recipe"]["source"] == f"{tmp_path}/tiny[1]"
    assert run("remove", "mine", *where, cwd=tmp_path).returncode == 0
    assert list((tmp_path / "images").iterdir()) == []
    assert "none" in run("list", *where, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("build", "nowhere", "--name", "a"), "there is no nowhere"),
        (("build", "nowhere"), "Missing option '--name'"),
        (("build", "docker://a", "--name", "../a"), "is not a name for an image"),
        (("build", "docker://a", "--name", "a", "--mode", "lock"), "--mode lock --lock FILE"),
        (("build", "docker://a", "--name", "a", "--mode", "never"), "'never' is not one of 'scratch'"),
        (("build", "docker://a", "--name", "a", "--format", "tar"), "'tar' is not one of 'directory'"),
        (("build", "docker://a", "--name", "a", "--set", "b"), "write NAME=VALUE"),
        (("build", "a.def.j2", "--name", "a"), "'version' is undefined; give it with --set NAME=VALUE"),
        (("build", "a.def.j2", "--name", "a", "--set", "version=1", "--set", "vesion=2"), "has no variable vesion"),
        (("show", "none"), "there is no image none"),
        (("remove", "none"), "there is no image none"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.def.j2").write_text("Bootstrap: docker\nFrom: python:{{ version }}\n")
    assert said in complaint(run(*arguments, "--images", "images", cwd=tmp_path))


def test_help_teaches(tmp_path: Path) -> None:
    assert "prorl image build ./rootfs --name mine" in " ".join(run("--help", cwd=tmp_path).stdout.split())
    shown = " ".join(run("build", "--help", cwd=tmp_path).stdout.split())
    assert "Example: prorl image build python.def.j2 --set version=3.12" in shown
    assert "debootstrap://SUITE?include=" in shown
