"""Caches on hosts of their own (network namespaces) that read each other's DRAM, while workers are
killed or stopped and links are cut."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hosts import PORT, HostCache, Network, host_caches, network, until_all_are_up
from stores import missing

COUNT = 24  # blocks of a prompt
LONGEST_GET_S = 8.0
"""What is promised is 1.5 s; the rest is for a machine that is busy."""
STRANGER = Path(__file__).parents[1] / "support" / "mooncake_stranger.py"
BOUNCE_MEMORY = "/dev/zero"  # how the kernel names memory without a file

BY_TRANSFER_ENGINE = [
    pytest.mark.whole,
    pytest.mark.skipif(bool(missing("mooncake.engine")), reason="Mooncake is missing"),
]


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.fixture(params=["tcp", pytest.param("rdma", marks=BY_TRANSFER_ENGINE)])
def pair(
    hosts: Network, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[HostCache]]:
    with host_caches(tmp_path, hosts, peer_transport=request.param) as caches:
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


def get(cache: HostCache, prompt: int, awaits: bool = False) -> int:
    """Load a prompt; return how many of its blocks arrived, all of them right.

    Args:
        awaits: Whether to wait for what is on its way to a peer's DRAM.
    """
    seen = cache.do("get", prompt=prompt, count=COUNT, awaits=awaits)
    assert seen["wrong"] == []
    assert seen["seconds"] < LONGEST_GET_S
    return int(seen["arrived"])


def until_found(cache: HostCache, prompt: int) -> None:
    """Load a prompt until all of it is found: a peer that answers late is a miss."""
    until(lambda: get(cache, prompt) == COUNT)


def test_a_host_finds_what_another_has_in_dram(
    pair: list[HostCache], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    until_found(two, 0)
    assert hits(two) == {"PEER": COUNT}
    two.do("put", prompt=4, count=COUNT)  # and the other way round
    until_found(one, 4)
    assert hits(one) == {"PEER": COUNT}
    is_by_rdma = "[rdma]" in request.node.name
    for log in tmp_path.glob("host-*.log"):
        assert ("peer_rdma_began" in log.read_text()) is is_by_rdma
        assert "peer_read_by_tcp" not in log.read_text()


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


def test_what_another_has_on_ssd_alone_is_found(hosts: Network, tmp_path: Path) -> None:
    with host_caches(tmp_path, hosts, num_ssd_blocks=400) as (one, two):
        until_all_are_up([one, two])
        for prompt in (0, 4):
            one.do("put", prompt=prompt, count=COUNT)
        until(lambda: one.do("stats")["tiers"]["SSD"]["indexed"] == 2 * COUNT)
        until(lambda: one.do("stats")["tiers"]["CPU"]["leased"] == 0)
        one.do("clear", tier="CPU")
        for prompt in (0, 4):
            until(lambda prompt=prompt: get(two, prompt, awaits=True) == COUNT)
        assert one.do("stats")["ops"]["DISK2H"]["blocks"] == 2 * COUNT, "each once"
        assert two.do("stats")["ops"]["PEER2H"]["blocks"] == 2 * COUNT
        until(lambda: one.do("stats")["peers"]["open"] == 0)
        until(lambda: one.do("stats")["early_loads"]["open_blocks"] == 0)
        one.do("check")


# -- before a host goes ----------------------------------------------------------------------------


def drain(one: HostCache, seconds: float = 60.0) -> None:
    one.do("drain", to=f"tcp://10.77.0.2:{PORT}", seconds=seconds)


def until_drained(one: HostCache) -> dict[str, Any]:
    until(lambda: one.do("drained")["state"] != "running")
    found: dict[str, Any] = one.do("drained")
    return found


def num_leased(cache: HostCache) -> int:
    return int(cache.do("stats")["tiers"]["CPU"]["leased"])


def test_a_drain_that_is_stopped_leaves_nothing_behind(pair: list[HostCache]) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    two.signal(signal.SIGSTOP, "peer")
    drain(one)
    until(lambda: num_leased(two) > 0)
    found = one.do("drained", stop=True)
    found = until_drained(one)
    assert (found["state"], found["left_blocks"]) == ("stopped", COUNT)
    two.signal(signal.SIGCONT, "peer")
    until(lambda: num_leased(two) == 0)
    drain(one)  # and once more
    found = until_drained(one)
    assert found["moved_blocks"] + found["there_blocks"] == COUNT
    assert get(two, 0) == COUNT
    assert hits(two) == {"CPU": COUNT}


def test_a_drain_to_a_host_that_is_killed_fails(pair: list[HostCache]) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    two.signal(signal.SIGSTOP, "peer")
    drain(one)
    until(lambda: num_leased(two) > 0)
    two.kill()
    pair.remove(two)
    found = until_drained(one)
    assert found["state"] == "failed"
    assert found["left_blocks"] == COUNT


def test_a_drain_of_a_host_whose_own_worker_dies_fails(pair: list[HostCache]) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    two.signal(signal.SIGSTOP, "peer")
    drain(one)
    one.signal(signal.SIGKILL, "peer")
    found = until_drained(one)
    two.signal(signal.SIGCONT, "peer")
    assert found["state"] == "failed"
    assert "worker of this host" in found["error"]
    assert found["left_blocks"] == COUNT


def test_a_host_that_is_killed_while_it_is_drained_leaves_what_was_moved(
    pair: list[HostCache],
) -> None:
    one, two = pair
    one.do("put", prompt=0, count=COUNT)
    drain(one)
    assert until_drained(one)["moved_blocks"] == COUNT
    one.do("put", prompt=4, count=COUNT)
    one.signal(signal.SIGSTOP, "peer")
    drain(one)
    until(lambda: num_leased(two) > 0)
    one.kill()
    pair.remove(one)
    until(lambda: num_leased(two) == 0)
    assert get(two, 0) == COUNT
    assert get(two, 4) == 0


@pytest.mark.whole
def test_all_bytes_are_right_while_a_host_is_drained(pair: list[HostCache]) -> None:
    one, two = pair
    for cache in pair:
        cache.begin("load", seconds=4.0)
    for cache in pair:
        assert cache.end()["wrong"] == []
    for turn in range(3):
        drain(one, seconds=2.0)
        for cache in pair:
            cache.begin("load", seconds=2.0)
        for cache in pair:
            assert cache.end()["wrong"] == [], turn
        assert until_drained(one)["state"] in ("done", "time")
    assert two.do("stats")["peers"]["taken"] > 0


@pytest.mark.whole
def test_a_gigabyte_is_drained_within_its_time(hosts: Network, tmp_path: Path) -> None:
    with host_caches(tmp_path, hosts, head_size=1024, num_cpu_blocks=4600) as (one, two):
        until_all_are_up([one, two])
        prompts = range(0, 4 * 171, 4)
        for prompt in prompts:
            one.do("put", prompt=prompt, count=COUNT)
        total = len(prompts) * COUNT  # 1.08 GB
        moved = 0
        for seconds in (0.2, 10.0):
            drain(one, seconds)
            found = until_drained(one)
            assert found["state"] in ("done", "time")
            assert (found["total_blocks"], found["there_blocks"]) == (total, moved)
            assert found["seconds"] < seconds + LONGEST_GET_S
            moved += found["moved_blocks"]
            assert found["left_blocks"] == total - moved
        one.kill()
        assert sum(get(two, prompt) for prompt in prompts) == moved > 0
        assert hits(two) == {"CPU": moved}


def test_all_bytes_are_right_while_prompts_are_overwritten(pair: list[HostCache]) -> None:
    for cache in pair:
        cache.begin("load", seconds=8.0)
    for cache in pair:
        seen = cache.end()
        assert seen["wrong"] == []
        assert seen["hits"] > 0
    assert sum(hits(cache).get("PEER", 0) for cache in pair) > 0


@contextmanager
def stranger_at(namespace: str, pid: int) -> Iterator[list[str]]:
    """Let a stranger overwrite a worker's bounce memory and its pool, wherever Transfer Engine lets
    it; return what it could write to."""
    command = [sys.executable, str(STRANGER), str(pid), f"{BOUNCE_MEMORY}|/memfd"]
    process = subprocess.Popen(["ip", "netns", "exec", namespace, *command], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith(b"{"):
            assert line, "the stranger ended"
        yield json.loads(line)["written"]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("pair", [pytest.param("rdma", marks=BY_TRANSFER_ENGINE)], indirect=True)
def test_what_a_stranger_overwrites_on_its_way_is_not_served(
    pair: list[HostCache], hosts: Network
) -> None:
    one, two = pair
    for cache, other, prompt in ((one, two, 0), (two, one, 4)):
        cache.do("put", prompt=prompt, count=COUNT)
        until_found(other, prompt)  # so both have bounce memory
    with ExitStack() as stack:
        for cache, namespace in zip(pair, hosts.names, strict=True):
            pid = cache.do("pids")["peer"]
            written = stack.enter_context(stranger_at(namespace, pid))
            assert [name.split()[0] for name in written] == [BOUNCE_MEMORY]
        for cache in pair:
            cache.begin("load", seconds=10.0)
        seen = [cache.end() for cache in pair]
    assert [each["wrong"] for each in seen] == [[], []]
    assert all(each["hits"] > 0 for each in seen)
