"""A rank that is stopped during a copy and resumed when its slots serve another request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from paths import SUPPORT
from rank import KV_BYTES, MODEL, NUM_BLOCKS, TOKENS_PER_BLOCK, map_kv
from test_faults import until

from flexcache import CacheConfig, KVManager, KVStatus
from flexcache.protocol.endpoints import private_endpoint
from flexcache.transfer.copier import PIECE_BYTES

pytestmark = pytest.mark.whole


TOKENS = np.arange(NUM_BLOCKS * TOKENS_PER_BLOCK)
ENGINE = "stopped"
STORED, EMPTY, FOREIGN = 1, 2, 3  # what every byte of a slot says
NUM_TRIES = 50
WAIT_S = 60.0


class RankProcess:
    """The engine's only rank, and the memory of its KV tensors."""

    def __init__(self, endpoint: str, server_timeout_s: float) -> None:
        self._memory = os.memfd_create("kv")
        os.ftruncate(self._memory, KV_BYTES)
        path = f"/proc/{os.getpid()}/fd/{self._memory}"
        self.kv = map_kv(path)
        self._process = subprocess.Popen(
            [
                sys.executable, str(SUPPORT / "rank.py"), endpoint, path, ENGINE,
                str(server_timeout_s),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def fill(self, byte: int) -> None:
        self.kv.fill_(byte)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def await_state(self, name: str) -> None:
        assert self._process.stdout is not None
        while self._process.stdout.readline() != f"{name}\n":
            assert self._process.poll() is None

    def close(self) -> None:
        self.resume()
        self._process.communicate(timeout=WAIT_S)
        os.close(self._memory)


@contextmanager
def stored_prompt(config: CacheConfig) -> Iterator[tuple[KVManager, RankProcess]]:
    """Run an engine that has stored a prompt as long as its KV cache."""
    manager = KVManager(MODEL, config, engine_id=ENGINE)
    rank = RankProcess(manager.endpoint, config.server_timeout_s)
    try:
        manager.start()
        manager.wait_ready(WAIT_S)
        rank.await_state("SERVING")
        rank.fill(STORED)
        task_id, mask = manager.put_async(TOKENS, TOKENS)
        assert mask.all()
        assert manager.wait([task_id], WAIT_S, completely=True)[task_id].status is KVStatus.SUCCESS
        yield manager, rank
    finally:
        rank.close()
        manager.shutdown()


def stop_in_a_load(manager: KVManager, rank: RankProcess) -> int:
    """Load all slots, stop the rank in the middle, and return the task."""
    for _ in range(NUM_TRIES):
        rank.fill(EMPTY)
        kv = rank.kv.numpy()
        task_id, mask = manager.get_async(TOKENS, TOKENS)
        assert mask.all()
        deadline = time.monotonic() + WAIT_S
        while kv[0] == EMPTY:
            assert time.monotonic() < deadline, "the load does not begin"
        rank.stop()
        if np.count_nonzero(kv == EMPTY) > KV_BYTES // 4:
            return task_id
        rank.resume()  # it was too quick
        manager.wait([task_id], WAIT_S)
    pytest.fail("the rank was never caught in a load")


def wrong_bytes(rank: RankProcess) -> int:
    return int(torch.count_nonzero(rank.kv != FOREIGN))


@pytest.mark.parametrize("way", ["DRAM", "SSD alone"])
def test_a_rank_stopped_past_a_deadline_writes_one_piece_at_most_when_it_goes_on(way: str) -> None:
    with ExitStack() as stack:
        settings: dict[str, Any] = {"num_cpu_blocks": NUM_BLOCKS}
        if way == "SSD alone":
            ssd = stack.enter_context(TemporaryDirectory())
            settings = {"num_cpu_blocks": 0, "num_ssd_blocks": NUM_BLOCKS, "ssd_cache_dirs": [ssd]}
        config = CacheConfig(op_timeout_s=5.0, **settings)
        manager, rank = stack.enter_context(stored_prompt(config))
        task_id = stop_in_a_load(manager, rank)
        response = manager.wait([task_id], WAIT_S)[task_id]
        assert not response.mask.all()  # ops of its first blocks may have ended before the stop
        assert "deadline" in (response.error or "")
        rank.fill(FOREIGN)
        rank.resume()
        until(lambda: manager.stats()["queues"]["device"]["running"] == 0)
        assert wrong_bytes(rank) <= PIECE_BYTES
        assert all(tier["leased"] == 0 for tier in manager.stats()["tiers"].values())
        task_id, _ = manager.get_async(TOKENS, TOKENS)  # the rank serves later tasks
        assert manager.wait([task_id], WAIT_S)[task_id].mask.all()
        assert (rank.kv == STORED).all()


@contextmanager
def serving(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in its own process, which may be killed inside the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flexcache.cli", "server", "--endpoint", endpoint],
        env={**os.environ, "FLEXCACHE_NUM_CPU_BLOCKS": str(NUM_BLOCKS)},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        process.wait(WAIT_S)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_stopped_until_its_server_is_given_up_writes_one_piece_at_most_when_it_goes_on(
    fault: signal.Signals,
) -> None:
    endpoint = private_endpoint(ENGINE)
    with ExitStack() as stack:
        server = stack.enter_context(serving(endpoint))
        manager, rank = stack.enter_context(stored_prompt(CacheConfig(endpoint=endpoint)))
        task_id = stop_in_a_load(manager, rank)
        server.send_signal(fault)
        response = manager.wait([task_id], WAIT_S)[task_id]
        assert response.status is KVStatus.FAILED
        rank.fill(FOREIGN)
        rank.resume()
        rank.await_state("HELLO")
        assert wrong_bytes(rank) <= PIECE_BYTES
        if fault == signal.SIGSTOP:
            server.send_signal(signal.SIGCONT)
        else:
            server.wait(WAIT_S)
            stack.enter_context(serving(endpoint))
        rank.await_state("SERVING")
        manager.wait_ready(WAIT_S)
        other = TOKENS + len(TOKENS)  # tasks of the next session are not revoked
        task_id, _ = manager.put_async(other, TOKENS)
        assert manager.wait([task_id], WAIT_S)[task_id].mask.all()
        rank.fill(EMPTY)
        task_id, _ = manager.get_async(other, TOKENS)
        assert manager.wait([task_id], WAIT_S)[task_id].mask.all()
        assert (rank.kv == FOREIGN).sum() >= KV_BYTES - PIECE_BYTES
