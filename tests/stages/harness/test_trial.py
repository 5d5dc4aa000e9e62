"""A tiny harness tried in real sandboxes: when it does as it is told, and each way in which it does not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_harness
from captured import segments_of

from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.stages.harness.adapter import load_adapter
from prorl_zmq.stages.harness.chosen_harness import ChosenHarness
from prorl_zmq.stages.harness.harness_store import HarnessStore
from prorl_zmq.stages.harness.trial import PROMPT, Trial, try_harness
from prorl_zmq.stages.package_installer import PackageInstaller
from prorl_zmq.wire.messages.jobs import Harness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.sandboxes import SharedSandboxes

    from prorl_zmq.stages.package_store import Installation
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

pytestmark = pytest.mark.xdist_group("tiny-harness")


def unpack(installer: PackageInstaller, argv: tuple[str, ...], folder: Path, lock: int) -> None:
    """Do what the installer's programs do, without pip: `test_harness_store` runs it."""
    del installer, lock
    if "venv" in argv:
        subprocess.run([*argv, "--without-pip"], check=True)
    else:
        (wheel,) = Path(os.environ["PIP_FIND_LINKS"]).glob("*-1.0-*.whl")
        (packages,) = (folder / "lib").glob("python*/site-packages")
        with zipfile.ZipFile(wheel) as content:
            content.extractall(packages)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """The tiny harness, whose adapter is found while this module runs."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tiny_harness.offer(folder).items():
            patch.setenv(name, value)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(PackageInstaller, "_run", unpack)
        yield HarnessStore(folder / "harnesses").install("tiny", say=lambda _: None, heard=lambda _: None)


def tried(installed: Installation, sandboxes: Sandboxes) -> Trial:
    if sandboxes.kind == "apptainer" and not installed.binds[1:]:
        pytest.skip("the harness runs on the system's Python, which the image hides")
    chosen = ChosenHarness(Harness("tiny"), load_adapter("tiny"), installed)
    return asyncio.run(try_harness(chosen, sandboxes))


def test_it_does_as_it_is_told_in_every_kind_of_sandbox(installed: Installation, sandboxes: Sandboxes) -> None:
    trial = tried(installed, sandboxes)
    assert (trial.problem, trial.calls, trial.episode.metrics["main_turns"]) == ("", 2, 2), trial.output
    (segment,) = segments_of(trial.episode.trajectory)
    assert PROMPT in EmbeddedChatFormat().decode(segment.token_ids)
    assert 0 < trial.first_call_s < trial.took_s
    assert list(sandboxes.root.iterdir()) == []
    if sandboxes.kind != "process":
        assert trial.output == "Done. /tmp/harness\n"


@pytest.mark.parametrize(
    ("mood", "problem"),
    [
        (
            "silent",
            "the harness tiny made no model call that could be answered, and ended with 1: it has nothing",
        ),
        ("other-tool", "it offered no tool run, but: other"),
        ("idle", "it did not write the file that the model asked for"),
        ("fails", "it ended with exit code 3"),
    ],
)
def test_what_went_wrong_is_said(
    installed: Installation, sandboxes_of: SharedSandboxes, monkeypatch: pytest.MonkeyPatch, mood: str, problem: str
) -> None:
    monkeypatch.setenv("TINY_MOOD", mood)
    trial = tried(installed, sandboxes_of("bubblewrap"))
    assert trial.problem.startswith(problem)
