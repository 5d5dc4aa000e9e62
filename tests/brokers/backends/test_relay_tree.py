"""Who feeds whom."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.backends.relay_tree import FAN_OUT, ancestors, relay_for, sources_of
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.relay import SOURCES_LIMIT, CopyState, WeightRelay, WeightSource

ROOT = (WeightSource("trainer", "ipc:///root"),)
WEIGHTS = "a" * 64


def copies(count: int) -> dict[str, CopyState]:
    return {
        f"h{number:03d}": CopyState(f"m{number}", "/copy", WeightSource(f"h{number:03d}", f"ipc:///{number}"), 4)
        for number in range(count)
    }


def names(backend_id: str, hosts: dict[str, CopyState]) -> list[str]:
    return [one.name for one in sources_of(backend_id, hosts, 5, WEIGHTS, ROOT)]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64, 500])
def test_a_tree_of_two(count: int) -> None:
    hosts = copies(count)
    parents = Counter(names(one, hosts)[0] for one in hosts)
    assert max(parents.values()) <= FAN_OUT
    assert parents["trainer"] == min(count, FAN_OUT)
    for one in hosts:
        way = names(one, hosts)
        assert way[-1] == "trainer"
        assert len(way) <= count.bit_length()
        assert one not in way
        assert way[1:] == ([] if way[0] == "trainer" else names(way[0], hosts))


def test_ancestors_of_eight() -> None:
    assert [ancestors(position) for position in range(8)] == [[], [], [0], [0], [1], [1], [2, 0], [2, 0]]


def test_hosts_of_one_copy_are_one_node() -> None:
    hosts = copies(6)
    hosts |= {f"{one}-b": replace(copy, source=WeightSource(f"{one}-b", "ipc:///b")) for one, copy in hosts.items()}
    assert names("h000-b", hosts) == names("h001", hosts) == ["trainer"]
    assert names("h004-b", hosts) == names("h004", hosts) == ["h001", "h001-b", "trainer"]
    held = hosts | {"h001-b": replace(hosts["h001-b"], version=5, weights=WEIGHTS)}
    assert names("h005", held) == ["h001-b", "h002", "h002-b", "trainer"]


def test_the_nearest_of_many_hosts_are_asked() -> None:
    hosts = copies(8)
    hosts |= {
        f"{one}-{twin:02d}": replace(copy, source=WeightSource(f"{one}-{twin:02d}", "ipc:///b"))
        for one, copy in hosts.items()
        for twin in range(40)
    }
    asked = names("h006", hosts)
    assert len(asked) == SOURCES_LIMIT
    assert asked[:41] == sorted(one for one in hosts if one.startswith("h002"))
    assert asked[-1] == "trainer"


def test_a_late_host_asks_those_that_have_the_version() -> None:
    hosts = {one: replace(copy, version=5, weights=WEIGHTS) for one, copy in copies(6).items()}
    late = {"z": CopyState("mz", "/copy", WeightSource("z", "ipc:///z"))}
    assert names("z", hosts | late) == ["h000", "h001", "h002", "h003", "trainer"]
    assert names("unknown", hosts)[-1] == "trainer"
    others = {one: replace(copy, weights="b" * 64) for one, copy in hosts.items()}
    assert "h000" not in names("h000", others)


def test_a_host_that_serves_nobody_is_no_parent() -> None:
    hosts = copies(4)
    hosts["h000"] = replace(hosts["h000"], source=None)
    assert all("h000" not in names(one, hosts) for one in hosts)
    assert names("h000", hosts)[-1] == "trainer"


def test_a_request_keeps_its_index_and_has_few_sources() -> None:
    request = WeightUpdate("r", "load", 5, "/w", digest=WEIGHTS, relay=WeightRelay("b" * 64, ROOT * SOURCES_LIMIT))
    relay = relay_for(request, "h400", copies(500))
    assert relay is not None
    assert (relay.index, len(relay.sources)) == ("b" * 64, SOURCES_LIMIT)
    assert relay_for(replace(request, relay=None), "h0", {}) is None


def test_sources_take_one_look_at_each_host() -> None:
    hosts = copies(4000)
    for one in [*hosts][::2]:
        hosts[one] = replace(hosts[one], version=5, weights=WEIGHTS)
    began = time.process_time()
    for one in [*hosts][-20:]:
        names(one, hosts)
    assert time.process_time() - began < 1
