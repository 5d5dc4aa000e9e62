"""A plugin of pytest that runs the proofs that are due: `--proofs=due` (see `support.proofs`)."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.proofs import ROOT, BadTurn, Due, Proof, Turn, due, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

REPORT = "proofs"


def git(folder: Path, *arguments: str) -> str:
    """Return what a command of git prints."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def with_quarter(turn: Turn, folder: Path = ROOT) -> tuple[Turn, list[str]]:
    """Return the turn of the submission, and what to print; the count of commits replaces a number that is stale."""
    try:
        later = git(
            folder, "rev-list", "--count", "--no-merges", f"{turn.raised_at or 'none'}..HEAD", "--", ":!.ci/turn.toml"
        )
    except subprocess.CalledProcessError:  # a clone without history, of which all proofs are due, or no such commit
        later = "all"
    if later == "0":
        return turn, []
    count = int(git(folder, "rev-list", "--count", "HEAD"))
    words = f".ci/turn.toml is older than {later} commits, so their count chooses the quarter: run make turn"
    return replace(turn, number=count), [words]


def changed_since(commit: str) -> list[str] | None:
    """Return the files that differ from those of a commit; None where it is not of this repository's history."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", "--no-renames", commit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if commit and done.returncode == 0 else None


def id_of(nodeid: str) -> str:
    """Return the id of a test without the xdist group that `--dist loadgroup` appends."""
    name, at, group = nodeid.rpartition("@")
    return name if at and "]" not in group else nodeid


def proof_of(item: pytest.Item) -> Proof | None:
    """Describe a collected test, if it is a proof."""
    vllm, mark = item.get_closest_marker("vllm") is not None, item.get_closest_marker("proof")
    if not vllm and mark is None:
        return None
    quick = mark is not None and mark.kwargs.get("quick", False)
    parameters: Iterable[Any] = item.callspec.params.values() if hasattr(item, "callspec") else ()
    benches = [f"bench/{value}.py" for value in parameters if isinstance(value, str)]
    ran = next((bench for bench in benches if item.path.name == "test_bench.py" and (ROOT / bench).is_file()), "")
    return Proof(id_of(item.nodeid), vllm, ran, quick)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proofs", "which proofs run")
    group.addoption("--proofs", choices=("all", "due"), default="all", help="run those that are due (--proofs=due)")
    group.addoption("--environments-to", default="", metavar="FILE", help="write which environments those need")


@pytest.hookimpl(trylast=True)  # when -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("proofs") == "all":
        return
    try:
        turn, notes = with_quarter(Turn.read())
    except BadTurn as error:
        raise pytest.UsageError(str(error)) from error
    changed = changed_since(turn.since)
    proofs = {item: proof for item in items if (proof := proof_of(item))}
    if changed is None:
        lines = [f"the commit {turn.since!r} of .ci/turn.toml is not in this clone, so all proofs are due"]
        found = Due(turn, environments=sorted({proof.environment for proof in proofs.values()} - {""}))
    else:
        found = due(proofs.values(), changed, turn)
        lines = found.lines()
        left_out = [item for item, proof in proofs.items() if proof.id not in found.reasons]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    config.stash[REPORTED] = [*notes, *lines]
    if path := config.getoption("environments_to"):
        Path(path).write_text(" ".join(found.environments))


REPORTED = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[REPORT] = session.config.stash.get(REPORTED, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[REPORTED] = getattr(node, "workeroutput", {}).get(REPORT, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := config.stash.get(REPORTED, []):
        terminalreporter.section("proofs that are due")
        for line in lines:
            terminalreporter.write_line(line)
        if failed := sorted({id_of(report.nodeid) for report in terminalreporter.getreports("failed")}):
            terminalreporter.write_line("failed; to run them in the next submission too, list them in .ci/turn.toml:")
            for test in failed:
                terminalreporter.write_line(f"  {quoted(test)},")
