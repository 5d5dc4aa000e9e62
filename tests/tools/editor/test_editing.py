"""The editor's commands on real files: what they do to the bytes, and what they tell the model."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.tools.containers.kinds import problem_with
from prorl_zmq.tools.editor.arguments import Command, EditorArguments
from prorl_zmq.tools.editor.editing import apply

if TYPE_CHECKING:
    from collections.abc import Iterator

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16"]
TEXT = st.text(st.sampled_from("ab \t\né漢😀"), max_size=12)


def rows(text: str, first: int = 1) -> str:
    return "".join(f"{number:6}\t{line}\n" for number, line in enumerate(text.split("\n"), first))


# str_replace ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_str_replace_is_what_replace_of_bytes_is(shared_workspace: Any, data: st.DataObject) -> None:
    # Bytes that are no UTF-8 in any order, but no NUL, and no BOM by chance.
    content = b"x" + data.draw(st.binary(max_size=60)).replace(b"\0", b"a").replace(b"\r", b"b")
    if data.draw(st.booleans()):
        content += data.draw(TEXT).encode() + data.draw(st.binary(max_size=9)).replace(b"\0", b"").replace(b"\r", b"")
    text = content.decode(errors="ignore")
    start = data.draw(st.integers(0, len(text)))
    old = text[start : start + data.draw(st.integers(1, 8))].encode("ascii", "ignore").decode() or "x"
    new = data.draw(st.text(st.characters(max_codepoint=126, exclude_categories=["Cs"], exclude_characters="\r\0")))
    path = shared_workspace.write(content)
    if old == new:
        return
    outcome = shared_workspace("str_replace", old_str=old, new_str=new)
    if content.count(old.encode()) == 1:
        assert outcome.ok
        assert path.read_bytes() == content.replace(old.encode(), new.encode())
        shared_workspace.done("undo_edit")
    else:
        assert not outcome.ok
    assert path.read_bytes() == content


@given(st.sampled_from(ENCODINGS), TEXT, TEXT.filter(bool), TEXT, TEXT)
def test_str_replace_in_each_encoding(
    shared_workspace: Any, encoding: str, before: str, old: str, new: str, after: str
) -> None:
    text = before + old + after
    path = shared_workspace.write(text.encode(encoding))
    if old == new:
        return
    outcome = shared_workspace("str_replace", old_str=old, new_str=new)
    assert outcome.ok == (text.count(old) == 1)
    if outcome.ok:
        assert path.read_bytes() == text.replace(old, new).encode(encoding)
        shared_workspace.done("undo_edit")
    assert path.read_bytes() == text.encode(encoding)


def test_what_is_told_of_an_edit(workspace: Any) -> None:
    workspace.write(b"".join(b"line %d\n" % number for number in range(1, 31)))
    text = workspace.done("str_replace", old_str="line 15\n", new_str="one\ntwo\n")
    around = [*(f"line {number}" for number in range(11, 15)), "one", "two", *(f"line {n}" for n in range(16, 21))]
    assert text == "file is edited. It reads now:\n" + rows("\n".join(around), 11)


@pytest.mark.parametrize(
    ("content", "old", "line", "shown"),
    [
        (b"a", "a", 1, ["X"]),
        (b"a\n", "a\n", 1, ["X"]),
        (b"a\nb\nc", "c", 3, ["a", "b", "X"]),
        (b"\n\n\na\n", "a", 4, ["", "", "", "X"]),
    ],
)
def test_edits_at_the_ends_of_a_file(workspace: Any, content: bytes, old: str, line: int, shown: list[str]) -> None:
    workspace.write(content)
    assert workspace.done("str_replace", old_str=old, new_str="X").endswith("now:\n" + rows("\n".join(shown)))


def test_text_that_is_not_unique(workspace: Any) -> None:
    workspace.write(b"a = 1\nb = 2\na = 1\na = 1 a = 1\n")
    said = workspace.refused("str_replace", old_str="a = 1", new_str="a = 2")
    assert "more than once, in lines 1, 3, 4." in said
    workspace.write(b"a\n" * 100)
    assert "19, 20 and maybe more" in workspace.refused("str_replace", old_str="a", new_str="b")


def test_text_that_is_not_there(workspace: Any) -> None:
    workspace.write(b"def f():\n\treturn 1\n\nx\n")
    assert workspace.refused("str_replace", old_str="return 2", new_str="").endswith("the same to each character.")
    said = workspace.refused("str_replace", old_str="def f():\n    return 1", new_str="")
    assert said.endswith("differs from it in whitespace only:\n" + rows("def f():\n\treturn 1"))
    said = workspace.refused("str_replace", old_str="     1\tdef f():\n     2\t\treturn 1\n", new_str="")
    assert "without the line numbers" in said


def test_new_str_may_be_left_out(workspace: Any) -> None:
    workspace.write(b"abc")
    workspace.done("str_replace", old_str="b")
    assert workspace.read() == b"ac"


def test_a_match_across_the_pieces_that_are_read(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.tools.editor.text_file.CHUNK_BYTES", 4)
    for encoding in ENCODINGS:
        for pad in range(12):
            text = "é" * pad + "\n\nneedle\nend"
            workspace.write(text.encode(encoding))
            said = workspace.done("str_replace", old_str="needle", new_str="x")
            assert workspace.read() == text.replace("needle", "x").encode(encoding)
            assert f"{3:6}\tx\n" in said
            workspace.write(("\n" * pad + "needle needle\n\nneedle").encode(encoding))
            lines = f"lines {pad + 1}, {pad + 3}."
            assert lines in workspace.refused("str_replace", old_str="needle", new_str="x")


def test_utf_16_is_matched_at_whole_characters(workspace: Any) -> None:
    content = "ab\u6100\u6200".encode("utf-16-le")  # "\u6100a" is there one byte further on
    workspace.write(b"\xff\xfe" + content)
    workspace.refused("str_replace", old_str="\u0062\u0061", new_str="x")
    workspace.write(b"\xff\xfe" + "\u0a00\u000a\u0a00end".encode("utf-16-le"))
    assert "no line after line 2." in workspace.refused("insert", insert_line=3, new_str="x")


@given(
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"]),
    st.lists(st.binary(max_size=9) | st.sampled_from([b"\r\n", b"\n\0", b"\0\n", b"a", b"\xe9", "é".encode()])),
    TEXT.filter(bool),
    TEXT,
    st.integers(0, 5),
)
def test_any_bytes_are_edited_or_refused(
    shared_workspace: Any, bom: bytes, parts: list[bytes], old: str, new: str, line: int
) -> None:
    content = bom + b"".join(parts)
    path = shared_workspace.write(content)
    shared_workspace("view")
    shared_workspace("view", view_range=[line + 1, -1])
    for command in ("str_replace", "insert"):
        if old != new and shared_workspace(command, old_str=old, new_str=new, insert_line=line).ok:
            assert path.read_bytes() != content
            shared_workspace.done("undo_edit")
        assert path.read_bytes() == content


# Encodings and line ends --------------------------------------------------------------------------------------------


def test_latin_1_stays_latin_1(workspace: Any) -> None:
    workspace.write("naïve café\ncrème\n".encode("latin-1"))
    assert "naïve café" in workspace.done("view")
    assert "crêpe" in workspace.done("str_replace", old_str="crème", new_str="crêpe")
    assert workspace.read() == "naïve café\ncrêpe\n".encode("latin-1")
    assert "naïve" in workspace.done("insert", insert_line=2, new_str="x")
    assert "Latin-1, which has no '漢'" in workspace.refused("str_replace", old_str="crêpe", new_str="漢")


def test_bytes_that_are_no_text_survive(workspace: Any) -> None:
    workspace.write("é漢字\n".encode() + b"\xff\xfe\x80\nend\n")
    said = workspace.done("view")
    assert "\ufffd stands for bytes that are not UTF-8; edits keep them" in said
    workspace.done("str_replace", old_str="漢", new_str="é")
    workspace.done("insert", insert_line=2, new_str="ü")
    assert workspace.read() == "éé字\n".encode() + b"\xff\xfe\x80\n\xc3\xbc\nend\n"


def test_line_ends_with_cr_are_kept(workspace: Any) -> None:
    workspace.write(b"one\r\ntwo\r\nthree\r\n")
    assert workspace.done("view").endswith("shows it:\n" + rows("one\ntwo\nthree"))
    workspace.done("str_replace", old_str="one\ntwo", new_str="1\n2")
    workspace.done("str_replace", old_str="three", new_str="3\nthree\r\nthird")
    workspace.done("insert", insert_line=1, new_str="x\ny")
    assert workspace.read() == b"1\r\nx\r\ny\r\n2\r\n3\r\nthree\r\nthird\r\n"
    for _ in range(3):
        workspace.done("undo_edit")
    assert workspace.read() == b"one\r\ntwo\r\nthree\r\n"


def test_line_ends_of_both_kinds(workspace: Any) -> None:
    workspace.write(b"one\r\ntwo\nthree\n")
    workspace.done("str_replace", old_str="two\nthree", new_str="2")
    assert workspace.read() == b"one\r\n2\n"


def test_binary_files_are_refused(workspace: Any) -> None:
    for content in (b"\x7fELF\0\0", b"x" * 100_000 + b"\0", b"\xff\xfe\0\0", b"\xff\xfea\0b"):
        workspace.write(content)
        assert "not a text file" in workspace.refused("str_replace", old_str="q", new_str="y")
        assert "not a text file" in workspace.refused("view", view_range=[2, 3])


# insert -------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(ENCODINGS), TEXT, TEXT, st.integers(0, 12))
def test_insert_puts_lines_between_lines(shared_workspace: Any, encoding: str, text: str, new: str, at: int) -> None:
    path = shared_workspace.write(text.encode(encoding))
    lines = text.split("\n")
    total = len(lines) - (not lines[-1])
    outcome = shared_workspace("insert", insert_line=at, new_str=new)
    assert outcome.ok == (at <= total)
    if outcome.ok:
        assert path.read_bytes() == "\n".join([*lines[:at], *new.split("\n"), *lines[at:]]).encode(encoding)
        shared_workspace.done("undo_edit")
    else:
        assert f"no line after line {total}." in outcome.text
    assert path.read_bytes() == text.encode(encoding)


def test_what_is_told_of_an_insert(workspace: Any) -> None:
    workspace.write(b"a\nb\nc")
    assert workspace.done("insert", insert_line=1, new_str="x\ny").endswith("now:\n" + rows("a\nx\ny\nb\nc"))
    assert workspace.done("insert", insert_line=5, new_str="z").endswith("now:\n" + rows("a\nx\ny\nb\nc\nz"))


# create and undo_edit -----------------------------------------------------------------------------------------------


def test_create_and_undo(workspace: Any) -> None:
    assert workspace.done("create", "a/b/new.py", file_text="é\n") == "a/b/new.py is created."
    assert workspace.read("a/b/new.py") == "é\n".encode()
    assert "exists already" in workspace.refused("create", "a/b/new.py", file_text="")
    workspace.done("str_replace", "a/b/new.py", old_str="é", new_str="e")
    workspace.done("undo_edit", "./a//b/new.py")
    assert workspace.read("a/b/new.py") == "é\n".encode()
    assert "removed again" in workspace.done("undo_edit", str(workspace.root / "a/b/new.py"))
    assert not (workspace.root / "a/b/new.py").exists()
    assert "no edit of a/b/new.py" in workspace("undo_edit", "a/b/new.py").text


def test_created_files_have_the_usual_mode(workspace: Any) -> None:
    before = os.umask(0o027)
    try:
        workspace.done("create", file_text="x")
    finally:
        os.umask(before)
    assert (workspace.root / "file").stat().st_mode & 0o777 == 0o640


def test_undo_of_a_file_that_something_else_changed(workspace: Any) -> None:
    path = workspace.write(b"abc\n")
    workspace.done("str_replace", old_str="b", new_str="x")
    path.write_bytes(b"axc\nmore\n")
    assert "was changed after its last edit" in workspace.refused("undo_edit")
    path.unlink()
    assert "does not exist" in workspace.refused("undo_edit")


@given(st.lists(st.tuples(TEXT.filter(bool), TEXT), max_size=8))
def test_undo_of_many_edits(shared_workspace: Any, edits: list[tuple[str, str]]) -> None:
    path = shared_workspace.write("a b\né\n漢\n".encode())
    states = [path.read_bytes()]
    for old, new in edits:
        if old != new and shared_workspace("str_replace", old_str=old, new_str=new).ok:
            states.append(path.read_bytes())
    while len(states) > 1:
        assert path.read_bytes() == states.pop()
        shared_workspace.done("undo_edit")
        assert path.read_bytes() == states[-1]


# view ---------------------------------------------------------------------------------------------------------------


@given(TEXT, st.integers(1, 8), st.integers(1, 10) | st.just(-1))
def test_view_shows_lines_as_cat_does(shared_workspace: Any, text: str, first: int, last: int) -> None:
    path = shared_workspace.write(text.encode())
    whole = subprocess.run(["cat", "-n", path], capture_output=True, check=True).stdout.decode().splitlines()
    if last != -1 and last < first:
        return
    outcome = shared_workspace("view", view_range=[first, last])
    if not whole and first == 1:
        assert outcome.text == "file is empty."
    elif first > len(whole):
        assert not outcome.ok
        assert f"no line after line {len(whole)}." in outcome.text
    else:
        shown = whole[first - 1 :] if last == -1 else whole[first - 1 : last]
        header, *lines = outcome.text.split("\n")[:-1]
        assert header == "file, as cat -n shows it:"
        assert lines[: len(shown)] == shown
        assert lines[len(shown) :] == ([f"[the file has {len(whole)} lines]"] if last > len(whole) else [])


def test_view_of_much_is_cut(workspace: Any) -> None:
    workspace.write(b"".join(b"line %d\n" % number for number in range(1, 20_001)))
    text = workspace.done("view")
    assert len(text) < 66_000
    *_, last, note = text.removesuffix("\n").split("\n")
    line = int(last.split("\t")[0])
    assert note == f"[see more with view_range [{line + 1}, {line + 200}]; the file has 20000 lines]"
    assert workspace.done("view", view_range=[line + 1, line + 2]).endswith(
        rows(f"line {line + 1}\nline {line + 2}", line + 1)
    )


@pytest.mark.parametrize("size", [65535, 65536, 65537])
@pytest.mark.parametrize("end", ["", "\n"])
def test_view_of_a_file_about_as_large_as_a_view(workspace: Any, size: int, end: str) -> None:
    lines = ["x" * 99] * (size // 100)
    text = "\n".join([*lines, "x" * (size - 100 * len(lines) - len(end))]) + end
    workspace.write(text.encode())
    assert len(text) == size
    shown = workspace.done("view", view_range=[650, -1])
    assert shown == "file, as cat -n shows it:\n" + rows("\n".join(text.split("\n")[649:656]), 650)
    shown = workspace.done("view")
    assert "see more with view_range" in shown
    assert "the file has 656 lines" in shown


def test_a_large_edit_is_shown_in_part(workspace: Any) -> None:
    workspace.write(b"a\nb\nc\n")
    text = workspace.done("str_replace", old_str="b", new_str="line\n" * 5000)
    assert text.endswith("[cut here]\n")
    assert len(text) < 9000
    text = workspace.done("insert", insert_line=0, new_str="x" * 10**5)
    assert text.endswith("x\n[cut here]\n")
    assert len(text) < 9000


@pytest.mark.parametrize("character", ["x", "漢", "\n"])
def test_view_is_bounded_whatever_the_lines_are(workspace: Any, character: str) -> None:
    workspace.write(("start\n" + character * 300_000).encode())
    assert len(workspace.done("view")) < 66_000
    text = workspace.done("view", view_range=[2, 2])
    assert len(text) < 66_000
    assert ("line 2 is cut" in text) == (character != "\n")


def test_a_large_file_takes_little_memory(workspace: Any) -> None:
    path = workspace.write(b"")
    block = b"".join(b"a line of text, number %07d\n" % number for number in range(40_000))
    with path.open("wb") as file:
        for _ in range(64):
            file.write(block)
        file.write("the é end\n".encode())
    workspace.done("view", view_range=[1, 2])
    tracemalloc.start()
    try:
        assert "a line of text, number 0000000\n" in workspace.done("view", view_range=[40_000 * 60 + 1, -1])
        workspace.done("str_replace", old_str="the é end", new_str="one more\nthe end")
        assert "one more" in workspace.done("view", view_range=[40_000 * 64 + 1, -1])
        workspace.done("insert", insert_line=40_000 * 32, new_str="middle")
        workspace.done("undo_edit")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20 < path.stat().st_size / 8
    with path.open("rb") as file:
        file.seek(-25, os.SEEK_END)
        assert file.read() == b"0039999\none more\nthe end\n"


CUT = """
import os, sys
from prorl_zmq.tools.editor.arguments import EditorArguments
from prorl_zmq.tools.editor.editing import apply
from prorl_zmq.tools.editor.text_file import TextFile
find = TextFile.find
def cut_and_find(file, pattern, limit):
    os.truncate("file", 0)
    return find(file, pattern, limit)
TextFile.find = cut_and_find
apply(EditorArguments("str_replace", "file", old_str="end", new_str="x"), None, "/", sys.argv[1])
"""


def test_a_large_file_that_is_cut_during_an_edit_costs_only_the_child(workspace: Any) -> None:
    workspace.write(b"line\n" * 600_000 + b"end\n")
    command = [sys.executable, "-P", "-c", CUT, workspace.root]
    result = subprocess.run(command, check=False, cwd=workspace.root)
    assert result.returncode == -signal.SIGBUS
    assert workspace.content() == {"file": b""}


def test_view_of_a_directory(workspace: Any) -> None:
    for path in ("b/inner/deep", ".git/x", "a"):
        (workspace.root / path).mkdir(parents=True)
    workspace.write(b"", "b/file")
    workspace.write(b"", ".hidden")
    workspace.write(b"", "b/.hidden")
    (workspace.root / "link").symlink_to("/etc")
    os.close(os.open(os.fsencode(workspace.root) + b"/\xff", os.O_CREAT))
    root = str(workspace.root)
    assert workspace.done("view", root) == (
        f"{root} and what is in it, two levels deep:\n"
        f"{root}/a/\n{root}/b/\n{root}/b/file\n{root}/b/inner/\n{root}/link (a symbolic link)\n{root}/\ufffd\n"
        f"[2 hidden entries of {root} are not shown]\n"
    )
    assert "view_range" in workspace.refused("view", root, view_range=[1, 2])
    assert "only view works on directories" in workspace.refused("insert", root, insert_line=0, new_str="")


def test_view_of_a_large_directory(workspace: Any) -> None:
    for number in range(1500):
        workspace.write(b"", f"{number}")
    text = workspace.done("view", ".")
    assert text.count("\n") == 1002
    assert text.endswith("[only the first 1000 entries are shown; see more with view of a directory in it]\n")


# What is not to be edited -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["view", "str_replace", "insert"])
def test_what_is_no_file_is_refused_at_once(workspace: Any, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(workspace.root / "fifo")
    monkeypatch.chdir(workspace.root)  # for the short path that a socket needs
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        (workspace.root / "device").symlink_to("/dev/null")
        for path in ("fifo", "socket", "device"):
            arguments = EditorArguments(command, path, old_str="a", new_str="b", insert_line=0)
            outcome = apply(arguments, None, "/", str(Path.cwd()))
            assert not outcome.ok
            assert "not a regular file" in outcome.text


def test_missing_paths(workspace: Any) -> None:
    workspace.write(b"a")
    assert workspace.refused("view", "none") == "none: it does not exist; view its directory to see what is there."
    assert "is a file, not a directory" in workspace.refused("view", "file/inner")
    assert "is a file, not a directory" in workspace.refused("create", "file/inner", file_text="")
    assert "too long" in workspace.refused("create", "x" * 300, file_text="")
    assert "exists already" in workspace.refused("create", ".", file_text="")


def test_mode_and_links_survive_an_edit(workspace: Any) -> None:
    path = workspace.write(b"abc")
    path.chmod(0o754)
    (workspace.root / "link").symlink_to("file")
    workspace.done("str_replace", "link", old_str="b", new_str="x")
    assert (workspace.root / "link").is_symlink()
    assert path.read_bytes() == b"axc"
    assert path.stat().st_mode & 0o7777 == 0o754
    workspace.done("undo_edit", "link")
    assert path.read_bytes() == b"abc"


def test_a_file_that_changes_during_the_edit_is_left_alone(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workspace.write(b"abc")
    real = os.fchmod

    def meddle(file: int, mode: int) -> None:
        real(file, mode)
        path.write_bytes(b"other")

    monkeypatch.setattr("prorl_zmq.tools.editor.replacement.os.fchmod", meddle)
    outcome = workspace("str_replace", old_str="b", new_str="x")
    assert not outcome.ok
    assert "changed by another process" in outcome.text
    assert workspace.content() == {"file": b"other"}


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_disk_that_is_full_changes_nothing(workspace: Any, monkeypatch: pytest.MonkeyPatch, unnamed: bool) -> None:
    if not unnamed:
        monkeypatch.setattr("prorl_zmq.tools.editor.replacement.os.O_TMPFILE", os.O_DIRECTORY)
    workspace.write(b"a" * 5000 + b"b")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5001, hard))
    try:
        assert "larger than is allowed" in workspace.refused("str_replace", old_str="b", new_str="c" * 10)
        assert "larger than is allowed" in workspace.refused("create", "new", file_text="x" * 6000)
        workspace.done("str_replace", old_str="b", new_str="c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert workspace.content() == {"file": b"a" * 5000 + b"c"}


TRY = """
import sys
from prorl_zmq.tools.editor.arguments import EditorArguments
from prorl_zmq.tools.editor.editing import apply
fixed = sys.argv[1].replace("/disk", "/fixed/file")
for arguments in (
    EditorArguments("create", "small", file_text="a" * 1000 + "b"),
    EditorArguments("create", "large", file_text="x" * 100_000),
    EditorArguments("create", "half", file_text="x" * 40_000 + "end"),
    EditorArguments("str_replace", "half", old_str="end", new_str="x" * 30_000),
    EditorArguments("str_replace", fixed, old_str="a", new_str="b"),
    EditorArguments("view", fixed),
):
    print(apply(arguments, None, "/", sys.argv[1]).text)
"""


@pytest.mark.skipif(problem_with("bubblewrap") is not None, reason="bubblewrap cannot be used here")
def test_a_full_disk_and_a_read_only_one(workspace: Any) -> None:
    disk = workspace.root / "disk"
    fixed = workspace.root / "fixed"
    disk.mkdir()
    fixed.mkdir()
    workspace.write(b"a\n", "fixed/file")
    mounts = ["--dev-bind", "/", "/", "--size", "65536", "--tmpfs", disk, "--ro-bind", fixed, fixed]
    command = ["bwrap", *mounts, sys.executable, "-P", "-c", TRY, disk]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    full = "the disk is full; remove what is not needed and try again."
    assert said[:4] == ["small is created.", f"large: {full}", "half is created.", f"half: {full}"]
    assert "cannot be written" in said[4]
    assert said[-2] == "     1\ta"


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of ours with a file in it, and this process without rights of root."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_bytes(b"abc")
        Path(folder, "file").chmod(0o444)
        Path(folder).chmod(0o555)
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)
            Path(folder).chmod(0o755)


def test_missing_permissions(unprivileged: Path) -> None:
    file = str(unprivileged / "file")
    assert apply(EditorArguments("view", file), None, "/", "/").ok
    for arguments in (
        EditorArguments("str_replace", file, old_str="a", new_str="b"),
        EditorArguments("create", file + "2", file_text="b"),
        EditorArguments("create", str(unprivileged / "inner/file"), file_text="b"),
    ):
        outcome = apply(arguments, None, "/", "/")
        assert not outcome.ok
        assert "you have no permission for this" in outcome.text


KILLED = """
import os, sys
from prorl_zmq.tools.editor import replacement
from prorl_zmq.tools.editor.arguments import EditorArguments
from prorl_zmq.tools.editor.editing import apply
replacement._write = lambda target, data: os.kill(os.getpid(), 9)
apply(EditorArguments("str_replace", "file", old_str="b", new_str="x"), None, "/", sys.argv[1])
"""


def test_a_kill_leaves_the_file_as_it_was(workspace: Any) -> None:
    workspace.write(b"abc")
    result = subprocess.run([sys.executable, "-P", "-c", KILLED, workspace.root], check=False)
    assert result.returncode == -9
    assert workspace.read() == b"abc"
    left = [name for name in workspace.content() if name != "file"]
    assert not left or not has_unnamed_files(workspace.root)


def has_unnamed_files(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        return False
    return True


ALL_IN_ONE = """
import os, sys
from prorl_zmq.tools.editor.arguments import EditorArguments
from prorl_zmq.tools.editor.editing import apply
before = set(sys.modules)
sys.path.clear()
sys.path_importer_cache.clear()
def do(command, path, **others):
    outcome = apply(EditorArguments(command, path, **others), undo.get(path), "/", sys.argv[1])
    undo[path] = outcome.undo
    print(outcome.ok, end=" ")
undo = {}
do("create", "a/new", file_text="é\\n")
do("insert", "a/new", insert_line=1, new_str="ü")
do("undo_edit", "a/new")
for path in ("utf-16-le", "utf-16-be", "latin-1"):
    do("str_replace", path, old_str="é", new_str="ö")
    do("str_replace", path, old_str="no\\ttext", new_str="漢")
    do("view", path)
do("view", ".")
do("view", "none")
print(sorted(set(sys.modules) - before))
"""


def test_nothing_is_imported_late(workspace: Any) -> None:
    workspace.write(b"\xff\xfe" + "é".encode("utf-16-le"), "utf-16-le")
    workspace.write(b"\xfe\xff" + "é".encode("utf-16-be"), "utf-16-be")
    workspace.write("é".encode("latin-1"), "latin-1")
    command = [sys.executable, "-P", "-c", ALL_IN_ONE, workspace.root]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "True True True " + "True False True " * 3 + "True False []\n"


def test_a_file_of_another_owner_keeps_it(workspace: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another account")
    path = workspace.write(b"abc")
    os.chown(path, 1234, 2345)
    path.chmod(0o4755)
    workspace.done("str_replace", old_str="b", new_str="x")
    status = path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1234, 2345, 0o4755)
