"""Caches on hosts of their own (network namespaces) that read each other's DRAM, while workers are
killed or stopped and links are cut."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import HostCache, Network, host_caches, network, until_all_are_up

COUNT = 24  # blocks of a prompt
LONGEST_GET_S = 8.0
"""What is promised is 1.5 s; the rest is for a machine that is busy."""


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.fixture
def pair(hosts: Network, tmp_path: Path) -> Iterator[list[HostCache]]:
    with host_caches(tmp_path, hosts) as caches:
        until_all_are_up(caches)
        yield caches
        for cache in caches:
            until(lambda cache=cache: cache.do("stats")["peers"]["open"] == 0)
            cache.do("check")


def until(condition: object, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hits(cache: HostCache) -> dict[str, int]:
    found: dict[str, int] = cache.do("stats")["hit_blocks"]
    return found


def get(cache: HostCache, prompt: int) -> int:
    """Load a prompt; return how many of its blocks arrived, all of them right."""
    seen = cache.do("get", prompt=prompt, count=COUNT)
    assert seen["wrong"] == []
    assert seen["seconds"] < LONGEST_GET_S
    return int(seen["arrived"])


def until_found(cache: HostCache, prompt: int) -> None:
    """Load a prompt until all of it is found: a peer that answers late is a miss."""
    until(lambda: get(cache, prompt) == COUNT)


def test_a_host_finds_what_another_has_in_dram(pair: list[HostCache]) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    until_found(two, 0)
    assert hits(two) == {"PEER": COUNT}
    two.do("put", prompt=4, count=COUNT)  # and the other way round
    until_found(one, 4)
    assert hits(one) == {"PEER": COUNT}


@pytest.mark.whole
@pytest.mark.parametrize("side", ["owner", "reader"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_costs_a_miss(
    pair: list[HostCache], side: str, how: signal.Signals
) -> None:
    one, two = pair
    for prompt in (0, 4, 8):
        one.do("put", prompt=prompt, count=COUNT)
    until_found(two, 0)
    host = one if side == "owner" else two
    host.signal(how, "peer")
    assert get(two, 4) <= COUNT
    if how is signal.SIGSTOP and side == "owner":
        host.signal(signal.SIGCONT, "peer")
    until_found(two, 8)


def test_a_host_that_is_cut_off_costs_a_miss_until_it_is_back(
    pair: list[HostCache], hosts: Network
) -> None:
    one, two = pair
    for prompt in (0, 4, 8):
        one.do("put", prompt=prompt, count=COUNT)
    until_found(two, 0)
    hosts.cut(0)
    assert get(two, 4) == 0
    until(lambda: two.do("stats")["peers"]["up"] == 0)
    seen = two.do("get", prompt=4, count=COUNT)
    assert seen["arrived"] == 0
    hosts.heal(0)
    until(lambda: two.do("stats")["peers"]["up"] == 1)
    until_found(two, 8)


@pytest.mark.whole
def test_a_host_that_is_killed_costs_a_miss(pair: list[HostCache]) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    one.do("put", prompt=4, count=COUNT)
    until_found(two, 0)
    one.kill()
    assert get(two, 4) == 0
    pair.remove(one)


@pytest.mark.whole
def test_a_reader_that_is_killed_leaves_no_loan(pair: list[HostCache]) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    two.signal(signal.SIGSTOP, "peer")
    two.begin("get", prompt=0, count=COUNT)
    two.kill()
    pair.remove(two)
    until(lambda: one.do("stats")["peers"]["open"] == 0)


def test_all_bytes_are_right_while_prompts_are_overwritten(pair: list[HostCache]) -> None:
    for cache in pair:
        cache.begin("load", seconds=8.0)
    for cache in pair:
        seen = cache.end()
        assert seen["wrong"] == []
        assert seen["hits"] > 0
    assert sum(hits(cache).get("PEER", 0) for cache in pair) > 0
