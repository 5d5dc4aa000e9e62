"""What tests cost: CPU seconds, and processes started, per test and per tier; the run fails where a limit is exceeded.

A plugin of pytest (see tests/conftest.py). Each worker records what its tests cost in their reports' properties; the
process that collects the reports prints the sums. CPU seconds are those of the worker and of the children it has
waited for; the cost of a process that several tests share counts for the test at whose end it ends. Starts are recorded
by `watched/watch_starts.py`, in every Python process that the virtual environment's `.pth` file reaches.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import bare
from support.tiers import LIMITS, PROOF, TIERS, UNIT, mark_all_but_few, tier_of, tiers_of_file

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
WATCH = Path(__file__).resolve().parent / "watched"
SHOWN = 20
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
"""Audit events of Python."""
PROPERTY = "cost"
EXCEEDED = "prorl/exceeded"
"""Under this name the cache of pytest keeps the limits that the last run exceeded; `.ci/again.sh` looks there."""


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


@dataclass
class Cost:
    """What a test has cost, in all of its phases."""

    tier: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    processes: int = 0
    interpreters: int = 0
    asks: set[str] = field(default_factory=set)
    not_unit: str = ""
    """Why the test cannot be of tier `unit`, as far as `--survey` saw."""

    def add(self, phase: dict[str, Any], wall_s: float) -> None:
        """Add what one phase of the test has cost."""
        self.tier = phase["tier"]
        self.wall_s += wall_s
        self.cpu_s += phase["cpu_s"]
        self.processes += phase["processes"]
        self.interpreters += phase["interpreters"]
        self.asks |= set(phase["asks"])
        self.not_unit = self.not_unit or phase["not_unit"]


def exceeded(costs: dict[str, Cost]) -> list[str]:
    """Return one line for each limit of `tiers.LIMITS` that the tests' costs exceed."""
    found = []
    for tier, limit in LIMITS.items():
        mine = [cost for cost in costs.values() if cost.tier == tier]
        for what, most in (("processes", limit.processes), ("interpreters", limit.interpreters)):
            count = sum(getattr(cost, what) for cost in mine)
            if count > most:
                found.append(f"the tests of tier {tier} started {count} {what}; the limit is {most}: {REMEDY}")
    return found


REMEDY = "share a service or call in the process (see CONTRIBUTING.md), or raise the limit in tests/support/tiers.py"


def asks_among(lines: list[str]) -> set[str]:
    """Return what `watch_starts` saw code of the package ask for."""
    return {line.split()[1] for line in lines if line.startswith("asks ")}


class NotAllowed(AssertionError):
    """A unit test starts a process or sleeps. Where code under test catches this, the test fails when it has ended."""


class Meter:
    """Measures the tests that this process runs.

    Args:
        starts: the file to which `watch_starts` appends.
        survey: watch every test as if it were of tier `unit`, and note what it does that none may.
    """

    def __init__(self, starts: Path, *, survey: bool) -> None:
        self.survey = survey
        starts.touch(0o600)
        self._starts = starts.open("rb")  # kept: some tests run as another user, who could not open it
        self.collected_cpu_s = 0.0
        self._new: list[str] = []
        self._cpu_s = cpu_s()
        self._unit = ""
        """Which unit test is running."""
        self._not_allowed = ""
        self._main = threading.get_ident()
        sys.addaudithook(self._on_event)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._starts.close()

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        # A thread of a fixture that other tests use may start processes.
        if self._unit and event in STARTS and threading.get_ident() == self._main:
            self._refuse(f"started a process ({event} {arguments[:2]})")

    def _refuse(self, what: str) -> None:
        self._not_allowed = f"{self._unit} {what}, which no test of tier {UNIT} may (tests/support/tiers.py)"
        if not self.survey:
            raise NotAllowed(self._not_allowed)

    def _look(self) -> list[str]:
        """Read what was recorded since the last look."""
        text = self._starts.read()
        lines = text.decode().splitlines()
        self._new += lines
        return lines

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        platform.platform()  # starts `uname` the first time: libraries ask for it, in unit tests too
        self._look()
        self._new = []
        self.collected_cpu_s = self._cpu_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._not_allowed = ""
        bare.guards.begin()
        if self.survey or tier_of(item) == UNIT:
            self._unit = item.nodeid
            sleep, async_sleep = time.sleep, asyncio.sleep
            time.sleep, asyncio.sleep = self._sleep(sleep), self._async_sleep(async_sleep)  # type: ignore[assignment]
            try:
                return (yield)
            finally:
                time.sleep, asyncio.sleep, self._unit = sleep, async_sleep, ""
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self._unit = ""  # what ends now may be of other tests: a service that they shared

    def _sleep(self, sleep: Any) -> Any:
        def refused(seconds: float) -> None:
            if self._unit and threading.get_ident() == self._main:
                self._refuse(f"slept for {seconds} s")
            sleep(seconds)

        return refused

    def _async_sleep(self, sleep: Any) -> Any:
        def refused(delay: float, result: Any = None) -> Any:
            if delay > 0 and self._unit and threading.get_ident() == self._main:
                self._refuse(f"slept for {delay} s")
            return sleep(delay, result)

        return refused

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        self._look()
        with bare.guards.setting_up(fixturedef, request) as key:
            try:
                return (yield)
            finally:
                if fixturedef.scope != "function":
                    bare.guards.asked(key, asks_among(self._look()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        self._look()
        tier = tier_of(item)
        # Asked for once per test: a worker of many threads and children takes 0.2 ms for the answer.
        now = cpu_s() if call.when == "teardown" else self._cpu_s
        # What others start meanwhile, such as a service that tests share, counts with the next test of another tier.
        own = f" {os.getpid()}" if call.when != "teardown" else " -"
        later = [line for line in self._new if tier == UNIT and not self.survey and not line.endswith(own)]
        lines, self._new = [line for line in self._new if line not in later], later
        kinds = Counter(line.split()[0] for line in lines)
        if kinds["process"] and self._unit and not self._not_allowed:
            self._not_allowed = f"{self._unit} started a process, which no test of tier {UNIT} may"
        phase = {
            "tier": tier,
            "not_unit": self._not_allowed,
            "cpu_s": now - self._cpu_s,
            "processes": kinds["process"],
            "interpreters": kinds["interpreter"],
            "asks": sorted(bare.guards.unguarded(item, asks_among(lines))),
        }
        item.user_properties[:] = [*(one for one in item.user_properties if one[0] != PROPERTY), (PROPERTY, phase)]
        self._cpu_s = now
        report = yield
        if report.passed and call.when == "call" and self._not_allowed and not self.survey:
            report.outcome, report.longrepr = "failed", self._not_allowed
        return report


class Bill:
    """Collects the costs of all tests, and prints them at the end."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.marked_bare: set[str] = set()
        self.collected_cpu_s = 0.0
        self.meter: Meter | None = None
        """Of this process, where it runs the tests itself."""
        self.failures: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, phase in report.user_properties:
            if name == PROPERTY:
                self.costs[report.nodeid].add(phase, report.duration)
        if bare.MARKER in report.keywords:
            self.marked_bare.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.collected_cpu_s += getattr(node, "workeroutput", {}).get("collected_cpu_s", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.getoption("limits"):
            self.failures = [*exceeded(self.costs), *bare.unmarked(self._asking(), self.marked_bare)]
            if not any(cost.interpreters for cost in self.costs.values()):
                self.failures.append("no interpreter was counted: .ci/watch_starts.pth is not in the environment")
            if self.config.cache is not None:
                self.config.cache.set(EXCEEDED, self.failures)
            if self.failures and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := self.config.getoption("costs"):
            rows = {name: {**vars(cost), "asks": sorted(cost.asks)} for name, cost in self.costs.items()}
            Path(path).write_text(json.dumps(rows, indent=1))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _asking(self) -> dict[str, set[str]]:
        return {name: cost.asks for name, cost in self.costs.items() if cost.asks}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.costs:
            return
        write = terminalreporter.write_line
        terminalreporter.section("what the tests cost")
        write(f"{'tier':12}{'tests':>8}{'CPU s':>10}{'processes':>11}{'limit':>8}{'interpreters':>14}{'limit':>8}")
        for tier in TIERS:
            mine = [cost for cost in self.costs.values() if cost.tier == tier]
            if mine:
                counts = sum(cost.processes for cost in mine), sum(cost.interpreters for cost in mine)
                limit = LIMITS.get(tier)
                most = ("–", "–") if limit is None else (limit.processes, limit.interpreters)
                words = f"{tier:12}{len(mine):8}{sum(cost.cpu_s for cost in mine):10.1f}"
                write(f"{words}{counts[0]:11}{most[0]:>8}{counts[1]:14}{most[1]:>8}")
        collected_cpu_s = self.collected_cpu_s if self.meter is None else self.meter.collected_cpu_s
        write(f"{'collection':12}{'':8}{collected_cpu_s:10.1f}")
        write(f"{'whole run':12}{len(self.costs):8}{cpu_s():10.1f}")
        write("")
        write(f"{'CPU s':>8}{'wall s':>8}{'processes':>11}  the {SHOWN} most expensive tests")
        for name, cost in sorted(self.costs.items(), key=lambda row: -row[1].cpu_s)[:SHOWN]:
            write(f"{cost.cpu_s:8.2f}{cost.wall_s:8.2f}{cost.processes:11}  {name}")
        for line in self.failures:
            write(f"FAILED: {line}", red=True)


class WorkerEnd:
    """Hands a worker's cost of collection to the process that collects the reports."""

    def __init__(self, config: Any, meter: Meter) -> None:
        self.config, self.meter = config, meter

    def pytest_sessionfinish(self) -> None:
        self.config.workeroutput["collected_cpu_s"] = self.meter.collected_cpu_s


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("costs", "tiers, and what tests cost")
    group.addoption("--tier", action="append", default=[], choices=TIERS, help="run tests of this tier (--tier=unit)")
    group.addoption("--bare", action="store_true", help="run tests marked `bare`")
    group.addoption("--limits", action="store_true", help="fail if a limit of tests/support/tiers.py is exceeded")
    group.addoption("--survey", action="store_true", help="note in --costs what each test does that no unit test may")
    group.addoption("--costs", default="", metavar="FILE", help="write what each test cost, as JSON (--costs=FILE)")


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is None:
        folder = Path(tempfile.mkdtemp(prefix="prorl-costs-"))
        os.environ["PRORL_TEST_WATCH"] = str(WATCH)
        os.environ["PRORL_TEST_STARTS"] = str(folder / "main")
        bill = Bill(config, folder)
        config.pluginmanager.register(bill, "costs-bill")
        if config.getoption("numprocesses", None):
            return
    else:
        os.environ["PRORL_TEST_STARTS"] += f".{worker['workerid']}"
    starts = Path(os.environ["PRORL_TEST_STARTS"])
    sys.path.append(str(WATCH))
    import watch_starts

    sys.path.remove(str(WATCH))
    watch_starts.file = str(starts)
    watch_starts.begin()
    meter = Meter(starts, survey=config.getoption("survey"))
    config.pluginmanager.register(meter, "costs-meter")
    if worker is None:
        bill.meter = meter
    else:
        config.pluginmanager.register(WorkerEnd(config, meter), "costs-worker-end")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files alone that have no test of the chosen tiers: to import them takes most of a short run."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(ROOT):
        return None
    path, chosen = str(collection_path.relative_to(ROOT)), set(config.getoption("tier"))
    other_tier = chosen and PROOF not in chosen and not chosen & tiers_of_file(path)
    return True if other_tier or (config.getoption("bare") and not bare.may_have(path)) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_all_but_few(items)
    for item in items:
        if bare.is_bare(item.nodeid):
            item.add_marker(bare.MARKER)
        if tier_of(item) == PROOF and item.get_closest_marker("vllm") is None:
            item.add_marker(PROOF)  # of a file whose tests all are
    chosen = set(config.getoption("tier")) or set(TIERS)
    runs = [
        tier_of(item) in chosen and (not config.getoption("bare") or bare.MARKER in item.keywords) for item in items
    ]
    config.hook.pytest_deselected(items=[item for item, run in zip(items, runs, strict=True) if not run])
    items[:] = [item for item, run in zip(items, runs, strict=True) if run]
