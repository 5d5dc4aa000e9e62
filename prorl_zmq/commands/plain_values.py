"""Values of options without pydantic, which typer needs for every option and whose import outlasts most commands.

Text, numbers, paths and choices are converted here; typer handles other types and invalid values.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

import typer

from .command_table import HELP_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable


PLAIN_NUMBER = {int: re.compile(r"-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]+)?")}


class _Unfit(Exception): ...


class PlainValue(NamedTuple):
    """Replaces typer's converter for the values of one parameter."""

    leave_to_typer: Callable[[], Any]
    convert: Callable[[Any], Any]

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        try:
            return self.convert(value)
        except _Unfit:
            return self.leave_to_typer().coerce(value, param=param, ctx=ctx)


def use_plain_values(command: Any) -> None:
    """Make a typer command, and those below it, convert plain values without pydantic."""
    # With its option for help, which is made now and kept.
    for param in command.get_params(typer.Context(command, help_option_names=HELP_NAMES)):
        if hasattr(param, "get_runtime_param") and hasattr(param, "type_descriptor"):
            param._runtime_param = _plain_value(param)  # noqa: SLF001
    for below in getattr(command, "commands", {}).values():
        use_plain_values(below)


def _plain_value(param: Any) -> PlainValue:
    def leave_to_typer() -> Any:
        param._runtime_param = None  # noqa: SLF001
        return param.get_runtime_param()

    def convert(value: Any) -> Any:
        kind = param.type_descriptor.annotation
        if get_origin(kind) is list and isinstance(value, (list, tuple)):
            return [_converted(each, get_args(kind)[0], param.type_descriptor.parameter_info) for each in value]
        return _converted(value, kind, param.type_descriptor.parameter_info)

    return PlainValue(leave_to_typer, convert)


def _converted(value: Any, kind: Any, info: Any) -> Any:
    if info.parser is not None:
        try:
            return info.parser(value)
        except ValueError:
            raise _Unfit from None
    if get_origin(kind) is Literal and info.case_sensitive:
        if value in get_args(kind):
            return value
    elif isinstance(kind, type) and issubclass(kind, Enum) and info.case_sensitive:
        for choice in kind:
            if value is choice or value == choice.value:
                return choice
    elif kind is str and isinstance(value, str):
        return value
    elif kind is Path and _may_be_any(info):
        path = Path(value)
        with suppress(OSError, ValueError):  # typer reports the error
            if os.access(path, os.R_OK) or not path.exists():
                return path
    elif kind in {int, float} and not info.clamp:
        number = kind(value) if isinstance(value, str) and PLAIN_NUMBER[kind].fullmatch(value) else value
        if type(number) is kind and _is_within(number, info):
            return number
    raise _Unfit


def _may_be_any(info: Any) -> bool:
    looked_at = (info.exists, info.writable, info.resolve_path, info.allow_dash, info.path_type)
    return not any(looked_at) and info.file_okay and info.dir_okay


def _is_within(number: float, info: Any) -> bool:
    return (info.min is None or number >= info.min) and (info.max is None or number <= info.max)
