"""The cost of watching a service, and the delay until viewers see a change."""

from __future__ import annotations

from harness import Incomplete, Row, main
from watching_broker import VIEWERS, Cost, metrics_cost, traces_cost, viewers_cost
from watching_page import lacks, measure_page

PAINT_S, FILTER_S, CHANGE_S = 1.0, 0.2, 2.0


def page_rows(quick: bool) -> list[Row]:
    """Measure the dashboard in a browser, with a table of many jobs.

    Raises:
        Incomplete: there is none here.
    """
    if problem := lacks():
        raise Incomplete(problem, [])
    jobs, repeats = (2_000, 3) if quick else (10_000, 10)
    figures = measure_page(jobs, repeats)
    table = f"the table of {jobs:,} jobs"
    return [
        _worst(f"{table}: its first paint", figures.paints, PAINT_S),
        _worst(f"{table}: a search until it is drawn", figures.filters, FILTER_S),
        _worst(f"{table}: from a job's end until it is shown", figures.changes, CHANGE_S),
    ]


def _worst(name: str, seconds: list[float], target_s: float) -> Row:
    worst = max(seconds)
    return Row(
        f"{name}, the worst of {len(seconds)}", worst, "s", target=f"under {target_s:g} s", holds=worst < target_s
    )


def broker_rows(quick: bool) -> list[Row]:
    """Measure what the rollout broker loses to those who look at it."""
    count, rounds = (1_000, 2) if quick else (2_000, 30)
    traces, traced = traces_cost(count, rounds)
    return [
        *_broker(f"with {VIEWERS} viewers at a gateway", viewers_cost(count, rounds), 0.95),
        *_broker("with metrics, all scraped each second", metrics_cost(count, rounds), 0.98),
        *_broker("with a trace of each job", traces, 0.95),
        Row("with a trace of each job: jobs whose spans were exported", traced, "of all"),
    ]


def _broker(name: str, cost: Cost, target: float) -> list[Row]:
    bare = "none, by turns"
    return [
        Row(f"{name}: throughput", cost.jobs_per_s, "jobs/s", bare, cost.rate, f"{target:g}×", cost.rate >= target),
        Row(f"{name}: the broker's CPU", cost.cpu_us, "µs a job", bare, cost.cpu),
    ]


def measure(quick: bool) -> list[Row]:
    """Measure all.

    Raises:
        Incomplete: there is no browser here.
    """
    rows = broker_rows(quick)
    try:
        return rows + page_rows(quick)
    except Incomplete as error:
        raise Incomplete(str(error), rows) from None


if __name__ == "__main__":
    main("watching", "what it costs to look at a service", measure)
