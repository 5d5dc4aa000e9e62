"""Describes the fields of a task's instances (`prorl tasks show`)."""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect as types

NAMES: dict[type[types.Type], str] = {
    types.StrType: "text",
    types.IntType: "whole number",
    types.FloatType: "number",
    types.BoolType: "true or false",
    types.NoneType: "null",
    types.AnyType: "anything",
    types.RawType: "anything",
}


@dataclass(frozen=True, slots=True)
class InstanceField:
    name: str
    """As in a row; of a nested field, such as `tests[].input`."""
    type: str
    default: str | None
    """JSON; None: it is required."""
    about: str


def instance_fields(kind: type[msgspec.Struct], prefix: str = "") -> list[InstanceField]:
    """Return the fields of a Struct, each followed by those of its Structs."""
    described = types.type_info(kind)
    assert isinstance(described, types.StructType), "a Struct"
    about = _docstrings(kind)
    fields = []
    for field in described.fields:
        name = f"{prefix}{field.encode_name}"
        fields.append(InstanceField(name, type_in_words(field.type), _default(field), about.get(field.name, "")))
        for inner, path in _structs(field.type, name):
            if inner is not kind:
                fields += instance_fields(inner, f"{path}.")
    return fields


def type_in_words(kind: types.Type) -> str:
    """Return a type in words."""
    match kind:
        case types.Metadata(type=inner):
            return type_in_words(inner)
        case types.LiteralType(values=values):
            return " | ".join(msgspec.json.encode(value).decode() for value in values)
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item) | types.SetType(item_type=item):
            return f"list of {type_in_words(item)}"
        case types.DictType(value_type=value):
            return f"map of names to {type_in_words(value)}"
        case types.UnionType(types=several):
            return " or ".join(type_in_words(each) for each in several)
        case types.StructType(cls=cls):
            return cls.__name__
        case types.EnumType(cls=cls):
            return " | ".join(str(each.value) for each in cls)
    return NAMES.get(type(kind), type(kind).__name__.removesuffix("Type").lower())


def _structs(kind: types.Type, path: str) -> list[tuple[type[msgspec.Struct], str]]:
    match kind:
        case types.Metadata(type=inner):
            return _structs(inner, path)
        case types.StructType(cls=cls):
            return [(cls, path)]
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return _structs(item, f"{path}[]")
        case types.UnionType(types=several):
            return [each for one in several for each in _structs(one, path)]
    return []


def _default(field: types.Field) -> str | None:
    if field.required:
        return None
    value: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(value).decode()


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class and its bases, which only the source has."""
    about: dict[str, str] = {}
    for owner in reversed(kind.__mro__[: kind.__mro__.index(msgspec.Struct)]):
        with suppress(OSError, TypeError, SyntaxError):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            assert isinstance(tree, ast.ClassDef), "the source of a class"
            for field, text in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    match text:
                        case ast.Expr(value=ast.Constant(value=str() as said)):
                            about[field.target.id] = inspect.cleandoc(said)
    return about
