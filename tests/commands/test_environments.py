"""`prorl env`, as the documents use it, and what it says about wrong options."""

from __future__ import annotations

import inspect
import os
import shlex
from typing import TYPE_CHECKING

import pytest
from documents import ENVIRONMENT_COMMANDS, PAGES, ROOT, blocks
from support.commands import complaint, prorl

if TYPE_CHECKING:
    from pathlib import Path


class Duel:
    """Both players say a number at the same time; what they earn is known when the game is closed."""

    def open(self, args: dict[str, str], seed: int) -> dict[str, object]:
        del seed
        self._said = {args["first"]: "", "black": ""}
        return {"observations": dict.fromkeys(self._said, "Say a number.")}

    def step(self, player: str, text: str) -> dict[str, object]:
        if text == "?":
            return {"observations": {player: "Again."}}
        self._said[player] = text
        return {"done": all(self._said.values())}

    def close(self) -> dict[str, object]:
        return {"rewards": {player: float(text) for player, text in self._said.items() if text.isdigit()}}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PRORL_ENVIRONMENTS": str(tmp_path / "environments")}


def test_a_class_of_ones_own_as_the_documents_have_it(tmp_path: Path, environment: dict[str, str]) -> None:
    assert PAGES[ROOT / "docs" / "environments.md"]
    (example,) = [block for block in blocks("python") if "class GuessTheNumber" in block]
    (tmp_path / "guess.py").write_text(example)
    said = []
    for line in ENVIRONMENT_COMMANDS:
        done = prorl(*shlex.split(line)[1:], cwd=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == f"{tmp_path}/environments/guess/own\n"
    assert said[1].endswith(
        "--- main says: 3\n--- main sees: No. Again.\nrewards: none; not done\n"
        "--- main says: 1\nrewards: {'main': 1.0}; done\n"
    )
    assert "guess" in said[2]
    assert "gem-llm" in said[2]
    assert "guess" not in prorl("env", "list", environment=environment).stdout


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("test", "guess"), "environment guess is neither known nor installed in", 1),
        (("test", "gem"), "environment gem 0.1.0 is not installed in", 1),
        (
            ("install", "own", "--adapter", "textarena.py:Textarena"),
            "textarena.py has no Textarena; its classes: TextArena",
            2,
        ),
        (("install", "own", "--adapter", "no.py:Duel"), "the adapter's file no.py does not exist", 2),
        (("test", "gem", "--args", "{"), "--args must be a JSON object", 2),
        (("install", "gme"), "'gme' is not a known environment (gem, ", 2),
        (("remove", "gem"), "gem is not installed in", 2),
    ],
)
def test_what_is_wrong(arguments: tuple[str, ...], said: str, code: int, environment: dict[str, str]) -> None:
    assert said in complaint(prorl("env", *arguments, environment=environment), code)


def test_players_act_as_in_a_rollout(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "duel.py").write_text(inspect.getsource(Duel))
    installed = prorl("env", "install", "duel", "--adapter", "duel.py:Duel", cwd=tmp_path, environment=environment)
    assert installed.stderr == "installing duel\n"
    says = [word for text in ("?", "5", "7", "9") for word in ("--say", text)]
    done = prorl("env", "test", "duel", "--args", '{"first": "white"}', *says, environment=environment)
    assert done.stderr == "prorl env: starting duel\n"
    assert [line for line in done.stdout.splitlines() if " says: " in line or "ends" in line] == [
        "--- white says: ?",
        "--- black says: 5",
        "--- white says: 7",
    ]
    assert done.stdout.endswith(
        "done\nrewards at the end: {'white': 7.0, 'black': 5.0}\nnot said, since no player was to act: 9\n"
    )
    without = prorl("env", "test", "duel", environment=environment)
    assert without.returncode == 1
    assert "KeyError: 'first'" in without.stderr
    assert without.stderr.endswith("; --args is empty: give what it needs\n")
