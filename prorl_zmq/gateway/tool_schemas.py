"""JSON schemas of the package's tools by name; clients in text mode render their templates with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tools.bash import BashTool
from ..tools.editor_tool import EditorTool
from ..tools.ipython import IPythonTool, JupyterTool
from ..tools.think_and_finish import FinishTool, ThinkTool

if TYPE_CHECKING:
    from ..tools.tool import Tool

# A schema follows from the class; a tool itself would need a sandbox.
_KINDS: tuple[type[Tool[Any]], ...] = (BashTool, IPythonTool, JupyterTool, EditorTool, ThinkTool, FinishTool)
SCHEMAS: dict[str, dict[str, Any]] = {kind.name: object.__new__(kind).schema() for kind in _KINDS}


def schemas_of(names: Any) -> list[dict[str, Any]]:
    """Return the schemas of an instance's tools; unknown names are left out."""
    return [SCHEMAS[name] for name in names or () if isinstance(name, str) and name in SCHEMAS]
