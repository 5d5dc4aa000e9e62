"""EVAL of rows as published sets have them, in an image with what theirs have: conda's environment, hidden tests."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from needed import usable
from phases import eval_phase

from prorl_zmq import Job
from prorl_zmq.stages.handler import InitPhase
from prorl_zmq.stages.handlers.swe import SweHandler
from prorl_zmq.tasks.row_format import recognise
from prorl_zmq.tasks.swe import SweInstance
from prorl_zmq.tasks.swe_formats import CONDA, ROW_FORMATS
from prorl_zmq.wire.messages.jobs import PhaseLimits

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tasks")]
from swe_image import RUN_TESTS, make_image
from swe_rows import R2E, SWE_BENCH

if TYPE_CHECKING:
    from support.graders import Graders
    from support.sandboxes import SharedSandboxes

    from prorl_zmq.stages.handler import Evaluation
    from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("image of a project")]
JOB = Job(task="swe", instance={}, limits=PhaseLimits(eval_s=120))
RIGHT = "--- a/calculator.py\n+++ b/calculator.py\n@@ -3 +3 @@\n-    return number * 3\n+    return number * 2\n"
WRONG = RIGHT.replace("* 2", "* 4")
PYTEST = '#!/bin/sh\nfor each; do case $each in *.py) python3 "$each";; esac; done\n'
"""Runs files that print what pytest would."""
ACTIVATE = 'conda() { test "$*" = "activate testbed" && export CONDA_IS_ACTIVE=1; }\n'


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    usable("apptainer")
    image, before = make_image(tmp_path_factory.mktemp("sets"))
    conda = image / CONDA.lstrip("/")
    programs = conda / "envs" / "testbed" / "bin"
    programs.mkdir(parents=True)
    (conda / "bin").mkdir()
    (conda / "bin" / "activate").write_text(ACTIVATE)
    (programs / "pytest").write_text(PYTEST)
    (programs / "pytest").chmod(0o755)
    hidden = image / "r2e_tests"
    hidden.mkdir()
    (hidden / "run.py").write_text(f'print("=== short test summary info ===")\n{RUN_TESTS}')
    return image, before


def instance(row: dict[str, Any], image: tuple[Path, str]) -> SweInstance:
    made = recognise(row, ROW_FORMATS).convert(row)
    assert isinstance(made, SweInstance)
    return msgspec.structs.replace(made, image=str(image[0]), base_commit=image[1])


@pytest.fixture
def sandboxes(sandboxes_of: SharedSandboxes) -> Sandboxes:
    return sandboxes_of("apptainer", with_image=False)


def judged(instance: SweInstance, patch: str, sandboxes: Sandboxes, graders: Graders) -> Evaluation:
    async def run() -> Evaluation:
        async with eval_phase(JOB, instance, {"patch": patch}, sandboxes, pool=graders.pool) as phase:
            return await SweHandler().eval(phase)

    return graders.run(run())


def test_official_script_of_swe_bench_judges_in_conda_s_environment(
    image: tuple[Path, str], sandboxes: Sandboxes, graders: Graders
) -> None:
    test = 'import os\nassert os.environ["CONDA_IS_ACTIVE"]\n' + RUN_TESTS.replace("test_double.py", "test_new.py")
    patch = (
        "diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n--- /dev/null\n"
        f"+++ b/tests/test_new.py\n@@ -0,0 +1,{test.count(chr(10))} @@\n"
        + "".join(f"+{line}\n" for line in test.splitlines())
    )
    names = {"FAIL_TO_PASS": ["tests/test_new.py::test_two"], "PASS_TO_PASS": ["tests/test_new.py::test_zero"]}
    row = {**SWE_BENCH, "test_patch": patch, **{name: json.dumps(tests) for name, tests in names.items()}}
    case = instance(row, image)
    assert case.eval_script == ""
    right, wrong = (judged(case, each, sandboxes, graders) for each in (RIGHT, WRONG))
    assert (right.reward, right.metrics["fail_to_pass"], right.metrics["pass_to_pass"]) == (1.0, 1, 1), right.notes
    assert (wrong.reward, wrong.metrics["fail_to_pass"], wrong.metrics["pass_to_pass"]) == (0.0, 0, 1), wrong.notes


def test_r2e_s_tests_are_hidden_from_the_agent_and_their_output_judges(
    image: tuple[Path, str], sandboxes: Sandboxes, graders: Graders
) -> None:
    expected = {"TestDouble.test_two": "PASSED", "TestDouble.test_zero": "PASSED"}
    testbed = image[0] / "testbed"
    (testbed / "run_tests.sh").write_text("python3 r2e_tests/run.py | sed 's/.py::/.py::TestDouble::/'\n")
    case = instance({**R2E, "expected_output_json": json.dumps(expected)}, image)

    async def looked() -> list[str]:
        """What is there of the tests, as the agent finds it."""
        made: list[Any] = []

        async def create(spec: Any) -> Any:
            made.append(await sandboxes.create("job.1", spec))
            return made[-1]

        try:
            await SweHandler().init(InitPhase(JOB, case, create))
            look = "ls -d /r2e_tests r2e_tests run_tests.sh calculator.py 2>/dev/null"
            result = await made[0].exec(["/bin/sh", "-c", look], timeout_s=60.0)
            return result.stdout.decode().split()  # type: ignore[no-any-return]
        finally:
            for each in made:
                await each.close()

    try:
        assert asyncio.run(looked()) == ["calculator.py"]
        right, wrong = (judged(case, each, sandboxes, graders) for each in (RIGHT, WRONG))
    finally:
        (testbed / "run_tests.sh").unlink()
    assert (right.reward, right.metrics["pass_to_pass"]) == (1.0, 1.0), right.notes
    assert (wrong.reward, wrong.metrics["pass_to_pass"]) == (0.0, 0.5), wrong.notes
