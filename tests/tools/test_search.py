"""The search tool: what the model is told. The provider alone is scripted; the HTTP one has tests of its own."""

from __future__ import annotations

import asyncio

import pytest

from prorl_zmq.tools.search import (
    CONTENT_LIMIT,
    SearchAnswer,
    SearchArguments,
    SearchFailed,
    SearchProvider,
    SearchResult,
    SearchTool,
    render,
)
from prorl_zmq.tools.tool import ToolArgumentsInvalid


class Scripted(SearchProvider):
    def __init__(self, answer: SearchAnswer | SearchFailed) -> None:
        self.answer = answer
        self.queries: list[SearchArguments] = []
        self.closed = False

    async def search(self, query: SearchArguments, timeout_s: float) -> SearchAnswer:
        self.queries.append(query)
        if isinstance(self.answer, SearchFailed):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True


def test_a_search() -> None:
    provider = Scripted(SearchAnswer([SearchResult("Title", "https://a/b", " Content. ")], answer="42"))
    tool = SearchTool(provider)
    text = asyncio.run(tool({"query": "meaning of life", "topic": "news"}, 5))
    assert text == "Answer: 42\n\n[1] Title\nhttps://a/b\nContent.\n"
    assert provider.queries == [SearchArguments("meaning of life", 5, "news")]
    asyncio.run(tool.close())
    assert not provider.closed


def test_a_failed_search_is_told() -> None:
    assert asyncio.run(SearchTool(Scripted(SearchFailed("no luck")))({"query": "x"}, 5)) == "no luck"


def test_what_is_shown_is_bounded() -> None:
    long = "x" * 10**6
    text = render(SearchAnswer([SearchResult(long, long, long)] * 50, answer=long), 20)
    assert len(text) < 25 * (CONTENT_LIMIT + 1500)
    assert "[20]" in text
    assert "[21]" not in text
    assert render(SearchAnswer([SearchResult()]), 5) == "[1] \n\n\n"
    assert render(SearchAnswer([]), 5).startswith("Nothing was found.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"query": ""}, "length >= 1"),
        ({"query": "x" * 401}, "length <= 400"),
        ({"query": "x", "max_results": 21}, "`int` <= 20"),
        ({"query": "x", "topic": "sports"}, "Invalid enum value 'sports'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ToolArgumentsInvalid, match=said) as caught:
        SearchTool(Scripted(SearchAnswer([]))).check(arguments)
    usage = '{"query": string, "max_results"?: integer, "topic"?: "finance" | "general" | "news"}'
    assert str(caught.value).endswith(usage)
