"""`prorl explain` compared with the truth: real runs in which a known thing is slow, lost or missing."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from explain_scenarios import SCENARIOS
from explain_service import StagedService
from harness import Row, main

from prorl_zmq.evaluation.recorded_run import read_recorded
from prorl_zmq.explain.diagnosis import diagnose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from explain_scenarios import Scenario

    from prorl_zmq.explain.explanation import Explanation

ABOUT = "does `prorl explain` name what bounded a run? Real runs on services whose bottleneck is known"

KILL_S = 0.6


def explained(
    scenarios: Iterable[Scenario], folder: Path, service: StagedService | None = None
) -> Iterator[tuple[Scenario, Explanation]]:
    """Run scenarios, those of one service together unless one is given, and explain each from its folder."""
    for _, group in groupby(sorted(scenarios, key=lambda one: one.service), key=lambda one: one.service):
        same = list(group)
        with (
            nullcontext(service)
            if service is not None
            else StagedService(same[0].processes, same[0].schedule) as staged
        ):
            for scenario in same:
                out = folder / scenario.name.replace(" ", "-")
                out.mkdir()
                staged.run(scenario.jobs(out), scenario.feed(), out / "run", *meanwhile(scenario, staged))
                recorded = read_recorded(out / "run")
                assert recorded.recording is not None
                yield scenario, diagnose(recorded.recording, "the run", recorded.notes)


def meanwhile(scenario: Scenario, service: StagedService) -> tuple[float, Callable[[], None]]:
    """Return what happens after how many seconds."""
    if scenario.no_backend_s:
        service.drain_engines()
        return scenario.no_backend_s, service.add_engines
    if scenario.weights_every_s:
        return 0.0, partial(service.renew_weights, scenario.weights_every_s)
    return KILL_S, partial(service.kill, scenario.kills) if scenario.kills else lambda: None


def measure(quick: bool) -> list[Row]:
    """Run them all, or each fourth."""
    scenarios = SCENARIOS[::4] if quick else SCENARIOS
    rows = []
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        for scenario, explanation in explained(scenarios, Path(folder)):
            named = scenario.is_named(explanation)
            print(f"{'named ' if named else 'MISSED'} {scenario.name}: {' '.join(explanation.sentences)}")
            found = explanation.finding
            what = f"{scenario.name}: {found.kind} {found.name}, {explanation.sureness}"
            rows.append(Row(what, explanation.took_s, "s", target="is named", holds=named))
    named = sum(bool(row.holds) for row in rows)
    count = Row("runs whose bottleneck is named", named, f"of {len(rows)}", target="all", holds=named == len(rows))
    return [count, *rows]


if __name__ == "__main__":
    main("explain", ABOUT, measure)
