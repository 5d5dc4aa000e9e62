"""What a worker of `pytest -n` gets as one piece of work: a group, a file of unit tests, or a single test.

A plugin of pytest (see tests/conftest.py). A worker is asked for its pending tests after each test, which takes longer
the more pieces it has had. Files of unit tests need a core all the time, and other tests mostly wait, so files of the
former are spread over the latter.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
from support.tiers import UNIT, tiers_of_file
from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable


def file_of(test: str) -> str:
    return test.split("::")[0]


@cache
def is_unit(file: str) -> bool:
    """Return whether a file's tests are all of tier `unit`, but for proofs."""
    return tiers_of_file(file) == {UNIT}


def spread(pieces: Iterable[str]) -> list[str]:
    """Return pieces in an order that has the files among them everywhere between the files of single tests."""
    pieces = list(pieces)
    files = [piece for piece in pieces if is_file(piece)]
    others = [list(tests) for _, tests in groupby((piece for piece in pieces if not is_file(piece)), key=file_of)]
    order: list[str] = []
    for index, tests in enumerate(others):
        order += files[len(files) * index // len(others) : len(files) * (index + 1) // len(others)]
        order += tests
    return order or files


def is_file(piece: str) -> bool:
    return piece.endswith(".py")


class Pieces(LoadGroupScheduling):
    """Hands out pieces; the largest come first in `workqueue`, but for the order of `spread`."""

    def _split_scope(self, nodeid: str) -> str:
        piece = super()._split_scope(nodeid)
        return file_of(nodeid) if piece == nodeid and is_unit(file_of(nodeid)) else piece

    def schedule(self) -> None:
        begins = self.collection is None
        super().schedule()
        if begins:
            self.workqueue = OrderedDict((piece, self.workqueue[piece]) for piece in spread(self.workqueue))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Pieces | None:
    return Pieces(config, log) if config.getoption("dist") == "loadgroup" else None
