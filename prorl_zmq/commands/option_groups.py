"""Options that several commands share: a class whose fields are options, as one parameter of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


class OptionGroup:
    """Base of the groups, which are dataclasses."""


def flat(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the options of its groups in their place, as typer needs it."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Callable[..., Any], list[inspect.Parameter]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind, own = parameter.annotation, [parameter]
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            own = list(inspect.signature(kind, eval_str=True).parameters.values())
            groups[name] = kind, own
        parameters += (each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)
    if not groups:
        return command

    @wraps(command)
    def run(**given: Any) -> Any:
        for name, (kind, own) in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in own})
        return command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
