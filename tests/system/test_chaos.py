"""kill -9 at random moments under load, again and again, seeded.

    CHAOS_KILLS=240 CHAOS_SEED=7 pytest -o faulthandler_timeout=0 tests/system/test_chaos.py -s

One engine survives, in this process; another, a scheduler and a rank in processes of their own, is
killed piece by piece, and so are the disk worker and the server. After each kill the survivor's
next put and get are exact, what is counted adds up, and the dead comes back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import NO_HANG_S, until
from load import LoadEngine
from test_shared import Member, child, until_free

from flexcache import CacheConfig
from flexcache.errors import FlexCacheError
from flexcache.protocol.endpoints import runtime_dir
from flexcache.storage.pool_directory import DATA_FILE, INDEX_FILE

pytestmark = pytest.mark.whole


KILLS = int(os.environ.get("CHAOS_KILLS", 16))
SEED = int(os.environ.get("CHAOS_SEED", 1))
KINDS = ["scheduler", "rank", "disk", "server"]


class Victim:
    """An engine whose scheduler and rank are processes that can be killed."""

    def __init__(self, endpoint: str, kv_path: Path) -> None:
        self._endpoint = endpoint
        self._kv_path = str(kv_path)
        self._starts = 0
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.start("rank")
        self.start("scheduler")

    def start(self, kind: str) -> None:
        self._starts += 1
        extra = [str(self._starts)] if kind == "scheduler" else []
        self.processes[kind] = child(kind, self._endpoint, "victim", self._kv_path, *extra)

    def kill(self, kind: str) -> str:
        """Kill it; return its output."""
        process = self.processes.pop(kind)
        process.kill()
        said, _ = process.communicate()
        return said

    def stop(self) -> str:
        said = ""
        for kind in ("scheduler", "rank"):
            process = self.processes.pop(kind, None)
            if process is not None:
                said += process.communicate(timeout=120)[0]
        return said


@contextlib.contextmanager
def working(load: LoadEngine) -> Iterator[threading.Lock]:
    """Step on a thread until the end of the block, except while the lock is held."""
    between_steps, stop, failures = threading.Lock(), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not stop.is_set():
                with between_steps:
                    load.step()
                stop.wait(0.0005)  # let another thread have the lock
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield between_steps
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive()
        assert failures == []


def test_any_process_can_be_killed_at_any_moment(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    config = CacheConfig(
        num_cpu_blocks=256, num_ssd_blocks=512, ssd_cache_dirs=[str(tmp_path / "ssd")],
        transfer_chunk_mb=0.1, early_load_share=0.1,
    )  # fmt: skip
    survivor = Member(config, engine_id="survivor")
    survivor.manager.wait_ready(60)
    endpoint = survivor.manager.endpoint
    victim = Victim(endpoint, tmp_path / "kv")
    try:
        with working(survivor.load) as between_steps:
            for turn in range(KILLS):
                kind = KINDS[turn % 4] if turn % 8 < 4 else str(rng.choice(KINDS))
                time.sleep(rng.random() * 0.3)
                killed = kill(kind, survivor, victim)
                started = time.monotonic()
                bring_back(kind, killed, survivor, victim)
                survivor.manager.check()
                with between_steps:
                    exact_again(survivor, turn)
                seen = survivor.load.seen
                assert seen.wrong == []
                assert seen.longest_call_s < NO_HANG_S
                print(
                    f"kill {turn + 1:3}: {kind:9} back after {time.monotonic() - started:4.1f} s; "
                    f"{seen.steps} steps, {seen.hits} hits, {seen.lost} lost, "
                    f"longest call {seen.longest_call_s:.2f} s"
                )
        said = victim.stop()
        assert "WRONG" not in said
        assert "done" in said
        settled(survivor)
    finally:
        for process in victim.processes.values():
            process.kill()
        survivor.close()
    until_free(endpoint)
    # What other programs of this machine keep there comes and goes.
    assert [name for name in os.listdir("/dev/shm") if "flexcache" in name] == []
    assert list(runtime_dir().iterdir()) == []
    assert sorted(os.listdir(tmp_path / "ssd")) == [INDEX_FILE, DATA_FILE]


def kill(kind: str, survivor: Member, victim: Victim) -> int:
    """Kill one process; return its process id."""
    if kind in victim.processes:
        pid = victim.processes[kind].pid
        assert "WRONG" not in victim.kill(kind)
        return pid
    pid = process_ids(survivor)[kind]
    os.kill(pid, signal.SIGKILL)
    return pid


def bring_back(kind: str, killed: int, survivor: Member, victim: Victim) -> None:
    if kind in ("scheduler", "rank"):
        victim.start(kind)
    else:
        until(lambda: process_ids(survivor).get(kind) not in (None, killed))
    survivor.manager.wait_ready(60)
    until(lambda: set(engines(survivor)) == {"survivor/dp0", "victim/dp0"})


def process_ids(survivor: Member) -> dict[str, int]:
    try:
        stats = survivor.manager.stats()
    except FlexCacheError:
        return {}
    return {"server": stats["server_pid"], **stats["workers"]}


def engines(survivor: Member) -> list[str]:
    try:
        return list(survivor.manager.stats()["engines"])
    except FlexCacheError:
        return []


def exact_again(survivor: Member, turn: int) -> None:
    """Store and load a prompt that was never stored before."""
    load = LoadEngine(survivor.manager, survivor.kv, seed=turn)
    prompt = 4 * (1000 + turn)

    def is_stored() -> bool:
        """Put it, as far as the loads of others leave room in DRAM."""
        load.put(prompt, 12)
        return load.seen.stored == 12

    until(is_stored)
    assert load.get(prompt, 12) == 12
    assert load.seen.wrong == []


def settled(survivor: Member) -> None:
    """Check that, at rest, nothing is leased and counts add up."""
    until(lambda: engines(survivor) == ["survivor/dp0"])
    until(lambda: sum(survivor.manager.stats()["tasks"].values()) == 0)
    survivor.manager.check()
    for tier in survivor.manager.stats()["tiers"].values():
        assert tier["leased"] == 0
        assert tier["free"] + tier["indexed"] == tier["capacity"]
