"""Settings files: TOML that is checked as a whole against a struct; errors name the place and the allowed values."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Settings = TypeVar("Settings")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    import tomllib  # later: a client needs no file

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", key="") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", key="") from error


def checked_settings(data: Mapping[str, Any], kind: type[Settings], source: str, advice: str = "") -> Settings:
    """Convert the content of a file, which errors call `source`.

    `advice` is shown for an unknown key that resembles no known one; empty: the known keys are listed.

    Raises:
        ConfigError: it has an unknown key or an invalid value (`key` names it).
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`key` in ", "").partition(" - at `$")
        place = where.lstrip(".").rstrip("`")
        taken = _type_at(kind, place)
        if item := _wrong_item(kind, data, place):
            place, value = item
            what = what if what.startswith("Invalid enum value") else f"{what}, not {value!r},"
        name = what.partition("field `")[2].rstrip("`")
        where = f" in {place}" if place else ""
        raise ConfigError(
            f"{source}: {what}{where}{_allowed(taken, what, name, advice)}",
            key=".".join(filter(None, (place, name))),
        ) from error


def _type_at(kind: type[Any], place: str) -> Any:
    """Return msgspec's type description at a place, such as `backends[0].tool_calls`."""
    found: Any = msgspec.inspect.type_info(kind)
    for part in place.replace("[", ".[").split(".") if place else ():
        if part.startswith("["):
            found = getattr(found, "item_type", None)
        else:
            found = {field.encode_name: field.type for field in getattr(found, "fields", ())}.get(part)
        while isinstance(found, msgspec.inspect.Metadata):
            found = found.type
    return found


def _allowed(taken: Any, what: str, name: str, advice: str) -> str:
    """Return what is allowed in place of an unknown value or field; empty for other errors."""
    if what.startswith("Invalid enum value"):
        is_enum = isinstance(taken, msgspec.inspect.EnumType)
        found = [one.value for one in taken.cls] if is_enum else getattr(taken, "values", ())
        values = [str(value) for value in found if value != ""]
        return f"; allowed are {', '.join(values)}" if values else ""
    if "unknown field" not in what:
        return ""
    from difflib import get_close_matches  # only for errors

    keys = [field.encode_name for field in getattr(taken, "fields", ())]
    near = get_close_matches(name, keys, 1)
    return f"; did you mean `{near[0]}`?" if near else f"; {advice or 'its keys are ' + ', '.join(keys)}"


def _wrong_item(kind: type[Any], data: Any, place: str) -> tuple[str, object] | None:
    """Find the item that an error is about in a table with free names, since msgspec's errors do not name it.

    Return its place and what is wrong: the value (`place` ends with `[...]`) or the name; None if there is no such
    table.
    """
    of_value = place.endswith("[...]")
    place = place.removesuffix("[...]")
    table = data = copy.deepcopy(data)
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
                return f"{place}.{name}", value if of_value else name
    return None
