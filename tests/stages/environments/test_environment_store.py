"""Installing environments of one's own, without a registry, and finding them."""

from __future__ import annotations

import asyncio
import sys
import zipfile
from pathlib import Path

import pytest

from prorl_zmq.errors import ConfigError, EnvironmentFailed
from prorl_zmq.stages.environments.environment_store import ADAPTERS, KNOWN, EnvironmentStore
from prorl_zmq.stages.environments.trial import try_environment

WORLD = """
class Coin:
    def reset(self, seed=None):
        return {"coins": 3}, {}

    def step(self, action):
        return "over", 1.5, False, True, {"action": action}
"""


def ignored(line: str) -> None:
    del line


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "environments")


def test_a_class_in_a_file_is_installed_played_replaced_and_removed(store: EnvironmentStore, tmp_path: Path) -> None:
    """A class with gymnasium's methods needs no adapter, and an environment without requirements no pip."""
    (tmp_path / "coin.py").write_text(WORLD)
    for _ in range(2):
        made = store.install("coin", say=ignored, heard=ignored, adapter=f"{tmp_path}/coin.py:Coin")
    assert (made.version, made.adapter) == ("own", f"{tmp_path}/coin.py:Coin")
    place = store.place("coin")
    said = asyncio.run(try_environment(place, {}, 1, ["toss"]))
    assert "--- main sees: {\"coins\": 3}\n--- main says: toss\nrewards: {'main': 1.5}; done" in said
    assert sys.executable != place.python
    store.remove("coin", say=ignored)
    with pytest.raises(EnvironmentFailed, match=r"coin is neither known nor installed in .*; see: prorl env list"):
        store.place("coin")
    with pytest.raises(EnvironmentFailed, match="cannot be started"):  # a rollout that has begun meanwhile
        asyncio.run(try_environment(place, {}, 1, []))


@pytest.mark.proof(quick=True)
def test_an_entry_point_says_where_the_class_is(store: EnvironmentStore, tmp_path: Path) -> None:
    files = {
        "coin.py": WORLD,
        "coin-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: coin\nVersion: 1\n",
        "coin-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "coin-1.dist-info/entry_points.txt": "[prorl_zmq.environments]\ncoin = coin:Coin\n",
    }
    files["coin-1.dist-info/RECORD"] = "".join(f"{name},,\n" for name in (*files, "coin-1.dist-info/RECORD"))
    with zipfile.ZipFile(tmp_path / "coin-1-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    requirement = f"{tmp_path}/coin-1-py3-none-any.whl"
    made = store.install("coin", say=ignored, heard=ignored, requirements=(requirement,))
    assert store.place("coin").adapter == "coin:Coin"
    assert "rewards: {'main': 1.5}" in asyncio.run(try_environment(store.place("coin"), {}, 1, ["toss"]))
    with pytest.raises(ConfigError, match="no installed package has an entry point other in the group"):
        store._adapter("other", Path(made.folder))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gme", {}, r"'gme' is not a known environment \(gem, .*; install one of your own with --from and --adapter"),
        ("Gem", {}, "'Gem' cannot be the name of an environment; allowed are"),
        ("../gem", {}, "cannot be the name"),
        ("gem==../x", {}, "'../x' is not a version"),
        ("gem", {"adapter": "a:B"}, "needs another name"),
        ("coin", {"adapter": "coin"}, "'coin' is not an adapter; write module:Class or file.py:Class"),
        ("coin", {"adapter": "/nowhere/coin.py:Coin"}, "file /nowhere/coin.py does not exist"),
    ],
)
def test_what_cannot_be_installed(store: EnvironmentStore, name: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        store.install(name, say=ignored, heard=ignored, **options)  # type: ignore[arg-type]
    assert not store.root.exists()


def test_every_adapter_of_ours_belongs_to_a_known_environment() -> None:
    in_no_index = "tau2.py"
    files = {path.name for path in ADAPTERS.glob("*.py")} - {"__init__.py", "gymnasium.py", in_no_index}
    assert files == {known.adapter.partition(":")[0] for known in KNOWN.values()} & files
    assert all(len(path.read_text().splitlines()) <= 110 for path in ADAPTERS.glob("*.py"))


def test_an_adapter_of_ours_is_named_by_its_file(store: EnvironmentStore) -> None:
    store.install("shop", say=ignored, heard=ignored, adapter="tau2.py:Tau2")
    assert store.place("shop").adapter == f"{ADAPTERS}/tau2.py:Tau2"
    with pytest.raises(ConfigError, match=r"file tau3\.py does not exist; files of this package: .*tau2"):
        store.install("mall", say=ignored, heard=ignored, adapter="tau3.py:Tau3")
