"""`prorl doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ..errors import ConfigError
from . import options
from .tables import console, print_table

if TYPE_CHECKING:
    from ..wire.messages.chat import ToolCallFormatName

STYLES = {"ok": "green", "missing": "bold red", "optional": "yellow"}


def doctor(
    model: Annotated[
        str,
        typer.Option(metavar="DIR", help="Show instead how the chat format of this model is understood."),
    ] = "",
    tool_calls: options.ToolCalls = "",
    template_argument: options.TemplateArguments = None,
) -> None:
    """Check what this machine has and what is missing. Exit code 1 if the default service cannot work here.

    prorl doctor --model Qwen/Qwen3-8B --template-argument enable_thinking=false

    With --model: how the model's chat template writes tool calls and reasoning, what ends a turn, the arguments that
    the template takes, an example conversation as the engine sees it, and what was not recognised; exit code 1 if
    the model's own form of tool calls is not read.
    """
    if model:
        _show_model(model, tool_calls, options.named_values("--template-argument", template_argument))
        return
    if tool_calls or template_argument:
        raise ConfigError("--tool-calls and --template-argument are about a model: name it with --model", key="model")
    from ..service.doctor import examine

    screen = console()
    with screen.status("looking at this machine"):
        findings = list(examine())
    rows = ((one.subject, Text(one.state, STYLES[one.state]), one.detail) for one in findings)
    print_table("subject", "=state", "detail", rows=rows, title="this machine")
    missing = [finding.subject for finding in findings if finding.state == "missing"]
    if missing:
        screen.print(f"The default service needs: {', '.join(missing)}.")
        raise typer.Exit(1)
    screen.print(f"The default service can run here. {_first_step()}")


def _first_step() -> str:
    from importlib.util import find_spec

    from ..system.installation import how_to_install

    if find_spec("matplotlib") is None:
        return f"Try: prorl serve. For prorl demo: {how_to_install('eval')}"
    return "Try: prorl demo"


def _show_model(model: str, tool_calls: ToolCallFormatName, arguments: dict[str, Any]) -> None:
    from ..inference.chat.report import report
    from ..inference.chat.transformers_chat import TransformersChatFormat
    from ..wire.messages.chat import ChatSettings

    settings = ChatSettings("transformers", model, tool_calls).with_arguments(arguments)
    found = report(TransformersChatFormat.load(settings))
    print_table("property", "value", rows=found.rows, title=f"the chat format of {model}")
    print_table("who", "text", rows=found.conversation, title="an example conversation")
    for warning in found.warnings:
        console().print(Text(f"Warning: {warning}", "yellow"))
    if found.warnings:
        raise typer.Exit(1)
