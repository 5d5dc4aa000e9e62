"""`prorl keys`: from a new key to its revocation."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from support.commands import complaint, prorl

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import CompletedProcess


def keys(home: Path, *arguments: str, **variables: str) -> CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(home), **variables}
    if "PRORL_KEYS" not in variables:
        environment.pop("PRORL_KEYS", None)
    return prorl("keys", *arguments, environment=environment)


def test_from_a_new_key_to_its_revocation(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "prorl" / "keys"
    made = keys(tmp_path, "new", "alice", "--role", "trainer")
    assert made.returncode == 0, made.stderr
    secret = re.findall('secret_key = "(.*)"', (folder / "alice.secret").read_text())[0]
    public = re.findall('public_key = "(.*)"', (folder / "alice.pub").read_text())[0]
    assert public in made.stdout
    assert keys(tmp_path, "allow", str(folder / "alice.pub"), "--role", "trainer").returncode == 0
    listed = keys(tmp_path, "list").stdout
    lines = [line for line in listed.splitlines() if public in line]
    assert [("ours" in line, "allowed" in line) for line in lines] == [(True, False), (False, True)]
    assert keys(tmp_path, "revoke", "alice").returncode == 0
    assert "allowed" not in keys(tmp_path, "list").stdout
    for done in (made, keys(tmp_path, "new", "alice", "--role", "trainer")):
        assert secret not in done.stdout + done.stderr + listed


def test_a_bearer_token_is_printed_once_and_revoked(tmp_path: Path) -> None:
    made = keys(tmp_path, "bearer", "alice", "--role", "operator")
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    assert re.fullmatch(r"prorl_[\w-]{43}", token)
    listed = keys(tmp_path, "list").stdout
    assert re.search(r"alice .*operator .*allowed .*a bearer token", listed)
    assert token not in listed
    assert keys(tmp_path, "revoke", "alice").returncode == 0
    assert "alice" not in keys(tmp_path, "list").stdout


def test_the_folder_is_that_of_the_flag_or_the_environment(tmp_path: Path) -> None:
    assert keys(tmp_path, "new", "a", "--role", "stage", PRORL_KEYS="~/two").returncode == 0
    flag = ("--keys", str(tmp_path / "one"))
    assert keys(tmp_path, "new", "b", "--role", "stage", *flag, PRORL_KEYS="~/two").returncode == 0
    assert (tmp_path / "two" / "a.secret").is_file()
    assert (tmp_path / "one" / "b.secret").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list",), "the key folder .* cannot be used: No such file or directory; `prorl keys new` makes one"),
        (("new", "alice"), "Missing option '--role'"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    line = complaint(keys(tmp_path, *arguments))
    assert re.search(said, line), line


def test_a_command_without_the_keys_that_a_topology_names_says_so(tmp_path: Path) -> None:
    topology = tmp_path / "topology.toml"
    topology.write_text(f'[security]\nkeys = "{tmp_path}/none"\n')
    environment = {**os.environ, "PRORL_RUN_DIR": str(tmp_path / "run")}
    done = prorl("status", "--config", topology, environment=environment)
    assert done.returncode == 2, done.stderr
    assert f"the key folder {tmp_path}/none cannot be used" in done.stderr
