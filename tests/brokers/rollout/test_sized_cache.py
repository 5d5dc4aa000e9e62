"""A cache of values that is bounded in bytes, and in number."""

from __future__ import annotations

from prorl_zmq.brokers.rollout.sized_cache import SizedCache


def test_the_oldest_go_when_all_take_more_than_the_limit() -> None:
    cache: SizedCache[bytes] = SizedCache(3000)
    blocks = [bytes(1000) for _ in range(4)]
    for number, block in enumerate(blocks):
        gone = cache.put(f"job-{number}", block, len(block))
        assert gone == ([("job-0", blocks[0])] if number == 3 else [])
    assert (cache.get("job-0"), len(cache), cache.size_bytes) == (None, 3, 3000)
    assert cache.get("job-3") is blocks[3]  # not a copy


def test_one_that_is_larger_than_the_limit_goes_at_once_and_so_do_all_where_the_limit_is_nothing() -> None:
    cache: SizedCache[str] = SizedCache(0)
    assert cache.put("a", "block", 5) == [("a", "block")]
    assert "a" not in cache
    cache = SizedCache(10)
    cache.put("a", "small", 5)
    assert [key for key, _ in cache.put("b", "large", 100)] == ["a", "b"]
    assert (list(cache), cache.size_bytes) == ([], 0)


def test_a_key_that_comes_again_is_the_newest_and_counts_once() -> None:
    cache: SizedCache[int] = SizedCache(100, limit=2)
    cache.put("again", 1, 40)
    cache.put("other", 2, 40)
    assert cache.put("again", 3, 50) == [("again", 1)]
    cache.change("other", 4)
    assert ([*cache], cache.get("other"), cache.size_bytes) == (["other", "again"], 4, 90)
    assert cache.put("third", 5, 1) == [("other", 4)]
    cache.drop("again")
    cache.drop("unknown")
    assert ([*cache], cache.size_bytes) == (["third"], 1)
