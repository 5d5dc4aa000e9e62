"""Values of options are converted as typer does it, without pydantic."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated, Literal

import pytest
import typer

from prorl_zmq.commands.plain_values import use_plain_values


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def parse(text: str) -> str:
    if text == "bad":
        raise typer.BadParameter("it is bad")
    if text == "wrong":
        raise ValueError("it is wrong")
    return text.upper()


def call(words: list[str], *, plain: bool) -> object:
    """What a command gets, or how it complains."""
    got: list[object] = []

    def command(
        text: str = "default",
        number: Annotated[int, typer.Option(min=2, max=20)] = 5,
        real: Annotated[float, typer.Option(min=0)] = 1,
        path: Path | None = None,
        file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None,
        colour: Colour = Colour.RED,
        kind: Literal["one", "two"] = "one",
        parsed: Annotated[str | None, typer.Option(parser=parse)] = None,
        many: list[str] | None = None,
        numbers: list[int] | None = None,
        flag: bool = False,
    ) -> None:
        got.append([text, number, real, path, file, colour, kind, parsed, many, numbers, flag])

    app = typer.Typer(add_completion=False)
    app.command("command")(command)
    made = typer.main.get_command(app)
    if plain:
        use_plain_values(made)
    try:
        made.main(words, prog_name="command", standalone_mode=False)
    except typer.TyperException as error:
        got.append((type(error).__name__, error.format_message()))  # type: ignore[attr-defined]
    return got


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--text a --number 7 --real 0.5 --path /tmp/missing --colour blue --kind two --parsed x --flag",
        "--many a --many b --numbers 1 --numbers 2",
        "--number 1",
        "--number 21",
        "--number 1_0",
        "--number 7.0",
        "--number x",
        "--number -3",
        "--number 99999999999999999999",
        "--real 1e1",
        "--real nan",
        "--real -1",
        "--real 3",
        "--colour green",
        "--kind three",
        "--parsed bad",
        "--parsed wrong",
        "--numbers 1 --numbers x",
        "--file /tmp/missing",
        "--file /tmp",
        "--path /tmp",
        "--unknown",
    ],
)
def test_values_and_complaints_are_typers(line: str) -> None:
    assert call(line.split(), plain=True) == call(line.split(), plain=False)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("prorl-stage", ["--role", "init", "--slots", "3", "--run-dir", "/dev/null"]),
        ("prorl-engine", ["--weight", "2.5", "--run-dir", "/dev/null"]),
        ("prorl", ["status", "--connect", "nowhere"]),
        ("prorl", ["serve", "--sandbox", "process", "--run-dir", "/dev/null"]),
        ("prorl", ["--help"]),
    ],
)
def test_our_commands_do_without_pydantic(program: str, arguments: list[str]) -> None:
    code = (
        f"import sys\nfrom prorl_zmq.commands import app\napp.run({program!r}, {arguments})\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)
