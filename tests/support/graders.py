"""Grader processes that tests share: each pool takes up to two CPU seconds to import what it compares with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from prorl_zmq.stages.grading.grader_pool import GraderPool

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

T = TypeVar("T")


class Graders:
    """A pool and the event loop it belongs to. Tests that kill graders make a pool of their own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.pool = GraderPool(2)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(main)

    def close(self) -> None:
        self.pool.close()
        self._runner.close()
