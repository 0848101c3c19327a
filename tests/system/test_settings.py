"""Every setting takes part in a real server: with a value that is not its default, bytes come back.

Where the effect of a setting shows from outside, its scenario checks that too.
"""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from cluster import Cluster, running_cluster, until
from ports import free_ports, free_range
from test_shared import serving

from flexcache import CacheConfig
from flexcache.errors import ConfigError
from flexcache.events.subscriber import KVEventSubscriber
from flexcache.ids import OpKind
from flexcache.protocol.endpoints import private_endpoint
from flexcache.protocol.trust import make_keys
from flexcache.replay.traces import RecordedTrace
from flexcache.storage.block_io import io_uring_problem

NUM_BLOCKS = 4
LONG = 24
"""Blocks of a prompt that is not too short for the samples by which a store's policy judges."""
Settings = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """A server with some settings.

    Attributes:
        settings: Makes them; gets an empty directory.
        check: What they do to a cache that has stored and loaded one prompt.
        missing: Says why the machine cannot run it; "" if it can.
        in_file: The settings are those of a server process, in its file.
    """

    name: str
    settings: Callable[[Path], Settings]
    check: Callable[[Cluster], None] = lambda cluster: None
    missing: Callable[[], str] = lambda: ""
    in_file: bool = False


def prompt(cluster: Cluster, number: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
    return np.arange(num_blocks * cluster.config.tokens_per_block) + 1_000_000 * number


def indexed(cluster: Cluster, tier: str) -> int:
    return int(cluster.manager.stats()["tiers"][tier]["indexed"])


def tiers_are_available(cluster: Cluster) -> bool:
    tiers = cluster.manager.stats()["tiers"]
    # That of peers is, once one answers: here there is none.
    return all(tier["available"] for name, tier in tiers.items() if name != "PEER")


def store_and_load(cluster: Cluster) -> None:
    """One prompt, into blocks that are wiped meanwhile."""
    until(lambda: tiers_are_available(cluster))
    blocks = list(range(NUM_BLOCKS))
    stored = cluster.read(blocks)
    assert cluster.put(prompt(cluster, 0), blocks).mask.all()
    cluster.wipe(blocks)
    assert cluster.get(prompt(cluster, 0), blocks).mask.all()
    assert cluster.read(blocks) == stored


# -- effects that show from outside ----------------------------------------------------------------


def writes_back_when_dram_is_dirty(tier: str) -> Callable[[Cluster], None]:
    def check(cluster: Cluster) -> None:
        assert indexed(cluster, tier) == 0
        numbers = itertools.count(1)

        def is_written() -> bool:
            cluster.put(prompt(cluster, next(numbers)), range(NUM_BLOCKS))
            return indexed(cluster, tier) > 0

        until(is_written)

    return check


def writes_what_is_seen_twice(tier: str) -> Callable[[Cluster], None]:
    def check(cluster: Cluster) -> None:
        before = indexed(cluster, tier)
        cluster.put(prompt(cluster, 7, LONG), range(LONG))
        assert indexed(cluster, tier) == before
        put_until_it_is_in(cluster, prompt(cluster, 7, LONG), tier, before + LONG)

    return check


def comes_back_from(tier: str) -> Callable[[Cluster], None]:
    def check(cluster: Cluster) -> None:
        put_until_it_is_in(cluster, prompt(cluster, 0), tier, NUM_BLOCKS)
        cluster.manager.clear("CPU")
        stored = cluster.read(range(NUM_BLOCKS))
        cluster.wipe(range(NUM_BLOCKS))
        assert cluster.get(prompt(cluster, 0), range(NUM_BLOCKS)).mask.all()
        assert cluster.read(range(NUM_BLOCKS)) == stored

    return check


def comes_back_past_dram(*kinds: OpKind) -> Callable[[Cluster], None]:
    def check(cluster: Cluster) -> None:
        comes_back_from("SSD")(cluster)
        ops = cluster.manager.stats()["ops"]
        assert [ops[kind.value]["blocks"] >= NUM_BLOCKS for kind in kinds] == [True] * len(kinds)

    return check


def put_until_it_is_in(cluster: Cluster, tokens: np.ndarray, tier: str, num_indexed: int) -> None:
    """Put a prompt again until a tier has it: a busy store may not take it the first time."""

    def is_in() -> bool:
        cluster.put(tokens, range(len(tokens) // cluster.config.tokens_per_block))
        return indexed(cluster, tier) >= num_indexed

    until(is_in)


def has_capacities(**blocks: int) -> Callable[[Cluster], None]:
    def check(cluster: Cluster) -> None:
        tiers = cluster.manager.stats()["tiers"]
        assert {name: tiers[name]["capacity"] for name in blocks} == blocks

    return check


def throttles_writes(cluster: Cluster) -> None:
    until(lambda: tiers_are_available(cluster))
    cluster.put(prompt(cluster, 1, LONG), range(LONG))
    dropped = cluster.manager.stats()["dropped_blocks"]
    assert {"ssd_write_throttled", "remote_write_throttled"} <= dropped.keys()


def has_a_retention_time(cluster: Cluster) -> None:
    assert cluster.manager.stats()["retention_s"] == cluster.config.retention_s


def pins_a_quarter(cluster: Cluster) -> None:
    size = cluster.config.tokens_per_block
    quarter = cluster.manager.stats()["tiers"]["CPU"]["capacity"] // 4
    tokens = np.arange((quarter + 1) * size)
    cluster.put(tokens, list(range(quarter + 1)))
    assert cluster.manager.pin(tokens, ttl_s=60) is None
    assert cluster.manager.pin(tokens[:-size], ttl_s=60) is not None


def forgets_matches_that_are_not_launched(cluster: Cluster) -> None:
    cluster.manager.put_match(prompt(cluster, 9))
    until(lambda: not sum(cluster.manager.stats()["tasks"].values()))
    assert cluster.num_leased() == 0


def is_observed(cluster: Cluster) -> None:
    config = cluster.config
    url = f"http://{config.http_endpoint}/status"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=30)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {config.http_token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["tiers"]["CPU"]["indexed"] == NUM_BLOCKS
    assert config.kv_events_endpoint is not None and config.kv_events_topic is not None
    endpoint, replay = config.kv_events_endpoint, config.kv_events_replay_endpoint
    with KVEventSubscriber(endpoint, replay, config.kv_events_topic) as subscriber:
        assert next(iter(subscriber)) is not None
    assert config.trace_dir is not None
    trace = RecordedTrace([Path(config.trace_dir)])
    until(lambda: any(trace.records()))


def is_in_touch_with_itself_alone(cluster: Cluster) -> None:
    stats = cluster.manager.stats()
    assert (stats["peers"]["up"], "PEER" in stats["tiers"]) == (0, True)


def records_changes(cluster: Cluster) -> None:
    until(lambda: cluster.manager.take_changes())


# -- the scenarios -----------------------------------------------------------------


def ssd(directory: Path) -> Settings:
    if directory.is_dir():
        (directory / "ssd").mkdir(exist_ok=True)
    return {"num_ssd_blocks": 96, "ssd_cache_dirs": [str(directory / "ssd")]}


def remote(directory: Path) -> Settings:
    return {
        "remote_url": f"file://{directory / 'store'}",
        "remote_lookup_timeout_s": 1.0,
        "remote_timeout_s": 10.0,
    }


def observers(directory: Path) -> Settings:
    http, events, replay = free_ports(3)
    return {
        "http_endpoint": f"127.0.0.1:{http}",
        "http_token": "secret-of-the-test",
        "kv_events_endpoint": f"tcp://127.0.0.1:{events}",
        "kv_events_replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "kv_events_topic": "kv@here@model",
        "kv_events_hashes": "bytes",
        "trace_dir": str(directory / "trace"),
        "trace_file_mb": 1.0,
    }


def peers(directory: Path) -> Settings:
    port, other = free_range(2), free_range(2)
    addresses = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{other}")
    return {"peer_endpoint": addresses[0], "peers": addresses, "peer_transport": "rdma"}


def at_a_server(directory: Path) -> Settings:
    keys = directory / "keys"
    if directory.is_dir():
        make_keys(keys)
    return {
        "endpoint": private_endpoint("settings") if directory.is_dir() else "ipc:///s",
        "curve_keys": str(keys),
        "server_timeout_s": 10.0,
        "client_timeout_s": 60.0,
        "log_level": "WARNING",
        "log_format": "json",
        **ssd(directory),
    }


def io_uring_is_missing() -> str:
    return io_uring_problem() or ""


def package_is_missing(name: str) -> Callable[[], str]:
    def missing() -> str:
        try:
            __import__(name)
        except ImportError:
            return f"{name} is not installed"
        return ""

    return missing


def reserved_pages_are_missing() -> str:
    sizes = Path("/sys/kernel/mm/hugepages").glob("*/free_hugepages")
    if not any(int(size.read_text()) for size in sizes):
        return "the system has no reserved huge pages"
    return ""


SCENARIOS = [
    Scenario(
        "write-back to SSD",
        lambda d: {**ssd(d), "ssd_write_policy": "write_back"},
        writes_back_when_dram_is_dirty("SSD"),
    ),
    Scenario(
        "selective to SSD",
        lambda d: {**ssd(d), "ssd_write_policy": "selective"},
        writes_what_is_seen_twice("SSD"),
    ),
    Scenario(
        "write-back to a store",
        lambda d: {**remote(d), "remote_write_policy": "write_back"},
        writes_back_when_dram_is_dirty("REMOTE"),
    ),
    Scenario(
        "selective to a store",
        lambda d: {**remote(d), "remote_write_policy": "selective"},
        writes_what_is_seen_twice("REMOTE"),
    ),
    *(
        Scenario(
            f"{method} in {name}",
            lambda d, s=settings, n=name, m=method: {**s(d), f"{n}_compression": m},  # type: ignore[misc]
            comes_back_from(name.upper()),
            package_is_missing(package),
        )
        for name, settings in (("ssd", ssd), ("remote", remote))
        for method, package in (("zstd", "zstandard"), ("lz4", "lz4"))
    ),
    Scenario(
        "sizes in GB and large blocks",
        lambda d: {
            "tokens_per_block": 64, "cpu_cache_gb": 0.02, "num_cpu_blocks": None,
            "ssd_cache_gb": 0.04, "ssd_cache_dirs": ssd(d)["ssd_cache_dirs"],
        },
        comes_back_from("SSD"),
    ),
    Scenario("sizes in blocks", lambda d: {**ssd(d), "num_cpu_blocks": 24},
             has_capacities(CPU=24, SSD=96)),
    Scenario(
        "SSD by threads",
        lambda d: {
            **ssd(d), "io_engine": "threads", "ssd_sync": "none",
            "ssd_on_mismatch": "clear", "transfer_chunk_mb": 0.05,
            "ssd_past_dram": "never",
        },
        comes_back_from("SSD"),
    ),
    Scenario(
        "SSD past DRAM",
        lambda d: {**ssd(d), "ssd_past_dram": "always"},
        comes_back_past_dram(OpKind.DISK2D),
    ),
    Scenario(
        "SSD alone",
        lambda d: {**ssd(d), "num_cpu_blocks": 0},
        comes_back_past_dram(OpKind.DISK2D, OpKind.D2DISK),
    ),
    Scenario("SSD by io_uring", lambda d: {**ssd(d), "io_engine": "io_uring"},
             comes_back_from("SSD"), io_uring_is_missing),
    Scenario(
        "policies of the cache",
        lambda d: {
            **ssd(d), "eviction_policy": "lru", "skip_slow_loads": False,
            "early_load_share": 0.25, "quotas": "a tenant=10%/1MB",
            "skip_useless_ssd_writes": False,
        },
        comes_back_from("SSD"),
    ),
    Scenario(
        "limited writes",
        lambda d: {**ssd(d), **remote(d), "ssd_write_mb_s": 0.02, "remote_write_mb_s": 0.01},
        throttles_writes,
    ),
    Scenario("peers", peers, is_in_touch_with_itself_alone),
    Scenario("shards", lambda d: {**ssd(d), "store_shards": 4, "head_dim": 3},
             comes_back_from("SSD")),
    Scenario("retention", lambda d: {**ssd(d), "retention_s": 600.0}, has_a_retention_time),
    Scenario("short deadlines", lambda d: {"match_ttl_s": 0.5, "op_timeout_s": 20.0},
             forgets_matches_that_are_not_launched),
    Scenario("layers on", lambda d: {"layerwise_load": "on", "log_level": "DEBUG"}),
    Scenario("named weights", lambda d: {"model_version": "v1"}),
    Scenario("tails", lambda d: {"tail_interval_tokens": 128}),
    Scenario("answers", lambda d: {"answer_interval_tokens": 64}),  # of vLLM: tests/vllm has more
    Scenario("few pins", lambda d: {"max_pinned_share": 0.25}, pins_a_quarter),
    Scenario("layers off", lambda d: {"layerwise_load": "off", "log_level": "ERROR"}),
    Scenario("reserved huge pages", lambda d: {"hugepages": "reserved"},
             missing=reserved_pages_are_missing),
    Scenario("observers", observers, is_observed),
    Scenario("SGLang's block hashes", lambda d: {**observers(d), "kv_events_hashes": "int_first"},
             is_observed),
    Scenario("locality", lambda d: {**observers(d), "kv_events_locality": True}, is_observed),
    Scenario("runs", lambda d: {**observers(d), **ssd(d), "kv_events_runs": True}, is_observed),
    Scenario("changes", lambda d: {"kv_events": True}, records_changes),
    Scenario("a server process", at_a_server, comes_back_from("SSD"), in_file=True),
]  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_stored_blocks_come_back_and_the_settings_take_effect(
    scenario: Scenario, tmp_path: Path
) -> None:
    missing = scenario.missing()
    if missing:
        pytest.skip(missing)
    settings = scenario.settings(tmp_path)
    with server_of(scenario, settings, tmp_path), running_cluster(**settings) as cluster:
        store_and_load(cluster)
        scenario.check(cluster)


@contextmanager
def server_of(scenario: Scenario, settings: Settings, directory: Path) -> Iterator[None]:
    """A server process with the settings in a file, where the scenario wants one."""
    if not scenario.in_file:
        yield
        return
    file = directory / "server.json"
    file.write_text(json.dumps({"num_cpu_blocks": 48, **settings}))
    with serving("--config", str(file)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield


def test_reserved_huge_pages_that_the_system_lacks_are_refused_by_name() -> None:
    if not reserved_pages_are_missing():
        pytest.skip("the system has reserved huge pages")
    with pytest.raises(ConfigError, match="hugepages"), running_cluster(hugepages="reserved"):
        pass


# -- no setting is left out -----------------------------------------------------------------


def unused_settings(config: type[Any], used: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the fields that always have their defaults, and choices that are never made."""
    hints = get_type_hints(config)
    missing = []
    for field in fields(config):
        values = [settings[field.name] for settings in used if field.name in settings]
        if all(value == default_of(field) for value in values):
            missing.append(field.name)
        elif get_origin(hints[field.name]) is Literal:
            choices = set(get_args(hints[field.name])) - {default_of(field), *values}
            missing += [f"{field.name} = {choice}" for choice in sorted(choices)]
    return missing


def default_of(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def test_every_setting_has_a_non_default_value_in_some_scenario() -> None:
    used = [scenario.settings(Path("/nowhere")) for scenario in SCENARIOS]
    assert unused_settings(CacheConfig, used) == []


def test_settings_that_no_scenario_changes_are_found() -> None:
    @dataclass
    class Config:
        size: int = 1
        way: Literal["a", "b", "c"] = "a"
        dirs: tuple[str, ...] = ()

    assert unused_settings(Config, []) == ["size", "way", "dirs"]
    used = [{"size": 1, "way": "b"}, {"dirs": ["x"]}]
    assert unused_settings(Config, used) == ["size", "way = c"]
    assert unused_settings(Config, [*used, {"size": 2, "way": "c"}]) == []
