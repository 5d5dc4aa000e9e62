"""Every task's end is seen by somebody: one that nobody waits for ends in silence, and what it did is done no more."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STARTERS = {"create_task", "ensure_future"}
UNSEEING = {"cancel", "cancelled", "done"}
"""What asks a task for nothing that it ended with."""
MODULES = [path for top in ("prorl_zmq", "brokers", "stages", "tools") for path in (ROOT / top).rglob("*.py")]


def unobserved(source: str) -> list[int]:
    """Give the lines that start a task which nothing but `cancel` and the like ever mentions again."""
    if not any(starter in source for starter in STARTERS):
        return []
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    used: set[str] = set()
    for node in ast.walk(tree):
        parent = parents.get(node)
        asked = isinstance(parent, ast.Attribute) and parent.attr in UNSEEING
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and not asked:
            used.add(ast.unparse(node))
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") not in STARTERS:
            continue
        parent = parents[node]
        names = parent.targets if isinstance(parent, ast.Assign) else []
        kept = not isinstance(parent, (ast.Expr, ast.Assign)) or any(
            not isinstance(name, (ast.Name, ast.Attribute)) or ast.unparse(name) in used for name in names
        )
        if not kept:
            lines.append(node.lineno)
    return lines


def test_every_task_is_observed() -> None:
    found = {path.relative_to(ROOT): unobserved(path.read_text(encoding="utf-8")) for path in MODULES}
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("create = asyncio.create_task(work())\ncreate.cancel()", [1]),
        ("asyncio.create_task(work())", [1]),
        ("self.task = loop.create_task(work())\nself.task.add_done_callback(note)", []),
        ("async def main():\n    task = asyncio.ensure_future(work())\n    await task", []),
    ],
)
def test_a_task_that_nobody_observes_is_found(source: str, lines: list[int]) -> None:
    assert unobserved(source) == lines
