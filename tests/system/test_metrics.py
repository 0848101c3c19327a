"""Every metric responds to its cause, at a real server scraped over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import zmq
from cluster import READY_S, Cluster, joined_kv, running_cluster, until
from paths import ROOT
from ports import free_port, free_ports

from flexcache.server import observers

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from scrapes import CHANGES, Expected, Is, Scrapes

from flexcache import CacheConfig, KVManager, KVTPClient, ModelConfig, __version__
from flexcache.cache import tiered_cache
from flexcache.cache.admission import MIN_MISSED_BLOCKS
from flexcache.counters import families
from flexcache.events.wire import END_OF_REPLAY
from flexcache.protocol.endpoints import private_endpoint
from flexcache.protocol.messages import HelloEngine, ModelSpec
from flexcache.server.server import KVServer
from flexcache.stats import Stats
from flexcache.storage.pool_directory import DATA_FILE

NUM_BLOCKS = 24
TOKENS = np.arange(NUM_BLOCKS * 16)
BLOCKS = list(range(NUM_BLOCKS))
MODEL = ModelConfig("metrics", 3, 4, 32, torch.bfloat16)
BLOCK_BYTES = 16 * MODEL.token_size_in_bytes
PROMPT_BYTES = NUM_BLOCKS * BLOCK_BYTES


class Server(Scrapes):
    """HTTP of one server, and its metrics at each scrape."""

    def __init__(self) -> None:
        self.port = free_port()
        super().__init__(lambda: str(self.ask("/metrics")), "flexcache_")

    def ask(self, path: str, content: object = None) -> Any:
        """GET, or POST if there is content. An HTTP error is an answer too."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()


# -- what is done to a server ---------------------------------------------------------------------


def use_every_tier(server: Server, tmp_path: Path) -> None:
    """Put, get from each tier, prefetch, overfill, leave a match alone, compute instead of load."""
    with running_cluster(
        [tmp_path / "ssd"],
        model=MODEL,
        num_cpu_blocks=192,
        remote_url=f"file://{tmp_path / 'store'}",
        remote_lookup_timeout_s=20.0,
        server_timeout_s=60.0,
        http_endpoint=str(server.port),
    ) as cluster:
        until(lambda: cluster.manager.stats()["remote"]["available"])
        server.look()
        assert cluster.put(TOKENS, BLOCKS).mask.all()
        assert cluster.get(TOKENS, BLOCKS).mask.all()
        assert clear(server, "CPU") == NUM_BLOCKS
        assert cluster.get(TOKENS, BLOCKS).mask.all()
        assert clear(server, "CPU") == clear(server, "SSD") == NUM_BLOCKS
        assert cluster.get(TOKENS, BLOCKS).mask.all()
        server.look()
        assert not cluster.get(TOKENS + 5000, BLOCKS).mask.any()
        clear(server, "CPU")
        answer = server.ask("/cache/prefetch", {"token_ids": TOKENS.tolist()})
        assert json.loads(answer) == {"blocks": NUM_BLOCKS}
        until(lambda: cluster.manager.stats()["ended_tasks"].get("prefetch_success") == 1)
        server.look()
        for prompt in range(1, 9):
            cluster.put(TOKENS + 10_000 * prompt, BLOCKS)
        server.look()
        task_id, mask = cluster.manager.put_match(TOKENS + 10**6)
        assert mask.all()
        server.look()
        cluster.manager.cancel([task_id])
        cluster.manager.report_prefill(1e12)
        clear(server, "CPU")
        assert not cluster.get(TOKENS + 80_000, BLOCKS).mask.any()
        server.look()


def give_hints(server: Server, tmp_path: Path) -> None:
    """Tell that a session returns, that it is over, and then have it go on."""
    with running_cluster(model=MODEL, http_endpoint=str(server.port)) as cluster:
        manager = cluster.manager
        server.look()
        task_id, _ = manager.put_async(TOKENS, cluster.slots(BLOCKS), session_id="a")
        manager.wait([task_id])
        returns = {"session_id": "a", "returns_in_s": 10}
        assert json.loads(server.ask("/cache/session", returns)) == {"known": True}
        over = {"session_id": "a", "over": True}
        assert json.loads(server.ask("/cache/session", over)) == {"known": True}
        unknown = {"session_id": "b", "over": True}
        assert json.loads(server.ask("/cache/session", unknown)) == {"known": False}
        task_id, _ = manager.get_match(TOKENS, session_id="a")
        manager.cancel([task_id])
        server.look()


def load_early(server: Server, tmp_path: Path) -> None:
    """Prefetch, and get at once, before it has landed, or not at all."""
    with running_cluster([tmp_path], model=MODEL, http_endpoint=str(server.port)) as cluster:
        manager = cluster.manager
        cluster.put(TOKENS, BLOCKS)
        clear(server, "CPU")
        server.look()
        server.ask("/cache/prefetch", {"token_ids": TOKENS.tolist()})
        until(lambda: cluster.manager.stats()["early_loads"]["open_blocks"] == NUM_BLOCKS)
        until(lambda: manager.stats()["ended_tasks"].get("prefetch_success") == 1)
        assert cluster.get(TOKENS, BLOCKS).mask.all()
        clear(server, "CPU")
        os.kill(manager.stats()["workers"]["disk"], signal.SIGSTOP)
        server.ask("/cache/prefetch", {"token_ids": TOKENS.tolist()})
        task_id, _ = manager.get_async(TOKENS, cluster.slots(BLOCKS))
        os.kill(manager.stats()["workers"]["disk"], signal.SIGCONT)
        assert manager.wait([task_id], READY_S, completely=True)[task_id].mask.all()
        until(lambda: manager.stats()["ended_tasks"].get("prefetch_success") == 2)
        clear(server, "CPU")
        server.ask("/cache/prefetch", {"token_ids": TOKENS.tolist()})
        until(lambda: manager.stats()["ended_tasks"].get("prefetch_success") == 3)
        clear(server, "CPU")
        server.look_until(lambda look: look['early_load_blocks_total{outcome="wasted"}'] > 0)


def keep_to_quotas(server: Server, tmp_path: Path) -> None:
    """Fill DRAM with the blocks of two tenants, then store more for one of them."""
    with running_cluster(
        model=MODEL, http_endpoint=str(server.port), num_cpu_blocks=2 * NUM_BLOCKS,
        quotas="quiet=50%,*=50%",
    ) as cluster:  # fmt: skip
        server.look()
        slots = cluster.slots(BLOCKS)
        for number, tenant in enumerate(["quiet", "loud", "loud"]):
            task_id, _ = cluster.manager.put_async(TOKENS + 5000 * number, slots, namespace=tenant)
            assert cluster.manager.wait([task_id], READY_S)[task_id].mask.all()
        for tokens, is_there in ((TOKENS, True), (TOKENS + 90_000, False)):
            task_id, _ = cluster.manager.get_async(tokens, slots, namespace="quiet")
            assert cluster.manager.wait([task_id], READY_S)[task_id].mask.all() == is_there
        server.look()


def limit_writes_and_retention(server: Server, tmp_path: Path) -> None:
    """Store a prompt, and leave it alone."""
    with running_cluster(
        [tmp_path], model=MODEL, http_endpoint=str(server.port), ssd_write_mb_s=500.0,
        retention_s=1.0,
    ) as cluster:  # fmt: skip
        server.look()
        cluster.put(TOKENS, BLOCKS)
        gone = [f'tier_expired_blocks_total{{tier="{tier}"}}' for tier in ("CPU", "SSD")]
        server.look_until(lambda look: all(look[name] == NUM_BLOCKS for name in gone))


def pause_useless_writes(server: Server, tmp_path: Path) -> None:
    """Replace the SSD's content without a hit, then ask for what was not written any more."""
    with running_cluster(
        [tmp_path], model=MODEL, http_endpoint=str(server.port), num_cpu_blocks=NUM_BLOCKS + 4,
        num_ssd_blocks=3 * NUM_BLOCKS, eviction_policy="lru", skip_slow_loads=False,
    ) as cluster:  # fmt: skip
        server.look()
        task_id, _ = cluster.manager.get_match(np.arange(MIN_MISSED_BLOCKS * 16) + 10**6)
        cluster.manager.cancel([task_id])
        for prompt in range(9):
            cluster.put(TOKENS + 10_000 * prompt, BLOCKS)
        server.look()
        assert not cluster.get(TOKENS + 60_000, BLOCKS).mask.any()
        server.look()


def restart_with_much_on_ssd(server: Server, tmp_path: Path) -> None:
    """Start with more prompts on SSD than are indexed at once, and clear them meanwhile."""
    settings: dict[str, Any] = {"model": MODEL, "num_ssd_blocks": 3 * NUM_BLOCKS}
    with running_cluster([tmp_path], **settings) as cluster:
        for prompt in range(3):
            cluster.put(TOKENS + 10_000 * prompt, BLOCKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered_cache, "_RESTORED_AT_ONCE", 1)
        patch.setattr(tiered_cache, "_RESTORE_PAUSE_S", 3600.0)
        with running_cluster([tmp_path], http_endpoint=str(server.port), **settings) as cluster:
            server.look()
            assert cluster.manager.clear("SSD") == 3 * NUM_BLOCKS
            server.look()


def clear(server: Server, tier: str) -> int:
    return int(json.loads(server.ask("/cache/clear", {"tier": tier}))["dropped_blocks"])


def serves(server: Server) -> bool:
    try:
        return bool(json.loads(server.ask("/healthz"))["serving"])
    except urllib.error.HTTPError as answer:
        if answer.code != 503:
            raise
        return False


def hold_the_disk_worker_up(server: Server, tmp_path: Path) -> None:
    """Stop it with writes waiting, kill it, then destroy the content of the files."""
    with running_cluster([tmp_path], model=MODEL, http_endpoint=str(server.port)) as cluster:
        server.look()
        pid = cluster.manager.stats()["workers"]["disk"]
        os.kill(pid, signal.SIGSTOP)
        cluster.manager.put_async(TOKENS, cluster.slots(BLOCKS))
        # The worker has taken all it takes: 8 of the 12 ops.
        server.look_until(lambda look: look['waiting_ops{worker="disk"}'] == 4)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not serves(server))
        server.look_until(lambda look: look['worker_up{worker="disk"}'] == 0)
        cluster.manager.wait_ready(READY_S)
        assert json.loads(server.ask("/healthz")) == {"serving": True, "missing": []}
        server.look()
        cluster.put(TOKENS + 5000, BLOCKS)
        assert clear(server, "CPU") == 2 * NUM_BLOCKS
        os.truncate(tmp_path / DATA_FILE, 0)
        assert not cluster.get(TOKENS + 5000, BLOCKS).mask.any()
        server.look()


def hold_the_store_up(server: Server, tmp_path: Path) -> None:
    """Have the remote worker answer nothing until the store is given up, and then answer again."""
    with running_cluster(
        model=MODEL,
        remote_url=f"file://{tmp_path / 'store'}",
        remote_lookup_timeout_s=5.0,
        server_timeout_s=12.0,
        http_endpoint=str(server.port),
    ) as cluster:
        until(lambda: cluster.manager.stats()["remote"]["available"])
        server.look()
        pid = cluster.manager.stats()["workers"]["remote"]
        os.kill(pid, signal.SIGSTOP)
        for prompt in range(4):
            cluster.manager.get_match_by_tier(TOKENS + 10_000 * prompt)
        server.look_until(lambda look: look["open_lookups"] > 0)
        server.look_until(lambda look: look['breaker_state{state="open"}'] == 1)
        os.kill(pid, signal.SIGCONT)
        server.look_until(lambda look: look['breaker_state{state="closed"}'] == 1)


def share_a_server(server: Server, tmp_path: Path) -> None:
    """Have engines come, work and go; one is silent, one does not read, one sends garbage."""
    config = CacheConfig(
        num_cpu_blocks=48,
        endpoint=private_endpoint(),
        client_timeout_s=6.0,
        http_endpoint=str(server.port),
    )
    with ExitStack() as stack:
        kv_server = KVServer(config)
        kv_server.start()
        stack.callback(kv_server.shutdown)
        server.look()
        assert json.loads(server.ask("/healthz"))["serving"]
        manager = KVManager(MODEL, CacheConfig(endpoint=config.endpoint), engine_id="a")
        client = KVTPClient(manager.endpoint, engine_id="a")
        stack.callback(client.close)
        client.register_kv_caches(joined_kv(MODEL, 16))
        manager.start()
        stack.callback(manager.shutdown)
        manager.wait_ready(READY_S)
        manager.put_match(TOKENS)
        server.look()
        with zmq.Context() as context, context.socket(zmq.DEALER) as silent:
            silent.connect(kv_server.endpoint)
            spec = ModelSpec.of(MODEL, 16)
            hello = HelloEngine("silent", "x", os.getpid(), spec, b"calls")
            silent.send(msgspec.msgpack.encode(hello))
            server.look_until(
                lambda look: len([name for name in look if "engine_ranks" in name]) == 2
            )
            server.look_until(lambda look: look["expired_clients_total"] > 0)
        with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
            deaf.linger = 0
            deaf.rcvhwm = 1
            deaf.connect(kv_server.endpoint)
            for _ in range(150_000):
                deaf.send(b"nonsense")  # and it never reads what the server says to that
            server.look_until(lambda look: look["unread_messages_total"] > 0)
        fail_at_a_message(kv_server)
        with kv_server.lock:
            kv_server.hub.cache.tasks.forget(AssertionError("played"))
        until(lambda: kv_server.hub.counters.cache_forgotten > 0)
        client.close()
        manager.shutdown()
        server.look_until(lambda look: not [name for name in look if "engine_ranks" in name])


def fail_at_a_message(server: KVServer) -> None:
    """Make the server fail at a message; no real message is known to do that."""

    def fail(*_: object) -> None:
        raise AssertionError("played")

    server.hub._dispatch = fail
    until(lambda: server.hub.counters.failed_messages > 0)  # a client pings
    del server.hub._dispatch


def follow_the_cache(server: Server, tmp_path: Path) -> None:
    """Publish, replay, delay and leave events; write a trace and cut it."""
    traces, kept, no_directory = (tmp_path / name for name in ("traces", "kept", "none"))
    kept.mkdir()
    traces.symlink_to(kept)
    no_directory.touch()
    publish, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    with (
        mock.patch.object(observers, "NUM_QUEUED", 1),
        running_cluster(
            model=MODEL,
            kv_events=True,
            kv_events_endpoint=publish,
            kv_events_replay_endpoint=replay,
            trace_dir=str(traces),
            trace_file_mb=0.001,
            http_endpoint=str(server.port),
        ) as cluster,
    ):
        server.look()
        cluster.put(TOKENS, BLOCKS)
        until(lambda: cluster.manager.stats()["trace"]["lines"] > 0)
        server.look_until(lambda look: look["published_event_batches_total"] > 0)
        ask_for_replay(replay)
        until(lambda: cluster.manager.stats()["events"]["bad_replay_requests"] == 1)
        hold_the_publisher_up(cluster, server)
        no_directory.replace(traces)  # at one stroke: from now on there can be no next file
        for prompt in range(1, 40):
            cluster.get(TOKENS + 10_000 * prompt, BLOCKS)
        server.look_until(lambda look: look["dropped_trace_lines_total"] > 0)


def ask_for_replay(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send_multipart([b"", b"?"])
        snapshot, replay = b"\xfe" + bytes(7), bytes(8)
        for request, last in ((snapshot, snapshot), (replay, END_OF_REPLAY)):
            socket.send_multipart([b"", request])
            number = b""
            while number != last:  # an answer that is not taken whole does not count
                assert socket.poll(30_000)
                _, _, number, _ = socket.recv_multipart()


def hold_the_publisher_up(cluster: Cluster, server: Server) -> None:
    feed = cluster.server._observers.feed
    assert feed is not None
    publisher = feed._publisher
    assert publisher is not None
    encode, gate = publisher._encode, threading.Event()

    def wait(*arguments: Any) -> bytes:
        gate.wait()
        return encode(*arguments)

    publisher._encode = wait
    try:
        for prompt in range(1, 2_000):  # what waits is gathered into few batches
            cluster.put(TOKENS + 1_000 * prompt, BLOCKS)
            if publisher.stats()["dropped_batches"]:
                break
        server.look()
    finally:
        gate.set()
    server.look_until(lambda look: look["queued_event_batches"] == 0)


# -- what it shows --------------------------------------------------------------------------------

EXPECTED: dict[Callable[[Server, Path], None], Expected] = {
    use_every_tier: {
        'tier_hit_blocks_total{tier="CPU"}': NUM_BLOCKS,
        'tier_hit_blocks_total{tier="SSD"}': NUM_BLOCKS,
        'tier_hit_blocks_total{tier="REMOTE"}': NUM_BLOCKS,
        "missed_blocks_total": 2 * NUM_BLOCKS,
        'hit_ratio{window="1m"}': CHANGES,  # on a slow machine some gets are older than that
        'hit_ratio{window="10m"}': Is(3 / 5),
        'hit_ratio{window="1h"}': Is(3 / 5),
        'skipped_blocks_total{reason="ssd_slower_than_recompute"}': NUM_BLOCKS,
        'tier_stored_blocks_total{tier="SSD"}': 9 * NUM_BLOCKS,
        'tier_stored_blocks_total{tier="CPU"}': 12 * NUM_BLOCKS,  # twice by a get, by a prefetch
        'tier_evicted_blocks_total{tier="SSD"}': 5 * NUM_BLOCKS,
        'tier_indexed_blocks{tier="SSD"}': CHANGES,
        'tier_leased_blocks{tier="REMOTE"}': CHANGES,
        'op_blocks_total{op="D2H"}': 9 * NUM_BLOCKS,
        'op_blocks_total{op="H2D"}': 3 * NUM_BLOCKS,
        'op_blocks_total{op="H2DISK"}': 9 * NUM_BLOCKS,
        'op_blocks_total{op="DISK2H"}': NUM_BLOCKS,
        'op_blocks_total{op="H2REMOTE"}': 9 * NUM_BLOCKS,
        'op_blocks_total{op="REMOTE2H"}': 2 * NUM_BLOCKS,
        'op_bytes_total{op="H2D"}': 3 * PROMPT_BYTES,
        'op_device_bytes_total{op="H2DISK"}': 9 * PROMPT_BYTES,
        'op_device_bytes_total{op="DISK2H"}': PROMPT_BYTES,
        'op_busy_seconds_total{op="D2H"}': CHANGES,
        'op_duration_seconds_count{op="DISK2H"}': 12,
        'op_duration_seconds_sum{op="REMOTE2H"}': CHANGES,
        'ended_tasks_total{kind="put",status="success"}': 9,
        'ended_tasks_total{kind="put",status="cancelled"}': 1,
        'ended_tasks_total{kind="get",status="success"}': 3,
        'ended_tasks_total{kind="get",status="not_found"}': 2,
        'ended_tasks_total{kind="prefetch",status="success"}': 1,
        'task_duration_seconds_count{kind="get"}': 3,
        'task_duration_seconds_sum{kind="put"}': CHANGES,
        'tasks{state="created"}': CHANGES,
        "uptime_seconds": CHANGES,
    },
    hold_the_disk_worker_up: {
        'worker_up{worker="disk"}': CHANGES,
        'worker_restarts_total{worker="disk"}': 1,
        'waiting_ops{worker="disk"}': CHANGES,
        'running_ops{worker="disk"}': CHANGES,
        'ops_total{op="D2H"}': 24,
        'failed_ops_total{op="H2DISK"}': 8,
        "store_backlog_blocks": CHANGES,
        'dropped_blocks_total{reason="ssd_write_failed"}': 16,
        'dropped_blocks_total{reason="ssd_unavailable"}': 8,
        'dropped_blocks_total{reason="ssd_bad_block"}': CHANGES,
    },
    hold_the_store_up: {
        "remote_lookups_total": 4,
        "late_remote_lookups_total": 4,
        "open_lookups": CHANGES,
        'tier_available{tier="REMOTE"}': CHANGES,
        "breaker_openings_total": CHANGES,  # each trial in vain is another one
        'breaker_state{state="open"}': CHANGES,
        'breaker_state{state="closed"}': CHANGES,
    },
    load_early: {
        'early_load_blocks_total{outcome="early"}': NUM_BLOCKS,
        'early_load_blocks_total{outcome="late"}': NUM_BLOCKS,
        'early_load_blocks_total{outcome="wasted"}': NUM_BLOCKS,
    },
    keep_to_quotas: {
        'quota_blocks{namespace="quiet",tier="CPU"}': Is(NUM_BLOCKS),
        'quota_used_blocks{namespace="quiet",tier="CPU"}': NUM_BLOCKS,
        'quota_used_blocks{namespace="*",tier="CPU"}': NUM_BLOCKS,
        'quota_evicted_blocks_total{namespace="quiet",tier="CPU"}': 0,
        'quota_evicted_blocks_total{namespace="*",tier="CPU"}': NUM_BLOCKS,
        'quota_hit_blocks_total{namespace="quiet",tier="CPU"}': NUM_BLOCKS,
        'quota_miss_blocks_total{namespace="quiet",tier="CPU"}': NUM_BLOCKS,
    },
    limit_writes_and_retention: {
        'tier_expired_blocks_total{tier="CPU"}': NUM_BLOCKS,
        'tier_expired_blocks_total{tier="SSD"}': NUM_BLOCKS,
    },
    pause_useless_writes: {
        'tier_writes_paused{tier="SSD"}': CHANGES,
        'tier_refused_returns_total{tier="SSD"}': 1,
        'dropped_blocks_total{reason="ssd_nothing_returns"}': 3 * NUM_BLOCKS,
    },
    restart_with_much_on_ssd: {
        'tier_restoring_blocks{tier="SSD"}': CHANGES,
    },
    give_hints: {
        'session_hints_total{hint="over"}': 2,
        'session_hints_total{hint="returning"}': 1,
        'session_hints_total{hint="unknown"}': 1,
        'session_hint_blocks_total{effect="retired"}': NUM_BLOCKS,
        'session_hint_blocks_total{effect="kept"}': NUM_BLOCKS,
    },
    share_a_server: {
        'engine_ranks{engine="a/dp0"}': CHANGES,
        'engine_open_tasks{engine="a/dp0"}': CHANGES,
        "expired_clients_total": CHANGES,
        'rejected_messages_total{reason="malformed"}': CHANGES,
        "unread_messages_total": CHANGES,
        "failed_messages_total": CHANGES,
        "cache_forgotten_total": CHANGES,
        f'build_info{{version="{__version__}"}}': Is(1),
        "block_bytes": BLOCK_BYTES,
        "block_tokens": 16,
        'tier_capacity_blocks{tier="CPU"}': 48,
    },
    follow_the_cache: {
        "published_event_batches_total": CHANGES,
        "dropped_event_batches_total": CHANGES,
        "queued_event_batches": CHANGES,
        "replayed_event_batches_total": CHANGES,
        "lost_event_batches_total": CHANGES,
        "dropped_trace_lines_total": CHANGES,
    },
}


@pytest.mark.parametrize("scenario", EXPECTED, ids=lambda scenario: scenario.__name__)
def test_metrics_change_as_expected(
    scenario: Callable[[Server, Path], None], tmp_path: Path
) -> None:
    server = Server()
    scenario(server, tmp_path)
    server.check(EXPECTED[scenario])


def test_every_metric_is_in_a_scenario() -> None:
    moved = {
        sample.partition("{")[0].removesuffix("_count").removesuffix("_sum")
        for expected in EXPECTED.values()
        for sample in expected
    }
    assert moved == {metric.name.removeprefix("flexcache_") for metric in families(Stats)}


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_finds_data_for_every_panel_of_the_dashboard(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "dashboard.png"
    script = ROOT / "scripts" / "show_metrics.py"
    done = subprocess.run(
        [sys.executable, script, "--seconds", "8", "--out", picture],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "0 queries without data, 0 alerts amiss" in done.stdout
    assert picture.stat().st_size > 50_000
