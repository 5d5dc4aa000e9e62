"""A stage process for benchmarks: `python bench/stage.py ROLE SLOTS CONNECT RUN_DIR`, serving handlers.py."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop
from handlers import HANDLERS

from prorl_zmq.messages import Phase
from prorl_zmq.stages.stage_process import StageOptions, StageProcess


def main() -> None:
    role, slots, connect, run_dir = sys.argv[1:]
    options = StageOptions(
        role=Phase(role), slots=int(slots), connect=connect, node="local", run_dir=Path(run_dir), sandbox="process"
    )
    handlers = {name: handler() for name, handler in HANDLERS.items()}
    uvloop.run(StageProcess(options, handlers).run())


if __name__ == "__main__":
    main()
