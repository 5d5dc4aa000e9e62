"""lm-evaluation-harness, unchanged, evaluates a model by the gateway, against transformers' own forward pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from needed import lacking
from support.adapters import PeftReference
from support.ports import free_port
from support.services import PROCESS, serving
from support.waiting import until

from prorl_zmq.examples.trainers.shared.make_model import make

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(find_spec("peft") is None, reason="it is of the extra [train]"),
    pytest.mark.timeout(500),
    pytest.mark.xdist_group("transformers"),
]
LIMIT_S = 300.0
CLOSE = 1e-3
"""Most that the log-prob of a choice may differ from the model's."""
APART = 0.5
"""Least that some of them differs from another model's."""
ROWS = [{"question": f"def f{number}(self):", "choices": [" return", " import x", " self.a"]} for number in range(6)]
TASKS = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0},
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": 8},
    },
}


def evaluated(model: str, url: str, tokenizer: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run all tasks; return their samples, in the order of `ROWS`."""
    (folder / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}}}
    more = {"test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": ""}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **more, **task}))
    files = ",".join(str(folder / f"{name}.yaml") for name in TASKS)
    given = f"model={model},base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=4"
    words = ("--model", "local-completions", "--model_args", given, "--tasks", files, "--output_path", folder / "out")
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lm_eval", *words, "--log_samples"],
        cwd=folder,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for name in TASKS:
        (file,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == len(ROWS)
        found[name] = sorted(samples, key=lambda sample: sample["doc_id"])
    return found


def test_it_compares_likelihoods_and_reads_replies(tmp_path: Path) -> None:
    if find_spec("lm_eval") is None:
        lacking("lm_eval", "lm-eval is not installed; see make trainers")
    from transformers import AutoTokenizer

    models = [tmp_path / "policy", tmp_path / "other"]
    for seed, model in enumerate(models):
        make(model, seed)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    address = f"127.0.0.1:{free_port()}"
    backends = "".join(
        f'[[backends]]\nname = "{model.name}"\nkind = "transformers"\nmodel = {json.dumps(str(model))}\n'
        for model in models
    )
    with serving(f'{PROCESS}[gateway]\nbind = "{address}"\n{backends}') as service, service.client() as client:
        until(lambda: len(client.backends.list()) == 2, "the engines", 120)
        found = evaluated("policy", f"http://{address}", models[0], tmp_path)
    own, other = (PeftReference(model) for model in models)
    apart = 0.0
    for row, sample in zip(ROWS, found["choices"], strict=True):
        for choice, [[logprob, _]] in zip(row["choices"], sample["resps"], strict=True):
            ids, asked = (tokenizer(text)["input_ids"] for text in (row["question"] + choice, row["question"]))
            right, wrong = (one.logprobs(None, [ids], len(ids) - len(asked)).sum() for one in (own, other))
            assert abs(float(logprob) - right) < CLOSE
            apart = max(apart, abs(float(logprob) - wrong))
    assert apart > APART
    for row, sample in zip(ROWS, found["answers"], strict=True):
        [[said]] = sample["resps"]
        assert said == tokenizer.decode(own.likeliest(None, tokenizer(row["question"])["input_ids"], 8))
