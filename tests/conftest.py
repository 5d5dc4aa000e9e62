"""For all tests: Hypothesis without deadlines; logging put back; one service of a worker, and one real vLLM server."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.sandboxes import sandboxes_of, shared_sandboxes
from vllm_server import VllmServer

from prorl_zmq.metrics.catalog import METRICS
from prorl_zmq.metrics.metric import Metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.services import SharedService

__all__ = ["sandboxes_of", "shared_sandboxes"]  # fixtures

pytest_plugins = ["support.costs", "support.due"]
LONGEST_ID = 100
gc.set_threshold(20_000, 20, 20)  # a worker keeps millions of objects, which all collections walk
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # where others work too, threads wait for each other for seconds
os.environ["RAY_ADDRESS"] = "local"  # without it Ray joins whatever cluster a file of the machine names, dead or alive
settings.register_profile(
    "quick",
    deadline=None,
    max_examples=20,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase != Phase.explain],  # it traces every line: ten times slower
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=2000, stateful_step_count=80)
settings.register_profile("many", parent=settings.get_profile("quick"), max_examples=100)
settings.load_profile("quick")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name long values by their length: each worker keeps all ids, sends them, and repeats them in its reports."""
    return f"{argname} of {len(val)}" if isinstance(val, str | bytes) and len(val) > LONGEST_ID else None


@pytest.fixture(autouse=True)
def logging_kept() -> Iterator[None]:
    """Put back what `start_logging` and a metrics reporter change; a handler would write to a closed stream."""
    root, package = logging.getLogger(), logging.getLogger("prorl")
    handlers, levels, hook = root.handlers[:], (root.level, package.level), sys.excepthook
    counting = Metric.counting
    yield
    Metric.counting = counting
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    for logger, level in zip((root, package), levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)  # forgets what all loggers have found out about their levels
    sys.excepthook = hook


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the collector of garbage from looking through modules and items, which stay: that takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one worker run all tests of the shared service: each further one takes seconds of CPU."""
    for item in items:
        definitions = getattr(item, "_fixtureinfo").name2fixturedefs.get("served")  # noqa: B009 - a private attribute
        if definitions and definitions[-1].scope == "session" and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("served"))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process counts metrics, from nothing."""
    monkeypatch.setattr(Metric, "counting", True)
    yield
    for metric in METRICS.values():
        for _, labels, _ in tuple(metric.rows()):
            metric.delivered(labels)


@pytest.fixture(scope="session", autouse=True)
def _forks() -> Iterator[None]:
    """What tests start in Python is a fork of a process of the worker that has imported it."""
    from support import forks

    with forks.instead_of_starts():
        yield


@pytest.fixture
def started_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package starts in this test are interpreters, as for a user."""
    from support import forks

    forks.start_interpreters(monkeypatch)


@pytest.fixture(scope="session")
def served() -> Iterator[SharedService]:
    """The service of all tests that neither stop nor configure one: with a gateway, a dashboard and an engine."""
    from support.services import SharedService

    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = SharedService(Path(folder))
        try:
            service.wait_ready()
            yield service
        finally:
            service.close()


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM server for all tests that use one; half a minute to start. They are marked `vllm`."""
    with VllmServer(tmp_path_factory.mktemp("vllm-server")) as server:
        yield server
