"""What it costs to look at a service, and how soon those who look see what has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness import main
from watching_page import page_rows

if TYPE_CHECKING:
    from harness import Row


def measure(quick: bool) -> list[Row]:
    return page_rows(quick)


if __name__ == "__main__":
    main("watching", "what it costs to look at a service", measure)
