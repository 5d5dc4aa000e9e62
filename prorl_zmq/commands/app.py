"""The programs `prorl`, `prorl-stage` and `prorl-engine`."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

from ..errors import ProrlError
from ..system.logs import start_logging
from .command_table import ABOUT, COMMANDS, HELP_NAMES
from .exit_codes import INTERRUPTED, USAGE_ERROR, complain, complain_of
from .option_groups import flat
from .plain_values import use_plain_values

PROGRAMS = {"prorl-stage": "stage:stage", "prorl-engine": "engine:engine"}
"""The programs next to `prorl`."""


def new_typer(help_text: str) -> typer.Typer:
    """Create a program; `run_program` runs it."""
    return typer.Typer(
        help=help_text,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": HELP_NAMES, "max_content_width": 100},
    )


def run(program: str, arguments: list[str]) -> int:
    """Run one of the programs with its arguments; return its exit code."""
    return run_program(program, program_of(program, arguments), arguments)


def program_of(program: str, arguments: list[str]) -> typer.Typer:
    """Return a program; of `prorl` only the named command, since importing all takes 0.1 s."""
    if program in PROGRAMS:
        alone = new_typer("")
        alone.command(program)(flat(_load(PROGRAMS[program])))
        return alone
    prorl = new_typer(ABOUT)
    prorl.callback(invoke_without_command=True)(_version)
    named = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    if not named:
        prorl.command("\0")(_nothing)  # a group needs a command; no argument can equal this one
        return prorl
    command = _load(COMMANDS[named].place)
    if isinstance(command, typer.Typer):
        for below in command.registered_commands:
            below.callback = flat(below.callback) if below.callback is not None else None
        prorl.add_typer(command, name=named)
    else:
        prorl.command(named)(flat(command))
    return prorl


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def _nothing() -> None: ...


def _version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if show:
        from importlib.metadata import version

        print(f"prorl-zmq {version('prorl-zmq')}")
        raise typer.Exit


def run_program(program: str, app: typer.Typer, arguments: list[str]) -> int:
    """Run a program under a name; print its errors as a line and return an exit code."""
    start_logging(program)
    command = typer.main.get_command(app)
    use_plain_values(command)
    try:
        code = command.main(arguments, prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else program
        return complain(path, f"{_usage_message(error)} (see `{path} --help`)", USAGE_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except ProrlError as error:
        return complain_of(program, error)
    return int(code or 0)


def _usage_message(error: typer.TyperException) -> str:
    format_message = getattr(error, "format_message", error.__str__)
    message = str(format_message()).replace("Value error, ", "").rstrip(".")
    return f"{message}{_near_command(message)}"


def _near_command(message: str) -> str:
    """Return a hint for an error about an unknown command of `prorl`."""
    _, _, named = message.partition("No such command ")
    near = get_close_matches(named.strip("'"), COMMANDS, 1)
    return f"; did you mean `{near[0]}`?" if near else ""
