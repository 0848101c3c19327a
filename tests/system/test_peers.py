"""Caches that read each other's DRAM."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from cluster import Cluster, running_cluster, until
from ports import free_port, free_range
from typer.testing import CliRunner

from flexcache import ModelConfig
from flexcache.cli import app
from flexcache.cli import cache as cache_commands
from flexcache.doctor.endpoints import check_peers
from flexcache.doctor.subject import Level, Subject
from flexcache.ids import HandOver
from flexcache.protocol.messages import FindBlocks, FoundBlocks, TakeBlocks, TookBlocks
from flexcache.protocol.trust import make_keys
from flexcache.server import peers as server_peers
from flexcache.server.operator import Operator
from flexcache.server.peer_worker import connect_peer

NUM_BLOCKS = 24
TOKENS = np.arange(NUM_BLOCKS * 16)
BLOCKS = list(range(NUM_BLOCKS))
_numbers = itertools.count()


@pytest.fixture
def model() -> ModelConfig:
    return ModelConfig(f"model-{next(_numbers)}", 3, 4, 32, torch.bfloat16)


@contextmanager
def caches(
    model: ModelConfig, count: int = 2, first: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[list[Cluster]]:  # fmt: skip
    """Run caches that know each other, and themselves, by address.

    Args:
        first: Settings of the first one alone.
    """
    ports = [free_range(2) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    settings = {"num_cpu_blocks": 256, "skip_slow_loads": False, **settings}
    with ExitStack() as stack:
        clusters = []
        for own in addresses:
            mine = {**settings, **(first if not clusters else {}), "peer_endpoint": own}
            cluster = running_cluster(model=model, peers=addresses, **mine)
            clusters.append(stack.enter_context(cluster))
        for cluster in clusters:
            until(lambda cluster=cluster: is_ready(cluster, count - 1))
        yield clusters


def is_ready(cluster: Cluster, num_peers: int) -> bool:
    stats = cluster.manager.stats()
    return bool(stats["peers"]["up"] == num_peers and stats["tiers"]["PEER"]["available"])


def peers(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.manager.stats()["peers"]
    return found


def test_blocks_in_dram_of_one_cache_reach_another_byte_for_byte(model: ModelConfig) -> None:
    with caches(model) as (one, two):
        expected = one.read(BLOCKS)
        assert one.put(TOKENS, BLOCKS).mask.all()
        two.wipe(BLOCKS)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
        assert two.manager.stats()["hit_blocks"] == {"PEER": NUM_BLOCKS}
        two.wipe(BLOCKS)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
        assert two.manager.stats()["hit_blocks"] == {"PEER": NUM_BLOCKS, "CPU": NUM_BLOCKS}
        until(lambda: peers(one)["open"] == 0)
        [line] = Operator(two.server).lately().peers
        assert (line.name, line.state) == (one.config.peer_endpoint, "up"), "not of itself"


def test_the_doctor_says_which_peers_answer(model: ModelConfig, tmp_path: Path) -> None:
    port, unused = free_range(2), free_range(2)
    address = f"tcp://127.0.0.1:{port}"
    settings = {
        "FLEXCACHE_NUM_CPU_BLOCKS": "8",
        "FLEXCACHE_PEERS": f"{address},tcp://127.0.0.1:{unused}",
    }
    with running_cluster(model=model, peer_endpoint=address):
        found = list(check_peers(Subject(environ=settings)))
        own = list(check_peers(Subject(environ={"FLEXCACHE_PEER_ENDPOINT": address})))
    assert [each.level for each in found] == [Level.OK, Level.WARNING]
    assert found[0].text == f"{address}: answers"
    assert [each.level for each in own] == [Level.ERROR], "another process has it"
    [free] = check_peers(Subject(environ={"FLEXCACHE_PEER_ENDPOINT": address}))
    assert free.level is Level.OK
    make_keys(tmp_path / "keys")
    unknown = {
        "FLEXCACHE_PEERS": "dns://no.such.name.invalid:9600",
        "FLEXCACHE_CURVE_KEYS": str(tmp_path / "keys"),
    }
    [found_none] = check_peers(Subject(environ=unknown))
    assert found_none.level is Level.WARNING


def test_peers_of_another_model_are_told_apart(
    model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = [f"tcp://127.0.0.1:{free_range(2)}" for _ in range(3)]
    clusters: list[Cluster] = []
    models = [model, model, dataclasses.replace(model, num_layers=2)]
    with ExitStack() as stack:
        for own, each in zip(addresses, models, strict=True):
            settings = {"peers": addresses, "peer_endpoint": own}
            clusters.append(stack.enter_context(running_cluster(model=each, **settings)))
        settings = {"FLEXCACHE_NUM_CPU_BLOCKS": "8", "FLEXCACHE_PEERS": ",".join(addresses)}
        *answer, other = check_peers(Subject(environ=settings))
        until(lambda: caplog.text.count("peer_keeps_another_model") >= 4)
        clusters[0].put(TOKENS, BLOCKS)
        goes = Operator(clusters[0].server)
        goes.drain(addresses[2], 60.0)
        until(lambda: (found := goes.drain_progress()) is not None and found.state == "failed")
        found = goes.drain_progress()
        assert found is not None
        assert "another model" in found.error
    assert [each.level for each in answer] == [Level.OK] * 3
    assert other.level is Level.WARNING
    assert other.text.startswith(f"{addresses[2]}: another model")
    logged = [each for each in caplog.messages if "peer_keeps_another_model" in each]
    assert len(logged) == 4, "each of the two kinds of the other, once"


def test_a_get_waits_for_what_is_on_its_way_to_the_dram_of_a_peer(model: ModelConfig) -> None:
    with caches(model) as (one, two):
        put, _ = one.manager.put_match(TOKENS)
        one.manager.launch([put], [one.slots(BLOCKS)], gated=True)  # it is computed in a moment

        def matched() -> Any:
            return two.manager.get_match_by_tier(TOKENS, awaits_loads=True)

        until(lambda: matched() is None)
        for _ in range(20):
            assert matched() is None
            time.sleep(0.01)
        one.clients[0].open_gates([put])
        until(lambda: (found := matched()) is not None and found[1].all())
        assert matched()[2] == {"PEER": len(TOKENS)}


def test_a_get_does_not_wait_for_what_never_comes(model: ModelConfig) -> None:
    with caches(model) as (one, two):
        put, _ = one.manager.put_match(TOKENS)
        one.manager.launch([put], [one.slots(BLOCKS)], gated=True)
        until(lambda: two.manager.get_match_by_tier(TOKENS, awaits_loads=True) is None)
        one.manager.cancel([put])
        until(lambda: two.manager.get_match_by_tier(TOKENS, awaits_loads=True) is not None)


# -- hand-over: a get waits for what another engine computes now -----------------------------------


def handed_over(cluster: Cluster, source: str = "", wait_s: float = 60.0) -> Any:
    """Ask for a prompt that is computed elsewhere; None: wait."""
    hand_over = HandOver(time.monotonic() + wait_s, source)
    return cluster.manager.get_match_by_tier(TOKENS, awaits_loads=True, hand_over=hand_over)


def test_a_get_waits_for_what_another_engine_computes_and_loads_what_is_there(
    model: ModelConfig,
) -> None:
    half = NUM_BLOCKS // 2
    with caches(model) as (one, two):
        source = one.manager.cache_config.peer_endpoint
        assert handed_over(two, source) is None
        one.put(TOKENS[: half * 16], BLOCKS[:half])

        def has_half() -> bool:
            assert handed_over(two, source) is None
            return bool(two.manager.stats()["tiers"]["CPU"]["indexed"] == half)

        until(has_half)
        one.put(TOKENS, BLOCKS)
        expected = {"CPU": half * 16, "PEER": half * 16}
        until(lambda: (found := handed_over(two, source)) is not None and found[2] == expected)
        two.wipe(BLOCKS)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == one.read(BLOCKS)


def test_a_get_waits_no_longer_than_it_is_told(model: ModelConfig) -> None:
    with caches(model) as (one, two):
        one.put(TOKENS[:16], BLOCKS[:1])
        ends_s = time.monotonic() + 0.5
        until(lambda: handed_over(two, wait_s=ends_s - time.monotonic()) is not None)
        assert time.monotonic() >= ends_s
        until(lambda: (found := handed_over(two, wait_s=0)) is not None and found[1].sum() == 16)


@pytest.mark.parametrize("step_s", [0.0, 0.1])
def test_a_get_does_not_wait_for_an_engine_that_is_gone(model: ModelConfig, step_s: float) -> None:
    own = [f"tcp://127.0.0.1:{free_range(2)}" for _ in range(2)]
    one, two = (
        running_cluster(model=model, peer_endpoint=each, num_cpu_blocks=256) for each in own
    )
    with two as reader:
        with one:
            until(lambda: handed_over(reader, own[0]) is None and peers(reader)["up"] == 1)

        def ask_after_a_step() -> Any:
            time.sleep(step_s)
            return handed_over(reader, own[0])

        until(lambda: ask_after_a_step() is not None)


@pytest.mark.parametrize("busy_s", [600.0, 0.5])
def test_a_get_waits_a_while_for_an_engine_that_is_silent(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, busy_s: float
) -> None:
    monkeypatch.setattr(server_peers, "_AWAITED_S", busy_s)
    with caches(model) as (one, two):
        source = one.manager.cache_config.peer_endpoint
        with one.server.lock:  # it answers no one
            until(lambda: handed_over(two, source) is not None or not peers(two)["up"])
            if busy_s < 1.0:
                until(lambda: handed_over(two, source) is not None)
                return
            assert handed_over(two, source) is None
        one.put(TOKENS, BLOCKS)
        until(lambda: (found := handed_over(two, source)) is not None and found[1].all())


def test_a_cache_without_peers_does_not_wait_for_one(model: ModelConfig) -> None:
    with running_cluster(model=model) as alone:
        assert handed_over(alone, "tcp://127.0.0.1:9600") is not None
        assert handed_over(alone) is None  # another engine of this cache may have it soon


def test_a_request_names_a_peer_that_the_settings_do_not(model: ModelConfig) -> None:
    own = [f"tcp://127.0.0.1:{free_range(2)}" for _ in range(2)]
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                running_cluster(model=model, peer_endpoint=each, num_cpu_blocks=256)
            )
            for each in own
        )
        one.put(TOKENS, BLOCKS)
        until(lambda: "PEER" in one.manager.stats()["tiers"])
        expected = {"PEER": len(TOKENS)}
        until(lambda: (found := handed_over(two, own[0])) is not None and found[2] == expected)
        assert handed_over(two, "tcp://192.0.2.7:9600", wait_s=0) is not None, "without keys"
        assert peers(two)["up"] == 1


# -- before a host goes ----------------------------------------------------------------------------


def drained(port: int, *options: str, status: int = 0) -> Any:
    ran = CliRunner().invoke(app, ["drain", "--endpoint", str(port), "--json", *options])
    assert ran.exit_code == status, ran.output
    return json.loads(ran.output.splitlines()[0])


def prompt_of(number: int) -> np.ndarray:
    return TOKENS + 100_000 * number


def address_of(cluster: Cluster) -> str:
    found = cluster.config.peer_endpoint
    assert found is not None
    return found


def test_a_peer_takes_over_what_a_host_has_that_goes(model: ModelConfig) -> None:
    port = free_port()
    with caches(model, first={"http_endpoint": str(port)}) as (one, two):
        expected = one.read(BLOCKS)
        for number in range(3):
            one.put(prompt_of(number), BLOCKS)
        two.put(prompt_of(1), BLOCKS)  # it has that already
        found = drained(port, "--to", address_of(two))
        assert found["state"] == "done"
        assert found["total_blocks"] == 3 * NUM_BLOCKS
        assert found["moved_blocks"] == 2 * NUM_BLOCKS
        assert (found["there_blocks"], found["left_blocks"]) == (NUM_BLOCKS, 0)
        assert peers(one)["moved"] == peers(two)["taken"] == 2 * NUM_BLOCKS
        until(lambda: peers(one)["open"] == 0)
        one.manager.clear("CPU")
        for number in (0, 2):
            two.wipe(BLOCKS)
            assert two.get(prompt_of(number), BLOCKS).mask.all()
            assert two.read(BLOCKS) == expected
        assert two.manager.stats()["hit_blocks"] == {"CPU": 2 * NUM_BLOCKS}


def test_a_peer_keeps_what_it_used_later_than_what_it_is_handed(model: ModelConfig) -> None:
    port = free_port()
    settings = {"num_cpu_blocks": 3 * NUM_BLOCKS, "eviction_policy": "lru"}
    first = {"http_endpoint": str(port), "num_cpu_blocks": 256}
    with caches(model, first=first, **settings) as (one, two):
        for number, cluster in enumerate((one, two, one, two)):
            if number:
                time.sleep(1.0)  # what is handed over seems younger by the time of a message
            cluster.put(prompt_of(number), BLOCKS)
        two.put(prompt_of(4), BLOCKS[: NUM_BLOCKS // 2])
        found = drained(port, "--to", address_of(two))
        # Of what both have used the last stays: 4, 3, 2 and half of 1.
        assert found["state"] == "done"
        assert found["left_blocks"] == NUM_BLOCKS
        assert found["moved_blocks"] == NUM_BLOCKS
        in_dram = [two.manager.lookup(prompt_of(number))["CPU"] // 16 for number in (4, 3, 2, 1, 0)]
        assert in_dram == [NUM_BLOCKS // 2, NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS // 2, 0]


def test_a_drain_ends_with_its_bytes_and_can_be_refused(model: ModelConfig) -> None:
    port = free_port()
    with caches(model, first={"http_endpoint": str(port)}) as (one, two):
        one.put(prompt_of(0), BLOCKS)
        block_bytes = one.server.hub.cache.shards.block_bytes  # type: ignore[union-attr]
        found = drained(port, "--to", address_of(two), "--bytes", str(5 * block_bytes))
        assert (found["state"], found["moved_blocks"]) == ("bytes", 5)
        assert found["left_blocks"] == NUM_BLOCKS - 5
        own = drained(port, "--to", address_of(one), status=1)
        assert "this host itself" in own["error"]
        nowhere = drained(port, "--to", f"tcp://127.0.0.1:{free_range(2)}", status=1)
        assert "does not answer" in nowhere["error"]
        assert drained(port, "--stop", status=1) == nowhere
    with (
        caches(model, first={"http_endpoint": str(port)}) as (one, _),
        running_cluster(model=model, peer_endpoint=f"tcp://127.0.0.1:{free_range(2)}") as third,
    ):
        one.put(prompt_of(0), BLOCKS)
        found = drained(port, "--to", address_of(third), status=1)
        assert "add this host to its setting peers" in found["error"]


def test_ctrl_c_stops_a_drain(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    port, sleep = free_port(), time.sleep

    def pressed(seconds: float) -> None:
        monkeypatch.setattr(cache_commands.time, "sleep", sleep)
        raise KeyboardInterrupt

    with running_cluster(
        model=model, http_endpoint=str(port), peer_endpoint=f"tcp://127.0.0.1:{free_range(2)}"
    ) as one:
        one.put(prompt_of(0), BLOCKS)
        monkeypatch.setattr(cache_commands.time, "sleep", pressed)
        found = drained(port, "--to", f"tcp://127.0.0.1:{free_range(2)}")
    assert (found["state"], found["left_blocks"]) == ("stopped", NUM_BLOCKS)


def test_a_peer_that_hands_over_and_asks_for_anything_disturbs_no_one(
    model: ModelConfig, tmp_path: Path
) -> None:
    ssd = {"ssd_cache_dirs": [str(tmp_path)], "num_ssd_blocks": 64, "transfer_chunk_mb": 0.05}
    with caches(model, first=ssd) as (one, two), zmq.Context() as context:
        one.put(TOKENS, BLOCKS)
        links, cache = two.server.peers, one.server.cache
        assert links is not None
        assert cache is not None
        with connect_peer(context, address_of(one), None) as line:
            line.rcvtimeo = 60_000
            # As if the other one went, and had what it has not; then what makes no sense.
            for number in range(100):
                keys = b"%016d" % number * 50
                line.send(msgspec.msgpack.encode(TakeBlocks(
                    number, links.id, cache.kept, b"r" * 16, keys, 16, 0.0, number % 3
                )))  # fmt: skip
                line.send(msgspec.msgpack.encode(
                    FindBlocks(0, b"r" * 16, keys, 16, [(0, b"x", 1 << 40)], stage=True)
                ))  # fmt: skip
            line.send(msgspec.msgpack.encode(
                TakeBlocks(100, links.id, cache.kept, b"short", b"", 0, float("nan"), -1)
            ))  # fmt: skip
            took, decoder = [], msgspec.msgpack.Decoder(FoundBlocks | TookBlocks)
            while len(took) < 100:
                answer = decoder.decode(line.recv())
                took += [answer] if isinstance(answer, TookBlocks) else []
        assert any(each.refusal for each in took)
        assert not any(each.num_read or each.num_blocks for each in took)
        until(lambda: one.num_leased() == 0)
        assert one.manager.stats()["counters"]["rejected_messages"]["malformed"] == 1
        expected = one.read(BLOCKS)
        two.wipe(BLOCKS)
        until(lambda: two.get(TOKENS, BLOCKS).mask.all())
        assert two.read(BLOCKS) == expected


def test_a_source_that_cannot_have_it_is_not_waited_for(model: ModelConfig) -> None:
    unused = f"tcp://127.0.0.1:{free_range(2)}"
    with caches(model) as (one, two):
        until(lambda: handed_over(two, "tcp://192.0.2.7:9600") is not None)  # without keys
        until(lambda: handed_over(two, "tcp://a.name:9600") is not None)
        assert handed_over(two, unused) is None
        one.put(TOKENS, BLOCKS)
        until(lambda: handed_over(two, unused) is not None)
        until(lambda: bool(two.get(TOKENS, BLOCKS).mask.all()))
