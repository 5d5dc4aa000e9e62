"""Rows of the published software-engineering sets, told apart by their columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prorl_zmq.errors import InvalidRecord
from prorl_zmq.stages.handlers.swe import _columns
from prorl_zmq.stages.handlers.swe_report import official_script, r2e_report
from prorl_zmq.tasks.loading import load_jobs
from prorl_zmq.tasks.row_format import recognise
from prorl_zmq.tasks.row_formats import ROW_FORMATS
from prorl_zmq.tasks.swe import SweInstance
from prorl_zmq.tasks.swe_formats import image_name

sys.path.append(str(Path(__file__).parent))
from swe_rows import GENERIC, MULTIMODAL, MYPY, R2E, SWE_BENCH, SWE_GYM, SWE_SMITH, TEST_PATCH, VERIFIED

ROWS = {
    "swe-bench": SWE_BENCH,
    "swe-gym": SWE_GYM,
    "swe-smith": SWE_SMITH,
    "r2e-gym": R2E,
    "generic": GENERIC,
}
IMAGES = {
    "swe-bench": ("sweb.eval.x86_64.psf_1776_requests-2317", "docker://swebench/"),
    "swe-gym": ("sweb.eval.x86_64.getmoto_s_moto-5752", "docker://xingyaoww/"),
    "swe-smith": ("swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536", "docker://jyangballin/"),
}


def converted(row: dict[str, Any]) -> SweInstance:
    instance = recognise(row, ROW_FORMATS).convert(row)
    assert isinstance(instance, SweInstance)
    return instance


@pytest.mark.parametrize("form", ROWS)
def test_form_is_told_by_the_columns(form: str) -> None:
    assert recognise(ROWS[form], ROW_FORMATS).name == form


@pytest.mark.parametrize("form", IMAGES)
def test_image_is_named_by_the_rules_of_its_set(form: str) -> None:
    name, registry = IMAGES[form]
    instance = converted(ROWS[form])
    assert (instance.image, instance.image_source) == (name, f"{registry}{name}")


def test_image_of_another_registry_keeps_its_name() -> None:
    row = {**SWE_SMITH, "image_name": "swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536:latest"}
    assert converted(row).image == IMAGES["swe-smith"][0]
    assert converted(row).image_source == f"docker://{row['image_name']}"
    assert converted(R2E).image == "aiohttp_final-f0d74880deec8fcd982bce639c93c5e130d41654"
    assert (converted(GENERIC).image, converted(GENERIC).image_source) == ("mine", "")
    assert image_name("/images/mine.sif") == "/images/mine.sif"


def test_gold_patch_never_comes_along() -> None:
    for row in (SWE_BENCH, SWE_GYM, GENERIC):
        assert "the answer" not in repr(converted({**row, "patch": "the answer"}))


def test_bug_of_swe_smith_is_put_in_before_the_agent_starts() -> None:
    instance = converted(SWE_SMITH)
    assert (instance.setup_patch, instance.base_commit) == (SWE_SMITH["patch"], "")


def test_tests_of_swe_gym_are_those_of_its_patch() -> None:
    script = converted(SWE_GYM).eval_script
    assert "-rA -p no:cacheprovider tests/test_a.py\n" in script
    assert f"|| exit 1\n{TEST_PATCH}EOF" in script
    assert "-k testNew\n" in converted(MYPY).eval_script


def test_blank_last_line_of_a_test_patch_stays_and_removed_tests_are_not_run() -> None:
    patch = TEST_PATCH.replace("+b = 2\n", "+b = 2\n \n") + (
        "diff --git a/tests/old.py b/tests/old.py\ndeleted file mode 100644\n--- a/tests/old.py\n+++ /dev/null\n"
        "diff --git a/tests/one.py b/tests/two.py\nsimilarity index 100%\nrename from tests/one.py\n"
        "rename to tests/two.py\n"
    )
    script = converted({**SWE_GYM, "test_patch": patch}).eval_script
    assert "-p no:cacheprovider tests/test_a.py tests/two.py\n" in script
    assert "+b = 2\n \ndiff" in script
    files = ["tests/test_a.py", "tests/old.py", "tests/one.py", "tests/two.py"]
    assert converted({**SWE_GYM, "test_patch": patch}).test_files == files


MULTILINGUAL = {
    **{name: value for name, value in SWE_BENCH.items() if name != "environment_setup_commit"},
    "repo": "gin-gonic/gin",
    "FAIL_TO_PASS": ["TestA"],
    "eval_script": "go test",
    "log_parser": "parse_log_gotest",
}


def test_multilingual_rows_are_of_swe_bench_and_keep_the_path_of_their_image() -> None:
    assert recognise(MULTILINGUAL, ROW_FORMATS).name == "swe-bench"
    assert converted(MULTILINGUAL).environment == {"HOME": "/root"}
    assert converted(SWE_BENCH).environment["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")
    assert recognise({**SWE_BENCH, "repo": "pydantic/pydantic"}, ROW_FORMATS).name == "swe-bench"


def test_pictures_of_multimodals_tests_are_fetched_in_eval_and_are_the_tests_own() -> None:
    assert recognise(MULTIMODAL, ROW_FORMATS).name == recognise(VERIFIED, ROW_FORMATS).name == "swe-bench"
    instance = converted(MULTIMODAL)
    assert instance.test_images == {"test/fixtures/a.png": "https://example.invalid/a.png"}
    assert (instance.network, "test/fixtures/a.png" in instance.test_files) == (True, True)
    script = official_script(_columns(instance))
    assert "curl -o test/fixtures/a.png https://example.invalid/a.png" in script
    assert (converted(VERIFIED).network, converted({**MULTIMODAL, "image_assets": None}).network) == (False, False)
    with pytest.raises(InvalidRecord, match="image_assets"):
        converted({**MULTIMODAL, "image_assets": json.dumps({"test_patch": ["a.png"]})})


def test_jobs_have_the_time_that_repositories_and_tests_take(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS.values()))
    assert {(job.limits.init_s, job.limits.eval_s) for job in load_jobs(path)} == {(600.0, 2700.0)}


def test_script_of_swe_bench_is_swebenchs_own() -> None:
    assert converted(SWE_BENCH).eval_script == ""
    newer = converted({**SWE_BENCH, "eval_script": "run", "log_parser": "parse_log_pytest", "image": "a/b:latest"})
    assert (newer.eval_script, newer.log_parser, newer.image) == ("run", "parse_log_pytest", "b")


def test_tests_are_left_out_of_the_agents_patch() -> None:
    assert converted(SWE_BENCH).test_files == ["tests/test_a.py"]
    assert {"tests/test_common.py", "tests/test_uri.py"} <= set(converted(SWE_SMITH).test_files)
    assert "tests/test_uri.py" not in converted(SWE_SMITH).eval_script
    assert converted(SWE_SMITH).pass_to_pass == []
    assert converted({**GENERIC, "test_files": ["mine"]}).test_files[0] == "mine"


@pytest.mark.parametrize(
    ("form", "change", "field"),
    [
        ("swe-bench", {"FAIL_TO_PASS": "[not json"}, "FAIL_TO_PASS"),
        ("swe-bench", {"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS"),
        ("swe-bench", {"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS"),
        ("swe-bench", {"base_commit": "main; rm -rf /"}, "base_commit"),
        ("swe-bench", {"problem_statement": None}, "problem_statement"),
        ("swe-bench", {"repo": 5}, "repo"),
        ("swe-smith", {"problem_statement": ""}, "problem_statement"),
        ("swe-smith", {"FAIL_TO_PASS": ["TestMain"]}, "FAIL_TO_PASS"),
        ("r2e-gym", {"expected_output_json": "[]"}, "expected_output_json"),
        ("r2e-gym", {"expected_output_json": "{"}, "expected_output_json"),
        ("generic", {"test_command": " "}, "test_command"),
        ("generic", {"environment": {"A": 1}}, "environment"),
    ],
)
def test_wrong_row_is_refused_by_the_column(form: str, change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        converted({**ROWS[form], **change})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("summary", "resolved"),
    [
        ("PASSED t.py::test[a - b]\nPASSED t.py::test[a - c]\nPASSED t.py::other", True),
        ("PASSED t.py::test[a - b]\nPASSED t.py::test[a - c]\nFAILED t.py::other - assert 1 - 1", False),
        ("PASSED t.py::test[a - b]\nPASSED t.py::other", True),
        ("PASSED t.py::test[x - b]\nPASSED t.py::other", False),
        ("FAILED t.py::test[a - b] - assert 0\nPASSED t.py::other", False),
        ("PASSED t.py::test[a - b]\nPASSED t.py::other\nPASSED t.py::more", False),
    ],
)
def test_r2e_s_names_are_paired_as_its_grader_does(summary: str, resolved: bool) -> None:
    """It cuts every name at ` - `, and of the names that become the same it takes the last one."""
    expected = {"test[a - b]": "FAILED", "test[a - c]": "PASSED", "\x1b[1mother\x1b[0m": "PASSED"}
    log = f">>>>> Start Test Output\n=== short test summary info ===\n{summary}\n>>>>> End Test Output\n"
    assert r2e_report(expected, log).resolved is resolved


def test_unknown_row_is_told_the_nearest_form() -> None:
    with pytest.raises(InvalidRecord, match="r2e-gym, needs docker_image too"):
        recognise({name: value for name, value in R2E.items() if name != "docker_image"}, ROW_FORMATS)
    with pytest.raises(InvalidRecord, match=r"r2e-gym, needs docker_image \(is that docker_img\?\) too"):
        recognise({name.replace("docker_image", "docker_img"): value for name, value in R2E.items()}, ROW_FORMATS)
    for record in ({"x": 1}, {}):
        with pytest.raises(InvalidRecord, match="none is near it"):
            recognise(record, ROW_FORMATS)


@pytest.mark.parametrize(
    ("summary", "resolved"),
    [
        ("PASSED tests/t.py::TestA::test_one\nFAILED tests/t.py::TestA::test_two - assert 0", True),
        ("PASSED tests/t.py::TestA::test_one\nPASSED tests/t.py::TestA::test_two", False),
        ("PASSED tests/t.py::TestA::test_one", False),
        ("FAILED tests/t.py::TestA::test_one - Exception: PASSED\nFAILED tests/t.py::TestA::test_two", False),
        ("", False),
    ],
    ids=["as expected", "another status", "one is missing", "said by an exception", "none ran"],
)
def test_r2e_is_graded_by_its_expected_output(summary: str, resolved: bool) -> None:
    log = f">>>>> Start Test Output\n=== short test summary info ===\n{summary}\n>>>>> End Test Output\n"
    assert r2e_report(converted(R2E).expected_output, log).resolved is resolved
