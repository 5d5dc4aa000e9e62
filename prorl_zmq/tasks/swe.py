"""Instances of the `swe` task: a repository in an image, an issue, and the tests that judge it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Grading = Literal["swebench", "r2e"]
TESTBED = "/testbed"
"""The repository's path in the images of published sets."""


class SweInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One issue of one repository.

    The agent sees `problem_statement` and the repository at its base; EVAL, in another sandbox, gets the rest.
    """

    instance_id: str
    problem_statement: str
    """The issue: the user message."""
    image: Annotated[str, Meta(min_length=1)]
    """The sandbox's root filesystem, as `prorl image list` names it, or a path below one of the `image_folders`."""
    fail_to_pass: list[str]
    """Tests that fail at the base, and must pass."""
    pass_to_pass: list[str]
    """Tests that pass at the base, and must still pass."""
    repo: str = ""
    """`owner/name`, by which swebench knows how to read the tests' output, and how to run them."""
    version: str = ""
    """The repository's version in swebench."""
    image_source: str = ""
    """Where the image was published, such as `docker://swebench/…`: the source for `prorl tasks images`."""
    directory: Annotated[str, Meta(pattern=r"^/[^\x00]+\Z")] = TESTBED
    """The repository in the image."""
    base_commit: Annotated[str, Meta(pattern=r"^([0-9a-fA-F]{7,64})?\Z")] = ""
    """The agent's starting commit; empty: the image's HEAD."""
    setup_patch: str = ""
    """A bug, applied to the base before the agent starts; the history before it is removed."""
    test_patch: str = ""
    """The issue's tests, applied in EVAL."""
    eval_script: str = ""
    """Bash that runs the tests, in EVAL, with swebench's marks around their output; empty: swebench's own, by `repo`
    and `version`."""
    log_parser: str = ""
    """swebench's parser of that output, such as `parse_log_pytest`; empty: the one of `repo`."""
    test_images: dict[str, str] = {}
    """Pictures that the tests compare with, their URLs by path: swebench's own script fetches them, in EVAL."""
    test_files: list[str] = []
    """Git pathspecs of files that the agent's patch must not contain, since they judge it."""
    hidden: list[str] = []
    """Paths that the agent must not see: absolute, or in `directory`."""
    environment: dict[str, str] = {}
    """Variables of the sandbox, such as the PATH of the repository's own Python."""
    memory_bytes: Annotated[int, Meta(ge=2**26, le=2**40)] = 10 * 2**30
    """Memory of all the sandbox's processes; exceeding it fails the tests."""
    processes: Annotated[int, Meta(ge=1, le=2**20)] = 4096
    """Most processes and threads of the sandbox."""
    output_limit_bytes: Annotated[int, Meta(ge=1024, le=16 * 2**20)] = 64 * 1024
    """Output of one bash command that the agent sees (see `SandboxSpec`)."""
    network: bool = False
    """The tests may use the host's network, in EVAL. The agent may not: the answer is there."""
    grading: Grading = "swebench"
    """`swebench`: by the two lists of tests; `r2e`: the tests' output must equal `expected_output`."""
    expected_output: dict[str, str] = {}
    """R2E: status by test."""
    tests_s: Annotated[float, Meta(gt=0, le=7 * 86400)] = 1800.0
    """Longest run of the tests, as in swebench; the job's `limits.eval_s` applies too."""
    tools: tuple[Literal["bash", "ipython", "str_replace_editor", "think", "finish"], ...] = (
        "bash",
        "str_replace_editor",
        "finish",
    )
    """The agent's tools."""

    def __post_init__(self) -> None:
        if not (self.expected_output if self.grading == "r2e" else self.fail_to_pass):
            what = "expected_output" if self.grading == "r2e" else "fail_to_pass"
            raise ValueError(f"{what} names no test, so nothing could be resolved")
