"""The search tool, and the interface of the providers that it asks.

A failed search does not fail the job: the model reads the reason and continues without the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .tool import Arguments, Tool

CONTENT_LIMIT = 2000
"""Most characters of one result's content that the model is shown."""
TITLE_LIMIT = 300
URL_LIMIT = 1000


class SearchArguments(Arguments, frozen=True):
    query: Annotated[str, Meta(description="What to search for, in a few words.", min_length=1, max_length=400)]
    max_results: Annotated[int, Meta(description="Most results to give.", ge=1, le=20)] = 5
    topic: Annotated[Literal["general", "news", "finance"], Meta(description="Where to look.")] = "general"


class SearchResult(msgspec.Struct, frozen=True):
    """One page that was found."""

    title: str | None = None
    url: str | None = None
    content: str | None = None
    """The part of the page that has to do with the query."""


class SearchAnswer(msgspec.Struct, frozen=True):
    """The results of a search, the best first."""

    results: list[SearchResult]
    answer: str | None = None
    """The provider's own answer to the query, if it was asked for one."""


class SearchFailed(Exception):
    """The search gave nothing; the text tells the model why, and what to do."""


class SearchProvider(ABC):
    """A search service. The caller that makes it closes it; many tools may share it."""

    @abstractmethod
    async def search(self, query: SearchArguments, timeout_s: float) -> SearchAnswer:
        """Search.

        Raises:
            SearchFailed: the provider gave no answer within `timeout_s`, or none that can be used.
        """

    @abstractmethod
    async def close(self) -> None: ...


class SearchTool(Tool[SearchArguments]):
    name = "search"
    description = "Searches the web and gives the title, address and relevant content of the best pages."
    takes = SearchArguments

    def __init__(self, provider: SearchProvider) -> None:
        self._provider = provider

    async def call(self, arguments: SearchArguments, timeout_s: float) -> str:
        try:
            return render(await self._provider.search(arguments, timeout_s), arguments.max_results)
        except SearchFailed as failed:
            return str(failed)


def render(answer: SearchAnswer, max_results: int) -> str:
    parts = [f"Answer: {_shortened(answer.answer, CONTENT_LIMIT)}\n"] if answer.answer else []
    for number, result in enumerate(answer.results[:max_results], 1):
        title = _shortened(result.title, TITLE_LIMIT)
        url, content = _shortened(result.url, URL_LIMIT), _shortened(result.content, CONTENT_LIMIT)
        parts.append(f"[{number}] {title}\n{url}\n{content}\n")
    return "\n".join(parts) or "Nothing was found. Try other or fewer words."


def _shortened(text: str | None, limit: int) -> str:
    text = (text or "").strip()
    return text if len(text) <= limit else f"{text[:limit]} …"
