"""The whole service with real engines: vLLM in an engine host, and a vLLM server over HTTP behind a ledger.

What the trainer gets must be what the engines sampled: `transformers` runs over the same ids, and the ledger has what
the server sent.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from documents import ENGINE_COMMANDS, blocks
from ledger import Entry, Ledger
from support.waiting import until
from vllm_python import environment, vllm_python
from vllm_server import SMALL

from prorl_zmq import Job, RolloutClient, Trajectory
from prorl_zmq.data.trajectory import Role
from prorl_zmq.errors import InvalidWeights
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
STAGES = """
[sandbox]
kind = "process"

[[stage]]
role = "init"
[[stage]]
role = "run"
slots = 32
[[stage]]
role = "eval"
"""
SHELL_JOBS, MATH_JOBS, SWAP_JOBS = 200, 24, 64


class Engines:
    """A service with both kinds of engine."""

    def __init__(self, server: VllmServer, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self.models = server.models
        self.ledger = running.enter_context(Ledger(server.url))
        self.config = folder / "topology.toml"
        (tables,) = [block for block in blocks("toml") if 'kind = "vllm"' in block and 'kind = "http"' in block]
        for there, here in (
            ('"Qwen/Qwen3-8B"', json.dumps(str(self.models[0]))),
            ('".vllm/bin/python"', json.dumps(vllm_python())),
            ("count = 4", ""),
            ("gpus = [0, 1, 2, 3]", ""),
            ('["--max-model-len", "32768"]', json.dumps(list(SMALL))),
            ('["http://gpu-7:8000", "http://gpu-8:8000"]', json.dumps([self.ledger.url])),
        ):
            assert there in tables
            tables = tables.replace(there, here)
        self.config.write_text(tables + STAGES)
        self.front_door = f"ipc://{folder}/run/front_door"
        self.environment = {
            **os.environ,
            "PYTHONPATH": environment(folder)["PYTHONPATH"],
            "PRORL_RUN_DIR": str(folder / "run"),
        }
        flags = ["--config", str(self.config), "--log-dir", str(folder / "logs")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "serve", *flags],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.callback(self._close)
        self.said = self._until_ready()

    def client(self) -> RolloutClient:
        return RolloutClient(self.front_door, timeout_s=120)

    @property
    def weight_version(self) -> int:
        """What all engines serve now: `models[0]`."""
        with self.client() as client:
            (version,) = {status.backend.weight_version for status in client.backends.list()}
        return version

    def start(self, line: str) -> subprocess.Popen[str]:
        """Start one of our programs, as a user types it in the folder."""
        command = [sys.executable, "-P", "-m", "prorl_zmq.cli", *shlex.split(line)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def rescored(self, trajectories: list[Trajectory], old: int = 0) -> float:
        """Give the largest difference of a log-prob from what transformers says.

        Args:
            trajectories: from `models[0]` under version `old`, and `models[1]` under the next one.
            old: that version.
        """
        arrays = {}
        for number, trajectory in enumerate(trajectories):
            arrays[f"ids_{number}"] = trajectory.token_ids
            arrays[f"mask_{number}"] = trajectory.loss_mask
            arrays[f"logprobs_{number}"] = trajectory.logprobs
            arrays[f"versions_{number}"] = trajectory.weight_versions - old
        path = self.folder / "trajectories.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        command = [vllm_python(), str(HERE / "rescore.py"), str(path), *map(str, self.models)]
        done = subprocess.run(command, env=environment(self.folder), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        assert report["tokens"] == sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
        return float(report["worst"])

    def _until_ready(self) -> list[str]:
        assert self._process.stderr is not None
        said: list[str] = []
        for line in self._process.stderr:
            said.append(line)
            if "ready at" in line:
                return said
        logs = "".join(path.read_text()[-2000:] for path in (self.folder / "logs").iterdir())
        raise AssertionError("".join(said) + logs)

    def _close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        assert self._process.stderr is not None
        self._process.stderr.close()


@pytest.fixture(scope="module")
def engines(vllm_server: VllmServer) -> Iterator[Engines]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, ExitStack() as running:
        engines = Engines(vllm_server, Path(folder), running)
        with engines.client() as client:  # whatever others have made of the server
            known = max(status.backend.weight_version for status in client.backends.list())
            client.update_weights(engines.models[0], known + 1)
        yield engines


def shell_job(number: int, **sampling: object) -> Job:
    return Job(
        task="shell",
        instance={"instruction": f"Work on {number}.", "check": "true", "files": {"notes.txt": f"note {number}\n"}},
        sampling=Sampling(max_tokens=80, seed=number, **sampling),  # type: ignore[arg-type]
        episode=EpisodeLimits(max_turns=6, max_tokens=2000),
    )


def generations(trajectory: Trajectory) -> list[Entry]:
    """Give a trajectory's generations as a ledger has them."""
    entries = []
    for start, end, role in trajectory.turns.tolist():
        drawn = np.flatnonzero(trajectory.loss_mask[start:end]) + start
        if role != Role.ASSISTANT or not len(drawn):
            continue
        first, last = int(drawn[0]), int(drawn[-1]) + 1
        assert trajectory.loss_mask[first:last].all()
        versions = trajectory.weight_versions[first:last]
        edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), last - first]
        spans = tuple((str(versions[a]), a, b) for a, b in itertools.pairwise(edges))
        ids = trajectory.token_ids
        logprobs = tuple(trajectory.logprobs[first:last].tolist())
        entries.append(Entry(tuple(ids[:first].tolist()), tuple(ids[first:last].tolist()), logprobs, spans))
    return entries


def same(ours: Entry, theirs: Entry) -> bool:
    """Whether two entries tell of the same tokens; the server's first version may be a word, which counts as 0."""
    numbers = tuple((version if version.isdigit() else "0", start, end) for version, start, end in theirs.versions)
    return (ours.prompt, ours.token_ids, ours.versions) == (
        theirs.prompt,
        theirs.token_ids,
        numbers,
    ) and ours.logprobs == tuple(np.array(theirs.logprobs, np.float32).tolist())


def check_ledger(engines: Engines, trajectories: list[Trajectory], since: int) -> int:
    """Compare what came over HTTP with what the server sent; give the number of generations."""
    sent = defaultdict(list)
    for entry in engines.ledger.entries[since:]:
        sent[entry.prompt, entry.token_ids].append(entry)
    over_http = [trajectory for trajectory in trajectories if trajectory.result.backend == "engine-1"]
    ours = [entry for trajectory in over_http for entry in generations(trajectory)]
    for entry in ours:
        candidates = sent[entry.prompt, entry.token_ids]
        candidates.remove(next(candidate for candidate in candidates if same(entry, candidate)))
    assert len(ours) == len(engines.ledger.entries) - since
    return len(ours)


def test_the_start_says_what_it_waits_for(engines: Engines) -> None:
    assert any("waiting for engine-0" in line for line in engines.said)


def test_trajectories_are_what_the_engines_sampled(engines: Engines) -> None:
    since, version = len(engines.ledger.entries), engines.weight_version
    math = Job(task="math", instance={"problem": "1 + 1?", "ground_truth": "2"}, sampling=Sampling(max_tokens=40))
    with engines.client() as client:
        client.submit([shell_job(number) for number in range(SHELL_JOBS)])
        client.submit([Job(task=math.task, instance=math.instance, sampling=math.sampling) for _ in range(MATH_JOBS)])
        trajectories = list(client.stream(timeout_s=300))
    assert [trajectory.error for trajectory in trajectories if trajectory.outcome != "completed"] == []
    assert len(trajectories) == SHELL_JOBS + MATH_JOBS
    backends = {trajectory.result.backend for trajectory in trajectories}
    assert backends == {"engine-0", "engine-1"}
    assert sum(trajectory.result.metrics["turns"] > 1 for trajectory in trajectories) > SHELL_JOBS / 3
    modes = {(trajectory.result.backend, trajectory.logprobs_mode) for trajectory in trajectories}
    assert modes == {("engine-0", "processed_logprobs"), ("engine-1", "raw_logprobs")}  # at temperature 1 the same
    assert all(trajectory.versions == (version,) for trajectory in trajectories)
    assert check_ledger(engines, trajectories, since) > SHELL_JOBS / 2
    assert engines.rescored(trajectories, version) < 1e-4


def test_what_the_seed_says_is_repeated(engines: Engines) -> None:
    """Turn by turn, on whichever engine: they serve the same weights."""
    with engines.client() as client:
        jobs = [shell_job(7) for _ in range(4)]
        client.submit(jobs)
        trajectories = list(client.stream(timeout_s=120))
    first_turns = {generations(trajectory)[0].token_ids for trajectory in trajectories}
    assert len(first_turns) == 1


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_weights_that_change_in_the_middle_are_seen_token_by_token(engines: Engines, mode: str) -> None:
    since, old = len(engines.ledger.entries), engines.weight_version
    with engines.client() as client:
        client.submit([shell_job(number) for number in range(SWAP_JOBS)])
        until(lambda: sum(s.load.running for s in client.backends.list() if s.load) >= 8, "generations", 60)
        client.update_weights(engines.models[1], old + 1, mode=mode, timeout_s=200)  # type: ignore[arg-type]
        later = [shell_job(number) for number in range(8)]
        client.submit(later)
        done = {trajectory.job_id: trajectory for trajectory in client.stream(timeout_s=300)}
        client.update_weights(engines.models[0], old + 2, timeout_s=200)
    assert {trajectory.outcome for trajectory in done.values()} == {"completed"}
    assert {trajectory.versions for trajectory in done.values()} >= {(old, old + 1), (old + 1,)}
    assert {done[job.job_id].versions for job in later} == {(old + 1,)}
    swapped_inside = [
        turn for trajectory in done.values() for turn in generations(trajectory) if len(turn.versions) > 1
    ]
    assert bool(swapped_inside) == (mode != "drain")
    assert engines.rescored(list(done.values()), old) < 1e-4
    if mode != "abort":  # what was aborted goes on in another request, so that a turn has two entries
        assert check_ledger(engines, list(done.values()), since) > 0


@pytest.mark.parametrize("mode", ["keep", "drain"])
def test_between_the_halves_of_an_update_no_engine_generates(engines: Engines, mode: str) -> None:
    old = engines.weight_version
    with engines.client() as client:
        early = [shell_job(number) for number in range(SWAP_JOBS)]
        client.submit(early)
        until(lambda: sum(s.load.running for s in client.backends.list() if s.load) >= 8, "generations", 60)
        client.begin_weights(old + 1, mode, timeout_s=200)  # type: ignore[arg-type]
        assert {status.state for status in client.backends.list()} == {"updating"}
        late = [shell_job(number) for number in range(8)]
        client.submit(late)
        client.update_weights(engines.models[1], old + 1, timeout_s=200)
        done = {trajectory.job_id: trajectory for trajectory in client.stream(timeout_s=300)}
        client.update_weights(engines.models[0], old + 2, timeout_s=200)
    assert {trajectory.outcome for trajectory in done.values()} == {"completed"}
    assert {done[job.job_id].versions for job in early} >= {(old, old + 1)}
    assert {done[job.job_id].versions for job in late} == {(old + 1,)}
    assert engines.rescored(list(done.values()), old) < 1e-4


def test_a_wrong_directory_is_refused_before_any_engine_sees_it(engines: Engines, tmp_path: Path) -> None:
    with engines.client() as client:
        with pytest.raises(InvalidWeights) as caught:
            client.update_weights(tmp_path / "nothing", 99, timeout_s=60)
        assert caught.value.backend in ("engine-0", "engine-1")
        assert 99 not in {status.backend.weight_version for status in client.backends.list()}
        client.submit(shell_job(1))
        (trajectory,) = client.stream(timeout_s=60)
    assert trajectory.outcome == "completed"


def test_the_commands_of_the_readme(engines: Engines) -> None:
    one_more, listing, update = ENGINE_COMMANDS
    url = "http://127.0.0.1:8000"
    assert url in one_more
    (engines.folder / "step-1").symlink_to(engines.models[1])
    before = engines.weight_version
    host = engines.start(f"{one_more.replace(url, engines.ledger.url)} --name one-more")
    try:
        with engines.client() as client:
            until(lambda: len(client.backends.list()) == 3, "one more engine host", 60)
            listed = engines.start(listing)
            out, err = listed.communicate(timeout=60)
            assert listed.returncode == 0, err
            for word in ("engine-0", "engine-1", "one-more", "ready", "%"):
                assert word in out
            updated = engines.start(update.removesuffix("1") + str(before + 1))
            out, err = updated.communicate(timeout=120)
            assert updated.returncode == 0, err
            assert engines.weight_version == before + 1
            client.update_weights(engines.models[0], before + 2)
    finally:
        host.send_signal(signal.SIGTERM)
        out, err = host.communicate(timeout=60)
    assert host.returncode == 0, err


def test_the_backends_say_what_they_do(engines: Engines) -> None:
    with engines.client() as client:
        client.submit([shell_job(number) for number in range(8)])
        assert {trajectory.outcome for trajectory in client.stream(timeout_s=120)} == {"completed"}
        for backend_id in ("engine-0", "engine-1"):

            def cached(backend_id: str = backend_id) -> bool:
                (status,) = [s for s in client.backends.list() if s.backend.backend_id == backend_id]
                assert status.backend.context_tokens == 4096
                return status.load is not None and 0 < status.load.cached_tokens < status.load.prompt_tokens

            until(cached, "prompts that the prefix cache had")
