"""Kill a cache at random moments of heavy writing and check what is left. Run by test_crash.py.

    python crash.py DIRECTORY ROUNDS SEED NUM_CPU_BLOCKS

Each life of the cache is a process forked from one that has imported everything, with the same SSD
directory. It first looks for what the life before had said to be durable, all of which must be
there, and for older prompts, which may have been evicted; every byte that comes back is compared.
Then it writes until it is killed, or first its disk worker and then it.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from load import MAX_BLOCKS, LoadEngine, make_kv, make_model, tokens_of

from flexcache import CacheConfig, KVManager, KVTPClient
from flexcache.storage.pool_directory import DATA_FILE

NUM_SLOTS = 4096
NUM_CHECKED = 40  # prompts of the life before that must be there: far fewer than fill the SSD
PATIENCE_S = 60.0

Stored = tuple[int, int]
"""A prompt, and how many of its blocks."""


def live(
    conn: Connection, directory: str, seed: int, first_prompt: int, num_cpu_blocks: int
) -> None:
    """Run one life of the cache: check what must and may be there, then write until killed."""
    config = CacheConfig(
        num_cpu_blocks=num_cpu_blocks, num_ssd_blocks=NUM_SLOTS, ssd_cache_dirs=[directory],
        transfer_chunk_mb=0.1,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    kv = make_kv(make_model())
    with KVManager(make_model(dp_size=1), config, engine_id=f"crash-{os.getpid()}") as manager:
        client = KVTPClient(manager.endpoint, engine_id=f"crash-{os.getpid()}")
        client.register_kv_caches(kv)
        manager.wait_ready(PATIENCE_S)
        load = LoadEngine(manager, kv, seed)
        must, may = conn.recv()
        conn.send((verify(load, must, may), manager.stats()["workers"]["disk"]))
        prompt = first_prompt
        while True:
            count = int(rng.integers(1, MAX_BLOCKS + 1))
            durable = put_completely(load, prompt, count)
            if durable == count:
                conn.send((prompt, count))
            prompt += 4  # the next three would begin alike


def verify(load: LoadEngine, must: list[Stored], may: list[Stored]) -> list[str]:
    """Return what is not as it must be."""
    lost = []
    for prompt, count in must:
        found = load.get(prompt, count)
        if found != count:
            lost.append(f"prompt {prompt}: {found} of {count} blocks")
    for prompt, count in may:
        load.get(prompt, count)
    return lost + load.seen.wrong


def put_completely(load: LoadEngine, prompt: int, count: int) -> int:
    """Put a new prompt; return how many of its blocks are durable on SSD."""
    slots, blocks = load._slots(count)
    load._fill(prompt, blocks)
    written = num_recorded(load.manager)
    task_id, mask = load.manager.put_async(tokens_of(prompt, count), slots)
    load.manager.wait([task_id], PATIENCE_S, completely=True)
    has_dram = load.manager.stats()["ops"]["D2DISK"]["ops"] == 0
    assert mask.all() or not has_dram, "the new prompt was stored before"
    return num_recorded(load.manager) - written


def num_recorded(manager: KVManager) -> int:
    """Return how many blocks were written to SSD and recorded, through DRAM or past it."""
    ops = manager.stats()["ops"]
    return int(ops["H2DISK"]["blocks"] + ops["COMMIT"]["blocks"])


def run(directory: str, num_rounds: int, seed: int, num_cpu_blocks: int) -> None:
    """Raises `AssertionError` if a byte is wrong or something durable is lost."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["crash", "flexcache.manager", "flexcache.client.rank"])
    rng = np.random.default_rng(seed)
    before: list[Stored] = []
    older: deque[Stored] = deque(maxlen=200)
    num_durable = num_checked = rounds = lives = 0
    while rounds < num_rounds or not num_checked:
        ours, theirs = context.Pipe()
        life_seed, first_prompt = int(rng.integers(1 << 30)), lives * 100_000
        arguments = (theirs, directory, life_seed, first_prompt, num_cpu_blocks)
        life = context.Process(target=live, args=arguments)
        life.start()
        theirs.close()
        lives += 1
        try:
            must = before[-NUM_CHECKED:]
            may = [older[i] for i in rng.integers(len(older), size=5)] if older else []
            ours.send((must, may))
            assert ours.poll(PATIENCE_S), "the cache does not come back"
            problems, disk_worker = ours.recv()
            assert problems == [], f"seed {seed}, life {lives}: {problems[:3]}"
            num_checked += len(must)
            before = durable_within(ours, rng.exponential(0.15))
            if rng.random() < 0.5:
                kill_disk_worker(disk_worker)
                rounds += 1
                before += durable_within(ours, rng.random() * 0.5)
        finally:
            life.kill()
            life.join(PATIENCE_S)
            until_free(Path(directory))
            rounds += 1
        before += durable_within(ours, 0.0)
        num_durable += len(before)
        older.extend(before)
        ours.close()
    print(
        f"{rounds} kills in {lives} lives: {num_durable} prompts were durable, "
        f"{num_checked} of them looked for, none lost, no byte wrong"
    )


def durable_within(conn: Connection, seconds: float) -> list[Stored]:
    """Return what a life reports as durable within a time, or before its end."""
    durable: list[Stored] = []
    deadline = time.monotonic() + seconds
    try:
        while conn.poll(max(0.0, deadline - time.monotonic())):
            durable.append(conn.recv())
    except (EOFError, ConnectionResetError):
        pass
    return durable


def until_free(directory: Path) -> None:
    """Wait until the dead process's disk worker, which holds its files, has ended too."""
    with contextlib.suppress(FileNotFoundError), (directory / DATA_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def kill_disk_worker(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    run(sys.argv[1], *map(int, sys.argv[2:5]))
