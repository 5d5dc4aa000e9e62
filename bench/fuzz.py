"""Coverage-guided fuzzing, by atheris, of the message decoder, front door and stage events: `--seconds 900`.

The target is fuzz_target.py, in its own process, which begins with a valid message of each kind. The limits: no input
crashes it, none takes longer than `INPUT_S`, and its memory grows by no more than 50 MB, including libFuzzer's corpus
and tables. To separate these, the kept inputs are replayed to the target in a process without libFuzzer, where all
growth is ours. A crashing input is stored in the folder that `--crashes` names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harness import Incomplete, Row, command, report

if TYPE_CHECKING:
    import argparse

SECONDS, QUICK_SECONDS = 900, 10
INPUT_S = 5
MEMORY_MB = 2048
"""Where libFuzzer stops; the target is 50 MB of growth."""
GROWTH_MB = 50.0
REPLAYED, QUICK_REPLAYED = 500_000, 5_000
"""Inputs given again."""
AGAIN = "growth while what it kept is given again"
LARGEST_INPUT_BYTES = 16_384
SAMPLE_S = 0.5
REPLAY_S = 600.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Watch(threading.Thread):
    """Reads a process's memory until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="watch")
        self._statm = Path(f"/proc/{pid}/statm")
        self._ended = threading.Event()
        self.resident: list[int] = []

    def run(self) -> None:
        """Read, and wait."""
        while not self._ended.wait(SAMPLE_S):
            try:
                self.resident.append(int(self._statm.read_text().split()[1]) * PAGE_BYTES)
            except (OSError, IndexError):
                return

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        self.join(10)


def measure(arguments: argparse.Namespace) -> list[Row]:
    if find_spec("atheris") is None:
        raise Incomplete("atheris is not installed: pip install '.[bench]'", [])
    seconds = QUICK_SECONDS if arguments.quick else arguments.seconds
    with tempfile.TemporaryDirectory(prefix="prorl-fuzz-") as folder:
        crashes = Path(folder) / "crashes"
        corpus = Path(folder) / "corpus"
        for each in (crashes, corpus):
            each.mkdir()
        flags = [f"-max_total_time={seconds}", f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_MB}"]
        flags += [f"-max_len={LARGEST_INPUT_BYTES}", f"-artifact_prefix={crashes}/", f"-seed={arguments.seed}"]
        script = str(Path(__file__).with_name("fuzz_target.py"))
        target = subprocess.Popen(
            [sys.executable, script, *flags, str(corpus)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watch = Watch(target.pid)
        watch.start()
        try:
            said, _ = target.communicate(timeout=seconds + 120)
        finally:
            target.kill()
            watch.stop()
        again = [sys.executable, script, "replay", str(QUICK_REPLAYED if arguments.quick else REPLAYED), str(corpus)]
        replayed = subprocess.run(again, capture_output=True, text=True, timeout=REPLAY_S, check=False)
        found = sorted(crashes.iterdir())
        if (found or target.returncode) and arguments.crashes is not None:
            shutil.copytree(crashes, arguments.crashes, dirs_exist_ok=True)
    if found or target.returncode:
        print(said[-4000:])
    before = re.search(r"resident before: (\d+)", said)
    if before is None:
        raise RuntimeError(f"the fuzz target did not start:\n{said[-4000:]}")
    ours = re.search(r"grown: (-?\d+)", replayed.stderr)
    if ours is None:
        raise RuntimeError(f"what was kept could not be given again:\n{replayed.stderr[-4000:]}")
    again_mb = int(ours[1]) / 1e6
    runs = max(map(int, re.findall(r"^#(\d+)", said, re.MULTILINE)))
    covered = max(map(int, re.findall(r"cov: (\d+)", said)))
    grown = (max(watch.resident) - int(before[1])) / 1e6
    return [
        Row("inputs", runs, "tried"),
        Row("inputs per second", runs / seconds, "1/s"),
        Row("coverage", covered, "edges"),
        Row("crashes and hangs", max(len(found), int(target.returncode != 0)), "found", target="0", holds=not found),
        Row("growth, libFuzzer's own included", grown, "MB", target=f"under {GROWTH_MB:g} MB", holds=grown < GROWTH_MB),
        Row(AGAIN, max(0.0, again_mb), "MB", target=f"under {GROWTH_MB:g} MB", holds=again_mb < GROWTH_MB),
    ]


def main() -> None:
    about = "coverage-guided inputs for the message decoder and the front door"
    parser = command("fuzz", about)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--seed", type=int, default=1, help="of what libFuzzer draws")
    parser.add_argument("--crashes", type=Path, metavar="FOLDER", help="keep inputs there that crash the target")
    arguments = parser.parse_args()
    report("fuzz", about, arguments, partial(measure, arguments))


if __name__ == "__main__":
    main()
