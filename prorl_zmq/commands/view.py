"""`prorl view`: the rollouts of a run as a list, one of them, or two runs compared; on a terminal through a pager."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from ..errors import ConfigError
from ..wire.messages.chat import ChatSettings, ToolCallFormatName
from .tables import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, PagerContext, RenderableType

    from ..evaluation.collection import Collection
    from ..evaluation.run_folder import Sample
    from ..evaluation.transcript import TextReader

EMBEDDED = "embedded"
SOLVED, NOT_SOLVED = "solved", "not solved"
SortKey = Literal["order", "reward", "outcome", "tokens", "turns", "problem"]
SORTS: dict[SortKey, Callable[[Sample], Any]] = {
    "order": lambda _: 0,
    "reward": lambda one: -1.0 if one.result.reward is None else one.result.reward,
    "outcome": lambda one: str(one.result.outcome),
    "tokens": lambda one: one.result.tokens,
    "turns": lambda one: one.result.metrics.get("turns", 0.0),
    "problem": lambda one: one.problem,
}


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
        typer.Option(metavar="ID", help="Show this rollout: its job's id, a beginning of it, or its problem's name."),
    ] = "",
    sort: Annotated[
        SortKey, typer.Option(help="The column that orders the list; `order` is that of the run folder.")
    ] = "order",
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the list.")] = False,
    only: Annotated[
        str, typer.Option(metavar="WHICH", help="List only these rollouts: solved, `not solved`, or an outcome.")
    ] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Print without a pager, as into a pipe.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show the tokens too, coloured by probability.")] = False,
    token_table: Annotated[
        bool, typer.Option("--token-table", help="Show a row per token: text, id, mask, log-prob, weight version.")
    ] = False,
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

    prorl view eval/aime --only "not solved" --sort tokens --reverse

    prorl view eval/aime --job 3f2a90c1d5e7-12-0.0 --tokens

    prorl view eval/aime eval/aime-after

    Without --job it lists the rollouts. On a terminal, $PAGER shows what does not fit. `prorl dashboard --runs FOLDER`
    shows the same in a browser.

    With two folders: the settings that differ, the problems that both, one or none solved, a paired test with its
    p value, and the problems that changed.
    """
    if other is not None:
        if job or plain or tokens or token_table or tokenizer or tool_calls or only or reverse or sort != "order":
            raise ConfigError(
                "two run folders are compared; --job, --sort, --reverse, --only, --plain, --tokens, --token-table, "
                "--tokenizer and --tool-calls are for one"
            )
        _compare(folder, other)
        return
    from ..evaluation.collection import open_collection

    collection = open_collection(folder, _reader(tokenizer, tool_calls) if tokenizer else None)
    rollout = collection.find(job) if job else None
    if rollout is None and len(collection.rollouts) == 1:
        rollout = collection.rollouts[0]
    screen = console()
    parts = (
        _rollout(collection, rollout, tokens=tokens, token_table=token_table)
        if rollout is not None
        else _list(collection, sort, only, reverse=reverse)
    )
    with ExitStack() as stack:
        if screen.is_terminal and not plain:
            stack.enter_context(_pager(screen))
        for part in parts:
            screen.print(part)


def _pager(screen: Console) -> PagerContext:
    """Return the context that pipes the output to $PAGER, with its colours."""
    os.environ.setdefault("LESS", "FRX")  # as for git: quit if all fits, and show colours
    return screen.pager(styles=True)


def _list(collection: Collection, sort: SortKey, only: str, *, reverse: bool) -> Iterator[RenderableType]:
    from ..evaluation.display import rollout_table

    kinds = {SOLVED, NOT_SOLVED, *(str(one.result.outcome) for one in collection.rollouts)}
    if only and only not in kinds:
        raise ConfigError(
            f"--only {only}: the rollouts of {collection.path} are {', '.join(sorted(kinds))}", key="only"
        )
    found = [one for one in collection.rollouts if not only or only in _kinds(one)]
    yield rollout_table(sorted(found, key=SORTS[sort], reverse=reverse))
    if only:
        yield Text(f"{len(found)} of {len(collection.rollouts)} rollouts", style="dim")
    yield Text("one of them: prorl view FOLDER --job ID", style="dim")


def _kinds(rollout: Sample) -> tuple[str, str]:
    return SOLVED if rollout.solved else NOT_SOLVED, str(rollout.result.outcome)


def _rollout(collection: Collection, rollout: Sample, *, tokens: bool, token_table: bool) -> Iterator[RenderableType]:
    from ..evaluation import display

    transcript = collection.transcript(rollout)
    yield display.head(rollout)
    yield display.turns_text(transcript)
    if transcript.tokens is None:
        yield Text("no texts were kept: --tokenizer DIR of the model, or `embedded`, reads the tokens", style="dim")
    if tokens:
        yield ""
        yield display.legend()
        yield display.token_text(transcript)
    if token_table:
        yield ""
        yield display.token_table(transcript)
    yield ""
    yield display.notes_text(rollout)


def _compare(first: Path, second: Path) -> None:
    from ..evaluation.display import comparison_text
    from ..evaluation.run_comparison import compare, read_figures

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
