"""The checks that the documentation shows, each against an honest policy and against policies that cheat."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest
from phases import eval_phase
from support.sandboxes import main_and_proofs

from prorl_zmq import Job
from prorl_zmq.stages.handlers.shell import ShellHandler, ShellInstance

if TYPE_CHECKING:
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.stages.handler import Evaluation
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHECK = re.compile(r'"check": ("(?:[^"\\]|\\.)*")')


class Policies(NamedTuple):
    honest: dict[str, str]
    """Files that it writes."""
    cheats: dict[str, dict[str, str]]
    files: dict[str, str]
    """What the instance has in the workspace."""


POLICIES = {
    "grep -qx 12.0 answer.txt": Policies(
        {"answer.txt": "12.0\n"}, {"nothing": {}, "another price": {"answer.txt": "2.5\n"}}, {}
    ),
    "test -e done": Policies({"done": ""}, {"nothing": {}, "another name": {"Done": ""}}, {}),
    "total()": Policies(
        {"sum.py": "def total(numbers):\n    return sum(numbers)\n"},
        {
            "nothing": {},
            "an emptied test": {"test_sum.py": ""},
            "an early exit": {"sum.py": "import os; os._exit(0)"},
            "an exit code": {"sum.py": "raise SystemExit(0)"},
            "one value": {"sum.py": "def total(numbers):\n    return 42\n"},
            "equal to all": {
                "sum.py": "class Any(int):\n    __eq__ = lambda *_: True\n\ndef total(numbers):\n    return Any()\n"
            },
            "a reward printed": {"sum.py": "print('reward: 1.0')"},
            "a reward printed behind the value": {
                "sum.py": "def total(numbers):\n    print(42)\n    return 'reward: 1'\n"
            },
            "planted modules": {"sitecustomize.py": "import os; os._exit(0)", "usercustomize.py": "raise SystemExit"},
            "a planted python3": {"python3": "#!/bin/sh\necho 42\n"},
        },
        {"sum.py": "def total(numbers):\n    return 0\n"},
    ),
}
"""By how the check begins."""


def examples() -> list[tuple[str, str]]:
    return [
        (page.name, msgspec.json.decode(check))
        for page in PAGES
        for check in CHECK.findall(page.read_text(encoding="utf-8"))
    ]


@pytest.fixture(params=main_and_proofs("bubblewrap"))
def sandboxes(request: pytest.FixtureRequest, sandboxes_of: SharedSandboxes) -> Sandboxes:
    return sandboxes_of(request.param)


def judged(check: str, files: dict[str, str], sandboxes: Sandboxes) -> Evaluation:
    async def run() -> Evaluation:
        sandbox = await sandboxes.create("job.1")
        try:
            await sandbox.write_files({path: text.encode() for path, text in files.items()})
            job = Job(task="shell", instance={"instruction": "", "check": check})
            async with eval_phase(job, ShellInstance("", check), {}, sandboxes, sandbox) as phase:
                return await ShellHandler().eval(phase)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def test_every_check_is_tried() -> None:
    found = {check for _, check in examples()}
    assert len(found) >= 2
    assert [check for check in found if not any(check.startswith(start) for start in POLICIES)] == []


@pytest.mark.parametrize(("page", "check"), examples())
def test_checks_of_the_documentation(page: str, check: str, sandboxes: Sandboxes) -> None:
    policies = next(each for start, each in POLICIES.items() if check.startswith(start))
    honest = judged(check, policies.files | policies.honest, sandboxes)
    assert honest.reward == 1.0, (page, honest.notes)
    rewards = {name: judged(check, policies.files | files, sandboxes).reward for name, files in policies.cheats.items()}
    assert rewards == dict.fromkeys(policies.cheats, 0.0)


def test_reward_that_the_agents_files_make_invalid_earns_nothing(sandboxes: Sandboxes) -> None:
    evaluation = judged("cat answer.txt", {"answer.txt": "reward: nan"}, sandboxes)
    assert (evaluation.reward, evaluation.metrics) == (0.0, {"invalid_check_reward": 1.0})
    assert "the reward must be a finite number" in evaluation.notes["check"]
