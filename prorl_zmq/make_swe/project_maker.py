"""Makes the instances of one project whose image is there: baseline, search, verification.

Mutations are searched for in one sandbox; those that were found are verified side by side in sandboxes of their own,
and the search continues for those that did not hold.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from .baseline import measure
from .candidates import Candidates
from .environment import TESTBED
from .patches import Patches
from .search import Search
from .suite import LOG_PARSER, suite_command
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


class SweRecord(msgspec.Struct, frozen=True):
    """An instance as a line of a data file, in the row format `generic` of the task `swe`."""

    instance_id: str
    repo: str
    version: str
    base_commit: str
    """The clean repository's only commit, its HEAD."""
    problem_statement: str
    patch: str
    """The gold patch: takes the bug back."""
    bug_patch: str
    """Makes the bug; applied to the clean repository before an agent sees it."""
    test_patch: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]
    image_name: str
    directory: str
    test_command: str
    """One bash line, run in `directory`."""
    test_files: list[str]
    """Git pathspecs of what is left out of an agent's patch."""
    log_parser: str


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


async def make_instances(
    project: Project, image: Image, order: Order, settings: Settings, opened: Opened, say: Callable[[str], None]
) -> Made:
    """Make as many instances as were ordered, or as many as there are."""
    label = project.label
    async with opened() as sandbox:
        baseline = await measure(sandbox, project, order.tests, order.options, settings.limit_s)
    say(f"{label}: {len(baseline.tests)} tests pass in {baseline.took_s:.1f} s, in {' '.join(baseline.paths)}")
    most_failing = max(1, int(settings.most_failing * len(baseline.tests)))
    patches = await asyncio.to_thread(Patches, project.folder, baseline.report.lines, baseline.paths)
    seed = f"{settings.seed} {label}"
    candidates = await asyncio.to_thread(Candidates, patches.sources, baseline.report, baseline.tests, seed)
    say(f"{label}: {len(candidates)} mutations of {candidates.functions} functions that tests reach")
    search = Search(
        project, baseline, candidates, patches, most_failing=most_failing, options=order.options, opened=opened
    )
    command = suite_command(baseline.paths, order.options)
    limit_s = TIME_FLOOR_S + TIME_FACTOR * baseline.took_s
    dropped: Counter[str] = Counter()
    verified: list[Verified] = []

    async def verify_one(found: Found) -> Verified | str:
        async with opened() as sandbox:
            return await verify(found, baseline, command, sandbox, most_failing=most_failing, limit_s=limit_s)

    while missing := order.instances - len(verified):
        found = await search.find(missing)
        for result in await side_by_side([verify_one(each) for each in found]):
            if isinstance(result, Verified):
                verified.append(result)
            else:
                dropped[result] += 1
        say(f"{label}: {len(verified)} of {order.instances} verified, {search.tried} mutations tried")
        if len(found) < missing:
            break
    records = [_record(each, project, baseline, image.name, command) for each in verified]
    return Made(
        label=label,
        instances=tuple(records),
        tests=len(baseline.tests),
        unreliable=baseline.unreliable,
        flaky=sum(each.flaky for each in verified),
        tried=search.tried,
        dropped=dict(search.dropped + dropped),
    )


def _record(verified: Verified, project: Project, baseline: Baseline, image: str, command: str) -> SweRecord:
    found = verified.found
    # The same bug in the same release has the same id wherever it is made.
    identity = hashlib.sha256(f"{project.commit}\n{found.bug_patch}".encode()).hexdigest()[:8]
    return SweRecord(
        instance_id=f"{project.label}.{found.candidate.mutation.kind}.{identity}",
        repo=project.metadata.name,
        version=project.metadata.version,
        base_commit=project.commit,
        problem_statement=found.statement,
        patch=found.gold_patch,
        bug_patch=found.bug_patch,
        test_patch="",
        FAIL_TO_PASS=verified.fail_to_pass,
        PASS_TO_PASS=verified.pass_to_pass,
        image_name=image,
        directory=TESTBED,
        test_command=command,
        test_files=baseline.test_files,
        log_parser=LOG_PARSER,
    )


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
