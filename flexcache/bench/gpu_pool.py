"""An engine's KV tensors on a CUDA device, a pinned pool, and copies between scattered blocks.

The tensors are like vLLM's: one per layer, so that a block of 2 MiB over 32 layers is 32 copies of
64 KiB, or views of one buffer. Blocks are in random order on both sides.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np
import torch

from flexcache.bench.suite import Result, Unsupported, sample, sample_beside
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import describe_kv_caches
from flexcache.transfer.copier import Runs
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.device_worker import DeviceWorker
from flexcache.transfer.gates import LayerLoad
from flexcache.transfer.messages import Execute, pack_ids

NUM_LAYERS = 32
KINDS = (OpKind.H2D, OpKind.D2H)


def pinning_copier(device: torch.device, segment: HostSegment) -> CudaCopier:
    """Return a copier with the segment pinned, since the bound is a copy of pinned memory.

    Raises:
        Unsupported: The segment cannot be pinned.
    """
    copier = CudaCopier(device)
    copier.attach(segment)
    if not copier.is_pinned:
        raise Unsupported(f"{segment.size >> 20} MiB of host memory cannot be pinned")
    return copier


class Arrangement(Enum):
    """How an engine's memory is divided among layers and blocks."""

    LAYERS_APART = "layers apart (LBNHC)"
    BLOCKS_OUTERMOST = "blocks outermost (BLNHC, BLHNC)"

    def make_layers(
        self, num_blocks: int, block_bytes: int, device: torch.device
    ) -> list[torch.Tensor]:
        """Make each layer's tensor ``(blocks, bytes)``, of random bytes."""
        shape = [NUM_LAYERS, num_blocks, block_bytes // NUM_LAYERS]
        if self is Arrangement.BLOCKS_OUTERMOST:
            shape[:2] = shape[1::-1]
        whole = torch.empty(shape, dtype=torch.uint8, device=device)
        whole.random_(0, 256)
        return list(whole.unbind(0 if self is Arrangement.LAYERS_APART else 1))


class Pool:
    """An engine's tensors, a host pool of as many blocks, and a copier between the two."""

    def __init__(
        self, segment: HostSegment, block_bytes: int, num_blocks: int, seed: int,
        arrangement: Arrangement,
    ) -> None:  # fmt: skip
        self.segment = segment
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(seed)
        self.layers = arrangement.make_layers(num_blocks, block_bytes, self.device)
        tensors = {f"layer {i}": layer for i, layer in enumerate(self.layers)}
        self.layout = describe_kv_caches(tensors, block_bytes)
        random = np.random.default_rng(seed)
        self._on_gpu = random.permutation(num_blocks)
        self._on_host = random.permutation(num_blocks)
        memory = (ctypes.c_uint8 * segment.size).from_address(segment.address)
        self.host = torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, segment.stride)
        torch.cuda.synchronize()
        self.copier = pinning_copier(self.device, segment)

    def runs(self, kind: OpKind, first: int = 0, count: int | None = None) -> Runs:
        """Return the copies of some of the blocks, as the device worker would submit them."""
        chosen = slice(first, None if count is None else first + count)
        gpu, host = self._on_gpu[chosen], self._on_host[chosen]
        on_gpu = self.layout.gpu_addresses(gpu).ravel()
        starts = self.segment.address + host * self.segment.stride
        on_host = self.layout.host_addresses(starts).ravel()
        sizes = np.tile(self.layout.sizes, len(gpu))
        to, start = (on_gpu, on_host) if kind is OpKind.H2D else (on_host, on_gpu)
        return Runs(to, start, sizes)

    def start(self, runs: Runs, kind: OpKind, way: CopyWay | None = None) -> torch.cuda.Event:
        """Submit copies behind the current stream, by default with the copier's choice."""
        return self.copier.start(runs, kind, self.copier.fence(), way=way)

    def copy(self, runs: Runs, kind: OpKind, way: CopyWay | None = None) -> None:
        """Submit copies and wait for their completion."""
        self.start(runs, kind, way).synchronize()

    def check(self) -> None:
        """Check that blocks come back byte for byte with each available copy method.

        Raises:
            AssertionError: They do not.
        """
        gpu = torch.from_numpy(self._on_gpu)

        def on_gpu() -> torch.Tensor:
            return torch.stack([layer.cpu()[gpu] for layer in self.layers], 1).flatten(1)

        for way in self.copier.ways:
            self.host.fill_(0)
            before = on_gpu()
            self.copy(self.runs(OpKind.D2H), OpKind.D2H, way)
            stored = self.host[torch.from_numpy(self._on_host), : self.block_bytes]
            assert torch.equal(stored, before), "a store moved wrong bytes"
            for layer in self.layers:
                layer.fill_(0)
            self.copy(self.runs(OpKind.H2D), OpKind.H2D, way)
            after = on_gpu()
            assert torch.equal(after, before), "a load moved wrong bytes"

    def contiguous(self, kind: OpKind) -> Callable[[], None]:
        """Return a function that makes one pinned copy of as many bytes and waits for it."""
        num_bytes = self.num_blocks * self.block_bytes
        on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        on_host = self.host.view(-1)[:num_bytes]
        target, source = (on_gpu, on_host) if kind is OpKind.H2D else (on_host, on_gpu)
        stream = torch.cuda.Stream(self.device)

        def copy() -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            stream.synchronize()

        return copy


@contextmanager
def open_pool(
    block_bytes: int, num_bytes: int, seed: int,
    arrangement: Arrangement = Arrangement.LAYERS_APART,
) -> Iterator[Pool]:  # fmt: skip
    """Yield a checked pool of ``num_bytes`` bytes."""
    num_blocks = num_bytes // block_bytes
    with HostSegment.create(block_bytes, num_blocks) as segment:
        device = torch.device("cuda", torch.cuda.current_device())
        segment.map(node=CudaCopier(device).numa_node)
        pool = Pool(segment, block_bytes, num_blocks, seed, arrangement)
        try:
            pool.check()
            yield pool
        finally:
            pool.copier.close()


PAGE_BYTES = (16 << 10, 64 << 10)
"""KV of 16 tokens in a layer: a rank of four of an 8B model, and all of it."""
_FEW_BLOCKS = 4
_PATIENCE_S = 60.0
_PAUSE_S = 0.0001


class Rank:
    """A rank's worker. Its thread is the only one that drives it."""

    def __init__(self, pool: Pool) -> None:
        self.worker = DeviceWorker([pool.layout], pool.segment, pool.copier)
        self._orders: SimpleQueue[Execute] = SimpleQueue()
        self._ended: SimpleQueue[str | None] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def order(self, kind: OpKind, blocks: range) -> None:
        """Order an op on blocks that have the same numbers on both sides; see `wait`."""
        number = next(self._numbers)
        self._orders.put(Execute(number, kind, _packed(blocks), _packed(blocks), number))

    def load_by_layer(self, blocks: range) -> LayerLoad:
        number = next(self._numbers)
        load = self.worker.gates.load_by_layer(number, len(blocks))
        packed = _packed(blocks)
        self._orders.put(Execute(number, OpKind.H2D, packed, packed, number, gated=True))
        return load

    def wait(self) -> None:
        """Wait for the end of an op.

        Raises:
            RuntimeError: It failed.
        """
        error = self._ended.get(timeout=_PATIENCE_S)
        if error is not None:
            raise RuntimeError(error)

    def close(self) -> None:
        self._is_ending.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_ending.is_set():
            is_busy = self.worker.has_work and not self.worker.only_waits
            with suppress(Empty):
                self.worker.execute(self._orders.get(timeout=0 if is_busy else _PAUSE_S))
            for done in self.worker.advance():
                self._ended.put(done.error)


def _packed(blocks: range) -> bytes:
    return pack_ids(np.array(blocks, np.int64))


@contextmanager
def serving(pool: Pool) -> Iterator[Rank]:
    rank = Rank(pool)
    try:
        yield rank
    finally:
        rank.close()


def arrangements(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure ops between steps and loads by layer with each arrangement of the memory."""
    for page_bytes in PAGE_BYTES:
        for arrangement in Arrangement:
            with (
                open_pool(page_bytes * NUM_LAYERS, op_bytes, seed, arrangement) as pool,
                serving(pool) as rank,
            ):
                yield from _arranged(pool, rank, arrangement.value, page_bytes, rounds)


def _arranged(pool: Pool, rank: Rank, name: str, page_bytes: int, rounds: int) -> Iterator[Result]:
    blocks = range(pool.num_blocks)
    num_bytes = pool.num_blocks * pool.block_bytes
    for kind in KINDS:

        def copy(kind: OpKind = kind) -> None:
            rank.order(kind, blocks)
            rank.wait()

        seconds, bound = sample_beside(copy, pool.contiguous(kind), rounds=rounds, scale=1)
        yield Result(
            f"{kind.name}, {name}", "GB/s", [num_bytes / s / 1e9 for s in seconds],
            num_bytes / bound / 1e9, "one contiguous pinned copy", parameter="KiB per page",
            at=page_bytes >> 10,
        )  # fmt: skip
    for name_of, layer in (("first", "layer 0"), ("last", f"layer {NUM_LAYERS - 1}")):
        times = sample(
            partial(_load_until, rank, blocks, layer), partial(_let_end, rank),
            rounds=rounds, scale=1e3,
        )  # fmt: skip
        yield Result(
            f"load by layer of {num_bytes >> 20} MiB until its {name_of} layer, {name}", "ms",
            times, parameter="KiB per page", at=page_bytes >> 10,
        )  # fmt: skip


def behind_large_load(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure a load by layer of a few blocks: alone, and right after a load of many."""
    with open_pool(2 << 20, op_bytes, seed) as pool, serving(pool) as rank:
        few, many = range(_FEW_BLOCKS), range(_FEW_BLOCKS, pool.num_blocks)
        last = f"layer {NUM_LAYERS - 1}"

        def alone() -> None:
            _let_end(rank, _load_until(rank, few, last))

        def behind() -> LayerLoad:
            rank.order(OpKind.H2D, many)
            return _load_until(rank, few, last)

        def let_both_end(load: LayerLoad) -> None:
            _let_end(rank, load)
            rank.wait()

        times, bound = sample_beside(behind, alone, let_both_end, rounds=rounds, scale=1e3)
        yield Result(
            f"load by layer of {_FEW_BLOCKS} blocks behind one of {len(many)}", "ms", times, bound,
            "the same alone",
        )  # fmt: skip


def _load_until(rank: Rank, blocks: range, layer: str) -> LayerLoad:
    """Begin a load by layer, and wait until a layer is on the device."""
    load = rank.load_by_layer(blocks)
    assert load.wait_layer(layer, _PATIENCE_S)
    torch.cuda.current_stream().synchronize()
    return load


def _let_end(rank: Rank, load: LayerLoad) -> None:
    assert load.wait_all(_PATIENCE_S)
    torch.cuda.current_stream().synchronize()
    rank.wait()
