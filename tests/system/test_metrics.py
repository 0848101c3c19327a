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
from flexcache.counters import families
from flexcache.events.wire import END_OF_REPLAY
from flexcache.protocol.endpoints import private_endpoint
from flexcache.protocol.messages import HelloEngine, ModelSpec
from flexcache.server.server import KVServer
from flexcache.stats import Stats
from flexcache.storage.pool_directory import DATA_FILE
from flexcache.storage.shards import digest

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
    """Have the remote worker answer nothing until the store is given up, and then answer again. The
    store has the model in another layout, too."""
    notes = tmp_path / "store" / "v2" / "models" / digest(MODEL.model_id).hex()
    notes.mkdir(parents=True)
    (notes / "0").write_text("tp=2")
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
        server.look_until(lambda look: look["remote_other_layouts"] == 1)


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
    publisher = cluster.server._observers._publisher
    assert publisher is not None
    encode, is_there, gate = publisher._encode, threading.Event(), threading.Event()

    def wait(*arguments: Any) -> bytes:
        is_there.set()
        gate.wait()
        return encode(*arguments)

    publisher._encode = wait
    try:
        cluster.put(TOKENS + 500, BLOCKS)
        assert is_there.wait(60)
        for prompt in range(1, 2_000):  # what waits is gathered into few batches
            cluster.put(TOKENS + 1_000 * prompt, BLOCKS)
            stats = publisher.stats()
            if stats["dropped_batches"] and stats["queued_batches"]:
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
        "remote_other_layouts": Is(1),
        'tier_available{tier="REMOTE"}': CHANGES,
        "breaker_openings_total": CHANGES,  # each trial in vain is another one
        'breaker_state{state="open"}': CHANGES,
        'breaker_state{state="closed"}': CHANGES,
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
        "dropped_trace_lines_total": CHANGES,
    },
}


COUNTED_BY_UNIT_TESTS = {
    "test_control": [
        "control_calls_total", "refused_pins_total", "ended_pins_total", "deleted_blocks_total",
        "tier_pinned_blocks",
    ],
    "test_peer_loans": ["peer_loans_total", "peer_lent_blocks", "peers_up"],
    "test_drain": ["peer_drained_blocks_total"],
    "test_early_loads": ["early_load_blocks_total"],
    "test_prompt_sessions": ["session_hints_total", "session_hint_blocks_total"],
    "test_quotas": [
        "quota_blocks", "quota_used_blocks", "quota_evicted_blocks_total", "quota_hit_blocks_total",
        "quota_miss_blocks_total",
    ],
    "test_restoration": ["tier_restoring_blocks"],
    "test_retention": ["tier_expired_blocks_total"],
    "test_reuse_watch": ["tier_writes_paused", "tier_refused_returns_total"],
}  # fmt: skip
"""Metrics whose figures the tests of their features check, by file."""


@pytest.mark.parametrize("scenario", EXPECTED, ids=lambda scenario: scenario.__name__)
def test_metrics_change_as_expected(
    scenario: Callable[[Server, Path], None], tmp_path: Path
) -> None:
    server = Server()
    scenario(server, tmp_path)
    server.check(EXPECTED[scenario])


def test_every_metric_is_checked_somewhere() -> None:
    elsewhere = {name for names in COUNTED_BY_UNIT_TESTS.values() for name in names}
    moved = {
        sample.partition("{")[0].removesuffix("_count").removesuffix("_sum")
        for expected in EXPECTED.values()
        for sample in expected
    }
    assert not moved & elsewhere
    served = {metric.name.removeprefix("flexcache_") for metric in families(Stats)}
    assert moved | elsewhere == served
    for file in COUNTED_BY_UNIT_TESTS:
        assert (ROOT / "tests" / "unit" / f"{file}.py").exists()


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
