"""Tests marked `bare` must also pass on a bare machine: without sandbox programs, and with an empty HOME.

On other machines, `support.costs` sees which tests make the package look for such a program or for HOME. Each of them
must be in `TESTS`, so that `make bare` runs it, unless the test is skipped without the program: then `guarded` was
called for it, or it has a `skipif` whose reason names the program's kind.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.tiers import begins

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

MARKER = "bare"
TESTS = (
    "tests/commands/test_clean.py",
    "tests/commands/test_image.py",
    "tests/commands/test_keys.py",
    "tests/commands/test_usage.py::test_doctor_names_what_it_found",
    "tests/make_swe/test_make_swe.py::test_without_apptainer_it_says_so",
    "tests/security/test_keys.py::test_which_folder_is_meant",
    "tests/inference/test_engine_kind.py::test_doctor_init_and_eval_know_the_kind",
    "tests/service/test_run_dir.py",
    "tests/stages/test_package_installer.py",
    "tests/test_config.py::test_a_wrong_value_is_named_in_one_line",
    "tests/test_config.py::test_the_run_dir_is_one_per_user_unless_it_is_named",
    "tests/test_documents.py::test_command[prorl doctor]",
    "tests/test_documents.py::test_engine_of_ones_own",
    "tests/test_documents.py::test_command[prorl image list]",
    "tests/test_documents.py::test_command[prorl init]",
    "tests/tools/images/test_debootstrap.py",
    "tests/tools/images/test_image_store.py",
    "tests/tools/images/test_interrupted_build.py",
    "tests/tools/sandbox/test_apptainer.py",
    "tests/tools/sandbox/test_bubblewrap.py::test_a_machine_without_it_says_what_to_do",
    "tests/tools/sandbox/test_kinds.py",
    "tests/tools/sandbox/test_root_image.py",
)
"""What is marked: folders, files and tests."""
KINDS = ("apptainer", "bubblewrap", "debootstrap")
Key = tuple[str, str, str]
"""A fixture: its name, where it is defined, and its parameter."""


class Guards:
    """Remembers which tests and fixtures skip themselves without a sandbox program, and which fixtures ask for one."""

    def __init__(self) -> None:
        self._stack: list[Key] = []
        self._guarded: set[Key] = set()
        self._asks: dict[Key, set[str]] = {}
        self._guarded_item = False

    def begin(self) -> None:
        """Begin with another test."""
        self._guarded_item = False

    def guard(self) -> None:
        """Note that the running test, and the fixture that is set up, skip themselves."""
        self._guarded_item = True
        self._guarded |= set(self._stack)

    @contextmanager
    def setting_up(self, fixture: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Key]:
        """Attribute what happens in the context to a fixture."""
        key = (fixture.argname, fixture.baseid, repr(getattr(request, "param", None)))
        self._stack.append(key)
        try:
            yield key
        finally:
            self._stack.pop()

    def asked(self, key: Key, what: set[str]) -> None:
        """Note what a fixture has asked for: all tests that use it depend on it."""
        self._asks.setdefault(key, set()).update(what)

    def unguarded(self, item: Any, what: set[str]) -> set[str]:
        """Return what a test and its fixtures ask for, unless the test is skipped without it."""
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        keys = {
            (definitions[-1].argname, definitions[-1].baseid, repr(parameters.get(name)))
            for name, definitions in item._fixtureinfo.name2fixturedefs.items()
            if definitions
        }
        reasons = [str(marker.kwargs.get("reason", "")).lower() for marker in item.iter_markers("skipif")]
        if self._guarded_item or keys & self._guarded or any(kind in reason for kind in KINDS for reason in reasons):
            return set()
        return what.union(*(self._asks.get(key, set()) for key in keys))


def is_bare(test: str) -> bool:
    """Return whether a test must pass on a bare machine too."""
    return any(begins(test, listed) for listed in TESTS)


def may_have(path: str) -> bool:
    """Return whether tests of a file are listed."""
    return any(begins(path, listed.partition("::")[0]) for listed in TESTS)


guards = Guards()
"""Of this process."""


def guarded(kind: str) -> None:
    """Note that the running test is skipped where this machine cannot make sandboxes of a kind."""
    if kind in KINDS:
        guards.guard()


def unmarked(asking: dict[str, set[str]], marked: set[str]) -> list[str]:
    """Return one line for each test that asks for a sandbox program or HOME without being marked."""
    return [
        f"{test} makes the package look for {', '.join(sorted(asking[test]))}, and is neither listed in "
        "tests/support/bare.py nor skipped where it is missing (needed.usable)"
        for test in sorted(asking.keys() - marked)
    ]
