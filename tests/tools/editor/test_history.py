from __future__ import annotations

from prorl_zmq.tools.editor.outcome import EDITS_PER_PATH, OVERHEAD_BYTES, EditHistory, EditOutcome, Stamp, Undo


def edit(path: str, number: int, old: bytes = b"") -> EditOutcome:
    return EditOutcome(path, "", undo=Undo(number, old, 0, Stamp(number, 0), Stamp(number + 1, 0)))


def undone(path: str, now: Stamp | None) -> EditOutcome:
    return EditOutcome(path, "", undone=True, now=now)


def test_edits_come_back_newest_first() -> None:
    history = EditHistory("/home")
    for number in range(3):
        history.record(edit("file", number))
    for number in (2, 1, 0):
        last = history.last("/home/file")
        assert last is not None
        assert last.offset == number
        history.record(undone("./file", Stamp(number, 7)))
        if number and (before := history.last("file")):
            assert before.after == Stamp(number, 7)
    assert history.last("file") is None
    history.record(undone("file", None))


def test_an_edit_before_a_change_by_something_else_stays_one_that_cannot_be_undone() -> None:
    history = EditHistory("/home")
    history.record(edit("file", 0))
    history.record(edit("file", 5))
    history.record(undone("file", Stamp(5, 7)))
    last = history.last("file")
    assert last is not None
    assert last.after == Stamp(1, 0)


def test_what_was_refused_is_no_edit() -> None:
    history = EditHistory("/")
    history.record(EditOutcome("file", "", ok=False))
    assert history.last("file") is None


def test_number_of_edits_is_bounded() -> None:
    history = EditHistory("/")
    for number in range(EDITS_PER_PATH + 5):
        history.record(edit("file", number))
    count = 0
    while history.last("file"):
        history.record(undone("file", None))
        count += 1
    assert count == EDITS_PER_PATH


def test_memory_is_bounded_and_the_path_edited_longest_ago_is_forgotten() -> None:
    history = EditHistory("/", limit_bytes=4 * (1000 + OVERHEAD_BYTES))
    for path in ("a", "b", "a", "c", "d"):
        history.record(edit(path, 0, b"x" * 1000))
    assert history.last("b") is None
    assert history.last("a")
    history.record(edit("e", 0, b"x" * 10_000))
    assert not any(history.last(path) for path in "abcde")
    history.record(edit("f", 0))
    assert history.last("f")
