"""Every kind of bug, on code where it can be seen; and what holds for all mutations of much other code."""

from __future__ import annotations

import ast
import shlex
import subprocess
import textwrap
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.make_swe.mutation import KINDS, is_sound, mutations
from prorl_zmq.make_swe.search import Patches
from prorl_zmq.make_swe.source_text import SourceText

if TYPE_CHECKING:
    from prorl_zmq.make_swe.mutation import Mutation

CASES = [
    ("comparison", "if a < b: return 1", "if a <= b: return 1"),
    ("comparison", "if a not  in b: return 1", "if a in b: return 1"),
    ("comparison", "if a is None: return 1", "if a is not None: return 1"),
    ("boolean_operator", "return a and (b)", "return a or (b)"),
    ("arithmetic", "return (a) + b", "return (a) - b"),
    ("arithmetic", "a //= b", "a /= b"),
    ("negated_condition", "if a: return b", "if not a: return b"),
    ("negated_condition", "while not a: b()", "while a: b()"),
    ("negated_condition", "return [x for x in a if b]", "return [x for x in a if not b]"),
    ("removed_condition", "if a and b and a.c: return 1", "if a and a.c: return 1"),
    ("wrong_constant", "return a + 7", "return a + 8"),
    ("wrong_constant", "return f(a, key=True)", "return f(a, key=False)"),
    ("wrong_constant", "return ', '.join(a)", "return ','.join(a)"),
    ("swapped_arguments", "return f(a, b)", "return f(b, a)"),
    ("swapped_branches", "return a if c() else b", "return b if c() else a"),
    ("changed_bound", "return a[1:b]", "return a[2:b]"),
    ("changed_bound", "return a[:-1]", "return a[:]"),
    ("changed_bound", "return a[0]", "return a[-1]"),
    ("dropped_call", "return a.strip() + b", "return a + b"),
    ("dropped_call", "return list(a + b)", "return (a + b)"),
    ("wrong_function", "return min(a, b)", "return max(a, b)"),
    ("wrong_function", "return a.b.startswith(b)", "return a.b.endswith(b)"),
    ("wrong_variable", "return a.x", "return b.x"),
    ("removed_statement", "a.append(b)\nreturn a", "return a"),
    ("removed_statement", "a = a or b\nreturn a", "return a"),
    ("removed_statement", "if b: a += 1\nreturn a", "if b: pass\nreturn a"),
    ("removed_guard", "if a:\n    return b  # why\nreturn a", "return a"),
    ("removed_guard", "if a:\n    b()\nelif b:\n    a()\nreturn a", "if a:\n    b()\nreturn a"),
    ("removed_return", "if a:\n    return b\nreturn a", "if a:\n    pass\nreturn a"),
    ("early_return", "for x in a:\n    b()\nreturn a", "for x in a:\n    b()\n    return a"),
    ("loop_exit", "for x in a:\n    continue", "for x in a:\n    break"),
    ("changed_exception", "raise ValueError(a)", "raise TypeError(a)"),
    ("changed_exception", "try: a()\nexcept (KeyError, OSError): b()", "try: a()\nexcept KeyError: b()"),
]
CORPUS = [SourceText(Path(module.__file__ or "").read_bytes()) for module in (shlex, textwrap)]


@cache
def mutations_of(number: int) -> list[Mutation]:
    """Return all mutations of one of `CORPUS`."""
    return list(mutations(CORPUS[number]))


def in_function(body: str) -> str:
    return "def f(a, b):\n" + textwrap.indent(body, "    ") + "\n"


def mutants(text: str, kind: str) -> list[str]:
    source = SourceText(text.encode())
    return [each.apply(source.data).decode() for each in mutations(source) if each.kind == kind]


@pytest.mark.few(8)
@pytest.mark.parametrize(("kind", "before", "after"), CASES)
def test_a_kind_makes_its_bug(kind: str, before: str, after: str) -> None:
    assert in_function(after) in mutants(in_function(before), kind)


def test_a_default_changes() -> None:
    assert "def f(a, b=4):\n    return a\n" in mutants("def f(a, b=3):\n    return a\n", "changed_default")


def test_every_kind_has_a_case() -> None:
    assert {kind for kind, _, _ in CASES} | {"changed_default"} == set(KINDS)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1 + 2\nclass A:\n    y = 3 < 4\n",
        'def f():\n    """One < 2."""\n',
        "def f(a: 3 < 4) -> 5 < 6:\n    pass\n",
        "@g(1 < 2)\ndef f(a):\n    pass\n",
        'def f(a):\n    return f"{a < 2} 3"\n',
    ],
    ids=["module", "docstring", "annotation", "decorator", "f-string"],
)
def test_only_code_of_functions_changes(text: str) -> None:
    assert list(mutations(SourceText(text.encode()))) == []


@pytest.mark.parametrize("data", [b"a = 1\r\n", b"\xef\xbb\xbfa = 1\n", b"a = '\xff'\n", b"def f(:\n"])
def test_files_that_cannot_be_changed_byte_by_byte_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"it (has|is)|decode"):
        SourceText(data)


def test_positions_count_bytes_not_characters() -> None:
    text = "def f(a):\n    return ['äöü…', a < 2]\n"
    assert "def f(a):\n    return ['äöü…', a <= 2]\n" in mutants(text, "comparison")


@pytest.mark.proof(quick=True)
@given(st.data())
def test_a_sound_mutation_is_other_python_of_the_same_function(data: st.DataObject) -> None:
    number = data.draw(st.sampled_from(range(len(CORPUS))))
    source, mutation = CORPUS[number], data.draw(st.sampled_from(mutations_of(number)))
    if not is_sound(mutation, source):
        return
    changed = mutation.apply(source.data)
    tree = ast.parse(changed)
    assert ast.dump(tree) != ast.dump(source.tree)
    assert changed != source.data
    undone = changed[: mutation.start] + source.data[mutation.start : mutation.end]
    assert undone + changed[mutation.start + len(mutation.replacement) :] == source.data
    assert without(tree, mutation.function) == without(source.tree, mutation.function)


def without(tree: ast.Module, function: str) -> str:
    """Give all of a module but one function."""
    tree = ast.parse(ast.unparse(tree))
    *classes, name = function.split(".")
    body = tree.body
    for each in classes:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == each).body
    body[:] = [node for node in body if getattr(node, "name", "") != name]
    return ast.dump(tree)


@pytest.mark.proof(quick=True)
def test_most_mutations_are_sound() -> None:
    for number, source in enumerate(CORPUS):
        every = mutations_of(number)[::37]
        assert sum(is_sound(each, source) for each in every) > 0.9 * len(every)


def test_patches_apply_and_reverse(tmp_path: Path) -> None:
    def git(*arguments: str, stdin: str = "") -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, input=stdin.encode(), check=True)

    for number, source in enumerate(CORPUS):
        (tmp_path / f"m{number}.py").write_bytes(source.data.rstrip(b"\n") if number == 0 else source.data)
    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=a")
    patches = Patches(tmp_path, [f"m{number}.py" for number in range(len(CORPUS))], ["tests"])
    for path, source in patches.sources.items():
        for mutation in mutations_of(int(path == "m1.py"))[::200]:
            forth, back = patches.of(path, mutation)
            assert (tmp_path / path).read_bytes() == source.data
            git("apply", "-", stdin=forth)
            assert (tmp_path / path).read_bytes() == mutation.apply(source.data)
            git("apply", "-", stdin=back)
            assert (tmp_path / path).read_bytes() == source.data


def test_the_lines_that_a_mutation_changes() -> None:
    source = SourceText(b"def f(a):\n    if a:\n        return 1\n    return  a\n")
    guard = next(each for each in mutations(source) if each.kind == "removed_guard")
    assert set(guard.lines(source.data)) >= {"if a:", "return 1"}
    constant = next(each for each in mutations(source) if each.kind == "wrong_constant")
    assert constant.lines(source.data) == ("return 1", "return 2")
