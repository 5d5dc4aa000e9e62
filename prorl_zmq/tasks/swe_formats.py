"""Row formats of SWE-bench and its relatives, SWE-Gym, SWE-smith, R2E-Gym, and our own.

An instance's image is named by the last part of the name that its set published; `prorl tasks images FILE` builds such
images, and a folder of SIF files works too.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..errors import InvalidRecord
from ..wire.messages.jobs import PhaseLimits
from .row_format import filled, formats_of, mapping, native, parsed_json, text, texts
from .swe import TESTBED, SweInstance

if TYPE_CHECKING:
    from .row_format import Record

START, END, EXIT_CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
"""swebench's marks in the output of an evaluation script."""
HEREDOC = "EOF_114329324912"
"""swebench's end of a patch within a script."""
ROOT = {"HOME": "/root"}
"""The home of the images' builder, with the caches of Go, npm and others."""
CONDA = "/opt/miniconda3"
CONDA_ENVIRONMENT = {
    **ROOT,
    "PATH": f"{CONDA}/envs/testbed/bin:{CONDA}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "CONDA_PREFIX": f"{CONDA}/envs/testbed",
    "CONDA_DEFAULT_ENV": "testbed",
}
"""The effect of `conda activate testbed` in the images of SWE-bench, SWE-Gym and SWE-smith."""
PYTEST = "pytest --color=no --tb=no -rA -p no:cacheprovider"
PYTEST_FILES = [":(glob)**/conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", ":(glob)**/*-info/**"]
"""Files that decide which tests run, and how; the last pattern is package metadata, which may name pytest plugins."""
CONDA_REPOSITORIES = frozenset(
    {
        *("astropy/astropy", "dbt-labs/dbt-core", "django/django", "marshmallow-code/marshmallow"),
        *("matplotlib/matplotlib", "mwaskom/seaborn", "pallets/flask", "psf/requests", "pvlib/pvlib-python"),
        *("pydata/xarray", "pydicom/pydicom", "pylint-dev/astroid", "pylint-dev/pylint", "pytest-dev/pytest"),
        *("pyvista/pyvista", "scikit-learn/scikit-learn", "sphinx-doc/sphinx", "sqlfluff/sqlfluff", "sympy/sympy"),
    }
)
"""SWE-bench's Python repositories; other languages' images have their own PATH."""
SWE_GYM_REPOSITORIES = frozenset(
    {
        *("bokeh/bokeh", "conan-io/conan", "dask/dask", "facebookresearch/hydra", "getmoto/moto", "iterative/dvc"),
        *("modin-project/modin", "pandas-dev/pandas", "Project-MONAI/MONAI", "pydantic/pydantic", "python/mypy"),
    }
)
"""Distinguish its rows from those of SWE-bench, which have the same columns."""
SWE_LIMITS = PhaseLimits(init_s=600.0, run_s=3600.0, eval_s=2700.0)
"""Large repositories take minutes to check out, and tests half an hour."""
R2E_PATH = "/testbed/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class _Tests(NamedTuple):
    """The tests that decide whether an issue is resolved."""

    fail_to_pass: list[str]
    pass_to_pass: list[str]

    def files(self) -> list[str]:
        """Return the files of tests with pytest's names: `path/test_a.py::test_b`."""
        return sorted({name.partition("::")[0] for name in (*self.fail_to_pass, *self.pass_to_pass) if "::" in name})

    def packages(self) -> list[str]:
        """Return the test packages' modules that are imported with those files."""
        folders = {folder for file in self.files() for folder in PurePosixPath(file).parents}
        return sorted(f"{folder}/__init__.py" for folder in folders if folder.name.startswith("test"))


def _swe_bench(record: Record) -> SweInstance:
    test_patch = text(record, "test_patch")
    test_images = _test_images(record)
    image = f"swebench/sweb.eval.x86_64.{filled(record, 'instance_id').replace('__', '_1776_')}".lower()
    return msgspec.structs.replace(
        _issue(record, _tests(record), text(record, "image", "") or image),
        base_commit=_commit(record),
        test_patch=test_patch,
        test_images=test_images,
        test_files=[*changed_files(test_patch), *test_images],
        network=bool(test_images),
        eval_script=text(record, "eval_script", ""),
        log_parser=text(record, "log_parser", ""),
        environment=CONDA_ENVIRONMENT if filled(record, "repo") in CONDA_REPOSITORIES else ROOT,
    )


def _test_images(record: Record) -> dict[str, str]:
    """Return the pictures of SWE-bench Multimodal's tests."""
    assets = parsed_json(record, "image_assets") if record.get("image_assets") else {}
    try:
        return {str(each["path"]): str(each["url"]) for each in assets.get("test_patch") or ()}
    except (AttributeError, TypeError, KeyError):
        message = "image_assets must be a map, with a list of path and url in test_patch"
        raise InvalidRecord(message, field="image_assets") from None


def _swe_gym(record: Record) -> SweInstance:
    test_patch = text(record, "test_patch")
    image = f"xingyaoww/sweb.eval.x86_64.{filled(record, 'instance_id').replace('__', '_s_')}".lower()
    if filled(record, "repo") == "python/mypy":  # its tests are cases of data files, which pytest knows by name
        cases = " or ".join(re.findall(r"^[+ ]\[case ([^\]\s]+)\]", test_patch, re.MULTILINE))
        command = f"pytest -n0 -rA -k {shlex.quote(cases)}"
    else:
        there = changed_files(test_patch, after=True)
        command = " ".join((PYTEST, *(shlex.quote(each) for each in there if each.endswith(".py"))))
    return msgspec.structs.replace(
        _issue(record, _tests(record), image),
        base_commit=_commit(record),
        test_patch=test_patch,
        test_files=changed_files(test_patch),
        eval_script=eval_script(command, TESTBED, test_patch),
        log_parser="parse_log_pytest",
        environment=CONDA_ENVIRONMENT,
    )


def _swe_smith(record: Record) -> SweInstance:
    """Convert SWE-smith: as there, only the files of FAIL_TO_PASS are run, and PASS_TO_PASS is restricted to them."""
    tests = _tests(record)
    files = _Tests(tests.fail_to_pass, []).files()
    if not any(file.endswith(".py") for file in files):
        raise InvalidRecord(
            "FAIL_TO_PASS has no test of a .py file: only SWE-smith's Python part", field="FAIL_TO_PASS"
        )
    if not text(record, "problem_statement", ""):
        message = "problem_statement is empty, as in many rows of SWE-smith: leave these rows out"
        raise InvalidRecord(message, field="problem_statement")
    image = filled(record, "image_name").replace("__", "_1776_")
    return msgspec.structs.replace(
        _issue(record, tests, image if "/" in image else f"jyangballin/{image}"),
        pass_to_pass=[test for test in tests.pass_to_pass if test.partition("::")[0] in files],
        setup_patch=filled(record, "patch"),
        test_files=[*tests.files(), *tests.packages(), *PYTEST_FILES],
        eval_script=eval_script(" ".join((PYTEST, "--verbose", *map(shlex.quote, files))), TESTBED),
        log_parser="parse_log_pytest",
        environment=CONDA_ENVIRONMENT,
    )


def _r2e(record: Record) -> SweInstance:
    image = filled(record, "docker_image")
    return SweInstance(
        instance_id=text(record, "instance_id", "") or image_name(image),
        problem_statement=filled(record, "problem_statement"),
        image=image_name(image),
        image_source=f"docker://{image}",
        fail_to_pass=[],
        pass_to_pass=[],
        repo=filled(record, "repo_name"),
        test_files=["r2e_tests", "run_tests.sh"],
        hidden=["/r2e_tests", "r2e_tests", "run_tests.sh"],
        eval_script=eval_script("ln -sfn /r2e_tests r2e_tests 2>/dev/null; bash run_tests.sh", TESTBED),
        environment={**ROOT, "PATH": R2E_PATH},
        grading="r2e",
        expected_output=_text_map(record, "expected_output_json"),
    )


def _generic(record: Record) -> SweInstance:
    directory = text(record, "directory", TESTBED)
    test_patch = text(record, "test_patch", "")
    tests = _tests(record)
    return SweInstance(
        fail_to_pass=tests.fail_to_pass,
        pass_to_pass=tests.pass_to_pass,
        instance_id=filled(record, "instance_id"),
        problem_statement=filled(record, "problem_statement"),
        image=image_name(filled(record, "image_name")),
        repo=text(record, "repo", ""),
        version=text(record, "version", ""),
        directory=directory,
        base_commit=_commit(record) if record.get("base_commit") else "",
        setup_patch=text(record, "bug_patch", ""),
        test_patch=test_patch,
        test_files=[
            *texts(record, "test_files", [*changed_files(test_patch), *tests.files()]),
            *tests.packages(),
            *PYTEST_FILES,
        ],
        eval_script=eval_script(filled(record, "test_command"), directory, test_patch),
        log_parser=text(record, "log_parser", "parse_log_pytest"),
        environment=_text_map(record, "environment") if record.get("environment") else {},
    )


def _is_of_swe_gym(record: Record) -> bool:
    return str(record["repo"]) in SWE_GYM_REPOSITORIES and "environment_setup_commit" not in record


_row_format = formats_of("swe", SWE_LIMITS)
ROW_FORMATS = (
    _row_format(
        "generic",
        "what `prorl tasks make-swe` writes: any image with a repository, and a command that runs its tests",
        {"instance_id", "problem_statement", "image_name", "test_command", "FAIL_TO_PASS", "PASS_TO_PASS"},
        _generic,
    ),
    _row_format(
        "swe-gym",
        "SWE-Gym and SWE-Gym Lite, recognized by their repositories",
        {"instance_id", "repo", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"},
        _swe_gym,
        _is_of_swe_gym,
    ),
    _row_format(
        "swe-bench",
        "SWE-bench, Lite, Verified, Multilingual, and the text of Multimodal (EVAL fetches pictures that tests want)",
        {"instance_id", "repo", "base_commit", "version", "test_patch", "FAIL_TO_PASS"},
        _swe_bench,
    ),
    _row_format(
        "swe-smith",
        "SWE-smith (its Python part): `patch` is the bug",
        {"instance_id", "repo", "patch", "image_name", "FAIL_TO_PASS", "PASS_TO_PASS"},
        _swe_smith,
    ),
    _row_format(
        "r2e-gym",
        "R2E-Gym (Lite, Subset, V1): graded by the expected output of its tests",
        {"repo_name", "docker_image", "expected_output_json", "problem_statement"},
        _r2e,
    ),
    dataclasses.replace(native("swe", SweInstance), limits=SWE_LIMITS),
)


def image_name(reference: str) -> str:
    """Return an image's name on a node for that of a container image: `b.c` for `a/b.c:latest`; paths are unchanged."""
    if reference.startswith("/"):
        return reference
    last = reference.rpartition("/")[2]
    name, _, tag = last.partition(":")
    return name if tag in ("", "latest") else f"{name}-{tag}"


def eval_script(command: str, directory: str, test_patch: str = "") -> str:
    """Return a script that runs tests in swebench's form: marks around the output, then the exit code."""
    lines = ["#!/bin/bash", "set -uxo pipefail", f"cd {shlex.quote(directory)}"]
    if test_patch:  # to its last line, which may be a blank of the context
        patch = test_patch.removesuffix("\n")
        lines.append(f"git apply -v --whitespace=nowarn - <<'{HEREDOC}' || exit 1\n{patch}\n{HEREDOC}")
    lines += [f": '{START}'", command, "code=$?", f": '{END}'", f'echo "{EXIT_CODE}: $code"']
    return "\n".join(lines) + "\n"


def changed_files(patch: str, *, after: bool = False) -> list[str]:
    """Return the files that a patch changes, adds or removes; `after`: those that exist after it."""
    found = re.findall(r"^diff --git a/(.*) b/(.*)\n(deleted file)?", patch, re.MULTILINE)
    if after:
        return list(dict.fromkeys(new for _, new, deleted in found if not deleted))
    return list(dict.fromkeys(name for *pair, _ in found for name in pair))


def _issue(record: Record, tests: _Tests, image: str) -> SweInstance:
    """Return an instance of the columns that SWE-bench's relatives share."""
    return SweInstance(
        fail_to_pass=tests.fail_to_pass,
        pass_to_pass=tests.pass_to_pass,
        instance_id=filled(record, "instance_id"),
        problem_statement=filled(record, "problem_statement"),
        image=image_name(image),
        image_source=f"docker://{image}",
        repo=filled(record, "repo"),
        version=text(record, "version", ""),
    )


def _tests(record: Record) -> _Tests:
    fail_to_pass = texts(record, "FAIL_TO_PASS", [])
    pass_to_pass = texts(record, "PASS_TO_PASS", [])
    if not fail_to_pass:
        raise InvalidRecord("FAIL_TO_PASS names no test, so nothing could be resolved", field="FAIL_TO_PASS")
    return _Tests(fail_to_pass, pass_to_pass)


def _text_map(record: Record, name: str) -> dict[str, str]:
    texts_by_name = dict(mapping(record, name, "of texts"))
    if not all(isinstance(each, str) for each in texts_by_name.values()):
        raise InvalidRecord(f"{name} must be a map of texts", field=name)
    return texts_by_name


def _commit(record: Record) -> str:
    commit = filled(record, "base_commit")
    if not re.fullmatch(r"[0-9a-fA-F]{7,64}", commit):
        raise InvalidRecord(f"base_commit is not a commit: {commit[:80]!r}", field="base_commit")
    return commit
