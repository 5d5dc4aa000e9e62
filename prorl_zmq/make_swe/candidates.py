"""`Candidates`: chooses the next mutation to try, spread over files and kinds of bugs.

Only functions that tests reach and lines that run are mutated. The seed and the mutations accepted so far decide
everything, so the same project and seed yield the same instances. No I/O.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .mutation import is_sound, mutations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .mutation import Mutation
    from .source_text import SourceText
    from .suite import Report

TRIES_PER_FUNCTION = 4
COMMON = frozenset({"wrong_variable"})
"""Kinds so frequent that they would crowd out the others."""


@dataclass(frozen=True)
class Candidate:
    path: str
    mutation: Mutation
    tests: frozenset[str]
    """Node ids of tests that call the function."""


class Candidates:
    def __init__(self, sources: Mapping[str, SourceText], report: Report, tests: Iterable[str], seed: str) -> None:
        self._random = random.Random(seed)  # noqa: S311 - chosen, not secret
        self._sources = sources
        self._left: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
        reliable = frozenset(tests)
        for path in sorted(sources):
            covered = frozenset(report.lines.get(path, ()))
            calls = report.calls.get(path, {})
            tests_of = {
                line: frozenset(report.tests[number] for number in numbers) & reliable
                for line, numbers in calls.items()
            }
            for mutation in mutations(sources[path]):
                called_by = tests_of.get(mutation.scope_line)
                # A default is of the line of its `def`, which ran when the module was imported.
                if called_by and (mutation.statement_line in covered or mutation.kind == "changed_default"):
                    self._left[path, mutation.function].append(Candidate(path, mutation, called_by))
        # Weighted shuffle: a function with much in it comes earlier than one of a single line.
        weights = {key: len({each.mutation.start for each in found}) for key, found in self._left.items()}
        self._order = sorted(self._left, key=lambda key: self._random.random() ** (1 / weights[key]), reverse=True)
        self._tries: Counter[tuple[str, str]] = Counter()
        self._files: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    @property
    def functions(self) -> int:
        return len(self._order)

    def next(self) -> Candidate | None:
        """Return the next one; None: all were tried, each function at most `TRIES_PER_FUNCTION` times."""
        while self._order:
            rank = {key: place for place, key in enumerate(self._order)}
            key = min(self._order, key=lambda each: (self._files[each[0]], self._tries[each], rank[each]))
            candidate = self._choose(key)
            self._tries[key] += 1
            if candidate is None or self._tries[key] >= TRIES_PER_FUNCTION:
                self._order.remove(key)
            if candidate is not None:
                return candidate
        return None

    def accept(self, candidate: Candidate) -> None:
        """Note a mutation that became an instance: its function gets no other, its file and kind come later."""
        self._files[candidate.path] += 1
        self._kinds[candidate.mutation.kind] += 1
        key = (candidate.path, candidate.mutation.function)
        if key in self._order:
            self._order.remove(key)

    def _choose(self, key: tuple[str, str]) -> Candidate | None:
        """Take a sound mutation of a function, of the kind accepted least so far."""
        found = self._left[key]
        while found:
            by_kind: dict[str, list[Candidate]] = defaultdict(list)
            for each in found:
                by_kind[each.mutation.kind].append(each)
            luck = {kind: self._random.random() for kind in sorted(by_kind)}
            kind = min(by_kind, key=lambda each: (self._kinds[each] + (each in COMMON), luck[each]))
            candidate = self._random.choice(by_kind[kind])
            found.remove(candidate)
            if is_sound(candidate.mutation, self._sources[key[0]]):
                # Of one kind a function is tried once while there are others.
                rest = [each for each in found if each.mutation.kind != kind]
                self._left[key] = rest or found
                return candidate
        return None
