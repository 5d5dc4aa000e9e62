from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prorl_zmq.errors import ConfigError
from prorl_zmq.tools.images.definition import load_definition

if TYPE_CHECKING:
    from pathlib import Path

GOOD = "Bootstrap: docker\nFrom: debian:12\n\n%post\n    echo hi: there\n"
TEMPLATE = "Bootstrap: docker\nFrom: python:{{ version }}\n%post\n    pip install {{ package }}\n"


def written(folder: Path, content: str, name: str = "a.def") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def test_a_definition_is_taken_as_it_is(tmp_path: Path) -> None:
    definition = load_definition(written(tmp_path, GOOD), {})
    assert definition.text == GOOD
    assert definition.bases == (("docker", "debian:12"),)


def test_stages_and_local_bases(tmp_path: Path) -> None:
    text = (
        "# two stages\nBootstrap: docker\nFrom: golang:1\nStage: one\n%post\n  true\n"
        "\nBootstrap: LocalImage\nfrom: ./base.sif\n%files from one\n  /a /b\n"
    )
    definition = load_definition(written(tmp_path, text), {})
    assert definition.bases == (("docker", "golang:1"), ("localimage", "./base.sif"))
    assert definition.local_bases() == [tmp_path / "base.sif"]


def test_a_template_is_filled_in(tmp_path: Path) -> None:
    path = written(tmp_path, TEMPLATE, "a.def.j2")
    definition = load_definition(path, {"version": "3.12", "package": "numpy"})
    assert definition.text == "Bootstrap: docker\nFrom: python:3.12\n%post\n    pip install numpy\n"


def test_a_template_knows_the_lock_file_and_may_include_others(tmp_path: Path) -> None:
    written(tmp_path, "%files\n  {{ lock_file }} /lock\n%post\n  echo {{ word }}\n", "common.j2")
    path = written(tmp_path, "Bootstrap: scratch\n{% include 'common.j2' %}\n", "a.def.j2")
    definition = load_definition(path, {"word": "w"}, tmp_path / "requirements.txt")
    assert f"{tmp_path}/requirements.txt /lock" in definition.text
    assert "echo w" in definition.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Bootstrap docker\nFrom: a\n", "line 1: 'Bootstrap docker' is neither"),
        ("Bootstrap: docker\nFrom a\n", "line 2: 'From a' is neither"),
        ("From: a\nBootstrap: docker\n", "line 1: a definition begins with 'Bootstrap"),
        ("%post\n  true\n", "no line 'Bootstrap"),
        ("", "no line 'Bootstrap"),
    ],
)
def test_a_malformed_header(content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_definition(written(tmp_path, content), {})


@pytest.mark.parametrize(
    ("content", "variables", "said"),
    [
        (TEMPLATE, {"version": "3"}, "'package' is undefined; give it with --set"),
        (TEMPLATE, {"version": "3", "package": "a", "pakage": "b"}, "has no variable pakage"),
        ("Bootstrap: {{ a\n", {}, "line 1"),
        ("{% include 'nowhere.j2' %}", {}, "includes nowhere.j2, which is not there"),
        ("Bootstrap: {{ 1 // 0 }}\n", {}, "cannot be filled in"),
    ],
)
def test_a_wrong_template(content: str, variables: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_definition(written(tmp_path, content, "a.def.j2"), variables)


def test_variables_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a template"):
        load_definition(written(tmp_path, GOOD), {"a": "b"})


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.def").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_definition(tmp_path / "a.def", {})
    (tmp_path / "b.def").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_definition(tmp_path / "b.def", {})
    with pytest.raises(ConfigError, match="No such file"):
        load_definition(tmp_path / "c.def", {})
