"""Each real harness that is installed, unmodified, in sandboxes without network (see `make harnesses`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import rootfs
from captured import segments_of
from needed import lacking, usable

from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.chat.embedded_chat import EmbeddedChatFormat
from prorl_zmq.stages.harness.adapter import PyPI, load_adapter
from prorl_zmq.stages.harness.chosen_harness import ChosenHarness
from prorl_zmq.stages.harness.harness_store import HarnessStore
from prorl_zmq.stages.harness.trial import try_harness
from prorl_zmq.stages.package_installer import find_python
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes
from prorl_zmq.wire.messages.jobs import Harness

if TYPE_CHECKING:
    from prorl_zmq.wire.messages.jobs import SandboxKind

pytestmark = pytest.mark.proof  # they need the environment of `make harnesses`
MADE = Path(__file__).resolve().parents[3] / ".harnesses"
INSTALLED = ("claude-code", "codex", "pi", "opencode", "qwen-code", "mini-swe-agent", "openhands")
OPTIONAL = ("gemini-cli", "aider", "terminus-2")
"""What `make harnesses` does not install."""
ROOT = MADE if MADE.is_dir() and "PRORL_HARNESSES" not in os.environ else HarnessStore.default_root()
ODD = '/help -p "it\'s" $HOME `id` {url} {{x}} {% y %} é\U0001f600\n'
PROMPT = ODD + "".join(f"line {number} of a long task\n" for number in range(6000)) + "the end"
"""More than one argument of a program may be long."""


def _lacks_python(name: str) -> bool:
    package = load_adapter(name).package
    try:
        return isinstance(package, PyPI) and not find_python(package.python)
    except ConfigError:
        return True


@pytest.mark.parametrize("kind", ["apptainer", "bubblewrap"])
@pytest.mark.parametrize("name", [*INSTALLED, *OPTIONAL])
def test_a_real_harness_does_as_a_scripted_model_tells_it(name: str, kind: SandboxKind, tmp_path: Path) -> None:
    usable(kind)
    try:
        installation = HarnessStore(ROOT).find(name)
    except ConfigError as error:
        if name in OPTIONAL or _lacks_python(name):
            pytest.skip(error.message)
        lacking("harness", error.message)
    image = str(rootfs.root_filesystem()) if kind == "apptainer" else ""
    if name == "terminus-2" and image and not (Path(image) / "usr" / "bin" / "tmux").exists():
        pytest.skip("the image has no tmux")
    sandboxes = Sandboxes(kind, tmp_path / "sandboxes", image=image)
    try:
        chosen = ChosenHarness(Harness(name), load_adapter(name), installation)
        trial = asyncio.run(try_harness(chosen, sandboxes, PROMPT))
    finally:
        sandboxes.close()
    assert not trial.problem, f"{trial.problem}\n{trial.output}"
    (segment, *_) = segments_of(trial.episode.trajectory)
    assert PROMPT in EmbeddedChatFormat().decode(segment.token_ids)
