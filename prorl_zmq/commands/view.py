"""`prorl view`: the rollouts of an evaluation one by one, or two evaluations compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..errors import ConfigError
from ..wire.messages.backends import ChatSettings, ToolCallFormatName
from .options import console

if TYPE_CHECKING:
    from ..evaluation.collection import Collection, Rollout
    from ..evaluation.transcript import TextReader

EMBEDDED = "embedded"


def view(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Of `prorl eval`, or of `prorl submit --out`.")],
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OTHER]", help="A second run folder of `prorl eval`: compare the two.", show_default=False
        ),
    ] = None,
    job: Annotated[
        str,
        typer.Option(metavar="ID", help="Open this rollout: its job's id, a beginning of it, or its problem's name."),
    ] = "",
    plain: Annotated[
        bool, typer.Option("--plain", help="Print, as into a pipe: the list, or with --job that rollout.")
    ] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print the tokens too, coloured by probability.")] = False,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Reads the tokens of rollouts that were kept without texts, as `prorl submit` does: the model's "
            "directory, or `embedded` for the package's own policy.",
        ),
    ] = "",
    tool_calls: Annotated[ToolCallFormatName, typer.Option(help="How that model writes tool calls.")] = "",
) -> None:
    """Look at rollouts: turns, tool calls, rewards, notes, and tokens with their mask and log-probs.

    prorl view eval/aime

    prorl view eval/aime eval/aime-after

    prorl view eval/aime --plain --job 3f2a90c1d5e7-12-0.0 --tokens

    In the list, s sorts by another column, r turns the order round, f filters (solved, not solved, each outcome) and
    Enter opens. There, 1 to 4 choose turns, tokens, the table of tokens, and the result; n and p go to the next
    rollout and back, ] and [ turn the pages of tokens, Escape goes to the list, q quits.

    With two folders: the settings that differ, the problems that both, one or none solved, a paired test with its
    p value, and the problems that changed.
    """
    if other is not None:
        if job or plain or tokens or tokenizer or tool_calls:
            raise ConfigError(
                "two run folders are compared; --job, --plain, --tokens, --tokenizer and --tool-calls are for one"
            )
        _compare(folder, other)
        return
    from ..evaluation.collection import open_collection

    collection = open_collection(folder, _reader(tokenizer, tool_calls) if tokenizer else None)
    first = collection.find(job) if job else None
    if plain or tokens or not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        _print(collection, first, tokens=tokens)
        return
    from ..evaluation.viewer import Viewer

    Viewer(collection, first).run()


def _print(collection: Collection, rollout: Rollout | None, *, tokens: bool) -> None:
    from ..evaluation.display import (
        head,
        legend,
        notes_text,
        pages,
        rollout_table,
        token_text,
        turn_body,
        turn_title,
    )

    screen = console()
    if rollout is None and len(collection.rollouts) == 1:
        rollout = collection.rollouts[0]
    if rollout is None:
        screen.print(rollout_table(collection.rollouts))
        screen.print(Text("one of them: prorl view FOLDER --plain --job ID", style="dim"))
        return
    transcript = collection.transcript(rollout)
    screen.print(head(rollout))
    for number, turn in enumerate(transcript.turns):
        screen.print()
        screen.print(turn_title(number, turn, transcript))
        screen.print(turn_body(turn, transcript))
    if tokens:
        screen.print()
        screen.print(legend())
        for page in range(pages(transcript)):
            screen.print(token_text(transcript, page))
    screen.print()
    screen.print(notes_text(rollout))


def _compare(first: Path, second: Path) -> None:
    from ..evaluation.display import comparison_text
    from ..evaluation.run_comparison import compare
    from ..evaluation.run_figures import read_figures

    comparison = compare(read_figures(first), read_figures(second))
    console().print(comparison_text(comparison, str(first), str(second)))


def _reader(tokenizer: str, tool_calls: ToolCallFormatName) -> TextReader:
    from ..evaluation.transcript import TextReader
    from ..inference.chat.loading import load_chat_format

    if tokenizer == EMBEDDED:
        settings = ChatSettings()
    elif Path(tokenizer).is_dir():
        settings = ChatSettings("transformers", tokenizer, tool_calls)
    else:
        raise ConfigError(f"--tokenizer {tokenizer}: there is no such directory", key="tokenizer")
    return TextReader(load_chat_format(settings), settings, tokenizer)
