from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.tools.images import sources
from prorl_zmq.tools.images.fingerprint import tree_digest
from prorl_zmq.tools.images.sources import DebootstrapSource, RegistrySource, parse_source

if TYPE_CHECKING:
    from pathlib import Path


def test_debootstrap() -> None:
    source = parse_source("debootstrap://bookworm?include=python3,g++&variant=buildd", mirror="http://x/debian")
    assert source == DebootstrapSource("bookworm", ("g++", "python3"), "buildd", "http://x/debian")
    assert str(source) == "debootstrap://bookworm?include=g++,python3&variant=buildd"
    assert parse_source("debootstrap://bookworm") == DebootstrapSource("bookworm")


def test_registry() -> None:
    assert parse_source("docker://debian:12") == RegistrySource("docker://debian:12")


def test_a_folder_a_file_and_a_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root" / "bin").mkdir(parents=True)
    (tmp_path / "a.sif").write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0")
    (tmp_path / "a.def").write_text("Bootstrap: localimage\nFrom: a.sif\n")
    assert parse_source("root") == sources.DirectorySource(tmp_path / "root")
    assert parse_source("a.sif") == sources.SifSource(tmp_path / "a.sif")
    before = parse_source("a.def").base()
    (tmp_path / "a.sif").write_bytes(b"other")
    assert parse_source("a.def").base() != before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere", "there is no nowhere"),
        ("nowhere.def", "No such file"),
        ("plain", "is no SIF file"),
        ("empty", "neither bin nor usr"),
        ("ftp://a/b", "images come from docker://"),
        ("docker://", "names no image"),
        ("docker://a b", "names no image"),
        ("debootstrap://", "is not a suite"),
        ("debootstrap://../x", "is not a suite"),
        ("debootstrap://--help", "is not a suite"),
        ("debootstrap://bookworm?include=a;rm", "is not the name of a package"),
        ("debootstrap://bookworm?include=--foo", "is not the name of a package"),
        ("debootstrap://bookworm?variant=huge", "is not one of minbase, buildd, standard"),
        ("debootstrap://bookworm?inclde=a", "'inclde' is not one of include, variant"),
        ("debootstrap://bookworm?variant=minbase&variant=buildd", "each once"),
    ],
)
def test_wrong_sources(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=said):
        parse_source(text)


def test_arguments_that_do_not_apply() -> None:
    with pytest.raises(ConfigError, match="nothing to set"):
        parse_source("docker://a", variables={"a": "b"})
    with pytest.raises(ConfigError, match="needs no mirror"):
        parse_source("docker://a", mirror="http://x/")
    with pytest.raises(ConfigError, match="mirror is not an address"):
        parse_source("debootstrap://bookworm", mirror="--foreign")


def test_a_folders_identity_changes_with_its_content(tiny: Path) -> None:
    seen = {tree_digest(tiny)}
    assert tree_digest(tiny) in seen

    def is_new() -> bool:
        now = tree_digest(tiny)
        new = now not in seen
        seen.add(now)
        return new

    word = tiny / "etc" / "word"
    word.write_text("other\n")
    assert is_new()
    word.chmod(0o600)
    assert is_new()
    os.utime(word, ns=(1, 1))
    assert is_new()
    word.rename(tiny / "etc" / "name")
    assert is_new()
    (tiny / "etc" / "link").symlink_to("name")
    assert is_new()
    (tiny / "proc" / "1").mkdir()  # no part of any image
    (tiny / "home" / "a").mkdir()
    (tiny / "home" / "a").rmdir()
    now = tree_digest(tiny)
    (tiny / "dev" / "null").write_text("")
    os.utime(tiny / "dev", ns=(1, 1))
    assert tree_digest(tiny) == now
