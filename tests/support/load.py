"""An engine that puts, gets, cancels and prefetches at random, and checks every byte it receives.

Content follows from a block's place in its prompt, so that any engine can tell whether what another
one stored is right. Used inside a test, or as a process (`python load.py scheduler|rank ...`) that
can be killed; the two processes of an engine share its KV tensors by a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from cluster import NO_HANG_S, PATIENCE_S, Cluster, running_cluster, until

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig

TOKENS_PER_BLOCK = 16
NUM_GPU_BLOCKS = 96
NUM_PROMPTS = 40
MAX_BLOCKS = 24
SHARED_BLOCKS = 8  # prompts of a family of four begin alike
T = TypeVar("T")


def make_model(head_size: int = 64, dp_size: int = 2) -> ModelConfig:
    """``head_size`` 64 makes blocks of 16 KiB."""
    return ModelConfig("load", 2, 2, head_size, torch.bfloat16, dp_size=dp_size)


def block_bytes(model: ModelConfig) -> int:
    """Return the size of a block of one layer."""
    return TOKENS_PER_BLOCK * model.token_size_in_bytes // model.num_layers


def make_kv(model: ModelConfig, path: Path | None = None) -> dict[str, torch.Tensor]:
    """Make layers one after another in one buffer, in a file that other processes can map."""
    size = NUM_GPU_BLOCKS * block_bytes(model)
    if path is None:
        flat = torch.zeros(size * model.num_layers, dtype=torch.uint8)
    else:
        if not path.exists():
            path.write_bytes(bytes(size * model.num_layers))
        flat = torch.from_file(str(path), shared=True, size=size * model.num_layers,
                               dtype=torch.uint8)  # fmt: skip
    shape = (NUM_GPU_BLOCKS, 2, TOKENS_PER_BLOCK, model.num_kv_heads, model.head_size)
    return {
        f"layer.{i}": flat[i * size : (i + 1) * size].view(model.dtype).view(shape)
        for i in range(model.num_layers)
    }


def tokens_of(prompt: int, num_blocks: int) -> np.ndarray:
    tokens = np.arange(num_blocks * TOKENS_PER_BLOCK) + 1_000_000 * (prompt + 1)
    shared = SHARED_BLOCKS * TOKENS_PER_BLOCK
    family = np.arange(num_blocks * TOKENS_PER_BLOCK) + 1_000_000_000 * (prompt // 4 + 1)
    tokens[:shared] = family[:shared]
    return tokens


@cache
def content_of(prompt: int, block: int, size: int) -> bytes:
    """Return what every layer's share of the block must hold, apart from the layer's number."""
    owner = prompt // 4 if block < SHARED_BLOCKS else 1000 + prompt
    return np.random.default_rng([owner, block]).bytes(size)


@dataclass
class Seen:
    """The outcome of a load."""

    steps: int = 0
    hits: int = 0
    stored: int = 0
    lost: int = 0
    longest_call_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


class LoadEngine:
    """One engine: its manager, and its KV tensors, which some `KVTPClient` serves.

    With the ``client`` at hand it also loads as vLLM does: gated, and over when the rank says so.
    """

    def __init__(
        self, manager: KVManager, kv: dict[str, torch.Tensor], seed: int,
        client: KVTPClient | None = None,
    ) -> None:  # fmt: skip
        self.manager = manager
        self.client = client
        self.seen = Seen()
        self._rng = np.random.default_rng(seed)
        self._size = block_bytes(manager.model_config)
        self._layers = [
            layer.view(torch.uint8).view(NUM_GPU_BLOCKS, self._size).numpy()
            for layer in kv.values()
        ]

    def step(self) -> None:
        """Make one random request and check all of it."""
        rng = self._rng
        prompt = int(rng.integers(NUM_PROMPTS))
        count = int(rng.integers(1, MAX_BLOCKS + 1))
        act = rng.choice(["put", "get", "cancel put", "cancel get", "match", "prefetch"],
                         p=[0.3, 0.35, 0.08, 0.08, 0.15, 0.04])  # fmt: skip
        self.seen.steps += 1
        if act == "put":
            self.put(prompt, count)
        elif act == "get":
            self.get(prompt, count)
        elif act == "match" and self.client is not None:
            self.get_gated(prompt, count)
        elif act == "prefetch":
            task_id = self._timed(lambda: self.manager.prefetch_async(tokens_of(prompt, count)))
            self._timed(lambda: self.manager.wait([task_id]))
        elif act == "match":
            task_id, _ = self._timed(lambda: self.manager.get_match(tokens_of(prompt, count)))
            self._timed(lambda: self.manager.cancel([task_id]))
        else:
            self._cancelled(prompt, count, act == "cancel put")

    def put(self, prompt: int, count: int) -> None:
        slots, blocks = self._slots(count)
        self._fill(prompt, blocks)
        task_id, _ = self._timed(lambda: self.manager.put_async(tokens_of(prompt, count), slots))
        response = self._timed(lambda: self.manager.wait([task_id]))[task_id]
        self.seen.stored += int(response.mask.sum()) // TOKENS_PER_BLOCK
        self._note(response.status)

    def get_gated(self, prompt: int, count: int) -> int:
        """Like `get`, but the slots are free again when the rank, not the manager, says so."""
        assert self.client is not None
        slots, blocks = self._wiped(count)
        task_id, mask = self._timed(lambda: self.manager.get_match(tokens_of(prompt, count)))
        self._timed(lambda: self.manager.launch([task_id], [slots[mask]], gated=True))
        if not mask.any():
            return 0
        if self._rng.random() < 0.5:  # the step that opens the gate may come much later
            time.sleep(self._rng.random() * 0.05)
        self.client.open_gates([task_id])

        def over() -> int:
            while not (ended := self.client.take_ended([task_id])):  # type: ignore[union-attr]
                self.client.wait_ended(0.01)  # type: ignore[union-attr]
                if time.monotonic() - started > PATIENCE_S:
                    self.seen.wrong.append(f"task {task_id} is never over")
                    return 0
            return ended[task_id]

        started = time.monotonic()
        arrived = self._timed(over)
        self.compare(prompt, blocks[:arrived])
        return arrived

    def get(self, prompt: int, count: int) -> int:
        """Load and compare blocks; return how many arrived."""
        slots, blocks = self._wiped(count)
        started = time.monotonic()
        task_id, _ = self._timed(lambda: self.manager.get_async(tokens_of(prompt, count), slots))
        response = self._timed(lambda: self.manager.wait([task_id]))[task_id]
        self.seen.latencies_s.append(time.monotonic() - started)
        arrived = int(response.mask.sum()) // TOKENS_PER_BLOCK
        self.compare(prompt, blocks[:arrived])
        self._note(response.status)
        return arrived

    def _wiped(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        slots, blocks = self._slots(count)
        for layer in self._layers:
            layer[blocks] = 0xEE
        return slots, blocks

    def compare(self, prompt: int, blocks: np.ndarray) -> None:
        """Compare GPU blocks with the prompt's; differences are noted as wrong."""
        for position, block in enumerate(blocks):
            for number, layer in enumerate(self._layers):
                if layer[block].tobytes() != self._content(prompt, position, number):
                    self.seen.wrong.append(f"prompt {prompt}, block {position}, layer {number}")
        self.seen.hits += len(blocks)

    def _cancelled(self, prompt: int, count: int, is_put: bool) -> None:
        slots, blocks = self._slots(count)
        if is_put:
            self._fill(prompt, blocks)
        call = self.manager.put_async if is_put else self.manager.get_async
        task_id, _ = self._timed(lambda: call(tokens_of(prompt, count), slots))
        self._timed(lambda: self.manager.cancel([task_id]))
        self._timed(lambda: self.manager.wait([task_id]))

    def _note(self, status: KVStatus) -> None:
        self.seen.lost += status is KVStatus.FAILED

    def _slots(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = self._rng.permutation(NUM_GPU_BLOCKS)[:count]
        grid = blocks[:, None] * TOKENS_PER_BLOCK + np.arange(TOKENS_PER_BLOCK)
        return grid.ravel(), blocks

    def _fill(self, prompt: int, blocks: np.ndarray) -> None:
        for position, block in enumerate(blocks):
            for number, layer in enumerate(self._layers):
                content = self._content(prompt, position, number)
                layer[block] = np.frombuffer(content, dtype=np.uint8)

    def _content(self, prompt: int, position: int, layer: int) -> bytes:
        content = content_of(prompt, position, self._size)
        return bytes([layer]) + content[1:]

    def _timed(self, call: Callable[[], T]) -> T:
        started = time.monotonic()
        result = call()
        self.seen.longest_call_s = max(self.seen.longest_call_s, time.monotonic() - started)
        return result


def run_rank(endpoint: str, engine_id: str, kv_path: str) -> None:
    """Serve the engine's KV tensors until killed."""
    client = KVTPClient(endpoint, engine_id=engine_id)
    client.register_kv_caches(make_kv(make_model(), Path(kv_path)))
    client.wait_registered(60)
    print("up", flush=True)
    sys.stdin.read()
    client.close()


def run_scheduler(endpoint: str, engine_id: str, kv_path: str, seed: str) -> None:
    """Work until killed or until standard input ends."""
    import threading

    manager = KVManager(make_model(), CacheConfig(endpoint=endpoint), engine_id=engine_id)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    with manager:
        manager.wait_ready(60)
        print("up", flush=True)
        engine = LoadEngine(manager, make_kv(make_model(), Path(kv_path)), int(seed))
        while not stop.is_set():
            engine.step()
            if engine.seen.wrong:
                print("WRONG", engine.seen.wrong[:3], flush=True)
                raise SystemExit(1)
            if engine.seen.longest_call_s > NO_HANG_S:
                print(f"WRONG a call took {engine.seen.longest_call_s} s", flush=True)
                raise SystemExit(1)
    print(f"done {engine.seen.steps} {engine.seen.hits} {engine.seen.lost}", flush=True)


def run_crowd(endpoint: str, first: str, count: str, seconds: str) -> None:
    """Several engines in one process, each at work on its own, leaving and coming back now and
    then; what each saw, as one line of JSON."""
    import json
    import threading

    deadline = time.monotonic() + float(seconds)
    results: dict[int, dict[str, object]] = {}

    def live(number: int) -> None:
        rng = np.random.default_rng(number)
        kv, seen = make_kv(make_model()), Seen()
        visits = 0
        while time.monotonic() < deadline or not seen.hits:
            visits += 1
            name = f"crowd-{number}"
            client = KVTPClient(endpoint, engine_id=name)
            client.register_kv_caches(kv)
            with KVManager(make_model(), CacheConfig(endpoint=endpoint), engine_id=name) as manager:
                manager.wait_ready(60)
                load = LoadEngine(manager, kv, seed=int(rng.integers(1 << 30)))
                load.seen = seen
                leaves_at = time.monotonic() + rng.exponential(float(seconds) / 4)
                while time.monotonic() < min(deadline, leaves_at) and not seen.wrong:
                    load.step()
                while not (seen.hits or seen.wrong):  # on a machine too slow for that
                    load.step()
                if rng.random() < 0.5:  # leave in the middle of things
                    manager.get_match(tokens_of(int(rng.integers(NUM_PROMPTS)), MAX_BLOCKS))
                    slots = np.arange(MAX_BLOCKS * TOKENS_PER_BLOCK)
                    manager.put_async(tokens_of(5000 + number, MAX_BLOCKS), slots)
            client.close()
        times = np.sort(seen.latencies_s)
        results[number] = {
            "steps": seen.steps, "hits": seen.hits, "stored": seen.stored, "lost": seen.lost,
            "visits": visits, "wrong": seen.wrong[:3], "longest_call_s": seen.longest_call_s,
            "get_p50_s": float(np.quantile(times, 0.5)),
            "get_p99_s": float(np.quantile(times, 0.99)),
        }  # fmt: skip

    print("up", flush=True)
    threads = [
        threading.Thread(target=live, args=(number,))
        for number in range(int(first), int(first) + int(count))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == int(count), "an engine failed"
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    roles = {"rank": run_rank, "scheduler": run_scheduler, "crowd": run_crowd}
    roles[sys.argv[1]](*sys.argv[2:])


SETTINGS: dict[str, Any] = {
    "num_cpu_blocks": 192,  # an eighth of it less, a quarter of the rest may wait for the store
    "server_timeout_s": 6.0,
    "remote_lookup_timeout_s": 2.0,  # a busy machine is no slow store
    "skip_slow_loads": False,
}


def breaker(cluster: Cluster) -> str:
    return str(cluster.manager.stats()["remote"]["breaker"]["state"])


def remote(cluster: Cluster, counter: str) -> int:
    return int(cluster.manager.stats()["tiers"]["REMOTE"][counter])


class Loaded:
    """A cache of 128 blocks under a load of 700, each byte of which is checked."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.engine = LoadEngine(cluster.manager, cluster.kv[0], seed, cluster.clients[0])

    def work_until(self, condition: str) -> None:
        def is_so() -> bool:
            self.engine.step()
            return breaker(self.cluster) == condition

        until(is_so)

    def work_until_it_grows(self, *counters: str) -> None:
        """Work until the store has supplied blocks again."""
        before = {name: remote(self.cluster, name) for name in counters}

        def has_grown() -> bool:
            self.engine.step()
            return all(remote(self.cluster, name) > before[name] for name in counters)

        until(has_grown)


@contextmanager
def under_load(url: str) -> Iterator[Loaded]:
    with running_cluster(
        model=make_model(dp_size=1), make_kv=lambda model, _: make_kv(model),
        remote_url=url, transfer_chunk_mb=1, **{**SETTINGS, "num_cpu_blocks": 128},
    ) as cluster:  # fmt: skip
        yield Loaded(cluster, seed=7)
        until(lambda: not any(cluster.manager.stats()["tasks"][s] for s in ("ready", "running")))
        assert cluster.num_leased() == 0
