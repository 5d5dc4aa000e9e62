"""Which proofs a submission runs: those whose code it changed, those that failed, and one quarter of the rest.

Four submissions in a row run every proof. Which quarter is due follows from `.ci/turn.toml`:

    number = 18        # of this submission; number % 4 is the quarter
    since = "2f6c…"    # the commit that landed last: what has changed since then is this submission
    raised_at = "ab…"  # the last commit before this file was written
    again = []         # ids of proofs to run whatever the quarter

`make turn` writes the file, as the last commit of a submission. The number is one more than in the landed commit's
file, so no quarter is skipped. If commits follow the file, the count of commits chooses the quarter, which may be the
same twice in a row (`support.due`). If CI rejects a submission, nothing lands: the corrected one has the same number
and the same `since`, so the proofs that failed are due again.

A proof's code is its test file, the conftest files above it, and all that they import (`support.import_graph`).
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from support.import_graph import FOLDERS, ROOT, closure

if TYPE_CHECKING:
    from collections.abc import Iterable

TURN_FILE = ROOT / ".ci" / "turn.toml"
QUARTERS = 4
COMMON_SHARE = 0.5
"""A changed file that more than this share of all proof files imports selects none: `make test` covers it, and it would
select most proofs at each submission."""

MOST_CHANGED = 240
"""If a submission changed the code of more proofs that are not quick, those run in turn: they would not end within the
time of CI."""

ENVIRONMENTS = {
    "vllm": 0,
    "trainers": 1,
    "harness": 2,
    "environments": 2,
    "harbor": 2,
    "gym": 3,
    "mcp": 3,
    "openenv": 3,
    "outside": 3,
}
"""The environments that CI makes only for proofs that are due, and the quarter of their proofs."""
NEEDS = {
    "tests/integrations/test_harbor.py": "harbor",
    "tests/integrations/test_nemo_gym.py": "gym",
    "tests/integrations/test_ray.py": "trainers",
    "tests/integrations/test_skyrl_training.py": "trainers",
    "tests/integrations/test_verl.py": "trainers",
    "tests/integrations/test_verl_training.py": "trainers",
    "tests/service/test_complete_batches.py": "trainers",
    "tests/service/test_harnesses.py": "harness",
    "tests/service/test_outside_programs.py": "outside",
    "tests/stages/harness/test_captured_harnesses.py": "harness",
    "tests/stages/environments/test_real_environments.py": "environments",
    "tests/stages/environments/test_real_openenv.py": "openenv",
    "tests/stages/environments/test_real_worlds.py": "gym",
    "tests/stages/environments/test_self_play.py": "environments",
    "tests/tools/mcp/test_real_servers.py": "mcp",
    "tests/stages/harness/test_real_harnesses.py": "harness",
}
"""Which environment the proofs of a file need; those marked `vllm` need that one."""

STARTED = {
    "brokers/": (
        "tests/chaos/",
        "tests/service/test_full_disk.py",
        "tests/service/test_pauses.py",
        "tests/service/test_restarts.py",
    ),
    ".ci/make_release.py": ("tests/test_packaging.py",),
    "deploy/": ("tests/service/test_manifests.py",),
    "docs/": ("tests/test_documents.py", "tests/testing/test_page.py"),
    "prorl_zmq/cluster/": ("tests/cluster/",),
    "prorl_zmq/dashboard/": ("tests/dashboard/",),
    "prorl_zmq/gateway/": ("tests/dashboard/",),
    "prorl_zmq/testing/": ("tests/testing/",),
    "README.md": ("tests/test_documents.py", "tests/test_packaging.py"),
    "bench/": ("tests/chaos/",),
}
"""Code that proofs start as processes of their own, which no import shows: where it is, and whose proofs those are."""


class BadTurn(ValueError):
    """`.ci/turn.toml` cannot be used; the message says why."""


@dataclass(frozen=True)
class Turn:
    """What `.ci/turn.toml` says."""

    number: int = 0
    since: str = ""
    raised_at: str = ""
    again: tuple[str, ...] = ()

    @property
    def quarter(self) -> int:
        return self.number % QUARTERS

    @classmethod
    def parse(cls, text: str) -> Turn:
        """Read a file's text.

        Raises:
            BadTurn: it is no TOML, or a key is missing, unknown or of another type.
        """
        try:
            keys = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise BadTurn(f".ci/turn.toml: {error}; write it with make turn") from error
        types = {"number": int, "since": str, "raised_at": str, "again": list}
        if unknown := keys.keys() - types.keys():
            raise BadTurn(f".ci/turn.toml: unknown key {min(unknown)}; the keys are {', '.join(types)}")
        for key, expected in types.items():
            if type(keys.get(key)) is not expected:
                raise BadTurn(f".ci/turn.toml: {key} must be a {expected.__name__}, not {keys.get(key)!r}")
        if not all(isinstance(test, str) for test in keys["again"]):
            raise BadTurn(f".ci/turn.toml: again must list ids of tests, not {keys['again']!r}")
        return cls(keys["number"], keys["since"], keys["raised_at"], tuple(keys["again"]))

    @classmethod
    def read(cls) -> Turn:
        """Read `.ci/turn.toml`.

        Raises:
            BadTurn: it is missing, or `parse` refuses it.
        """
        try:
            return cls.parse(TURN_FILE.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise BadTurn(".ci/turn.toml is missing: write it with make turn") from error

    def text(self) -> str:
        """Return the file's text."""
        again = "".join(f"  {quoted(test)},\n" for test in self.again)
        return (
            "# Which quarter of the proofs is due: see tests/support/proofs.py. Written by `make turn`.\n"
            f"number = {self.number}\nsince = {quoted(self.since)}\nraised_at = {quoted(self.raised_at)}\n"
            f"again = [{chr(10) if again else ''}{again}]\n"
        )


def quoted(text: str) -> str:
    """Return a string of TOML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def raised(landed: Turn, since: str, head: str, again: Iterable[str] = ()) -> Turn:
    """Return the turn of a submission.

    Args:
        landed: the turn in the commit that landed last.
        since: that commit.
        head: the submission's last commit.
        again: proofs that failed.
    """
    return Turn(landed.number + 1, since, head, tuple(again))


class Proof(NamedTuple):
    """A collected test that is marked `proof` or `vllm`."""

    id: str
    """As pytest names it, without the xdist group."""
    vllm: bool = False
    bench: str = ""
    """The file below bench/ that it runs, where that is a parameter."""
    quick: bool = False
    """It takes about a second, so it runs whenever its code changed, however many others do."""

    @property
    def file(self) -> str:
        return self.id.split("::")[0]

    @property
    def environment(self) -> str:
        """Return the environment that it needs, or an empty string."""
        return "vllm" if self.vllm else NEEDS.get(self.file, "")

    @property
    def quarter(self) -> int:
        """Return the quarter in which it is due: its environment's, else by a hash of its id."""
        if self.environment:
            return ENVIRONMENTS[self.environment]
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8]) % QUARTERS

    @property
    def files(self) -> frozenset[str]:
        """Return the files that are its code, relative to the repository."""
        return _code(self.file) | (_code(self.bench) if self.bench else frozenset())


@cache
def _packages(files: frozenset[str]) -> frozenset[str]:
    return frozenset(str(Path(file).parent) for file in files)


@cache
def _code(file: str) -> frozenset[str]:
    """Return what a file and the conftest files above it import, with themselves, relative to the repository."""
    path = ROOT / file
    above = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT / "tests")]
    roots = [path, *(conftest for conftest in above if conftest.is_file())]
    return frozenset(str(one.relative_to(ROOT)) for root in roots for one in closure(root))


@dataclass
class Due:
    """Which proofs are due, and why."""

    turn: Turn
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each is due, by its id."""
    left_out: list[str] = field(default_factory=list)
    common: list[str] = field(default_factory=list)
    """Changed files that too many proofs import to select them."""
    postponed: int = 0
    """Proofs whose code changed and that run in turn, since they are more than `MOST_CHANGED`."""
    environments: list[str] = field(default_factory=list)
    """What the proofs that are due need."""

    def lines(self) -> list[str]:
        """Return what to print."""
        turn, reasons = self.turn, list(self.reasons.values())
        counts = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        files = [test.split("::")[0] for test in self.left_out]
        return [
            f"turn {turn.number}: quarter {turn.quarter} of 0 to {QUARTERS - 1}; changed since {turn.since[:12]}",
            f"{len(reasons)} proofs are due: {counts or 'none'}",
            f"environments: {' '.join(self.environments) or 'none'}",
            *(
                [f"changed, but imported by most proofs, which run in turn: {' '.join(self.common)}"]
                if self.common
                else []
            ),
            *(
                [f"the code of {self.postponed} proofs changed; more than {MOST_CHANGED} run in turn: see make proof"]
                if self.postponed
                else []
            ),
            f"{len(files)} proofs are left out:",
            *(f"  {files.count(file):4} {file}" for file in sorted(set(files))),
        ]


CHANGED, AGAIN, IN_TURN = "changed", "again, since they failed", "in their quarter"


def due(proofs: Iterable[Proof], changed: Iterable[str], turn: Turn) -> Due:
    """Choose the proofs that a submission runs.

    Args:
        proofs: all proofs.
        changed: files that the submission changed, relative to the repository.
        turn: the submission's turn.
    """
    proofs, changed = list(proofs), set(changed)
    code = {proof: _changed_code(proof, changed) for proof in proofs}
    selecting, common = _selecting(code, changed)
    selected = {proof for proof in proofs if code[proof] & selecting}
    slow = sum(not proof.quick for proof in selected)
    postponed = slow if slow > MOST_CHANGED else 0
    found = Due(turn, common=common, postponed=postponed)
    for proof in proofs:
        if proof.id in turn.again:
            found.reasons[proof.id] = AGAIN
        elif proof in selected and (proof.quick or not postponed):
            found.reasons[proof.id] = CHANGED
        elif proof.quarter == turn.quarter:
            found.reasons[proof.id] = IN_TURN
        else:
            found.left_out.append(proof.id)
    needed = {proof.environment for proof in proofs if proof.id in found.reasons}
    found.environments = [name for name in ENVIRONMENTS if name in needed]
    return found


def _changed_code(proof: Proof, changed: set[str]) -> frozenset[str]:
    """Return the changed files that are a proof's code."""
    started = [start for start, tests in STARTED.items() if proof.file.startswith(tests)]
    own = proof.files
    packages = _packages(own)
    return frozenset(
        file
        for file in changed
        if file in own
        or file.startswith(tuple(started))
        # What lies beside modules, such as templates and tables, is theirs.
        or (file.split("/")[0] in FOLDERS and not file.endswith(".py") and str(Path(file).parent) in packages)
    )


def _selecting(code: dict[Proof, frozenset[str]], changed: set[str]) -> tuple[set[str], list[str]]:
    """Divide changed files into those that select proofs, and those that too many proof files have in common."""
    users: dict[str, set[str]] = {file: set() for file in changed}
    for proof, files in code.items():
        for file in files:
            users[file].add(proof.file)
    most = COMMON_SHARE * len({proof.file for proof in code})
    common = {file for file, tests in users.items() if len(tests) > max(most, 1)}
    return changed - common, sorted(common)
