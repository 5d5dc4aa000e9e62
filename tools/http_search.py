"""`HttpSearchProvider`: searches by the HTTP interface that Tavily documents, at Tavily's or any other address.

    POST {endpoint}/search, Authorization: Bearer KEY
    {"query": …, "max_results": 5, "search_depth": "basic", "topic": "general", "include_answer": false}
    200 {"results": [{"title": …, "url": …, "content": …, "score": …}, …], "answer": …}

The key comes from the environment and is sent only in that header, never in a text, a log or to another address:
redirects are not followed. An answer's size and time are bounded; an answer of another form is a failed search. Only
429 is retried, after the wait that the service asks for, if that is short. Tavily's own client is not a dependency: it
bounds no answer's size.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec

from ..errors import ConfigError, InvalidEndpoint
from .search import SearchAnswer, SearchFailed, SearchProvider

if TYPE_CHECKING:
    from .search import SearchArguments

log = logging.getLogger("prorl.search")

TAVILY = "https://api.tavily.com"
ANSWER_LIMIT_BYTES = 2 * 2**20
RETRY_AFTER_LIMIT_S = 10.0
"""Longest wait before a retry; if the service asks for more, there is none."""
TRIES = 3

NO_MORE = "Searching will not work in this session; continue without it."
LATER = "Try again later, or continue without it."
REFUSALS = {
    **dict.fromkeys((401, 403), f"The search service does not let us in. {NO_MORE}"),
    # Tavily's own codes for the limits of a plan.
    **dict.fromkeys((432, 433), f"The search service's limit for us is used up. {NO_MORE}"),
    **dict.fromkeys((400, 422), "The search service does not take this query. Try other or fewer words."),
}


class HttpSearchProvider(SearchProvider):
    """Searches over HTTP. Its connections belong to the event loop of its first search.

    Args:
        endpoint: where, without `/search`.
        key_variable: the environment variable that holds the key.
        search_depth: how thorough, as the service understands it; `advanced` costs more.
        include_answer: ask for the service's own answer too.
        answer_limit_bytes: largest answer that is read.

    Raises:
        ConfigError: the variable is not set, or to no key.
        InvalidEndpoint: the endpoint is no HTTP address.
    """

    def __init__(
        self,
        endpoint: str = TAVILY,
        key_variable: str = "TAVILY_API_KEY",
        *,
        search_depth: Literal["basic", "advanced"] = "basic",
        include_answer: bool = False,
        answer_limit_bytes: int = ANSWER_LIMIT_BYTES,
    ) -> None:
        if not endpoint.startswith(("https://", "http://")):
            raise InvalidEndpoint("a search endpoint begins with https:// or http://", endpoint=endpoint)
        key = os.environ.get(key_variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(f"set {key_variable} to the key of the search service: plain ASCII", key=key_variable)
        self._url = f"{endpoint.rstrip('/')}/search"
        # An answer that is packed could be far larger than its size says.
        self._headers = {"Authorization": f"Bearer {key}", "Accept-Encoding": "identity"}
        self._search_depth = search_depth
        self._include_answer = include_answer
        self._answer_limit_bytes = answer_limit_bytes
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: SearchArguments, timeout_s: float) -> SearchAnswer:
        content = {
            "query": query.query,
            "max_results": query.max_results,
            "search_depth": self._search_depth,
            "topic": query.topic,
            "include_answer": self._include_answer,
        }
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(TRIES - 1):
                    wait_s = await self._try(content)
                    if isinstance(wait_s, SearchAnswer):
                        return wait_s
                    await asyncio.sleep(wait_s)
                answer = await self._try(content)
        except TimeoutError:
            raise SearchFailed(f"The search service did not answer within {timeout_s:g} s. {LATER}") from None
        except (aiohttp.ClientError, OSError) as error:
            log.warning("search at %s failed: %s", self._url, type(error).__name__)
            raise SearchFailed(f"The search service cannot be reached. {LATER}") from None
        if isinstance(answer, SearchAnswer):
            return answer
        raise SearchFailed(f"The search service has too many requests. {LATER}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _try(self, content: dict[str, Any]) -> SearchAnswer | float:
        """Send one request; return the answer, or how many seconds to wait before a retry."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, auto_decompress=False)
        async with self._session.post(self._url, json=content, allow_redirects=False) as response:
            if response.status == 429:
                return _retry_after_s(response)
            if response.status != 200:
                log.warning("search at %s failed: status %d", self._url, response.status)
                failed = f"The search service failed (status {response.status}). {LATER}"
                raise SearchFailed(REFUSALS.get(response.status, failed))
            data = bytearray()
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > self._answer_limit_bytes:
                    raise SearchFailed("The search service's answer is too large. Ask for fewer results.")
        try:
            return msgspec.json.decode(data, type=SearchAnswer)
        except (msgspec.MsgspecError, UnicodeError):
            log.warning("search at %s gave an answer that is not of the form of Tavily's", self._url)
            raise SearchFailed(f"The search service's answer cannot be read. {LATER}") from None


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Return how long the service asks us to wait, 1 s by default; raise `SearchFailed` if that is too long."""
    said = response.headers.get("Retry-After", "1").strip()
    if said.isdecimal() and len(said) < 10 and (wait_s := float(said)) <= RETRY_AFTER_LIMIT_S:
        return wait_s
    raise SearchFailed(f"The search service has too many requests. {LATER}")
