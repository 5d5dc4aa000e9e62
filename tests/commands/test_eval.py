"""`prorl eval` as a user runs it: real services with the embedded engine, killed, stopped, and gone on with."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web
from chat_families import FAMILIES, make_tokenizer
from support.commands import prorl
from support.waiting import until
from vllm_python import START_LIMIT_S, environment, tiny_models, vllm_python
from vllm_server import ON_CPU, SMALL

from prorl_zmq import RolloutClient
from prorl_zmq.service.child import ChildService

from ..inference.http.conftest import FakeServer, Speech
from ..trackers import readback

if TYPE_CHECKING:
    from collections.abc import Iterator

EVAL = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "eval"]
PROBLEMS, SAMPLES = 10, 4
QUICK = ("--samples", str(SAMPLES), "--max-tokens", "12", "--max-turns", "2", "--sandbox", "process")
TOPOLOGY = """
stage = [{role = "init"}, {role = "run", slots = 1}, {role = "eval"}]
sandbox = {kind = "process"}
"""
WAIT_S = 150.0


def data_file(folder: Path, problems: int = PROBLEMS) -> Path:
    rows = [{"problem": f"What is {number} + 1?", "ground_truth": str(number + 1)} for number in range(problems)]
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def evaluate(
    *arguments: str, env: dict[str, str] | None = None, limit_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EVAL, *arguments], env=env, capture_output=True, text=True, check=False, timeout=limit_s)


@contextmanager
def evaluating(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*EVAL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(out: Path) -> list[str]:
    """The whole lines of the results."""
    file = out / "results.jsonl"
    return file.read_text().split("\n")[:-1] if file.exists() else []


def job_ids(out: Path) -> list[str]:
    return [json.loads(line)["result"]["job_id"] for line in lines(out)]


@pytest.mark.proof
def test_what_continues_logs_to_the_same_run(tmp_path: Path) -> None:
    readback.library("tensorboardX")
    file, out = data_file(tmp_path, 3), tmp_path / "run"
    arguments = (str(file), "--out", str(out), "--max-tokens", "8", "--sandbox", "process", "--log", "tensorboard")
    for samples in ("1", "2"):
        done = evaluate(*arguments, "--samples", samples, "--k", "1")
        assert done.returncode == 0, done.stderr
        assert f"prorl eval: logged to tensorboard: {out}/trackers/tensorboard/eval-" in done.stderr
    (run,) = (out / "trackers" / "tensorboard").iterdir()
    points, tables = readback.tensorboard(out / "trackers", run.name)
    assert [step for step, _ in points["rollouts/count"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in points["eval/pass_at_1"]] == [3, 6]
    assert [table.count("[user]") for table in tables] == [3, 6]
    assert "What is 2 + 1?" in tables[1]
    assert evaluate(*arguments, "--samples", "2", "--fresh", "--log", "comet").returncode == 2
    assert len(lines(out)) == 6  # what is wrong is said before anything is put aside


@pytest.mark.proof
@pytest.mark.timeout(400)
def test_killed_stopped_and_gone_on_with_it_repeats_nothing(tmp_path: Path) -> None:
    file, out = data_file(tmp_path), tmp_path / "run"
    arguments = (str(file), "--out", str(out), "--slots", "1", *QUICK)
    with evaluating(*arguments) as process:
        until(lambda: len(lines(out)) >= 2, "two results", WAIT_S)
        process.kill()
        process.wait(WAIT_S)
    first = lines(out)
    left = Path((out / "service" / "run_dir").read_text())
    assert 2 <= len(first) < PROBLEMS * SAMPLES
    assert left.exists()  # of the service, which the kernel has ended
    with (out / "results.jsonl").open("a") as results:
        results.write('{"problem": "torn')

    with evaluating(*arguments) as process:
        until(lambda: len(lines(out)) > len(first), "a further result", WAIT_S)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, said
    assert "the same command continues with them" in said.splitlines()[-1]
    assert not left.exists()
    second = lines(out)
    assert second[: len(first)] == first
    assert len(second) < PROBLEMS * SAMPLES
    assert not any('"cancelled"' in line for line in second)
    assert (
        f"{PROBLEMS * SAMPLES - len(second)} of {PROBLEMS * SAMPLES} rollouts have not ended"
        in (out / "report.md").read_text()
    )

    done = evaluate(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"has {len(second)} of {PROBLEMS * SAMPLES} rollouts" in done.stderr
    third = lines(out)
    assert third[: len(second)] == second
    assert len(third) == len(set(job_ids(out))) == PROBLEMS * SAMPLES
    assert not (out / "service" / "run_dir").exists()
    assert "pass@4" in done.stdout
    check_rollouts(out)

    begun = (out / "plan.json").read_bytes()
    again = evaluate(*arguments, "--k", "2", "--threshold", "0.5")  # nothing is missing: only the reports are made
    assert again.returncode == 0, again.stderr
    assert lines(out) == third
    assert [row["k"] for row in json.loads((out / "summary.json").read_text())["passes"]] == [2]
    assert (out / "plan.json").read_bytes() == begun

    explained = json.loads(prorl("explain", out, "--json").stdout)
    assert explained["rollouts"] >= PROBLEMS * SAMPLES / 3  # of the largest of three parts
    assert "the run was continued" in explained["notes"][0]

    other = evaluate(*arguments, "--temperature", "0.5", "--limit", "2")
    assert other.returncode == 2
    (line,) = [line for line in other.stderr.splitlines() if "another plan" in line]
    for part in ("--limit was 0 and is 2", "--temperature was not given and is 0.5", "--fresh"):
        assert part in line
    assert lines(out) == third
    file.write_text(file.read_text() + "\n")
    changed = evaluate(*arguments)
    assert changed.returncode == 2
    assert "the data file's checksum was" in changed.stderr


def check_rollouts(out: Path) -> None:
    """Each rollout has its arrays and its texts, and they fit together."""
    for line in lines(out):
        result = json.loads(line)["result"]
        assert result["outcome"] == "completed", line
        transcript = json.loads((out / "trajectories" / f"{result['job_id']}.json").read_text())
        with np.load(out / "trajectories" / f"{result['job_id']}.npz") as arrays:
            assert len(transcript["tokens"]) == len(arrays["token_ids"]) == result["tokens"]
            assert transcript["mask"] == arrays["loss_mask"].astype(int).tolist()
        assert "What is " in "".join(transcript["tokens"])
        assert [turn["role"] for turn in transcript["turns"]][:3] == ["system", "user", "assistant"]
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 4
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["ended"], summary["infrastructure_errors"]) == (PROBLEMS * SAMPLES, 0)


@pytest.mark.proof
@pytest.mark.timeout(400)
def test_a_service_that_runs_already_keeps_what_an_evaluation_that_was_killed_gave_it(tmp_path: Path) -> None:
    """The jobs continue there, and none is run a second time."""
    file, out = data_file(tmp_path), tmp_path / "run"
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = ChildService(Path(folder), TOPOLOGY)
        with service, RolloutClient(service.front_door) as client:
            service.wait_ready(client)
            arguments = (str(file), "--out", str(out), "--connect", service.front_door, *QUICK[:-2])
            with evaluating(*arguments) as process:
                until(lambda: len(lines(out)) >= 1, "a result", WAIT_S)
                process.kill()
                process.wait(WAIT_S)
            done = evaluate(*arguments)
            assert done.returncode == 0, done.stderr
            assert len(job_ids(out)) == len(set(job_ids(out))) == PROBLEMS * SAMPLES
            assert sum(client.status().outcomes.values()) == PROBLEMS * SAMPLES
            for ours in (("--engine", "embedded"), ("--tokenizer", "here"), ("--slots", "3"), ("--image-folder", "/i")):
                refused = evaluate(*arguments, *ours)
                assert refused.returncode == 2, ours
                assert "--connect and --config name a service that has its engines" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: No such file or directory"),
        (("{file}", "--k", "1,3", "--samples", "2"), "--k 1,3: each must be 1 to --samples, which is 2"),
        (("{file}", "--k", "many"), "--k takes numbers with commas between them"),
        (("{file}", "--engine", "http"), "--engine http needs --url"),
        (("{file}", "--url", "http://here", "--engine", "embedded"), "--engine embedded takes no --url; http would"),
        (("{file}", "--set", 'tools=["ipythn"]'), "line 1"),
        (("{file}", "--engine", "vllm"), "--engine vllm needs --model"),
        (("{file}", "--engine", "http", "--url", "here:80"), "here:80 is not of the form http://HOST:PORT"),
        (("{file}", "--model", "nowhere.npz"), "there is no such file"),
        (("{file}", "--set", "tools"), "write NAME=JSON"),
        (
            ("{file}", "--template-argument", "enable_thinking=false"),
            "--engine embedded takes no --template-argument; http, transformers and vllm would",
        ),
        (("{file}", "--row-format", "chess"), "chess"),
        (("{wrong}",), "line 2"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"problem": "p", "ground_truth": "1"}\n{"question": 5}\n')
    names = {"file": data_file(tmp_path), "wrong": wrong}
    flags = (argument.format(**names) for argument in arguments)
    done = prorl("eval", *flags, "--out", tmp_path / "run", *QUICK[-2:])
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_an_engine_that_cannot_start_is_said_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "policy.npz").write_text("no weights")
    done = prorl("eval", data_file(tmp_path), "--out", tmp_path / "run", "--model", tmp_path / "policy.npz", *QUICK)
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.splitlines()[-1]
    assert "the service ended as it started" in line
    assert "policy.npz" in line


def test_a_service_that_is_not_there_is_said_soon(tmp_path: Path) -> None:
    door = f"ipc://{tmp_path}/nobody"
    done = prorl("eval", data_file(tmp_path), "--out", tmp_path / "run", "--connect", door)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"no reply from {door} within" in done.stderr
    assert "is the service running?" in done.stderr


def test_a_server_that_takes_no_connections_is_named_before_anything_starts(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    arguments = ("--out", str(tmp_path / "run"), "--engine", "http", "--url", url, "--start-limit", "1")
    done = evaluate(str(data_file(tmp_path, 1)), *arguments, "--sandbox", "process")
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"prorl: {url} takes no connections within 1 s (Connection refused); is the server up?")
    assert said.endswith("--start-limit SECONDS waits longer")
    assert not (tmp_path / "run" / "service" / "logs").exists()


@pytest.mark.proof
@pytest.mark.timeout(400)
def test_a_model_behind_a_server_that_runs_already_is_evaluated(tmp_path: Path) -> None:
    """It answers every other problem right, in the tokens of the model that it says it serves."""
    model, out, speech = tmp_path / "model", tmp_path / "run", Speech("vllm")
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    tokenizer.save_pretrained(model)

    def generate(body: Any) -> web.Response:
        asked = re.search(r"What is (\d+) \+ 1", tokenizer.decode(speech.prompt(body)))
        if asked is None:
            return speech.good(body)
        number = int(asked[1])
        said = f"\\boxed{{{number + 1 - number % 2}}}<|im_end|>"
        ids = tokenizer.encode(said, add_special_tokens=False)
        return web.json_response(speech.answer(ids, [-0.5] * len(ids), "stop"))

    async def evaluated() -> subprocess.CompletedProcess[str]:
        server = FakeServer()
        card = {"id": "tiny", "root": str(model), "max_model_len": 2048}
        server.handlers |= {speech.path: generate, "/v1/models": lambda _: web.json_response({"data": [card]})}
        await server.start()
        try:
            arguments = ("--out", str(out), "--engine", "http", "--url", server.url, "--samples", "2")
            flags = ("--max-tokens", "64", "--sandbox", "process")
            return await asyncio.to_thread(evaluate, str(data_file(tmp_path, 4)), *arguments, *flags)
        finally:
            await server.stop()

    done = asyncio.run(evaluated())
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in lines(out)]
    assert len(samples) == 4 * 2
    for sample in samples:
        result = sample["result"]
        assert (sample["model"], result["outcome"], result["backend"]) == (str(model), "completed", "engine-0")
        assert result["reward"] == float(sample["problem"] in ("1", "3")), sample
        transcript = json.loads((out / "trajectories" / f"{result['job_id']}.json").read_text())
        assert "\\boxed{" in "".join(transcript["tokens"])
    summary = json.loads((out / "summary.json").read_text())
    assert [(row["k"], row["estimate"]["value"]) for row in summary["passes"]] == [(1, 0.5), (2, 0.5)]
    assert summary["models"] == [str(model)]
    assert f"{model};" in (out / "report.html").read_text()
    settings = json.loads((out / "plan.json").read_text())["settings"]
    assert (settings["engine"], len(settings["urls"])) == ("http", 1)


@pytest.mark.vllm
@pytest.mark.timeout(2 * START_LIMIT_S)
def test_a_real_vllm_is_evaluated_in_its_own_tokens(tmp_path: Path) -> None:
    out, (model,) = tmp_path / "run", tiny_models(tmp_path, 1)
    done = evaluate(
        *(str(data_file(tmp_path, 2)), "--out", str(out), "--samples", "2", "--max-tokens", "8", "--max-turns", "1"),
        *("--sandbox", "process", "--price-in", "1", "--price-out", "10"),
        *("--engine", "vllm", "--model", str(model), "--python", vllm_python(), "--", *SMALL),
        env={**environment(tmp_path), **ON_CPU},
        limit_s=START_LIMIT_S + WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in lines(out)]
    assert [one["model"] for one in samples] == [str(model)] * 4
    summary = json.loads((out / "summary.json").read_text())
    tokens = {row["name"]: row["total"] for row in summary["tokens"]}
    assert tokens["generated_tokens"] == sum(int(one["result"]["metrics"]["generated_tokens"]) for one in samples)
    assert summary["cost"]["total"] > 0
    for job_id in job_ids(out):
        transcript = json.loads((out / "trajectories" / f"{job_id}.json").read_text())
        assert "".join(transcript["tokens"]).count("?") >= 1, "the problem is there in the model's own tokens"
        assert [turn["role"] for turn in transcript["turns"]] == ["system", "user", "assistant"]
