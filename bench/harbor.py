"""Harbor task folders: what reading a large set as jobs takes, compared with opening its files and parsing its TOML.

Each folder has a Dockerfile of a dozen instructions, three files that it copies, two of tests, and a solution.
"""

from __future__ import annotations

import os
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from harness import Row, main

from prorl_zmq.tasks.loading import load_jobs

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDERS, QUICK_FOLDERS = 10_000, 500
TARGET_S = 10.0
"""For all folders of the full run."""
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
    count = QUICK_FOLDERS if quick else FOLDERS
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


def took_s(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main("harbor", "reading Harbor task folders", measure)
