"""What a file of settings takes, for the messages of errors in one."""

from __future__ import annotations

from typing import Any

import msgspec


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
