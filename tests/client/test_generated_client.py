"""The blocking client is what `make client` makes of the asyncio one."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import prorl_zmq
from prorl_zmq.client.asynchronous.backends import AsyncBackends
from prorl_zmq.client.asynchronous.batch import AsyncBatch
from prorl_zmq.client.blocking.backends import Backends
from prorl_zmq.client.blocking.batch import Batch

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "generate_client.py"
needs_ruff = pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="the generator formats with ruff")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_client", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_ruff
def test_it_is_not_stale() -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True)


@needs_ruff
def test_a_stale_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    made = generator()
    for folder in ("asynchronous", "blocking"):
        (tmp_path / folder).mkdir()
        for name in made.FILES:
            (tmp_path / folder / name).write_text((made.CLIENT / folder / name).read_text())
    monkeypatch.setattr(made, "CLIENT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_client.py", "--check"])
    assert made.main() == 0
    edited = tmp_path / "blocking" / "batch.py"
    edited.write_text(edited.read_text() + "# by hand\n")
    assert made.main() == 1
    assert "batch.py" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["generate_client.py"])
    assert made.main() == 0
    assert edited.read_text() == (generator().CLIENT / "blocking" / "batch.py").read_text()


def test_words_are_replaced() -> None:
    text = "async with AsyncThing() as one:\n    async for x in await one.go(): ...\nasync def __aenter__(self): ...\n"
    assert generator().translate("backends.py", text).splitlines()[1:] == [
        "with Thing() as one:",
        "    for x in one.go(): ...",
        "def __enter__(self): ...",
    ]


def test_nothing_asynchronous_is_left() -> None:
    made = generator()
    for name in made.FILES:
        text = (made.CLIENT / "blocking" / name).read_text().partition("\n")[2]
        assert [word for word in ("async", "await", "Async") if word in text.replace("make client", "")] == []


@pytest.mark.parametrize(
    ("written", "generated"),
    [(prorl_zmq.AsyncRolloutClient, prorl_zmq.RolloutClient), (AsyncBatch, Batch), (AsyncBackends, Backends)],
)
def test_both_clients_offer_the_same(written: type, generated: type) -> None:
    def offered(one: type) -> dict[str, str]:
        members = {name: member for name, member in vars(one).items() if not name.startswith("_")}
        return {
            name: str(inspect.signature(member)).replace("Async", "") if callable(member) else "property"
            for name, member in members.items()
        }

    assert offered(written) == offered(generated)
