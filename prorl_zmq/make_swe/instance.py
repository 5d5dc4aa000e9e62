"""An instance as a line of a data file, in the form `generic` of the task `swe`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from .environment import TESTBED
from .suite import LOG_PARSER

if TYPE_CHECKING:
    from .baseline import Baseline
    from .project import Project
    from .verification import Verified


class SweRecord(msgspec.Struct, frozen=True):
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


def record_of(verified: Verified, project: Project, baseline: Baseline, image: str, command: str) -> SweRecord:
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
