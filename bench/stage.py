"""A stage process for benchmarks, serving handlers.py: `stage.py ROLE SLOTS CONNECT RUN_DIR SANDBOX IMAGE`.

IMAGE may be empty.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import uvloop
from handlers import HANDLERS

from prorl_zmq.stages.stage_process import StageOptions, StageProcess
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from prorl_zmq.wire.messages.jobs import SandboxKind


def main() -> None:
    role, slots, connect, run_dir, sandbox, image = sys.argv[1:]
    options = StageOptions(
        role=Phase(role),
        slots=int(slots),
        connect=connect,
        node="local",
        run_dir=Path(run_dir),
        sandbox=cast("SandboxKind", sandbox),
        image=image,
    )
    handlers = {name: handler() for name, handler in HANDLERS.items()}
    uvloop.run(StageProcess(options, handlers).run())


if __name__ == "__main__":
    main()
