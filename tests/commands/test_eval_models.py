"""`prorl eval --model-name` and `--models`: the models of a service that runs already."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from support.commands import prorl

from prorl_zmq.testing import LocalService, say

if TYPE_CHECKING:
    from pathlib import Path


def test_a_services_other_models_take_the_turns_and_judge(tmp_path: Path) -> None:
    file, out = tmp_path / "words.jsonl", tmp_path / "run"
    file.write_text(json.dumps({"problem": "Where is the DNA?", "ground_truth": "the nucleus"}) + "\n")
    judge = say(lambda prompt: f"VERDICT: {'CORRECT' if 'core' in prompt else 'INCORRECT'}")
    models = {"b": say(lambda _: "\\boxed{inside of the cell's core}"), "rm": judge}
    with LocalService(engine=say("\\boxed{in the tail}"), models=models) as service:
        arguments = ("eval", file, "--task", "stem", "--out", out, "--connect", service.front_door)
        done = prorl(*arguments, "--model-name", "b", "--models", "judge=rm")
        assert done.returncode == 0, done.stderr
        other = prorl(*arguments, "--model-name", "rm", "--models", "judge=rm")
        assert "results of another plan: --model-name was b and is rm" in other.stderr
        wrong = prorl(*arguments[:-4], "--connect", service.front_door, "--models", "judge")
    assert "--models ROLE=NAME, such as judge=rm: Expected" in wrong.stderr.replace("\n", " ")
    (row,) = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    result = row["result"]
    assert (result["model"], result["reward"], result["metrics"]["judged"]) == ("b", 1.0, 1.0)
