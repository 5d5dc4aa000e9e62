"""Describe the keys that a settings file takes, for error messages."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import msgspec


class WrongItem(NamedTuple):
    """A name of a table, or its value, that is not what the table takes."""

    place: str
    """Of the item, as `place` of `instead_of`."""
    value: object
    """What is wrong there: the value, or the name itself."""


def instead_of(kind: type[Any], what: str, place: str, name: str) -> str:
    """Say what a place of a file takes instead of an unknown value or field; nothing for other errors.

    Args:
        kind: what the file is decoded as.
        what: the error of msgspec, without its place.
        place: such as `backends[0].tool_calls`.
        name: of the field that is unknown, if one is.
    """
    found: Any = msgspec.inspect.type_info(kind)
    for part in place.replace("[", ".[").split(".") if place else ():
        if part.startswith("["):
            found = getattr(found, "item_type", None)
        else:
            fields = {field.encode_name: field.type for field in getattr(found, "fields", ())}
            found = fields.get(part)
        while isinstance(found, msgspec.inspect.Metadata):
            found = found.type
    if what.startswith("Invalid enum value"):
        if isinstance(found, msgspec.inspect.EnumType):
            values = [str(one.value) for one in found.cls]
        else:
            values = [str(value) for value in getattr(found, "values", ()) if value != ""]
        return f"; allowed are {', '.join(values)}" if values else ""
    if name and "unknown field" in what:
        from difflib import get_close_matches  # for an error only

        near = get_close_matches(name, [field.encode_name for field in getattr(found, "fields", ())], 1)
        return f"; did you mean `{near[0]}`?" if near else "; `prorl init` writes a file with all keys"
    return ""


def wrong_item(kind: type[Any], data: Any, place: str) -> WrongItem | None:
    """Find the item of a table that an error is about, whose place has no name in the errors of msgspec.

    Args:
        kind: what the file is decoded as.
        data: the content of the file.
        place: such as `rollout_broker.session_weights[...]` for a value; without `[...]` for a name.

    Returns:
        None: the place is no table with free names.
    """
    of_value = place.endswith("[...]")
    place = place.removesuffix("[...]")
    data = copy.deepcopy(data)
    table = data
    for part in place.replace("[", ".[").split("."):
        try:
            table = table[int(part[1:-1]) if part.startswith("[") else part]
        except (LookupError, TypeError, ValueError):
            return None
    if not isinstance(table, dict):
        return None
    items = dict(table)
    for name, value in items.items():
        table.clear()
        table[name] = value
        try:
            msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            if "[...]`" in str(error) or "at `key` in" in str(error):
                return WrongItem(f"{place}.{name}", value if of_value else name)
    return None
