"""What `import prorl_zmq` adds to a trainer that has numpy and zmq already, beside what these two cost."""

from __future__ import annotations

import statistics
import subprocess
import sys

from harness import Row, main

TARGET_MS = 150.0
CODE = """
import time
started = time.perf_counter()
import numpy, zmq
between = time.perf_counter()
import prorl_zmq
print(between - started, time.perf_counter() - between)
"""


def measure(quick: bool) -> list[Row]:
    runs = []
    for _ in range(5 if quick else 30):
        done = subprocess.run([sys.executable, "-P", "-c", CODE], capture_output=True, text=True, check=True)
        runs.append([1e3 * float(part) for part in done.stdout.split()])
    before, ours = (statistics.median(column) for column in zip(*runs, strict=True))
    return [
        Row("import numpy and zmq", before, "ms"),
        Row(
            "import prorl_zmq on top",
            ours,
            "ms",
            "numpy and zmq",
            ours / before,
            f"under {TARGET_MS:g} ms",
            ours < TARGET_MS,
        ),
    ]


if __name__ == "__main__":
    main("startup", "what importing the client costs a trainer", measure)
