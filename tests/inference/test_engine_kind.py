"""Engine kinds by entry points: that of another package in `prorl serve` and `prorl-engine`, and what errors say."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
from support import commands

from prorl_zmq import Job, RolloutClient
from prorl_zmq.config import BackendSettings
from prorl_zmq.errors import ConfigError
from prorl_zmq.inference.hosting.builtin_kinds import EmbeddedKind, HttpKind, VllmKind
from prorl_zmq.service.child import ChildService

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from subprocess import CompletedProcess
    from typing import Any

MODULE = '''
from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from prorl_zmq.errors import EngineFailed
from prorl_zmq.inference.engine import Generation
from prorl_zmq.inference.engine_kind import EngineKind
from prorl_zmq.wire.messages.engines import VersionSpan


class ScriptedKind(EngineKind, frozen=True):
    """Gives one answer to everybody."""

    answer: Annotated[str, msgspec.Meta(min_length=1, description="what it says")]
    times: int = 1

    async def start(self, weight_version):
        from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
        from prorl_zmq.inference.policy import Policy, PolicyShape
        from prorl_zmq.inference.tokenizer import IM_END, encode

        if self.answer == "none":
            raise EngineFailed("the script has no answer; write one")
        if self.answer == "fault":
            raise LookupError("no page 7")

        class Engine(EmbeddedEngine):
            async def generate(engine, token_ids, sampling, stop_token_ids, job_id):
                ids = np.array([*encode(self.answer * self.times), IM_END], np.int32)
                logprobs = np.zeros(len(ids), np.float32)
                return Generation(ids, logprobs, (VersionSpan(weight_version, 0, len(ids)),), "stop")

        return Engine(Policy.initial(PolicyShape(), 0), weight_version, "script")
'''
SERVICE = """
stage = [{role = "init"}, {role = "run"}, {role = "eval"}]
sandbox = {kind = "process"}
backends = [{kind = "scripted", options = {answer = '\\boxed{42}'}}]
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An environment, and this process, with a package that offers the kinds `scripted` and `torn`."""
    place = tmp_path / "packages"
    information = place / "scripted_engines-1.0.dist-info"
    information.mkdir(parents=True)
    (place / "scripted_engines.py").write_text(MODULE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-engines\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[prorl_zmq.engines]\nscripted = scripted_engines:ScriptedKind\ntorn = scripted_engines:Missing\n"
        "odd = json:loads\n"
    )
    monkeypatch.syspath_prepend(str(place))
    yield {**os.environ, "PYTHONPATH": str(place)}
    sys.modules.pop("scripted_engines", None)


def run(environment: dict[str, str], program: str, *arguments: str) -> CompletedProcess[str]:
    return commands.run(program, *arguments, environment=environment)


@pytest.mark.proof(quick=True)
def test_a_job_is_answered_by_an_engine_of_another_package(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    folder = tmp_path / "service"
    folder.mkdir()
    with ChildService(folder, SERVICE) as service, RolloutClient(service.front_door, timeout_s=90) as client:
        service.wait_ready(client)
        client.submit(Job(task="math", instance={"problem": "What is it?", "ground_truth": "42"}))
        (trajectory,) = client.stream()
    assert (trajectory.outcome, trajectory.reward) == ("completed", 1.0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--engine", "scripted"), 2, "--engine scripted needs --option answer: what it says"),
        (
            ("--engine", "scripted", "--option", "answer=7"),
            2,
            "Expected `str`, got `int` in --option answer",
        ),
        (("--engine", "scripted", "--option", "answer"), 2, "--option answer: write NAME=JSON"),
        (("--engine", "scripted", "--model", "m"), 2, "takes no --model; embedded, transformers and vllm would"),
        (
            ("--engine", "embedded", "--option", "times=2"),
            2,
            "--engine embedded takes no --option times; scripted would",
        ),
        (("--engine", "torn"), 2, "the engine kind torn (scripted_engines:Missing, of scripted-engines) cannot"),
        (("--engine", "odd"), 2, "(json:loads, of scripted-engines) is not a subclass of EngineKind"),
        (("--engine", "gpt"), 2, "'gpt' is not a kind of engine; installed are: embedded, "),
        (("--engine", "embedded", "--", "--max-model-len", "5"), 2, "takes no flags behind --; vllm would"),
        (("--engine", "scripted", "--option", "answer=none"), 3, "cannot start: the script has no answer; write one"),
        (("--engine", "scripted", "--option", "answer=fault"), 3, "cannot start: LookupError: no page 7"),
    ],
)
def test_what_is_wrong_is_said_in_the_last_line(
    environment: dict[str, str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        done = run(environment, "prorl-engine", "--run-dir", run_dir, *arguments)
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("prorl-engine: cannot start: " if code == 3 else "prorl-engine: ")
    assert said in last


def test_doctor_init_and_eval_know_the_kind(tmp_path: Path, environment: dict[str, str]) -> None:
    shown = run(environment, "prorl", "doctor").stdout
    assert "engine scripted" in shown
    assert "Gives one answer to everybody" in shown
    assert "is not a subclass of EngineKind" in " ".join(shown.replace("│", " ").split())
    assert run(environment, "prorl", "init", str(tmp_path / "new.toml")).returncode == 0
    assert "# Further kinds of engines are installed: odd, scripted, torn." in (tmp_path / "new.toml").read_text()
    file = tmp_path / "sums.jsonl"
    file.write_text('{"problem": "1 + 1?", "ground_truth": "2"}\n')
    out = ("--out", str(tmp_path / "run"))
    done = run(environment, "prorl", "eval", str(file), "--engine", "scripted", *out)
    assert done.returncode == 2
    assert "--engine scripted needs --option answer: what it says" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--option", "answer"), "--option answer: write NAME=JSON"),
        (("--option", "answer=x", "--option", "tims=2"), "takes no --option tims; it takes --option answer, --option "),
        (("--option", "answer=x", "--option", "times=two"), "Expected `int`, got `str` in --option times"),
        (("--option", "answer=x", "--connect", "ipc:///x"), "--connect and --config name a service that has its"),
    ],
)
def test_eval_says_which_option_is_wrong(
    tmp_path: Path, environment: dict[str, str], options: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"problem": "1 + 1?", "ground_truth": "2"}\n')
    done = run(environment, "prorl", "eval", str(file), "--engine", "scripted", *options, "--sandbox", "process")
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.proof
def test_eval_hands_options_to_an_engine_of_another_package(tmp_path: Path, environment: dict[str, str]) -> None:
    file, out = tmp_path / "sums.jsonl", tmp_path / "run"
    file.write_text('{"problem": "1 + 1?", "ground_truth": "2222"}\n')
    options = ("--engine", "scripted", "--option", "answer=\\boxed{2222} ", "--option", "times=2")
    done = run(environment, "prorl", "eval", str(file), *options, "--sandbox", "process", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "results.jsonl").read_text())["result"]
    assert result["reward"] == 1.0
    settings = json.loads((out / "plan.json").read_text())["settings"]
    assert settings["engine_options"] == {"answer": "\\boxed{2222} ", "times": 2}


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({}, [EmbeddedKind()]),
        ({"model": "p.npz", "count": 2}, [EmbeddedKind(model="p.npz")]),
        ({"kind": "vllm", "model": "m", "arguments": ("-x",)}, [VllmKind(model="m", arguments=("-x",))]),
        (
            {"kind": "http", "urls": ("http://a", "http://b"), "api": "sglang", "context_tokens": 9},
            [HttpKind(url=f"http://{host}", api="sglang", context_tokens=9) for host in "ab"],
        ),
        (
            {"kind": "vllm", "model": "m", "parser_url": "http://cpu-1:8100"},
            [VllmKind(model="m", parser_url="http://cpu-1:8100")],
        ),
    ],
)
def test_the_keys_of_a_topology_are_a_kinds_options(given: dict[str, Any], kinds: list[object]) -> None:
    assert BackendSettings(**given).check() == kinds


def test_a_policy_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        EmbeddedKind(model=str(tmp_path / "none.npz")).check()
