"""What the indexes are measured with: events, prompts, and how calls are timed.

Imported by FlexCache's interpreter and by Dynamo's: needs only msgspec and NumPy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

BLOCK_SIZE = 16
SHARED_BLOCKS = 32
EVENT_BLOCKS = 32
LONG, SHORT = 8_192, 512
MEMORY_WORKERS = 64
MEMORY_EVENT_BLOCKS = 512
_VOCABULARY = 128_000


class Workload(msgspec.Struct):
    """Events and prompts.

    Attributes:
        events: Worker and msgpack payload of each batch, as vLLM publishes it.
        num_blocks: Blocks in the events, a block counting for each worker that stores it.
        prompts: Token ids, by what is known of the prompt.
        depths: Expected depth in blocks at the worker that has most, by prompt.
    """

    num_workers: int
    events: list[tuple[int, bytes]]
    num_blocks: int
    prompts: dict[str, list[int]]
    depths: dict[str, int]


class _Writer:
    """Tells prompts in events of `EVENT_BLOCKS` blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.events: list[tuple[int, bytes]] = []
        self.num_blocks = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def tokens(self, num_blocks: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, _VOCABULARY, num_blocks * BLOCK_SIZE).tolist()
        return tokens

    def names(self, num_blocks: int) -> list[int]:
        names: list[int] = self.rng.integers(0, 2**63, num_blocks).tolist()
        return names

    def store(
        self, worker: int, tokens: list[int], names: list[int], parent: int | None = None
    ) -> None:
        for start in range(0, len(names), EVENT_BLOCKS):
            part = names[start : start + EVENT_BLOCKS]
            event = {
                "type": "BlockStored",
                "block_hashes": part,
                "parent_block_hash": names[start - 1] if start else parent,
                "token_ids": tokens[start * BLOCK_SIZE : (start + len(part)) * BLOCK_SIZE],
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
            self.events.append((worker, self._encode((1.0, [event], 0))))
            self.num_blocks += len(part)


def make_workload(num_workers: int, num_blocks: int, seed: int) -> Workload:
    """Make a prefix that all workers have, prompts to look up, and conversations of 100 to 2,000
    blocks, nine of ten on one worker, the others on up to three."""
    writer = _Writer(seed)
    rng = writer.rng
    prefix, prefix_names = writer.tokens(SHARED_BLOCKS), writer.names(SHARED_BLOCKS)
    for worker in range(num_workers):
        writer.store(worker, prefix, prefix_names)
    prompts, depths = {}, {}

    def prompt(title: str, length: int, told: list[int]) -> None:
        """Store a prompt at some workers, at each to its depth in blocks."""
        own = length - SHARED_BLOCKS
        tokens, names = writer.tokens(own), writer.names(own)
        for worker, depth in enumerate(told):
            stop = depth - SHARED_BLOCKS
            writer.store(
                worker % num_workers, tokens[: stop * BLOCK_SIZE], names[:stop], prefix_names[-1]
            )
        prompts[title] = prefix + tokens
        depths[title] = max(told, default=SHARED_BLOCKS)

    few = min(3, num_workers)
    for length in (SHORT, LONG):
        name = f"{length:,} blocks"
        prompt(f"{name}, {few} holders", length, [length, length, length * 5 // 8][:few])
        prompt(f"{name}, only the prefix known", length, [])
    many = min(num_workers, 63)
    steps = [LONG - at * (LONG - SHARED_BLOCKS) // many for at in range(many)]
    prompt(f"{LONG:,} blocks, {many} depths", LONG, steps)
    while writer.num_blocks < num_blocks:
        length = int(rng.integers(100, 2_001))
        tokens, names = writer.tokens(length), writer.names(length)
        copies = 1 if rng.random() < 0.9 else int(rng.integers(2, 4))
        for worker in rng.choice(num_workers, min(copies, num_workers), replace=False):
            writer.store(int(worker), tokens, names, prefix_names[-1])
    return Workload(num_workers, writer.events, writer.num_blocks, prompts, depths)


def save(workload: Workload, path: Path) -> None:
    path.write_bytes(msgspec.msgpack.encode(workload))


def load(path: Path) -> Workload:
    return msgspec.msgpack.decode(path.read_bytes(), type=Workload)


class Times(msgspec.Struct):
    """Microseconds of a call; ``cpu_p99`` is the process's CPU time, which other processes on the
    machine disturb less."""

    p10: float
    p50: float
    p99: float
    cpu_p99: float


class Measured(msgspec.Struct):
    """What one index takes.

    Attributes:
        lookups: By prompt and by what was done with it.
        apply: Million blocks per second of CPU time, by what is done.
        hash_tokens: The keys of the longest prompt, from a list of its token ids.
    """

    lookups: dict[str, dict[str, Times]]
    apply: dict[str, float]
    hash_tokens: Times


class Memory(msgspec.Struct):
    """What an index takes of blocks that are on one worker each.

    Attributes:
        num_bytes: Resident memory.
        estimated_bytes: What the index says itself, if it does.
        cpu_s: CPU time of applying the events.
        slowest_batch_ms: CPU time of the slowest batch of `MEMORY_EVENT_BLOCKS`.
    """

    num_blocks: int
    num_bytes: float
    cpu_s: float
    estimated_bytes: float | None = None
    slowest_batch_ms: float | None = None


def times(call: Callable[[], object], rounds: int) -> Times:
    for _ in range(5):
        call()
    stopwatch = Stopwatch()
    for _ in range(rounds):
        with stopwatch:
            call()
    return stopwatch.times()


class Stopwatch:
    """Collects the times of the bodies of ``with`` statements."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def __enter__(self) -> None:
        self._cpu_started = time.process_time()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._wall.append((time.perf_counter() - self._started) * 1e6)
        self._cpu.append((time.process_time() - self._cpu_started) * 1e6)

    def times(self) -> Times:
        wall, cpu = sorted(self._wall), sorted(self._cpu)
        p10, p50, p99 = (wall[int(len(wall) * share)] for share in (0.1, 0.5, 0.99))
        return Times(p10, p50, p99, cpu[int(len(cpu) * 0.99)])


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(what)
