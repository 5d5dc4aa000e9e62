"""For mkdocstrings: all fields of a struct, dataclass or named tuple, and a wire module's constants, as one table."""  # noqa: INP001

from __future__ import annotations

from typing import Any

import griffe

RECORDS = ("Struct", "NamedTuple", "msgspec.Struct")


class Fields(griffe.Extension):
    """Moves the fields of each such class into its docstring, where the handler renders them as a table."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the classes of a package that is read whole, so that all bases are known."""
        for cls in list(_classes(pkg)):
            fields = [(name, each) for owner in _line(cls) for name, each in _fields(owner)]
            if _is_record(cls) and fields:
                cls.docstring = cls.docstring or griffe.Docstring("", parent=cls)
                parsed = cls.docstring.parse("google", warnings=False)
                cls.docstring.parsed = [*parsed, griffe.DocstringSectionAttributes([_row(*field) for field in fields])]
        for cls in list(_classes(pkg)):
            if _is_record(cls):
                for _, field in _fields(cls):
                    field.docstring = None  # not shown a second time
        for module in pkg["wire.messages"].modules.values():
            own = {name: each for name, each in module.attributes.items() if not each.is_alias}
            constants = [(name, each) for name, each in own.items() if each.is_public and _is_short(each)]
            if constants and module.docstring is not None:
                rows = [_row(*constant) for constant in constants]
                parsed = module.docstring.parse("google", warnings=False)
                module.docstring.parsed = [*parsed, griffe.DocstringSectionAttributes(rows)]
            for each in own.values():
                each.docstring = None


def _classes(parent: griffe.Module | griffe.Class) -> Any:
    for member in parent.members.values():
        if not member.is_alias and (member.is_class or member.is_module):
            if member.is_class:
                yield member
            yield from _classes(member)


def _line(cls: griffe.Class) -> list[griffe.Class]:
    """Return a class and those of its bases that are ours, the farthest first."""
    try:
        return [*reversed(cls.mro()), cls]
    except ValueError:
        return [cls]


def _is_record(cls: griffe.Class) -> bool:
    if any("dataclass" in str(decorator.value) for decorator in cls.decorators):
        return True
    return any(str(base) in RECORDS for owner in _line(cls) for base in owner.bases)


def _fields(cls: griffe.Class) -> Any:
    for name, member in cls.members.items():
        if member.is_attribute and not name.startswith("_") and "ClassVar" not in str(member.annotation or "ClassVar"):
            yield name, member


def _is_short(constant: griffe.Attribute) -> bool:
    """Return whether it is more than the union of a link's messages."""
    return constant.docstring is not None or len(str(constant.value)) < 90


def _row(name: str, field: griffe.Attribute) -> griffe.DocstringAttribute:
    text = field.docstring.value if field.docstring else ""
    if field.value is not None:
        word = "Default: " if field.parent is not None and field.parent.is_class else ""
        text = f"{text} {word}`{field.value}`.".strip()
    return griffe.DocstringAttribute(name, description=text, annotation=field.annotation, value=field.value)
