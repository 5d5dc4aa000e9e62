"""Instances of the `swe` task: a repository in an image, an issue, and the tests that decide whether it is resolved."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Grading = Literal["swebench", "r2e"]
TESTBED = "/testbed"
"""Where the images of all published sets have the repository."""


class SweInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One issue of one repository.

    The agent sees `problem_statement` and the repository at its base; all that could tell it the answer is kept for
    EVAL, which runs in another sandbox.
    """

    instance_id: str
    problem_statement: str
    """The issue: the user message."""
    image: Annotated[str, Meta(min_length=1)]
    """The sandbox's root filesystem, as `prorl image list` names it, or a path below one of the `image_folders`."""
    fail_to_pass: list[str]
    """Tests that fail at the base, and must pass."""
    pass_to_pass: list[str]
    """Tests that pass at the base, and must go on passing."""
    repo: str = ""
    """`owner/name`, by which swebench knows how to read the tests' output, and how to run them."""
    version: str = ""
    """Of the repository, as swebench counts."""
    image_source: str = ""
    """Where the image was published, such as `docker://swebench/…`: what `prorl tasks images` builds it from."""
    directory: Annotated[str, Meta(pattern=r"^/[^\x00]+\Z")] = TESTBED
    """The repository in the image."""
    base_commit: Annotated[str, Meta(pattern=r"^([0-9a-fA-F]{7,64})?\Z")] = ""
    """What the agent starts from; empty: the image's HEAD."""
    setup_patch: str = ""
    """Applied to the base before the agent starts: a bug. No history is left of what was before it."""
    test_patch: str = ""
    """The tests of the issue: applied in EVAL only."""
    eval_script: str = ""
    """Bash that runs the tests, in EVAL, with swebench's marks around their output; empty: swebench's own, by `repo`
    and `version`."""
    log_parser: str = ""
    """swebench's parser of that output, such as `parse_log_pytest`; empty: the one of `repo`."""
    test_images: dict[str, str] = {}
    """Pictures that the tests compare with, their URLs by path: swebench's own script fetches them, in EVAL."""
    test_files: list[str] = []
    """Git pathspecs of what no patch of the agent's may contain, since it judges the patch."""
    hidden: list[str] = []
    """Paths of the image that the agent is not to see: absolute, or in `directory`."""
    environment: dict[str, str] = {}
    """Variables of the sandbox, such as the PATH of the repository's own Python."""
    memory_bytes: Annotated[int, Meta(ge=2**26, le=2**40)] = 10 * 2**30
    """Memory of the sandbox, all its processes together; what takes more has not passed."""
    processes: Annotated[int, Meta(ge=1, le=2**20)] = 4096
    """Processes and threads of it."""
    output_limit_bytes: Annotated[int, Meta(ge=1024, le=16 * 2**20)] = 64 * 1024
    """How much of the output of one bash command the agent sees (see `SandboxSpec`)."""
    network: bool = False
    """The tests may use the host's network, in EVAL. The agent never may: what it looks for is there."""
    grading: Grading = "swebench"
    """`swebench`: by the two lists of tests; `r2e`: the output of the tests is `expected_output`, all of it."""
    expected_output: dict[str, str] = {}
    """R2E: status by test."""
    tests_s: Annotated[float, Meta(gt=0, le=7 * 86400)] = 1800.0
    """Longest run of the tests, as swebench has it; tests that take longer have not passed. What is left of the job's
    `limits.eval_s` bounds it too."""
    tools: tuple[Literal["bash", "ipython", "str_replace_editor", "think", "finish"], ...] = (
        "bash",
        "str_replace_editor",
        "finish",
    )
    """What the agent may call."""

    def __post_init__(self) -> None:
        if not (self.expected_output if self.grading == "r2e" else self.fail_to_pass):
            what = "expected_output" if self.grading == "r2e" else "fail_to_pass"
            raise ValueError(f"{what} names no test, so nothing could be resolved")
