"""Caches that share a remote store, and their behaviour when the store fails."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import NO_HANG_S, Cluster, running_cluster, until
from load import SETTINGS, breaker, remote, under_load
from stores import missing, store_server
from test_faults import flip_byte

from flexcache import KVStatus, ModelConfig
from flexcache.doctor.endpoints import check_remote_store
from flexcache.doctor.subject import Level, Subject
from flexcache.storage.remote import open_remote_store
from flexcache.storage.shards import digest

NUM_BLOCKS = 24
TOKENS = np.arange(NUM_BLOCKS * 16)
BLOCKS = list(range(NUM_BLOCKS))
SHARED = slice(0, 9)  # of BLOCKS: what stands before the damage
_numbers = itertools.count()

STORES: list[Any] = [
    "file",
    pytest.param("s3", marks=pytest.mark.skipif(bool(missing("obstore", "weed")), reason="s3")),
    pytest.param(
        "mooncake",
        marks=pytest.mark.skipif(
            bool(missing("mooncake", "mooncake_master")), reason="Mooncake is not installed"
        ),
    ),
]
SERVERS = STORES[1:]
FILES_AT_EACH_CHANGE = [
    "file",
    *(pytest.param(*each.values, marks=[*each.marks, pytest.mark.whole]) for each in SERVERS),
]
"""For tests of the tier; the stores' own are in `test_remote_stores`."""


@pytest.fixture(scope="module", params=STORES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "file":
        with tempfile.TemporaryDirectory(prefix="fc-store-") as directory:
            yield f"file://{directory}"
    else:
        with store_server(request.param) as server:
            yield server.url


@pytest.fixture
def model() -> ModelConfig:
    """Make a model with its own name, so that blocks of other tests are not found."""
    return ModelConfig(f"model-{next(_numbers)}", 3, 4, 32, torch.bfloat16)


@contextmanager
def caches(
    url: str, model: ModelConfig, count: int = 2, **settings: Any
) -> Iterator[list[Cluster]]:
    """Run caches that share only the store."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running_cluster(model=model, remote_url=url, **{**SETTINGS, **settings})
            )
            for _ in range(count)
        ]


def until_it_stores(cluster: Cluster) -> None:
    """Put new prompts until the store has taken one."""

    def stores() -> bool:
        before = remote(cluster, "stored_blocks")
        cluster.put(np.arange(16) + 10_000_000 + 16 * next(_numbers), [63])
        return remote(cluster, "stored_blocks") > before

    until(stores)


def put_into_the_store(cluster: Cluster, tokens: np.ndarray = TOKENS) -> list[bytes]:
    """Put blocks into the store; return their bytes once all of them are there."""
    until_it_stores(cluster)
    before = remote(cluster, "stored_blocks")
    expected = cluster.read(BLOCKS)

    def are_stored() -> bool:
        assert cluster.put(tokens, BLOCKS).mask.all()  # again: what a slow store did not take
        return remote(cluster, "stored_blocks") - before >= NUM_BLOCKS

    until(are_stored)
    return expected


def first_blocks(content: list[bytes], count: int) -> list[bytes]:
    """Return the first blocks of each layer, of what `Cluster.read` returned for all."""
    return [block for i in range(3) for block in content[i * NUM_BLOCKS :][:count]]


def test_blocks_stored_by_one_cache_reach_another_byte_for_byte(
    url: str, model: ModelConfig
) -> None:
    with caches(url, model) as (one, two):
        expected = put_into_the_store(one)
        until_it_stores(two)
        two.wipe(BLOCKS)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
        assert two.manager.stats()["hit_blocks"] == {"REMOTE": NUM_BLOCKS}
        two.wipe(BLOCKS)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
        assert two.manager.stats()["hit_blocks"]["CPU"] == NUM_BLOCKS


def test_a_store_of_the_users_own_module_is_used_and_examined_by_its_name(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the remote worker
    url = f"outside.sqlite_store://{tmp_path}/objects.db?journal=wal"
    with caches(url, model) as (one, two):
        expected = put_into_the_store(one)
        until_it_stores(two)
        two.wipe(BLOCKS)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
    settings = {"FLEXCACHE_NUM_CPU_BLOCKS": "4"}
    [found] = check_remote_store(Subject(environ=settings | {"FLEXCACHE_REMOTE_URL": url}))
    assert found.level is Level.OK
    assert found.text.endswith("objects.db: answers; it is meant for tests")
    unusable = url.replace("objects.db", "missing/objects.db")
    [found] = check_remote_store(Subject(environ=settings | {"FLEXCACHE_REMOTE_URL": unusable}))
    assert "unable to open database file" in found.text


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_blocks_are_read_by_caches_that_compress_differently(
    codec: str, tmp_path: Path, model: ModelConfig
) -> None:
    url = f"file://{tmp_path}"
    with (
        caches(url, model, 1, remote_compression=codec) as (one,),
        caches(url, model, 1) as (two,),
    ):
        one.wipe(BLOCKS[:12])  # these become smaller; random bytes do not
        expected = put_into_the_store(one)
        until_it_stores(two)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
    sizes = {
        path.stat().st_size
        for path in tmp_path.rglob("*")
        if path.is_file() and "models" not in path.parts
    }
    assert min(sizes) < 1000 < max(sizes)


@pytest.mark.parametrize("url", FILES_AT_EACH_CHANGE, indirect=True)
def test_a_prefetch_brings_blocks_from_the_store_to_dram(url: str, model: ModelConfig) -> None:
    with caches(url, model) as (one, two):
        expected = put_into_the_store(one)
        until_it_stores(two)
        task = two.manager.prefetch_async(TOKENS)
        assert two.manager.wait([task], 30)[task].mask.all()
        two.wipe(BLOCKS)
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
        assert two.manager.stats()["hit_blocks"] == {"CPU": NUM_BLOCKS}


def test_dram_ssd_and_store_serve_one_prompt_together(tmp_path: Path, model: ModelConfig) -> None:
    url = f"file://{tmp_path}/store"
    settings = {**SETTINGS, "model": model, "remote_url": url}
    with (
        caches(url, model, 1) as (one,),
        running_cluster([tmp_path / "ssd"], **settings) as two,
    ):
        expected = put_into_the_store(one)
        until_it_stores(two)
        two.get(TOKENS, BLOCKS[:12])
        two.put(TOKENS, BLOCKS[:12])  # DRAM has them: they are written to SSD
        until(lambda: two.manager.stats()["tiers"]["SSD"]["indexed"] >= 12)
        two.manager.clear("CPU")
        two.get(TOKENS, BLOCKS[:5])
        two.wipe(BLOCKS)
        before = two.manager.stats()["hit_blocks"]
        assert two.get(TOKENS, BLOCKS).mask.all()
        assert two.read(BLOCKS) == expected
        after = two.manager.stats()["hit_blocks"]
        gains = {tier: after[tier] - before.get(tier, 0) for tier in after}
        assert gains == {"CPU": 5, "SSD": 7, "REMOTE": 12}


def object_with(directory: Path, content: bytes) -> Path:
    """Return the file of the block with that content."""
    return next(p for p in directory.rglob("*") if p.is_file() and content in p.read_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        "flipped",
        "swapped",
        "removed",
        pytest.param("truncated", marks=pytest.mark.whole),
        pytest.param("foreign", marks=pytest.mark.whole),
    ],
)
def test_a_damaged_object_costs_the_blocks_behind_it_and_is_not_served_again(
    damage: str, tmp_path: Path, model: ModelConfig
) -> None:
    with caches(f"file://{tmp_path}", model, 3) as (one, two, three):
        expected = put_into_the_store(one)
        until_it_stores(two)
        until_it_stores(three)
        path = object_with(tmp_path, expected[9])
        if damage == "flipped":
            flip_byte(path, 64 + 1000)
        elif damage == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        elif damage == "swapped":
            path.write_bytes(object_with(tmp_path, expected[10]).read_bytes())
        elif damage == "foreign":
            path.write_bytes(b"not one of ours" * 1000)
        else:
            # Known to be there, and gone when it is read.
            two.manager.cancel([two.manager.get_match(TOKENS)[0]])
            path.unlink()
        two.wipe(BLOCKS)
        response = two.get(TOKENS, BLOCKS)
        assert response.status is KVStatus.SUCCESS
        assert response.mask.sum() == 9 * 16
        assert two.read(BLOCKS[SHARED]) == first_blocks(expected, 9)
        assert two.manager.stats()["dropped_blocks"]["remote_bad_block"] == 1
        assert breaker(two) == "closed"
        assert not path.exists()
        assert two.get(TOKENS, BLOCKS).mask.sum() == 9 * 16
        assert three.get(TOKENS, BLOCKS).mask.sum() == 9 * 16
        assert two.num_leased() == three.num_leased() == 0


@pytest.mark.parametrize("url", FILES_AT_EACH_CHANGE, indirect=True)
def test_a_cleared_tier_finds_nothing_although_the_store_still_holds_it(
    url: str, model: ModelConfig
) -> None:
    with caches(url, model) as (one, two):
        expected = put_into_the_store(one)
        until_it_stores(two)
        assert two.get(TOKENS, BLOCKS).mask.all()
        for drop in (lambda: two.manager.clear("REMOTE"), two.manager.reset):
            drop()
            two.manager.clear("CPU")
            assert not two.get(TOKENS, BLOCKS).mask.any()
            put_into_the_store(two)  # by another name
            two.manager.clear("CPU")
            assert two.get(TOKENS, BLOCKS).mask.all()
        one.manager.clear("CPU")
        one.wipe(BLOCKS)
        assert one.get(TOKENS, BLOCKS).mask.all()
        assert one.read(BLOCKS) == expected


# -- faults of the store --------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("kind", SERVERS)
def test_a_store_that_is_down_at_startup_is_used_once_it_is_up(
    kind: str, model: ModelConfig
) -> None:
    with store_server(kind) as server:
        server.kill()
        with caches(server.url, model) as (one, two):
            expected = one.read(BLOCKS)
            assert one.put(TOKENS, BLOCKS).mask.all()
            assert not two.get(TOKENS, BLOCKS).mask.any()
            one.wipe(BLOCKS)
            assert one.get(TOKENS, BLOCKS).mask.all()
            assert one.read(BLOCKS) == expected
            server.start()

            def arrives() -> bool:
                one.put(TOKENS, BLOCKS)  # DRAM has it: only the store lacks it
                return bool(two.get(TOKENS, BLOCKS).mask.all())

            until(arrives)
            assert two.read(BLOCKS) == expected


@pytest.mark.whole  # a directory that hangs costs a worker at each change
@pytest.mark.parametrize("kind", SERVERS)
def test_a_killed_worker_costs_a_miss_and_is_replaced(kind: str, model: ModelConfig) -> None:
    with store_server(kind) as server, caches(server.url, model) as (one, two):
        expected = put_into_the_store(one)
        until_it_stores(two)
        for _ in range(2):
            os.kill(two.manager.stats()["workers"]["remote"], signal.SIGKILL)
            two.manager.clear("CPU")
            started = time.monotonic()
            two.get(TOKENS, BLOCKS)
            assert time.monotonic() - started < NO_HANG_S
            until_it_stores(two)
            two.manager.clear("CPU")
            two.wipe(BLOCKS)
            until(lambda: bool(two.get(TOKENS, BLOCKS).mask.all()))  # a late look-up is a miss
            assert two.read(BLOCKS) == expected
        assert two.manager.stats()["worker_restarts"]["remote"] == 2
        assert two.num_leased() == 0


def test_a_directory_that_hangs_costs_a_miss_and_a_worker(
    tmp_path: Path, model: ModelConfig
) -> None:
    with caches(f"file://{tmp_path}", model) as (one, two):
        until_it_stores(two)
        expected = put_into_the_store(one)
        path = object_with(tmp_path, expected[9])
        path.rename(tmp_path / "aside")
        os.mkfifo(path)  # opening it takes until another process writes to it
        two.wipe(BLOCKS)
        started = time.monotonic()
        response = two.get(TOKENS, BLOCKS)
        assert time.monotonic() - started < NO_HANG_S
        assert not response.mask.all()
        until(lambda: two.manager.stats()["worker_restarts"]["remote"])
        (tmp_path / "aside").rename(path)
        until(lambda: two.get(TOKENS, BLOCKS).mask.all())
        assert two.read(BLOCKS) == expected
        assert two.num_leased() == 0


@pytest.mark.whole
@pytest.mark.parametrize("kind", SERVERS)
def test_a_store_that_is_killed_and_restarted_under_load_misses_and_is_used_again(
    kind: str,
) -> None:
    with store_server(kind) as server, under_load(server.url) as load:
        for _ in range(2):
            load.work_until_it_grows("stored_blocks", "read_bytes")
            server.kill()
            load.work_until("open")
            for _ in range(100):
                load.engine.step()
            server.start()
            load.work_until("closed")
        load.work_until_it_grows("stored_blocks", "read_bytes")
        assert load.engine.seen.wrong == []
        assert load.engine.seen.longest_call_s < NO_HANG_S


def num_other_layouts(cluster: Cluster) -> int:
    return int(cluster.manager.stats()["remote"]["lookups"]["other_layouts"])


def is_noted(url: str, model: ModelConfig) -> bool:
    with closing(open_remote_store(url, timeout_s=20.0)) as store:
        name = f"v2/models/{digest(model.model_id).hex()}/0"
        return store.first_present([name], time.monotonic() + 20.0) == 0


@pytest.mark.parametrize("url", FILES_AT_EACH_CHANGE, indirect=True)
def test_a_store_that_has_the_model_in_another_layout_is_named_once(
    url: str, model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caches(url, model) as (one, two):
        put_into_the_store(one)
        until_it_stores(two)
        until(lambda: is_noted(url, model))  # a worker that came before its store tries again
        assert num_other_layouts(one) == 0
        with caches(url, model, 1, tokens_per_block=32) as (other,):
            until(lambda: num_other_layouts(other) == 1)
            worker = other.manager.stats()["workers"]["remote"]
            os.kill(worker, signal.SIGKILL)  # the next one notes it again
            until(lambda: other.manager.stats()["workers"].get("remote") not in (None, worker))
            until(lambda: breaker(other) == "closed")
        (line,) = [each for each in caplog.messages if "stored_for_another_layout" in each]
        assert "block=16" in line
        assert 'here="block=32' in line
        assert model.model_id not in line
        assert num_other_layouts(two) == 0


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_look_up_begun_ahead_answers_the_match_that_follows(
    is_shared: bool, tmp_path: Path, model: ModelConfig
) -> None:
    url = f"file://{tmp_path}/store"
    patient = {"remote_lookup_timeout_s": 60.0, "server_timeout_s": 150.0}
    shared = {"endpoint": f"ipc://{tmp_path}/endpoint"} if is_shared else {}
    with (
        caches(url, model, 1) as (giver,),
        caches(url, model, 1, **patient, **shared) as (taker,),
    ):
        put_into_the_store(giver)
        until_it_stores(taker)
        asked_before = taker.manager.stats()["remote"]["lookups"]["asked"]
        worker = taker.manager.stats()["workers"]["remote"]
        os.kill(worker, signal.SIGSTOP)  # the store takes its time
        try:
            assert taker.manager.get_match_by_tier(TOKENS, look_up="only") is None
            assert taker.manager.stats()["open_lookups"] == 1
            assert taker.manager.get_match_by_tier(TOKENS) is None
            assert taker.manager.stats()["open_lookups"] == 1  # the same question
        finally:
            os.kill(worker, signal.SIGCONT)
        until(lambda: not taker.manager.stats()["open_lookups"])
        task_id, mask = taker.manager.get_match_by_tier(TOKENS)[:2]
        assert mask.all()
        taker.manager.cancel([task_id])
        assert taker.manager.stats()["remote"]["lookups"]["asked"] == asked_before + 1
        assert taker.manager.get_match_by_tier(TOKENS, look_up="only") is None
        assert taker.manager.stats()["remote"]["lookups"]["asked"] == asked_before + 1
        taker.manager.check()


@pytest.mark.whole
@pytest.mark.parametrize("kind", SERVERS)
def test_a_stopped_store_delays_no_call_for_long_and_is_used_again(kind: str) -> None:
    with store_server(kind) as server, under_load(server.url) as load:
        load.work_until_it_grows("stored_blocks", "read_bytes")
        server.stop()
        try:
            load.work_until("open")
            opened = load.cluster.manager.stats()["remote"]["breaker"]["openings"]
            load.engine.seen.latencies_s.clear()

            def is_tried_in_vain() -> bool:
                load.engine.step()
                remote = load.cluster.manager.stats()["remote"]
                return remote["breaker"]["openings"] > opened and bool(load.engine.seen.latencies_s)

            until(is_tried_in_vain)
            lookup_s = SETTINGS["remote_lookup_timeout_s"]
            assert np.median(load.engine.seen.latencies_s) < lookup_s  # the breaker spares them
        finally:
            server.resume()
        load.work_until("closed")
        load.work_until_it_grows("stored_blocks", "read_bytes")
        assert load.engine.seen.wrong == []
        assert load.engine.seen.longest_call_s < NO_HANG_S


@pytest.mark.whole
def test_a_store_that_accepts_connections_and_never_answers_is_like_a_stopped_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "none")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "none")
            with under_load(f"s3://bucket?endpoint={endpoint}&region=none") as load:
                load.work_until("open")
                for _ in range(100):
                    load.engine.step()
                assert load.engine.seen.longest_call_s < NO_HANG_S
                assert load.engine.seen.wrong == []
                assert load.engine.seen.hits > 0
