"""Rows of all tasks through a whole service, in Apptainer sandboxes, by a policy that knows right and wrong answers.

EVAL is on a node of its own, which has nothing of the one where INIT and RUN are but the images.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from beside import beside
from needed import usable
from rootfs import root_filesystem

from prorl_zmq import EpisodeLimits, RolloutClient
from prorl_zmq.service.child import ChildService
from prorl_zmq.stages.known_row_formats import known_row_formats
from prorl_zmq.tasks.loading import load_jobs
from prorl_zmq.wire.messages.jobs import Outcome

sys.path.append(str(Path(__file__).parents[1] / "stages"))
from swe_image import CLEAN, TEST_COMMAND, git, make_image

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 240.0
STAGE = ("-m", "prorl_zmq.cli", "prorl-stage")
TOPOLOGY = """\
backends = []
stage = [{{role = "init"}}, {{role = "run"}}]

[sandbox]
kind = "apptainer"
image = {image}
image_folders = {folders}
"""
FINISH = ["finish", {"message": "done"}]
CODE_TESTS = {"inputs": ["1 2\n", "-5 3\n"], "outputs": ["3\n", "-2\n"]}
FUNCTION_TESTS = {"inputs": [[1, 2], [-5, 3]], "outputs": [3, -2], "fn_name": "add"}


def programming(question: str, tests: dict[str, Any], starter_code: str = "") -> dict[str, Any]:
    """A row of APPS."""
    return {
        "problem_id": question,
        "question": question,
        "input_output": json.dumps(tests),
        "starter_code": starter_code,
        "solutions": "[]",
        "difficulty": "introductory",
    }


def words(question: str) -> dict[str, Any]:
    """A whole job, of which rules decide nothing."""
    return {"task": "stem", "instance": {"problem": question, "ground_truth": "It scatters.", "kind": "text"}}


def solution(source: str) -> list[Any]:
    return [["bash", {"command": f"cat > /workspace/solution.py <<'END'\n{source}\nEND"}], FINISH]


EDIT = {"old_str": "* 3", "new_str": "* 2"}
JUDGED = "because it scatters"
CASES: dict[str, tuple[dict[str, Any], list[Any], float]] = {
    "math-right": (
        {"problem": "math-right: 3/8?", "answer": "\\frac{3}{8}", "tools": []},
        ["I think so: \\boxed{0.375}"],
        1.0,
    ),
    "math-wrong": ({"problem": "math-wrong: 3/8?", "answer": "\\frac{3}{8}"}, ["\\boxed{0.376}"], 0.0),
    "math-tool": (
        {"problem": "math-tool: 2**64 + 1?", "ground_truth": "18446744073709551617", "tools": ["ipython", "finish"]},
        [["ipython", {"code": "2**64 + 1"}], ["finish", {"message": "\\boxed{18446744073709551617}"}]],
        1.0,
    ),
    "stem-right": (
        {"problem_text": "stem-right: how far?", "answer_number": "1.50", "unit": "km"},
        ["\\boxed{1500 m}"],
        1.0,
    ),
    "stem-wrong": (
        {"problem_text": "stem-wrong: how far?", "answer_number": "1.50", "unit": "km"},
        ["\\boxed{1500 km}"],
        0.0,
    ),
    "stem-words": (
        words("stem-words: blue?"),
        [f"\\boxed{{\\text{{{JUDGED}}}}}"],
        1.0,
    ),
    "stem-other-words": (
        words("stem-other-words: blue?"),
        ["\\boxed{\\text{it is painted}}"],
        0.0,
    ),
    "code-right": (
        programming("code-right:", CODE_TESTS),
        solution("print(sum(map(int, input().split())))"),
        1.0,
    ),
    "code-wrong": (programming("code-wrong:", CODE_TESTS), solution("print(3)"), 0.0),
    "code-function": (
        programming("code-function:", FUNCTION_TESTS, "def add(a, b):"),
        solution("def add(a, b):\n    return a + b"),
        1.0,
    ),
    "swe-right": (
        {"problem_statement": "swe-right: double(2) is 6"},
        [["bash", {"command": "cat calculator.py; sed -i 's/[*] 3/* 2/' calculator.py"}], FINISH],
        1.0,
    ),
    "swe-editor": (
        {"problem_statement": "swe-editor: double(2) is 6"},
        [["str_replace_editor", {"command": "str_replace", "path": "/testbed/calculator.py", **EDIT}], FINISH],
        1.0,
    ),
    "swe-turns": (
        {"problem_statement": "swe-turns: double(2) is 6"},
        [["bash", {"command": "sed -i 's/[*] 3/* 2/' calculator.py"}], *[["bash", {"command": "ls"}]] * 3],
        1.0,
    ),
    "swe-wrong": (
        {"problem_statement": "swe-wrong: double(2) is 6"},
        [["bash", {"command": "sed -i 's/[*] 3/* 4/' calculator.py"}], FINISH],
        0.0,
    ),
}
"""Row, what the policy says, reward."""
LIMITS = {"swe-turns": EpisodeLimits(max_turns=2)}


class Judge(BaseHTTPRequestHandler):
    """An OpenAI-style endpoint that takes one answer for right."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        *_, question = asked["messages"]
        verdict = "CORRECT" if JUDGED in question["content"].partition("STUDENT'S ANSWER")[2] else "INCORRECT"
        reply = {"choices": [{"message": {"role": "assistant", "content": f"I think.\nVERDICT: {verdict}"}}]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def judging() -> Iterator[dict[str, str]]:
    """Serve the judge; give the settings that name it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield {
                "PRORL_MODEL_JUDGE_URL": f"http://127.0.0.1:{server.server_port}",
                "PRORL_MODEL_JUDGE_MODEL": "judge-1",
            }
        finally:
            server.shutdown()


@contextmanager
def serving(folder: Path, images: Path) -> Iterator[RolloutClient]:
    topology = TOPOLOGY.format(image=json.dumps(str(root_filesystem())), folders=json.dumps([str(images)]))
    service = ChildService(folder, topology)
    speeches = folder / "speeches.json"
    speeches.write_text(json.dumps({f"{name}:": turns for name, (_, turns, _) in CASES.items()}))
    engine = str(Path(__file__).with_name("knowing_engine.py"))
    broker = f"ipc://{service.run_dir}/stage_events"
    elsewhere = ["--node", "elsewhere", "--run-dir", str(folder / "elsewhere"), "--connect", broker]
    sandboxes = ["--sandbox", "apptainer", "--image", str(root_filesystem()), "--image-folder", str(images)]
    with (
        service,
        judging() as judge,
        beside([engine, f"ipc://{service.run_dir}/backend_broker", f"ipc://{folder}/engine", str(speeches)]),
        beside([*STAGE, "--role", "eval", *elsewhere, *sandboxes], judge),
        RolloutClient(service.front_door, timeout_s=60) as client,
    ):
        service.wait_ready(client)
        yield client


@pytest.mark.timeout(300)
def test_right_answers_are_paid_for_and_wrong_ones_are_not(tmp_path: Path) -> None:
    usable("apptainer")
    image, before = make_image(tmp_path)
    bug = git(image / "testbed", "diff", "main", before)
    instance = {
        "image_name": image.name,
        "directory": "/testbed",
        "bug_patch": bug,
        "patch": git(image / "testbed", "diff", before, "main"),
        "test_command": TEST_COMMAND,
        "FAIL_TO_PASS": ["tests/test_double.py::test_two"],
        "PASS_TO_PASS": ["tests/test_double.py::test_zero"],
        "test_files": ["tests"],
        "log_parser": "parse_log_pytest",
    }
    data = tmp_path / "data.jsonl"
    with data.open("w") as file:
        for name, (row, _, _) in CASES.items():
            more = {"instance_id": name, **instance} if name.startswith("swe") else {}
            file.write(json.dumps({**row, **more}) + "\n")
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, serving(Path(folder), tmp_path) as client:
        jobs = zip(CASES, load_jobs(data, row_formats=known_row_formats()), strict=True)
        limited = [msgspec.structs.replace(job, episode=LIMITS.get(name, job.episode)) for name, job in jobs]
        asked = dict(zip(client.submit(limited), CASES, strict=True))
        done = {asked[one.job_id]: one for one in client.stream(timeout_s=WAIT_S)}
    found = {name: (one.outcome, one.reward, one.error) for name, one in done.items()}
    assert found == {name: (Outcome.COMPLETED, reward, None) for name, (_, _, reward) in CASES.items()}
    assert CLEAN.splitlines()[-1].strip() in done["swe-right"].result.notes["patch"]
    assert done["swe-turns"].result.stop_reason == "max_turns"
    for name, verdict in (("stem-words", "CORRECT"), ("stem-other-words", "INCORRECT")):
        notes = done[name].result.notes
        assert (done[name].result.metrics["judged"], notes["judge_model"]) == (1.0, "judge-1")
        assert notes["judge_verdict"].endswith(f"VERDICT: {verdict}")
        assert "It scatters." in notes["judge_prompt"]
    assert done["math-wrong"].result.notes == {"answer": "\\boxed{0.376}", "ground_truth": "\\frac{3}{8}"}
