"""The examples of docs/gateway.md, and of docs/outside-programs.md over HTTP, run as they are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from documents import PAGES, ROOT
from needed import lacking

from prorl_zmq.data.trajectory import array_views

if TYPE_CHECKING:
    from pathlib import Path

    from support.services import SharedService

TEXT = PAGES[ROOT / "docs" / "gateway.md"]
BASH = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = BASH.findall(TEXT)


def run(served: SharedService, example: str, folder: Path) -> list[bytes]:
    """Run the lines of an example in one shell; return what each printed."""
    if shutil.which("curl") is None:
        lacking("curl", "curl is not installed")
    script = "; ".join(f"{line} || exit 1; echo; echo ---" for line in example.splitlines())
    done = subprocess.run(
        ["sh", "-c", script], cwd=folder, env={**served.environment, "URL": served.url}, capture_output=True, timeout=90
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return [part.strip() for part in done.stdout.split(b"---\n")[:-1]]


def test_there_are_examples_of_all_apis() -> None:
    assert len(EXAMPLES) == 3


def test_the_json_api(served: SharedService, tmp_path: Path) -> None:
    submitted, state, told, _, left = run(served, EXAMPLES[0], tmp_path)
    assert json.loads(submitted) == {"job_ids": ["one"], "new": 1}
    assert json.loads(state)["job_id"] == "one"
    trajectory = json.loads(told)
    sizes = dict(re.findall(r"(?i)^prorl-(tokens|turns): (\d+)", (tmp_path / "headers.txt").read_text(), re.MULTILINE))
    arrays = array_views((tmp_path / "one.bin").read_bytes(), *(int(size) for size in sizes.values()))
    assert arrays.token_ids.tolist() == trajectory["token_ids"]
    assert json.loads(left)["session"] == "http"


def test_openais_api(served: SharedService, tmp_path: Path) -> None:
    models, model, chat, completion, scored = (json.loads(part) for part in run(served, EXAMPLES[1], tmp_path))
    assert [one["id"] for one in models["data"]] == ["policy"]
    assert model == models["data"][0]
    (choice,) = chat["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == chat["usage"]["completion_tokens"]
    assert [choice["prompt_token_ids"] for choice in completion["choices"]] == [[1, 2, 3]] * 2
    (prompt,) = scored["choices"]
    assert prompt["text"] == "1 + 1 = 2"
    assert [one is None for one in prompt["logprobs"]["token_logprobs"]] == [True, *[False] * 8]


def test_prorls_api(served: SharedService, tmp_path: Path) -> None:
    started, answer, status, stopped = (json.loads(part) for part in run(served, EXAMPLES[2], tmp_path))
    assert (started["status"], status["status"], stopped["status"]) == ("Server started", "running", "Server stopped")
    assert {message["role"] for message in answer["messages"]} >= {"user", "assistant"}


def test_a_program_outside_over_http(served: SharedService, tmp_path: Path) -> None:
    (example,) = BASH.findall(PAGES[ROOT / "docs" / "outside-programs.md"])
    *_, said, finished, told = run(served, example, tmp_path)
    assert json.loads(said)["object"] == "chat.completion"
    assert json.loads(finished) == {"status": "finished", "reward": 0.5}
    result = json.loads(told)["result"]
    assert (result["outcome"], result["reward"], result["metrics"]["turns"]) == ("completed", 0.5, 1)
