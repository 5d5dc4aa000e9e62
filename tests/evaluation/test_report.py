"""The reports: every figure is in them, and nothing that a model or a file says is markup there."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.later import Later

from prorl_zmq.evaluation.run_folder import REPORT_HTML, REPORT_MD, SUMMARY, RunFolder
from prorl_zmq.evaluation.summary import Counting, summarise
from prorl_zmq.wire.messages.jobs import Outcome

from .conftest import HOSTILE, made_plan, made_sample

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_zmq.evaluation import report
    from prorl_zmq.evaluation.plan import Plan
    from prorl_zmq.evaluation.run_folder import Sample
else:
    report = Later("prorl_zmq.evaluation.report")

pytestmark = pytest.mark.xdist_group("matplotlib")

NO_TAG_ENDS = {"meta", "br"}


class Page(HTMLParser):
    """What is in a page: its tags, whether they close, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in NO_TAG_ENDS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def samples_of(plan: Plan) -> list[Sample]:
    kinds = [
        {"reward": 1.0},
        {"reward": 0.25, "stop_reason": HOSTILE},
        {"outcome": Outcome.INFRASTRUCTURE_ERROR, "code": "sandbox_failed", "message": HOSTILE},
        {"outcome": Outcome.TIMEOUT, "code": HOSTILE[:100]},
    ]
    return [
        made_sample(
            plan,
            problem,
            sample,
            name=HOSTILE if problem else "",
            row_format=HOSTILE if problem else "aime",
            **kind,  # type: ignore[arg-type]
        )
        for problem in range(plan.problems)
        for sample, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    plan = msgspec.structs.replace(made_plan(3, 4), file=HOSTILE)
    samples = samples_of(plan)
    summary = summarise(plan, samples, Counting((1, 2, 4), price_in=1.0, price_out=2.0))
    return report.reports_of(plan, summary, samples, "run folder")


@pytest.mark.proof(quick=True)
def test_the_page_is_one_file_with_all_charts_and_tables(reports: dict[str, str]) -> None:
    page = Page(reports[REPORT_HTML])
    assert not page.open
    assert page.tags.count("svg") == 5
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    links = [value or "" for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(link.startswith("#") for link in links)
    text = " ".join(page.texts)
    for part in (
        "pass@1",
        "pass@4",
        "mean reward",
        "Failures by reason",
        "Time per rollout",
        "By task",
        "By row format",
        "cost",
    ):
        assert part in text
    assert "errors as failures" in text


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [REPORT_MD, REPORT_HTML])
def test_each_figure_is_in_its_own_cell(name: str) -> None:
    plan = made_plan(4, 2)
    engine_s = iter((1.0, 2.0, 4.0, 7.0, 11.0, 16.0, 22.0, 29.0))
    ends: list[dict[str, Any]] = [
        {},
        {"outcome": Outcome.INFRASTRUCTURE_ERROR, "code": "sandbox_failed", "message": "no disk"},
        {},
        {"reward": 0.25, "stop_reason": "max_turns"},
        {"reward": 0.0, "stop_reason": "max_turns"},
        {"reward": 0.0, "stop_reason": "max_turns"},
        {"outcome": Outcome.TIMEOUT, "code": "phase_timeout"},
        {},
    ]
    samples = [
        made_sample(plan, index // 2, index % 2, timings={"init": 1.0, "run": 40.0, "engine": next(engine_s)}, **end)
        for index, end in enumerate(ends)
    ]
    counting = Counting((1, 2), price_in=1000.0, price_cached=500.0, price_out=3000.0)
    text = report.reports_of(plan, summarise(plan, samples, counting), samples, "run")[name]
    rows = cells_of_page(text) if name == REPORT_HTML else cells_of_markdown(text)
    for row in (
        ["pass@1", "50.0%", "10.4% to 89.6%", "4"],
        ["pass@2", "66.7%", "4.4% to 98.9%", "3"],
        ["pass@1, errors as failures", "37.5%", "7.6% to 81.3%", "4"],
        ["mean reward", "0.531", "0.000 to 1.000", "4"],
        ["not solved: max_turns", "3", "37.5%", samples[3].job_id, ""],
        ["infrastructure error: sandbox_failed", "1", "12.5%", samples[1].job_id, "no disk"],
        ["run", "40 s", "40 s", "40 s", "320 s", "97.6%"],
        ["engine", "9 s", "26.5 s", "11.5 s", "92 s", "28.0%"],
        ["generated_tokens", "50", "50", "50", "100", "400"],
        ["math", "4", "8", "1", "50.0%", "10.4% to 89.6%", "66.7%", "0.531", "50", "41 s"],
        ["problem-1", "2", "1 of 2", "0.625", "200", "80", "100", "41 s", "0.46"],
    ):
        assert row in rows
    assert "1.84 in all, 0.46 per problem, 0.613 per solved rollout" in text
    if name == REPORT_HTML:
        figures = [re.findall(r">([^<]+)<", line) for line in text.splitlines() if 'class="figure"' in line]
        assert figures[:3] == [
            ["pass@1", "50.0%", "10.4% to 89.6%"],
            ["pass@2", "66.7%", "4.4% to 98.9%"],
            ["mean reward", "0.531", "0.000 to 1.000"],
        ]
        assert figures[-1] == ["cost", "1.84", "0.46 per problem"]


def cells_of_page(text: str) -> list[list[str]]:
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    return [[re.sub(r"<[^>]+>", "", cell).strip() for cell in row] for row in rows]


def cells_of_markdown(text: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[re.sub(r"[\\`]|– ", "", cell).strip() for cell in row] for row in rows]


def test_charts_take_the_pages_colours(reports: dict[str, str]) -> None:
    page = reports[REPORT_HTML]
    assert "#0102" not in page
    for variable in ("var(--main)", "var(--grid)", "var(--bad)", "currentColor"):
        assert variable in page
    for chart in page.split("<svg")[1:]:
        ET.fromstring("<svg" + chart.split("</svg>")[0] + "</svg>")


def test_what_others_say_is_no_markup_in_the_page(reports: dict[str, str]) -> None:
    page = reports[REPORT_HTML]
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.isprintable() or not {character for character in page if not character.isprintable()} - {"\n"}


def test_what_others_say_is_no_markup_in_markdown(reports: dict[str, str]) -> None:
    lines = reports[REPORT_MD].split("\n")
    assert not {character for character in reports[REPORT_MD] if not character.isprintable()} - {"\n"}
    said = [line for line in lines if "owned" in line]
    assert said
    for line in said:
        assert "<script" not in line
        assert " `x` " not in line
    for index, line in enumerate(lines):
        if line.startswith("|") and index and lines[index - 1].startswith("|"):
            assert columns(line) == columns(lines[index - 1])


def columns(line: str) -> int:
    return line.replace("\\|", "").count("|")


def test_cells_are_one_line_without_markup() -> None:
    assert report.cell("a|b\n<c> *d* [e](f)") == r"a\|b\\n&lt;c&gt; \*d\* \[e\](f)"
    assert report.cell("") == " "


def test_reports_of_an_evaluation_under_way_say_so(tmp_path: Path) -> None:
    plan = made_plan(2, 2)
    samples = [made_sample(plan, 0, reward=0.0)]
    with RunFolder(tmp_path, plan) as folder:
        report.write_reports(folder, summarise(plan, samples, Counting((1, 2))))
    assert "3 of 4 rollouts have not ended" in (tmp_path / REPORT_MD).read_text()
    assert "svg" in (tmp_path / REPORT_HTML).read_text()
    assert msgspec.json.decode((tmp_path / SUMMARY).read_bytes())["ended"] == 1


def test_charts_of_the_markdown_report_are_files_beside_it(tmp_path: Path) -> None:
    plan = made_plan(2, 2)
    samples = [made_sample(plan, problem, sample, reward=0.5) for problem in range(2) for sample in range(2)]
    with RunFolder(tmp_path, plan) as folder:
        report.write_reports(folder, summarise(plan, samples, Counting((1, 2))))
    named = re.findall(r"^!\[[^\]]+\]\((.+)\)$", (tmp_path / REPORT_MD).read_text(), re.MULTILINE)
    assert {tmp_path / name for name in named} == set((tmp_path / "charts").iterdir())
    assert len(named) >= 4
    for name in named:
        chart = ET.parse(tmp_path / name).getroot()
        assert chart.tag == "{http://www.w3.org/2000/svg}svg"
        assert "--main: #" in (chart[0].text or "")


def test_reports_without_any_result() -> None:
    plan = made_plan()
    texts = report.reports_of(plan, summarise(plan, [], Counting((1, 2))), [], "run")
    assert "no model yet" in texts[REPORT_MD]
    assert not Page(texts[REPORT_HTML]).open
