"""One server, several engines: what one has stored another loads; no death affects the others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import NO_HANG_S, until
from engine_memory import EngineMemory, HostMemory
from load import LoadEngine, make_kv, make_model, tokens_of
from paths import SUPPORT
from ports import free_port

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient
from flexcache.client.link import read_status
from flexcache.client.rank import ClientState
from flexcache.config.values import server_of
from flexcache.errors import ConfigError, RegistrationError, ServerLostError
from flexcache.events.subscriber import KVEventSubscriber, Received
from flexcache.events.wire import BlockStored
from flexcache.ids import RequestInfo
from flexcache.protocol.endpoints import is_served, private_endpoint, runtime_dir

CONFIG = {"num_cpu_blocks": 256}


class Member:
    """An engine in this process, at a shared server."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        dp_rank: int = 0,
        engine_id: str = "",
        keeps_loads: bool = False,
        memory: EngineMemory | None = None,
    ) -> None:
        memory = memory or HostMemory()
        self.model = make_model()
        names: dict[str, Any] = {"dp_rank": dp_rank, "engine_id": engine_id}
        self.manager = KVManager(self.model, config, **names)
        self.kv = memory.place(make_kv(self.model))
        self.client = KVTPClient(
            self.manager.endpoint,
            server_timeout_s=config.server_timeout_s,
            keeps_loads=keeps_loads,
            **names,
        )
        self.client.register_kv_caches(memory.lend(self.kv))
        self.manager.start()
        self.load = LoadEngine(self.manager, self.kv, seed=dp_rank, client=self.client)

    def close(self) -> None:
        self.client.close()
        self.manager.shutdown()


@contextlib.contextmanager
def members(*engines: Member) -> Iterator[None]:
    """Run engines that are ready inside the block; after it their server is gone with its files."""
    try:
        for engine in engines:
            engine.manager.wait_ready(60)
        yield
    finally:
        endpoint = engines[0].manager.endpoint
        for engine in engines:
            engine.close()
        until_free(endpoint)


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `flexcache server`, as a user would start it, until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flexcache.cli", "server", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


def until_free(endpoint: str) -> None:
    until(lambda: not is_served(endpoint))


def why_not_ready(manager: KVManager) -> str:
    with pytest.raises(TimeoutError) as reason:
        manager.wait_ready(0)
    return str(reason.value)


def shared_config(endpoint: str, **settings: object) -> CacheConfig:
    return CacheConfig(**{**CONFIG, "endpoint": endpoint, **settings})  # type: ignore[arg-type]


def test_blocks_stored_by_one_rank_are_loaded_by_another() -> None:
    config = CacheConfig(**CONFIG)
    zero, one = Member(config, dp_rank=0), Member(config, dp_rank=1)
    with members(zero, one):
        assert server_of(zero.manager.endpoint) == server_of(one.manager.endpoint)
        zero.load.put(3, 20)
        assert one.load.get(3, 20) == 20
        one.load.put(7, 12)
        assert zero.load.get(7, 12) == 12
        assert zero.load.get(6, 12) == 8  # a prompt of the same family
        assert zero.load.seen.wrong == one.load.seen.wrong == []
        stats = one.manager.stats()
        assert stats["engine"]["hit_blocks"] == {"CPU": 20}
        assert {name.split("/")[1] for name in stats["engines"]} == {"dp0", "dp1"}
        zero.manager.check()


def test_a_server_started_by_hand_outlives_its_engines(tmp_path: Path) -> None:
    endpoint = private_endpoint("by-hand")
    file = tmp_path / "server.json"
    file.write_text('{"num_cpu_blocks": 64, "num_ssd_blocks": 128, "ssd_cache_dirs": ["%s"]}'
                    % (tmp_path / "ssd"))  # fmt: skip
    with serving("--config", str(file), "--endpoint", endpoint) as process:
        assert process.stdout is not None
        assert f"FLEXCACHE_ENDPOINT={endpoint}" in process.stdout.readline()
        client_only = CacheConfig(endpoint=endpoint)
        first = Member(client_only, engine_id="first")
        first.manager.wait_ready(60)
        first.load.put(1, 24)
        first.close()
        second = Member(client_only, engine_id="second")
        second.manager.wait_ready(60)
        assert second.load.get(1, 24) == 24
        until(lambda: second.manager.stats()["tiers"]["SSD"]["indexed"] == 24)
        second.manager.clear("CPU")
        assert second.load.get(1, 24) == 24  # from SSD
        assert second.load.seen.wrong == []
        report = read_status(endpoint, None, 3)
        assert list(report["engines"]) == ["second/dp0"]
        assert report["tiers"]["SSD"]["indexed"] == 24
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libpython" in maps or "python" in maps
        assert "libtorch" not in maps  # it takes seconds to import, and 150 MB
        second.close()
        until(lambda: not read_status(endpoint, None, 3)["engines"])
    assert list(runtime_dir().iterdir()) == []


def test_another_model_is_refused_with_both_sides_named() -> None:
    config = CacheConfig(**CONFIG)
    mine = Member(config)
    with members(mine):
        other = make_model(head_size=32)
        stranger = KVManager(other, config, endpoint=mine.manager.endpoint, dp_rank=1)
        stranger.start()
        with pytest.raises(RegistrationError) as refused:
            stranger.wait_ready(30)
        assert "head=32" in str(refused.value)
        assert "head=64" in str(refused.value)
        task_id, mask = stranger.get_match(np.arange(64))
        assert not mask.any()
        assert stranger.wait([task_id])[task_id].status is KVStatus.NOT_FOUND
        stranger.shutdown()
        mine.load.put(1, 4)
        assert mine.load.get(1, 4) == 4


def test_a_name_that_is_taken_is_disputed_and_free_again_when_its_holder_leaves() -> None:
    config = CacheConfig(**CONFIG)
    holder = Member(config, engine_id="e")
    with members(holder):
        second = KVManager(make_model(), config, engine_id="e")
        second.start()
        claimed = f"the scheduler of engine 'e/dp0' is claimed by process {os.getpid()} and process"
        until(lambda: re.search(claimed, why_not_ready(second)))
        until(lambda: not holder.manager.is_ready())  # each hears of it in its own time
        with pytest.raises(RegistrationError, match=claimed):
            holder.manager.wait_ready(30)
        holder.manager.shutdown()
        with pytest.raises(RegistrationError, match=r"the scheduler .* was taken over by process"):
            second.wait_ready(60)
        holder.client.close()  # a rank of the first
        client = KVTPClient(second.endpoint)
        client.register_kv_caches(make_kv(make_model()))
        until(second.is_ready)
        client.close()
        second.shutdown()


def test_without_a_server_everything_misses_at_once() -> None:
    manager = KVManager(make_model(), CacheConfig(endpoint=private_endpoint("unserved")))
    manager.start()
    with pytest.raises(TimeoutError, match="the server"):
        manager.wait_ready(0.2)
    started = time.monotonic()
    for _ in range(100):
        task_id, mask = manager.get_async(tokens_of(1, 4), np.arange(64))
        assert not mask.any()
        assert manager.wait([task_id])[task_id].status is KVStatus.NOT_FOUND
        task_id, mask = manager.put_async(tokens_of(1, 4), np.arange(64))
        assert not mask.any()
    assert time.monotonic() - started < NO_HANG_S
    with pytest.raises(ServerLostError):
        manager.stats()
    manager.shutdown()


def test_a_killed_server_fails_what_is_open_and_is_replaced() -> None:
    config = CacheConfig(**CONFIG)
    zero, one = Member(config, dp_rank=0), Member(config, dp_rank=1)
    with members(zero, one):
        zero.load.put(3, 20)
        open_tasks = [engine.manager.get_match(tokens_of(3, 20))[0] for engine in (zero, one)]
        os.kill(zero.manager.stats()["server_pid"], signal.SIGKILL)
        for engine, task in zip((zero, one), open_tasks, strict=True):
            response = engine.manager.wait([task], 60)[task]
            assert response.status is KVStatus.FAILED
            assert "died" in (response.error or "")
            engine.manager.wait_ready(60)
        assert one.load.get(3, 20) == 0  # a new server knows nothing
        zero.load.put(3, 20)
        assert one.load.get(3, 20) == 20
        assert one.load.seen.wrong == []


def test_a_server_that_hangs_is_given_up_and_reconnected_to() -> None:
    config = CacheConfig(**CONFIG, server_timeout_s=3.0)
    zero = Member(config)
    with members(zero):
        zero.load.put(3, 20)
        pid = zero.manager.stats()["server_pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(20):
                started = time.monotonic()
                assert zero.load.get(3, 20) == 0
                assert time.monotonic() - started < NO_HANG_S
        finally:
            os.kill(pid, signal.SIGCONT)
        zero.manager.wait_ready(30)
        assert zero.load.get(3, 20) == 20  # it had only been away
        assert zero.load.seen.wrong == []
        zero.manager.check()


def test_a_gated_load_at_a_server_that_hangs_is_soon_over_and_moves_nothing_afterwards() -> None:
    config = CacheConfig(**CONFIG, server_timeout_s=3.0)
    zero = Member(config)
    with members(zero):
        zero.load.put(3, 20)
        pid = zero.manager.stats()["server_pid"]
        slots = np.arange(20 * 16)
        task_id, mask = zero.manager.get_match(tokens_of(3, 20))
        assert mask.all()
        os.kill(pid, signal.SIGSTOP)
        try:
            zero.manager.launch([task_id], [slots], gated=True)
            zero.client.open_gates([task_id])
            ended: dict[int, int] = {}
            until(lambda: ended.update(zero.client.take_ended([task_id])) or ended)
            assert ended == {task_id: 0}
            for layer in zero.kv.values():
                layer[:20] = 5  # the slots serve another request now
            until(lambda: zero.client.state is ClientState.HELLO)
        finally:
            os.kill(pid, signal.SIGCONT)
        zero.client.wait_registered(60)
        zero.manager.wait_ready(60)
        assert zero.manager.wait([task_id], 60)[task_id].status is KVStatus.FAILED
        assert all((layer[:20] == 5).all() for layer in zero.kv.values())
        assert zero.load.get(3, 20) == 20
        assert zero.load.seen.wrong == []


def test_tasks_of_an_engine_that_dies_give_their_blocks_back() -> None:
    script = """
import sys, numpy as np
from flexcache import CacheConfig, KVManager, KVTPClient
from load import make_kv, make_model, tokens_of
manager = KVManager(make_model(), CacheConfig(endpoint=sys.argv[1]), engine_id="mortal")
manager.start()
client = KVTPClient(manager.endpoint)
client.register_kv_caches(make_kv(make_model()))
manager.wait_ready(60)
assert manager.put_match(tokens_of(1, 24))[1].any()
manager.get_match(tokens_of(2, 24))
print("holding", flush=True)
sys.stdin.read()
"""
    zero = Member(CacheConfig(**CONFIG))
    with members(zero):
        zero.load.put(2, 24)
        process = subprocess.Popen(
            [sys.executable, "-c", script, zero.manager.endpoint],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=SUPPORT,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"holding\n"
        stats = zero.manager.stats()
        assert stats["tiers"]["CPU"]["leased"] == 16  # the first eight are cached
        assert stats["tasks"]["created"] == 2
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()
        until(lambda: zero.manager.stats()["tiers"]["CPU"]["leased"] == 0)
        stats = zero.manager.stats()
        assert sum(stats["tasks"].values()) == 0
        assert len(stats["engines"]) == 1
        zero.manager.check()


@pytest.mark.whole
def test_a_silent_engine_loses_its_session_and_finds_a_new_one() -> None:
    config = CacheConfig(**CONFIG, client_timeout_s=6.0)
    zero, one = Member(config, dp_rank=0), Member(config, dp_rank=1)
    with members(zero, one):
        script = (
            "import sys; sys.path.insert(0, sys.argv[3]); from load import run_scheduler;"
            "run_scheduler(sys.argv[1], 'sleepy', sys.argv[2], '1')"
        )
        zero.load.put(2, 24)
        path = runtime_dir() / "kv"
        rank = child("rank", zero.manager.endpoint, "sleepy", str(path))
        other = subprocess.Popen(
            [sys.executable, "-c", script, zero.manager.endpoint, str(path),
             str(SUPPORT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "up\n"
        os.kill(other.pid, signal.SIGSTOP)
        until(lambda: "sleepy/dp0" not in zero.manager.stats()["engines"])
        assert zero.manager.stats()["counters"]["expired_clients"] >= 1
        os.kill(other.pid, signal.SIGCONT)
        until(lambda: "sleepy/dp0" in zero.manager.stats()["engines"])
        other.stdin.close()
        assert other.stdout.read().startswith("done")
        other.stdout.close()
        assert other.wait(30) == 0
        end(rank)
        path.unlink()
        zero.manager.check()


def child(*arguments: str) -> subprocess.Popen[str]:
    """Run a process of `load.py` that is up."""
    process = subprocess.Popen(
        [sys.executable, str(SUPPORT / "load.py"), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def end(process: subprocess.Popen[str]) -> str:
    """Let it stop in an orderly way; return its last output."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    said = process.stdout.read()
    process.stdout.close()
    process.wait(30)
    return said


def test_only_the_beginning_of_an_oversized_prompt_is_looked_up() -> None:
    zero = Member(CacheConfig(**CONFIG))
    with members(zero):
        zero.load.put(1, 20)
        begin = tokens_of(1, 20)
        for length in (2_200_000, 4_400_000):
            task_id, mask = zero.manager.get_match(np.resize(begin, length))
            assert mask[: 20 * 16].all()
            assert mask.sum() == 20 * 16
            zero.manager.cancel([task_id])
        assert zero.manager.stats()["server"]["losses"] == 0


def test_status_with_wrong_keys_ends_with_a_message(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "flexcache.cli", "status", "--endpoint", "tcp://127.0.0.1:1"],
        env={**os.environ, "FLEXCACHE_CURVE_KEYS": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert shown.returncode == 1
    assert "curve_keys" in shown.stdout


@pytest.mark.whole
def test_stale_files_of_a_dead_server_are_removed() -> None:
    config = CacheConfig(**CONFIG)
    zero = Member(config)
    with members(zero):
        os.kill(zero.manager.stats()["server_pid"], signal.SIGKILL)
        until(lambda: not zero.manager.is_ready())
        zero.manager.wait_ready(60)
    assert list(runtime_dir().iterdir()) == []


def test_tcp_beyond_loopback_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="curve_keys"):
        KVManager(make_model(), CacheConfig(**CONFIG), endpoint="tcp://10.0.0.1:5555")


@pytest.mark.whole
def test_over_tcp_with_keys_only_key_holders_are_served(tmp_path: Path) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    for directory in (keys, others):
        subprocess.run(
            [sys.executable, "-m", "flexcache.cli", "server", "--keygen", str(directory)],
            check=True, capture_output=True,
        )  # fmt: skip
        assert (directory / "server.key_secret").stat().st_mode & 0o077 == 0
    endpoint = f"tcp://0.0.0.0:{free_port()}"
    local = endpoint.replace("0.0.0.0", "127.0.0.1")
    environment = {"FLEXCACHE_CURVE_KEYS": str(keys), "FLEXCACHE_NUM_CPU_BLOCKS": "64"}
    with serving("--endpoint", endpoint, **environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mine = KVManager(make_model(), CacheConfig(endpoint=local, curve_keys=str(keys)))
        client = KVTPClient(mine.endpoint, curve_keys=str(keys))
        client.register_kv_caches(make_kv(make_model()))
        with mine:
            mine.wait_ready(30)
            task_id, _ = mine.put_async(tokens_of(1, 4), np.arange(64))
            assert mine.wait([task_id], 60)[task_id].mask.all()
            for wrong in (None, str(others)):
                stranger = KVManager(
                    make_model(), CacheConfig(endpoint=local, curve_keys=wrong), dp_rank=1
                )
                with stranger, pytest.raises(TimeoutError, match="same curve_keys"):
                    stranger.wait_ready(1)
            assert mine.get_match(tokens_of(1, 4))[1].all()
        client.close()


def test_a_server_without_a_size_is_refused_by_name() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flexcache.cli", "server"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "cpu_cache_gb" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr


@pytest.mark.whole
def test_two_servers_by_hand_on_one_endpoint_are_refused_by_name() -> None:
    endpoint = private_endpoint("twice")
    sized = {"FLEXCACHE_NUM_CPU_BLOCKS": "64"}
    with serving("--endpoint", endpoint, **sized) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: is_served(endpoint))
        second = subprocess.run(
            [sys.executable, "-m", "flexcache.cli", "server", "--endpoint", endpoint],
            capture_output=True, text=True, env={**os.environ, **sized},
        )  # fmt: skip
        assert second.returncode == 1
        assert f"in use by process {process.pid}" in second.stdout
        assert "serving" not in second.stdout
        until(lambda: _answers(endpoint))
        shown = subprocess.run(
            [sys.executable, "-m", "flexcache.cli", "status", "--endpoint", endpoint],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "waiting for the first engine" in shown.stdout


def _answers(endpoint: str) -> bool:
    try:
        read_status(endpoint, None, 1)
    except ServerLostError:
        return False
    return True


def test_a_server_publishes_what_its_engines_store_with_the_request_info() -> None:
    endpoint, events = private_endpoint("events"), private_endpoint("events-pub")
    replay = private_endpoint("events-replay")
    config = shared_config(
        endpoint, kv_events_endpoint=events, kv_events_replay_endpoint=replay, kv_events=True
    )
    one, two = Member(config, dp_rank=0), Member(config, dp_rank=1)
    with members(one, two):
        tokens = tokens_of(5, 6)
        keys = [bytes([i]) * 32 for i in range(6)]
        info = RequestInfo("a-request", 3, "an-adapter", [(f"block-{i}",) for i in range(6)])
        own_key = {"block_keys": keys, "request_info": info}
        slots = range(len(tokens))
        put, _ = one.manager.put_async(tokens.tolist(), slots, **own_key)
        one.manager.wait([put])
        get, mask = two.manager.get_async(tokens, slots, **own_key)
        two.manager.wait([get])
        assert mask.all()
        put, _ = two.manager.put_async(tokens_of(9, 2), range(32))  # keys made from tokens
        two.manager.wait([put])
        with KVEventSubscriber(events, replay) as subscriber:
            told = []
            while len(told) < 2:
                news = subscriber.receive(20)
                assert isinstance(news, Received)
                told += news.batch.events
        assert one.manager.take_changes() == []
        stats = one.manager.stats()["events"]
    first, second = told
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert first.block_hashes == [int.from_bytes(key[-8:], "big") for key in keys]
    assert (first.token_ids, first.parent_block_hash) == (tokens.tolist(), None)
    assert (first.lora_id, first.lora_name) == (3, "an-adapter")
    assert first.extra_keys is not None and list(map(tuple, first.extra_keys)) == info.extra_keys
    assert second.token_ids == tokens_of(9, 2).tolist() and second.lora_name is None
    assert 1 <= stats["published_batches"] <= 2 and stats["untaken_batches"] == 0
