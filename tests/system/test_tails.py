"""Models with window and state groups: hits end at tails, in every tier, byte for byte."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import until
from ports import free_range
from tailed_engine import (
    ALL_LIKE,
    GEMMA_LIKE,
    PATIENCE_S,
    STATE_LIKE,
    STATES_ONLY,
    TailedEngine,
    model_of,
    tailed_engine,
)

from flexcache import KVGroup, KVStatus
from flexcache.protocol.endpoints import is_served, private_endpoint
from flexcache.server.operator import Operator


def until_it_stores(engine: TailedEngine) -> None:
    """Put new prompts until the remote store, to which its worker may still connect, takes one."""

    def stored() -> int:
        return int(engine.manager.stats()["tiers"]["REMOTE"]["stored_blocks"])

    numbers = itertools.count(1_000_000, 32)
    before = stored()

    def stores() -> bool:
        first = next(numbers)
        engine.put(np.arange(first, first + 32), engine.tables(32))
        return stored() > before

    until(stores)


def test_a_dram_tier_too_small_for_a_tail_is_said(caplog: pytest.LogCaptureFixture) -> None:
    groups = (KVGroup("full", 32), KVGroup("window", 32, 512))
    with tailed_engine(groups, num_cpu_blocks=17):
        assert "tails_do_not_fit" not in caplog.text
    with tailed_engine(groups, num_cpu_blocks=15):
        assert "tails_do_not_fit" in caplog.text


@contextlib.contextmanager
def two_peers(groups: tuple[KVGroup, ...], **first: Any) -> Iterator[list[TailedEngine]]:
    """Engines of two hosts, whose caches know each other.

    Args:
        first: Settings of the first one.
    """
    ports = [free_range(2) for _ in range(2)]
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        engines = []
        for own in addresses:
            settings = {"peers": addresses, "peer_endpoint": own, **({} if engines else first)}
            engine = tailed_engine(groups, awaits_tiers=False, **settings)
            engines.append(stack.enter_context(engine))
        for engine in engines:
            tiers = partial(engine.manager.stats)
            until(lambda tiers=tiers: all(t["available"] for t in tiers()["tiers"].values()))
        yield engines


@pytest.mark.parametrize("groups", ALL_LIKE, ids=["gemma", "state", "states_only", "llama"])
def test_a_peer_takes_over_tails_from_a_host_that_goes(groups: tuple[KVGroup, ...]) -> None:
    with two_peers(groups) as (one, two):
        prompts = [np.arange(32 * 6) + 1000 * number for number in range(2)]
        expected = []
        for prompt in prompts:
            tables = one.tables(32 * 4)
            expected.append(one.read(tables))
            assert one.put(prompt[: 32 * 4], tables) is KVStatus.SUCCESS
        servers = [engine.manager._transport.server for engine in (one, two)]  # type: ignore[union-attr]
        goes = Operator(servers[0])
        goes.drain(servers[1].config.peer_endpoint or "", 60.0)
        until(lambda: (found := goes.drain_progress()) is not None and found.state != "running")
        found = goes.drain_progress()
        assert found is not None
        assert (found.state, found.left_blocks, found.there_blocks) == ("done", 0, 0)
        one.manager.clear("CPU")
        for prompt, blocks in zip(prompts, expected, strict=True):
            assert two.get(prompt) == (32 * 4, blocks, KVStatus.SUCCESS)
        assert set(two.manager.stats()["hit_blocks"]) <= {"CPU"}


@pytest.mark.parametrize("groups", ALL_LIKE, ids=["gemma", "state", "states_only", "llama"])
def test_tails_on_the_ssd_of_a_peer_are_found(groups: tuple[KVGroup, ...], tmp_path: Path) -> None:
    ssd = {"ssd_cache_dirs": [str(tmp_path)], "num_ssd_blocks": 64}
    with two_peers(groups, **ssd) as (one, two):
        prompt, tables = np.arange(32 * 6), one.tables(32 * 4)
        expected = one.read(tables)
        assert one.put(prompt[: 32 * 4], tables) is KVStatus.SUCCESS
        one.manager.clear("CPU")
        found: list[Any] = []
        until(lambda: found.append(two.get(prompt)) or found[-1][0])
        assert found[-1] == (32 * 4, expected, KVStatus.SUCCESS)
        assert one.manager.stats()["ops"]["DISK2H"]["blocks"] > 0


@pytest.mark.parametrize("groups", ALL_LIKE, ids=["gemma", "state", "states_only", "llama"])
def test_a_hit_ends_at_a_tail_and_brings_its_bytes(groups: tuple[KVGroup, ...]) -> None:
    with tailed_engine(groups) as engine:
        prompt = np.arange(32 * 6)
        tables = engine.tables(32 * 4)
        expected = engine.read(tables)
        assert engine.put(prompt[: 32 * 4], tables) is KVStatus.SUCCESS
        engine.wipe()
        stop, came, status = engine.get(prompt)
        assert (stop, status) == (32 * 4, KVStatus.SUCCESS)
        assert came == expected
        assert engine.get(prompt[: 32 * 3])[0] == 0  # no tail there
        assert engine.get(prompt, start=32 * 4)[0] == 0  # the engine has it all
        stop, came, _ = engine.get(prompt, start=32 * 2)
        assert stop == 32 * 4
        assert came == [
            table[-len(part) :] if part else [] for table, part in zip(expected, came, strict=True)
        ]


@pytest.mark.parametrize("groups", [GEMMA_LIKE, STATE_LIKE, STATES_ONLY])
def test_only_states_keep_a_hit_off_the_last_token(groups: tuple[KVGroup, ...]) -> None:
    with tailed_engine(groups) as engine:
        prompt = np.arange(32 * 4)
        engine.put(prompt, engine.tables(len(prompt)))
        has_states = model_of(groups).has_states
        assert engine.get(prompt)[0] == (0 if has_states else len(prompt))
        assert engine.get(np.arange(32 * 4 + 1))[0] == len(prompt)


def test_a_longer_prompt_adds_a_tail_and_both_are_found() -> None:
    with tailed_engine(GEMMA_LIKE) as engine:
        prompt = np.arange(32 * 8)
        for end in (32 * 3, 32 * 8):
            tables = engine.tables(end)
            expected = engine.read(tables)
            engine.put(prompt[:end], tables)
        other = np.concatenate((prompt[: 32 * 5], np.arange(1000, 1100)))
        assert engine.get(other)[0] == 32 * 3
        engine.wipe()
        stop, came, _ = engine.get(prompt)
        assert stop == 32 * 8
        assert came[0] == expected[0]
        assert came[2] == expected[2]
        assert came[1][6:] == expected[1][6:]
        assert engine.manager.stats()["tiers"]["CPU"]["tails"] == 2


def test_a_cached_tail_is_not_copied_again() -> None:
    with tailed_engine(GEMMA_LIKE) as engine:
        prompt = np.arange(32 * 4)
        assert engine.put(prompt, engine.tables(len(prompt))) is KVStatus.SUCCESS
        before = engine.manager.stats()["ops"]["D2H"]["blocks"]
        assert engine.put(prompt, engine.tables(len(prompt))) is KVStatus.NOT_FOUND
        assert engine.manager.stats()["ops"]["D2H"]["blocks"] == before


def test_a_tail_alone_is_stored_behind_cached_blocks() -> None:
    with tailed_engine(STATE_LIKE) as engine:
        prompt = np.arange(32 * 6)
        tables = engine.tables(len(prompt))
        engine.put(prompt, tables)
        shorter = engine.tables(32 * 2)
        expected = engine.read(shorter)[1]
        assert engine.put(prompt[: 32 * 2], shorter) is KVStatus.SUCCESS
        stop, came, _ = engine.get(prompt[: 32 * 5])
        assert (stop, came[1]) == (32 * 2, expected)


@pytest.mark.parametrize("groups", ALL_LIKE, ids=["gemma", "state", "states_only", "llama"])
def test_a_restart_finds_the_tails_on_ssd(groups: tuple[KVGroup, ...], tmp_path: Path) -> None:
    ssd = {"num_ssd_blocks": 64, "ssd_cache_dirs": (str(tmp_path),)}
    prompt = np.arange(32 * 5)
    with tailed_engine(groups, **ssd) as engine:
        tables = engine.tables(32 * 4)
        expected = engine.read(tables)
        engine.put(prompt[: 32 * 4], tables)
    with tailed_engine(groups, **ssd) as engine:
        assert engine.manager.stats()["tiers"]["SSD"]["tails"] == 1
        stop, came, status = engine.get(prompt)
        assert (stop, status) == (32 * 4, KVStatus.SUCCESS)
        assert came == expected
        assert engine.manager.stats()["tiers"]["CPU"]["tails"] == 1  # it was promoted
        assert engine.get(prompt)[:2] == (stop, came)


def test_a_prefetch_brings_what_a_get_of_the_prompt_can_use(tmp_path: Path) -> None:
    ssd = {"num_ssd_blocks": 64, "ssd_cache_dirs": (str(tmp_path),)}
    with tailed_engine(STATE_LIKE, **ssd) as engine:
        prompt = np.arange(32 * 4)
        for end in (32 * 3, 32 * 4):
            engine.put(prompt[:end], engine.tables(end))
        engine.manager.clear("CPU")
        task = engine.manager.prefetch_async(prompt)
        engine.manager.wait([task], PATIENCE_S, completely=True)
        engine.manager.clear("SSD")
        assert engine.get(prompt)[0] == 32 * 3  # the last token is computed


@pytest.mark.parametrize("groups", [GEMMA_LIKE, STATES_ONLY])
def test_under_pressure_every_hit_has_its_bytes(
    groups: tuple[KVGroup, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)
    with tailed_engine(
        groups, num_cpu_blocks=16, num_ssd_blocks=24, ssd_cache_dirs=(str(tmp_path),)
    ) as engine:
        stored: dict[bytes, list[list[bytes]]] = {}
        num_hits = 0
        for _ in range(60):
            prompt = np.concatenate((np.full(64, rng.integers(3)), np.full(96, rng.integers(3))))
            end = 32 * int(rng.integers(1, 6))
            key = prompt[:end].tobytes()
            stop, came, status = engine.get(prompt[: end + 1])
            if stop:
                assert status is KVStatus.SUCCESS
                known = stored[prompt[:stop].tobytes()]
                for group, found, table in zip(groups, came, known, strict=True):
                    if not group.is_dense:
                        assert found == table
                num_hits += 1
            if key not in stored:
                tables = engine.tables(end)
                stored[key] = engine.read(tables)
                engine.put(prompt[:end], tables)
        assert num_hits


@pytest.mark.whole
@pytest.mark.parametrize("groups", ALL_LIKE, ids=["gemma", "state", "states_only", "llama"])
def test_one_engine_of_a_server_finds_the_tails_of_another(groups: tuple[KVGroup, ...]) -> None:
    endpoint = private_endpoint("tails")
    prompt = np.arange(32 * 5)
    with (
        tailed_engine(groups, endpoint=endpoint) as writer,
        tailed_engine(groups, endpoint=endpoint) as reader,
    ):
        tables = writer.tables(32 * 4)
        expected = writer.read(tables)
        assert writer.put(prompt[: 32 * 4], tables) is KVStatus.SUCCESS
        assert writer.put(prompt[: 32 * 4], tables) is KVStatus.NOT_FOUND
        stop, came, status = reader.get(prompt)
        assert (stop, status) == (32 * 4, KVStatus.SUCCESS)
        assert came == expected
        task, _ = reader.manager.get_match(prompt)
        with pytest.raises(ValueError, match="group 0"):
            reader.manager.launch([task], group_blocks=[[[7] * 99] * len(groups)])
        reader.manager.cancel([task])
    until(lambda: not is_served(endpoint))


@pytest.mark.parametrize("groups", ALL_LIKE, ids=["gemma", "state", "states_only", "llama"])
def test_another_cache_finds_the_tails_at_the_remote_store(
    groups: tuple[KVGroup, ...], tmp_path: Path
) -> None:
    patience = {"remote_lookup_timeout_s": 50.0, "remote_timeout_s": 50.0}
    remote = {"remote_url": f"file://{tmp_path}", "server_timeout_s": 120.0, **patience}
    prompt = np.arange(32 * 6)
    with tailed_engine(groups, **remote) as engine:
        until_it_stores(engine)
        for end in (32 * 2, 32 * 4):
            tables = engine.tables(end)
            expected = engine.read(tables)
            assert engine.put(prompt[:end], tables) is KVStatus.SUCCESS
    with tailed_engine(groups, **remote) as engine:
        until_it_stores(engine)
        stop, came, status = engine.get(prompt)
        assert (stop, status) == (32 * 4, KVStatus.SUCCESS)
        tails = [number for number, group in enumerate(groups) if not group.is_dense]
        assert [came[number] for number in tails] == [expected[number] for number in tails]
        assert engine.get(np.concatenate((prompt[:96], prompt[:96])))[0] == 32 * 2


def test_calls_that_do_not_fit_the_model_are_refused() -> None:
    with tailed_engine(GEMMA_LIKE) as engine:
        manager, prompt = engine.manager, np.arange(32 * 4)
        for tail_at in (0, 31, 32 * 5, -32):
            with pytest.raises(ValueError, match="tail_at"):
                manager.put_match(prompt, tail_at=tail_at)
        task, _ = manager.put_match(prompt, tail_at=len(prompt))
        tables = engine.tables(len(prompt))
        with pytest.raises(ValueError, match="group_blocks"):
            manager.launch([task], [np.arange(len(prompt))])
        with pytest.raises(ValueError, match="group 0"):
            manager.launch([task], group_blocks=[[tables[0][1:], *tables[1:]]])
        with pytest.raises(ValueError, match="group 1"):
            manager.launch([task], group_blocks=[[tables[0], tables[1][1:], tables[2]]])
        for group in range(3):
            lacking = [[-1, *table[1:]] if n == group else table for n, table in enumerate(tables)]
            with pytest.raises(ValueError, match=f"group {group} is below 0"):
                manager.launch([task], group_blocks=[lacking])
        with pytest.raises(ValueError, match="1 of 3 groups"):
            manager.launch([task], group_blocks=[tables[:1]])
        with pytest.raises(ValueError, match="put_match"):
            manager.put_async(prompt, np.arange(len(prompt)))
        manager.launch([task], group_blocks=[tables])
        assert manager.wait([task], PATIENCE_S)[task].status is KVStatus.SUCCESS
