"""Entry points of the commands. Without the extra that one needs, it says in one line what to install."""

from __future__ import annotations

import gc
import os
import sys

EXTRAS = {
    "server": (
        *("typer", "rich", "uvloop", "ptyprocess", "aiohttp", "jinja2", "spython", "plotext", "prometheus_client"),
        *("threadpoolctl", "math_verify", "zstandard", "xxhash"),
    ),
    "eval": ("matplotlib",),
    "models": ("transformers",),
}
"""What the commands import, by the extra that has it."""

USAGE_ERROR = 2
FORKING = {"serve", "node"}
"""The commands of `prorl` whose processes are forks: their fork server imports while they do."""


def main() -> None:
    _run("prorl")


def stage_main() -> None:
    _run("prorl-stage")


def engine_main() -> None:
    _run("prorl-engine")


def _run(program: str, arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    # Else numpy begins with a thread for each core, which waits by spinning; no matrix here is large enough for two.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        sys.exit(_command(program, given))
    except ModuleNotFoundError as error:
        sought = (error.name or "").partition(".")[0]
        extra = next((extra for extra, names in EXTRAS.items() if sought in names), None)
        if extra is None:
            raise
        from importlib.util import find_spec

        from .system.installation import how_to_install

        missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
        print(
            f"{program} needs the {extra} extra ({', '.join(missing)} not found): {how_to_install(extra)}",
            file=sys.stderr,
        )
        sys.exit(USAGE_ERROR)


def _command(program: str, arguments: list[str]) -> int:
    if program == "prorl-child":  # no console script: the supervisor runs the process of a plan's file
        if len(arguments) != 1:
            print("usage: prorl-child PLAN (a file that `prorl serve` or `prorl node` wrote)", file=sys.stderr)
            return USAGE_ERROR
        return _child(arguments[0])
    if program == "prorl" and (not arguments or arguments[0] in {"-h", "--help"}):
        from .commands.command_table import overview

        try:
            print(overview(), flush=True)
        except BrokenPipeError:  # the reader has seen enough, such as `head`; nothing is left to flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    if program == "prorl" and arguments[0] in FORKING and not {"-h", "--help"} & {*arguments}:
        from .service.preloading import begun_fork_server

        with begun_fork_server():
            return _imported(program, arguments)
    return _imported(program, arguments)


def _child(file: str) -> int:
    from pathlib import Path

    gc.disable()  # as below
    from .commands.children import run_child

    gc.freeze()
    gc.enable()
    return run_child(Path(file))


def _imported(program: str, arguments: list[str]) -> int:
    """Import a command, and run it."""
    gc.disable()  # imports make no garbage, and each collection would look at all that they make
    from .commands import app

    commands = app.program_of(program, arguments)
    gc.freeze()
    gc.enable()
    return app.run_program(program, commands, arguments)


if __name__ == "__main__":
    # `python -m prorl_zmq.cli PROGRAM …` runs a program without its console script, as the supervisor does.
    _run(sys.argv[1] if len(sys.argv) > 1 else "prorl", sys.argv[2:])
