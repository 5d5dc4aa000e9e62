"""`python -m prorl_zmq.examples.train_torch`."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec

from ...cli import EXTRAS, USAGE_ERROR
from ...system.installation import how_to_install

PROGRAM = "python -m prorl_zmq.examples.train_torch"


def main(arguments: list[str]) -> int:
    needed = ("torch", "safetensors", *(name for names in EXTRAS.values() for name in names))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        print(f"train_torch needs {', '.join(missing)}: {how_to_install('train')}", file=sys.stderr)
        return USAGE_ERROR
    from ...commands.app import new_typer, run_program
    from .command import train

    program = new_typer("")
    program.command()(train)
    return run_program(PROGRAM, program, arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as ^C does, in good order
    sys.exit(main(sys.argv[1:]))
