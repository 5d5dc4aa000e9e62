"""Harbor task folders: what reading a large set takes; their rewards, through the service and by Harbor; and starts.

Reading: each folder has a Dockerfile of a dozen instructions, three files that it copies, two of tests, and a solution.
All have the same task.toml, as in the public set of 3,566 folders after which they are modelled. The peer opens their
files and parses the TOML.

Rewards: folders of each kind (harbor_folders.py), whose images our converter builds on a Debian, are rolled out in
Apptainer sandboxes, once with their solution and once with nothing. `PRORL_HARBOR_TASKS` names a folder of further
tasks, and `PRORL_HARBOR_BASES` the map of their base images. Harbor's own verifier (`make harbor`) reads what each
verifier wrote, and files that no verifier should write.

Starts: INIT of a rollout from a built image and `apptainer exec IMAGE true` take turns.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from harbor_folders import BASE, KINDS, write_folders
from harbor_rollouts import build_images, grade_files, play, start_times
from harness import Incomplete, Row, main, quantiles
from sandbox_sides import root_filesystem

from prorl_zmq.tasks.loading import load_jobs
from prorl_zmq.tools.containers.kinds import problem_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harbor_rollouts import Graded, Played, Starts

FOLDERS, QUICK_FOLDERS = 10_000, 200
TARGET_S = 10.0
"""For reading all folders of the full run."""
ROLLED_OUT = 60
QUICK_KINDS = ("answer", "steps")
STARTS, QUICK_STARTS = 50, 2
QUICK_EVERY = 6
"""Of the reward files, a quick run grades one in so many."""
TARGET_START = 1.3
SLOTS = 2
BUILD_S = 3600.0
NAMES = {"oracle": "oracle", "no-op": "nop"}
"""Harbor's names of the two agents."""
PEER = Path(__file__).parent / "harbor_peer.py"
PYTHON = Path(os.environ.get("PRORL_HARBOR_PYTHON", Path(__file__).parent.parent / ".harbor/bin/python"))
NO_REWARDS = ("", " ", "nan", "inf", "-Infinity", "passed", "1,0", "0x1", "1\n0\n", "1 # good", "True", "[]")
REWARDS = ("1", "0.5\n", " -2 ", "1e-3", "1_000", "+.5")
NO_JSON = ("", "{", "[1]", "1", "null", '"1"', '{"reward": "1"}', '{"reward": null}', '{"reward": [1]}')
NO_JSON += ('{"reward": NaN}', '{"reward": 1e999}', '{"reward": 1, "b": {"c": 1}}', '{"reward": 1} 2')
JSON = (
    '{"reward": 1}',
    '{"reward": 0.25, "speed": 3}',
    '{"accuracy": true}',
    '{"reward": 1, "reward": 0}',
    ' {"a": -1e3}',
)
TOML = """\
version = "1.0"
[metadata]
author_name = "Bench"
difficulty = "medium"
category = "software-engineering"
tags = ["coding", "automation"]
expert_time_estimate_min = 30.0
[verifier]
timeout_sec = 240.0
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []
[verifier.env]
[solution.env]
"""
DOCKERFILE = """\
FROM ubuntu:24.04
ENV DEBIAN_FRONTEND=noninteractive
# What the tests need
RUN apt-get update && \\
    apt-get install -y python3-pip && \\
    ln -s /usr/bin/python3 /usr/bin/python && \\
    rm -rf /var/lib/apt/lists/*
RUN pip3 install --no-cache-dir --break-system-packages pytest==8.4.1 pandas==2.3.2
RUN mkdir -p /home/user
COPY data/log.csv /home/user/log.csv
COPY data/config.json data/other.csv /home/user/
RUN chmod 600 /home/user/config.json
WORKDIR /home/user
ENV TEST_DIR=/tests
"""
TEST = """\
#!/bin/bash
pytest /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def measure(quick: bool) -> list[Row]:
    rows = reading(QUICK_FOLDERS if quick else FOLDERS)
    base, no_base = root_filesystem(build=not quick)
    if problem := problem_with("apptainer") or no_base:
        raise Incomplete(f"without rollouts and starts: {problem}", rows)
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        root = Path(folder)
        images = root / "images"
        if quick:
            write_folders(root / "tasks", len(QUICK_KINDS), QUICK_KINDS)
        else:
            write_folders(root / "tasks", ROLLED_OUT, tuple(KINDS))
        took = build_images(root / "tasks", images, ("--base", f"{BASE}={base}"), BUILD_S)
        played = play(root / "tasks", images, SLOTS)
        rows += rollouts("folders of ours", played)
        graded = played.graded
        if not quick and (named := os.environ.get("PRORL_HARBOR_TASKS")):
            bases = os.environ.get("PRORL_HARBOR_BASES")
            build_images(Path(named), images, ("--bases", bases) if bases else (), BUILD_S)
            others = play(Path(named), images, SLOTS)
            rows += rollouts("folders of others", others)
            graded = [*graded, *others.graded]
        built = len(list(images.glob("[!.]*")))
        rows.append(Row(f"{built} images built from their Dockerfiles, one after the other", took / built, "s each"))
        image = next(images.glob("harbor-*")).resolve()
        rows += start_rows(uvloop.run(start_times(image, QUICK_STARTS if quick else STARTS)))
        if not PYTHON.exists():
            raise Incomplete("without Harbor's own verifier: run make harbor", rows)
        rows.append(as_harbor("what the verifiers of these rollouts wrote", graded, root / "graded"))
        if not quick:
            rows += [trials(root, agent, played) for agent in NAMES]
        files = [{"reward.txt": text} for text in (*NO_REWARDS, *REWARDS)]
        files += [{"reward.json": text} for text in (*NO_JSON, *JSON)]
        files += [{"reward.txt": "1", "reward.json": '{"reward": 1, "b": 2}'}, {"rewards.json": '{"reward": 1}'}]
        odd = uvloop.run(grade_files(image, files[::QUICK_EVERY] if quick else files))
        rows.append(as_harbor("reward files of every form", odd, root / "odd"))
    return rows


def reading(count: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        root = Path(folder)
        for number in range(count):
            write_task(root / f"task-{number}", number)
        read_all(root)  # the files are in memory for both
        bare, ours = took_s(lambda: read_all(root)), took_s(lambda: sum(1 for _ in load_jobs(root)))
    target_s = TARGET_S * count / FOLDERS
    return [
        Row(f"{count:,} task folders: opening their files, parsing their TOML", bare, "s"),
        Row(
            f"{count:,} task folders as jobs",
            ours,
            "s",
            "files and TOML",
            ours / bare,
            f"at most {target_s:g} s",
            ours <= target_s,
        ),
    ]


def rollouts(name: str, played: Played) -> list[Row]:
    """Return how many folders earn 1 with their solution, and 0 with nothing; print why others do not."""
    rows = []
    for agent, expected, words in (("oracle", 1.0, "their solution earns 1"), ("no-op", 0.0, "doing nothing earns 0")):
        earned = {folder: reward for (folder, of), reward in played.rewards.items() if of == agent}
        right = sum(reward == expected for reward in earned.values())
        rows.append(Row(f"{len(earned)} {name}: {words}", right, "folders", target="all", holds=right == len(earned)))
        for folder, reward in earned.items():
            if reward != expected:
                print(f"{folder}, {agent}: {reward} {played.problems.get((folder, agent), '')}")
    return rows


def start_rows(starts: Starts) -> list[Row]:
    init, create, bare, isolated = (
        quantiles(each)[0] for each in (starts.init, starts.create, starts.bare, starts.isolated)
    )
    return [
        Row(
            f"INIT of a rollout from a built image, p50 of {len(starts.init)}",
            1e3 * init,
            "ms",
            "isolated `apptainer exec`",
            init / isolated,
            f"at most {TARGET_START:g}×",
            init <= TARGET_START * isolated,
        ),
        Row("of that, the sandbox; the rest is folders and a bash in it", 1e3 * create, "ms"),
        Row("`apptainer exec --containall --net --network none IMAGE true`, p50", 1e3 * isolated, "ms"),
        Row("`apptainer exec IMAGE true`, with the host's files and network, p50", 1e3 * bare, "ms"),
    ]


def as_harbor(name: str, graded: Sequence[Graded], folder: Path) -> Row:
    """Compare rewards with those that Harbor reads from the same files."""
    for number, (files, _) in enumerate(graded):
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(folder / f"{number:04}", filter="data")
        (folder / f"{number:04}" / "logs" / "verifier").rename(folder / f"{number:04}" / "verifier")
    done = subprocess.run([PYTHON, "-P", PEER, folder], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    equal = 0
    for number, (_, rewards) in enumerate(graded):
        equal += theirs[f"{number:04}"] == rewards
        if theirs[f"{number:04}"] != rewards:
            print(f"{name}: ours {rewards}, Harbor's {theirs[f'{number:04}']}")
    total = len(graded)
    return Row(f"{name}: as Harbor reads them, of {total}", equal, "gradings", target="all", holds=equal == total)


def write_task(folder: Path, number: int) -> None:
    files = {
        "task.toml": TOML,
        "instruction.md": f"Task {number}. " + "Analyse the log and write a report.\n" * 40,
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/log.csv": f"{number},1,2\n" * 200,
        "environment/data/other.csv": f"{number}\n",
        "environment/data/config.json": "{}\n",
        "tests/test.sh": TEST,
        "tests/test_outputs.py": f"def test_{number}():\n    assert open('/home/user/report').read()\n" * 40,
        "solution/solve.sh": "#!/bin/bash\necho done > /home/user/report\n",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def read_all(root: Path) -> None:
    """Open each file once, and parse what is TOML."""
    for path, _, names in os.walk(root):
        for name in names:
            content = Path(path, name).read_bytes()
            if name == "task.toml":
                tomllib.loads(content.decode())


def trials(root: Path, agent: str, played: Played) -> Row:
    """Let Harbor run the folders itself, in our sandboxes, and compare the rewards of its trials with the service's."""
    jobs = root / f"jobs-{agent}"
    command = [PYTHON.with_name("harbor"), "run", "-y", "-p", root / "tasks", "-a", NAMES[agent], "-o", jobs]
    command += ["-n", SLOTS, "-e", "prorl_zmq.integrations.harbor:Environment", "--ek", f"images={root / 'images'}"]
    environment = {**os.environ, "HOME": str(root), "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    equal = 0
    for path in sorted(jobs.glob("*/*/result.json")):
        result = json.loads(path.read_text())
        rewards = (result["verifier_result"] or {}).get("rewards") or {}
        main = rewards.get("reward", next(iter(rewards.values()), None))
        ours = played.rewards[result["task_name"].rpartition("/")[2], agent]
        equal += main == ours
        if main != ours:
            print(f"{path.parent.name}: Harbor's trial {rewards} {result['exception_info']}, ours {ours}")
    total = sum(of == agent for _, of in played.rewards)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:])
    name = f"Harbor's own trials in our sandboxes, {agent}: the service's reward, of {total}"
    return Row(name, equal, "trials", target="all", holds=equal == total)


def took_s(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main("harbor", "Harbor task folders: reading, rewards and starts", measure)
