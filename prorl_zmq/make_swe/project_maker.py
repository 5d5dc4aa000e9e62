"""Makes the instances of one project whose image is there: baseline, search, verification.

Mutations are searched for in one sandbox; those that were found are verified side by side in sandboxes of their own,
and the search continues for those that did not hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from .baseline import measure
from .candidates import Candidates
from .instance import SweRecord, record_of
from .patches import Patches
from .search import Search
from .suite import suite_command
from .verification import Verified, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from ..tools.images.image import Image
    from ..tools.sandbox.sandbox import Sandbox
    from .baseline import Baseline
    from .project import Project
    from .recipe import Order
    from .search import Found

    Opened = Callable[[], AbstractAsyncContextManager[Sandbox]]

T = TypeVar("T")

TIME_FACTOR, TIME_FLOOR_S = 5.0, 60.0
"""All tests may take so much longer in verification than before any change, and this in any case."""


class Settings(msgspec.Struct, frozen=True):
    seed: int = 0
    base: str = ""
    """See `base.find_base`."""
    jobs: int = 1
    """Most sandboxes at a time."""
    most_failing: float = 0.2
    """Largest share of a project's tests that a bug may break."""
    limit_s: float = 300.0
    """How long all tests of a project may take."""


class Made(msgspec.Struct, frozen=True):
    label: str
    """Name and version."""
    instances: tuple[SweRecord, ...]
    tests: int
    """Tests that can be relied on."""
    unreliable: int
    """Tests that cannot, or have ids that swebench mangles."""
    flaky: int
    """Tests that verification left out, counted for each instance."""
    tried: int
    """Mutations."""
    dropped: dict[str, int]
    """How many mutations were dropped, by reason."""
    busy_s: float = 0.0
    """How long it was fetched and built, and had sandboxes, those at one time added up."""


class ProjectMaker:
    def __init__(
        self,
        project: Project,
        image: Image,
        order: Order,
        settings: Settings,
        opened: Opened,
        say: Callable[[str], None],
    ) -> None:
        self._project = project
        self._image = image
        self._order = order
        self._settings = settings
        self._opened = opened
        self._say = say

    async def make(self) -> Made:
        project, order, label = self._project, self._order, self._project.label
        async with self._opened() as sandbox:
            baseline = await measure(sandbox, project, order.tests, order.options, self._settings.limit_s)
        self._say(
            f"{label}: {len(baseline.tests)} tests pass in {baseline.took_s:.1f} s, in {' '.join(baseline.paths)}"
        )
        most_failing = max(1, int(self._settings.most_failing * len(baseline.tests)))
        patches, candidates = await asyncio.to_thread(self._candidates, baseline)
        self._say(f"{label}: {len(candidates)} mutations of {candidates.functions} functions that tests reach")
        search = Search(
            project,
            baseline,
            candidates,
            patches,
            most_failing=most_failing,
            options=order.options,
            opened=self._opened,
        )
        command = suite_command(baseline.paths, order.options)
        limit_s = TIME_FLOOR_S + TIME_FACTOR * baseline.took_s
        dropped: Counter[str] = Counter()
        verified: list[Verified] = []

        async def verify_one(found: Found) -> Verified | str:
            async with self._opened() as sandbox:
                return await verify(found, baseline, command, sandbox, most_failing=most_failing, limit_s=limit_s)

        while missing := order.instances - len(verified):
            found = await search.find(missing)
            for result in await side_by_side([verify_one(each) for each in found]):
                if isinstance(result, Verified):
                    verified.append(result)
                else:
                    dropped[result] += 1
            self._say(f"{label}: {len(verified)} of {order.instances} verified, {search.tried} mutations tried")
            if len(found) < missing:
                break
        records = [record_of(each, project, baseline, self._image.name, command) for each in verified]
        return Made(
            label=label,
            instances=tuple(records),
            tests=len(baseline.tests),
            unreliable=baseline.unreliable,
            flaky=sum(each.flaky for each in verified),
            tried=search.tried,
            dropped=dict(search.dropped + dropped),
        )

    def _candidates(self, baseline: Baseline) -> tuple[Patches, Candidates]:
        patches = Patches(self._project.folder, baseline.report.lines, baseline.paths)
        seed = f"{self._settings.seed} {self._project.label}"
        return patches, Candidates(patches.sources, baseline.report, baseline.tests, seed)


async def side_by_side(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Await all of these at one time; if one fails the others are cancelled, and its own exception is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def encode(made: Iterable[Made]) -> bytes:
    """Return the data file of these projects' instances: one JSON object a line."""
    return b"".join(msgspec.json.encode(record) + b"\n" for each in made for record in each.instances)
