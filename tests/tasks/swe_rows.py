"""Rows as the published software-engineering sets have them, cut short."""

from __future__ import annotations

import json
from typing import Any

TEST_PATCH = (
    "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n"
    "@@ -1 +1,2 @@\n a = 1\n+b = 2\n"
)
BASE = "0123456789abcdef0123456789abcdef01234567"
SWE_BENCH: dict[str, Any] = {
    "repo": "psf/requests",
    "instance_id": "psf__requests-2317",
    "base_commit": BASE,
    "patch": "diff --git a/requests/sessions.py b/requests/sessions.py\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "method = builtin_str(method) problem",
    "hints_text": "",
    "created_at": "2014-11-01T02:20:16Z",
    "version": "2.4",
    "FAIL_TO_PASS": json.dumps(["tests/test_a.py::test_b"]),
    "PASS_TO_PASS": json.dumps(["tests/test_a.py::test_a"]),
    "environment_setup_commit": BASE,
}
VERIFIED = {**SWE_BENCH, "difficulty": "15 min - 1 hour"}
MULTIMODAL = {
    **{name: value for name, value in SWE_BENCH.items() if name != "environment_setup_commit"},
    "repo": "chartjs/Chart.js",
    "instance_id": "chartjs__Chart.js-10301",
    "version": "3.7",
    "image_assets": json.dumps(
        {
            "problem_statement": ["https://example.invalid/seen.png"],
            "patch": [],
            "test_patch": [{"path": "test/fixtures/a.png", "url": "https://example.invalid/a.png"}],
        }
    ),
}
SWE_GYM = {
    **{name: value for name, value in SWE_BENCH.items() if name != "environment_setup_commit"},
    "repo": "getmoto/moto",
    "instance_id": "getmoto__moto-5752",
    "FAIL_TO_PASS": ["tests/test_a.py::test_b"],
    "PASS_TO_PASS": [],
}
MYPY = {
    **SWE_GYM,
    "repo": "python/mypy",
    "instance_id": "python__mypy-9",
    "test_patch": TEST_PATCH.replace("+b = 2", "+[case testNew]"),
}
SWE_SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "patch": "diff --git a/oauthlib/common.py b/oauthlib/common.py\n",
    "FAIL_TO_PASS": ["tests/test_common.py::EncodingTest::test_it"],
    "PASS_TO_PASS": ["tests/test_uri.py::test_more"],
    "image_name": "swesmith.x86_64.oauthlib__oauthlib.1fd52536",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "problem_statement": "urldecode raises",
}
R2E = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41654",
    "commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41654",
    "parsed_commit_content": "{}",
    "execution_result_content": "{}",
    "expected_output_json": json.dumps({"TestA.test_one": "PASSED", "\u001b[1mTestA.test_two\u001b[0m": "FAILED"}),
    "problem_statement": "[ISSUE] it leaks",
}
GENERIC = {
    "instance_id": "mine-1",
    "problem_statement": "it is wrong",
    "image_name": "mine",
    "directory": "/src",
    "bug_patch": "diff --git a/a.py b/a.py\n",
    "patch": "diff --git a/a.py b/a.py\n",
    "test_command": "python3 -m pytest -rA",
    "FAIL_TO_PASS": ["test_a.py::test_b"],
    "PASS_TO_PASS": [],
}
