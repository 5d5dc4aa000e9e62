"""What the tests of handlers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.graders import Graders

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def graders() -> Iterator[Graders]:
    made = Graders()
    yield made
    made.close()
