"""KV tensors on a CUDA device: scattered blocks compared with one contiguous pinned copy.

Times are by the host's clock, from submitting an op to observing its completion, since that is what
a request waits for.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flexcache.bench.ssd import beside_raw, raw_disks
from flexcache.bench.suite import Case, Result, Unsupported, rates, sample, sample_beside
from flexcache.errors import NoDirectPathError
from flexcache.ids import OpKind
from flexcache.storage.block_io import Direction, open_block_io
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import describe_kv_caches
from flexcache.transfer.copier import CopyPermit, Runs
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.direct.cuda import CudaDirectIO
from flexcache.transfer.direct.ops import Transfer

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
    """An engine's tensors, a host pool of as many blocks, and a copier between the two.

    The tensors are like vLLM's: one per layer, so that a block of 2 MiB over 32 layers is 32 copies
    of 64 KiB, or views of one buffer. Blocks are in random order on both sides.
    """

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

    def contiguous(self, kind: OpKind, num_blocks: int | None = None) -> Callable[[], None]:
        """Return a function that makes one pinned copy of as many bytes as that many blocks have,
        by default all, and waits for it."""
        num_bytes = (num_blocks or self.num_blocks) * self.block_bytes
        on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        on_host = self.host.view(-1)[:num_bytes]
        target, source = (on_gpu, on_host) if kind is OpKind.H2D else (on_host, on_gpu)
        stream = torch.cuda.current_stream(self.device)

        def copy() -> None:
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


BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
OP_BYTES = 256 << 20
REACH = 0.9


def cases(thorough: bool, directory: Path, seed: int) -> list[Case]:
    """Return the cases of the section. Raises `Unsupported` without a CUDA device."""
    if not torch.cuda.is_available():
        raise Unsupported("no CUDA device")
    rounds = 50 if thorough else 10
    op_bytes = OP_BYTES * (8 if thorough else 1)
    return [
        *(
            Case(
                f"blocks of {block_bytes >> 10} KiB",
                partial(scattered_blocks, block_bytes, op_bytes, rounds, seed),
            )
            for block_bytes in BLOCK_BYTES
        ),
        Case("SSD past DRAM", partial(past_dram, directory, op_bytes, 3, seed)),
        Case("both directions at once", partial(both_directions, op_bytes, rounds, seed)),
        Case("pinning", partial(pinning, 4 if thorough else 1)),
    ]


def scattered_blocks(block_bytes: int, op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure each copy method and direction against the contiguous copy, and submission itself."""
    with open_pool(block_bytes, op_bytes, seed) as pool:
        for kind in KINDS:
            runs, contiguous = pool.runs(kind), pool.contiguous(kind)
            chosen = pool.copier.choose(runs, kind).value
            for way in (None, *pool.copier.ways):
                copy = partial(pool.copy, runs, kind, way)
                yield rates(
                    f"{kind.name}, {way.value if way else 'as chosen'}", op_bytes,
                    sample_beside(copy, contiguous, rounds=rounds, scale=1),
                    reach=None if way else REACH, note="" if way else f"by the {chosen}",
                    parameter="KiB per block", at=block_bytes >> 10,
                )  # fmt: skip
            handed_over = sample(
                partial(pool.start, runs, kind),
                lambda landed: landed.synchronize(),
                rounds=rounds,
                scale=1e6 / len(runs[2]),
            )
            yield Result(
                f"{kind.name}, handing over, per copy", "us", handed_over,
                parameter="KiB per block", at=block_bytes >> 10,
            )  # fmt: skip


SSD_BLOCK_BYTES = 2 << 20
_DEPTH = 32


class DirectDisk:
    """All blocks of a pool's tensors, and the same blocks in a file."""

    def __init__(self, pool: Pool, io: CudaDirectIO, fd: int) -> None:
        self._pool = pool
        self._io = io
        self._fd = fd
        self._checksums = [0] * pool.num_blocks

    def run(self, direction: Direction) -> float:
        """Write or read all blocks; return GB/s.

        Raises:
            AssertionError: A block failed.
        """
        left = deque(range(self._pool.num_blocks))
        num_running = 0
        began = time.perf_counter()
        while left or num_running:
            count = min(len(left), self._io.depth - num_running)
            self._io.submit([self._transfer(left.popleft(), direction) for _ in range(count)])
            num_running += count
            for ended in self._io.reap():
                if ended.error is not None:
                    raise AssertionError(ended.error)
                num_running -= 1
                if direction is Direction.WRITE:
                    self._checksums[ended.token] = ended.checksum
        return self._pool.num_blocks * SSD_BLOCK_BYTES / (time.perf_counter() - began) / 1e9

    def check(self) -> None:
        """Raise `AssertionError` unless blocks come back byte for byte."""
        before = [layer.cpu() for layer in self._pool.layers]
        self.run(Direction.WRITE)
        for layer in self._pool.layers:
            layer.fill_(0)
        torch.cuda.synchronize()
        self.run(Direction.READ)
        for layer, expected in zip(self._pool.layers, before, strict=True):
            assert torch.equal(layer.cpu(), expected), "wrong bytes past DRAM"

    def _transfer(self, block: int, direction: Direction) -> Transfer:
        [addresses] = self._pool.layout.gpu_addresses(np.array([block]))
        expected = self._checksums[block] if direction is Direction.READ else 0
        return Transfer(
            block, 2, direction, self._fd, block * SSD_BLOCK_BYTES, SSD_BLOCK_BYTES, addresses,
            self._pool.layout.sizes, expected,
        )  # fmt: skip


def past_dram(path: Path, op_bytes: int, rounds: int, seed: int) -> Iterator[Result]:
    """Measure writes and reads of blocks past DRAM.

    Raises:
        Unsupported: There is no such path here.
    """
    with ExitStack() as stack:
        try:
            fd = os.open(path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as refusal:
            raise Unsupported(f"O_DIRECT in {path}: {refusal.strerror}") from None
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, op_bytes)
        pool = stack.enter_context(open_pool(SSD_BLOCK_BYTES, op_bytes, seed))
        try:
            io = CudaDirectIO(pool.device, pool.copier, [fd], SSD_BLOCK_BYTES, _DEPTH, CopyPermit())
        except NoDirectPathError as reason:
            raise Unsupported(str(reason)) from None
        stack.callback(io.close)
        if io.through_host:
            raise Unsupported(io.through_host)
        disk = DirectDisk(pool, io, fd)
        disk.check()
        host_io = open_block_io("auto", _DEPTH)
        stack.callback(host_io.close)
        raw = raw_disks(path, op_bytes, SSD_BLOCK_BYTES, host_io)
        yield from beside_raw({"SSD and GPU past DRAM": disk.run}, raw, rounds)


def both_directions(op_bytes: int, rounds: int, seed: int) -> Iterable[Result]:
    """Measure a simultaneous load and store of different blocks against two contiguous copies, as
    chosen and in each way."""
    with open_pool(2 << 20, 2 * op_bytes, seed) as pool:
        half = pool.num_blocks // 2
        ops = [
            (pool.runs(OpKind.H2D, 0, half), OpKind.H2D),
            (pool.runs(OpKind.D2H, half), OpKind.D2H),
        ]
        on_gpu = torch.empty((2, op_bytes), dtype=torch.uint8, device=pool.device)
        on_host = pool.host.view(2, -1)
        streams = [torch.cuda.Stream(pool.device) for _ in KINDS]

        def scattered(way: CopyWay | None) -> None:
            for landed in [pool.start(runs, kind, way) for runs, kind in ops]:
                landed.synchronize()

        def contiguous() -> None:
            with torch.cuda.stream(streams[0]):
                on_gpu[0].copy_(on_host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                on_host[1].copy_(on_gpu[1], non_blocking=True)
            for stream in streams:
                stream.synchronize()

        for way in (None, *pool.copier.ways):
            name = "as chosen" if way is None else way.value
            yield rates(
                f"H2D and D2H together, blocks of 2 MiB, {name}", 2 * op_bytes,
                sample_beside(partial(scattered, way), contiguous, rounds=rounds, scale=1),
                "two contiguous pinned copies together", reach=REACH if way is None else None,
            )  # fmt: skip


def pinning(rounds: int) -> Iterable[Result]:
    """Measure pinning a mapped pool of 4 GiB, as a rank does once."""
    num_bytes = 4 << 30
    with HostSegment.create(2 << 20, num_bytes >> 21) as segment:
        segment.map()
        speeds = []
        for _ in range(rounds):
            device = torch.device("cuda", torch.cuda.current_device())
            started = time.perf_counter()
            copier = pinning_copier(device, segment)
            took = time.perf_counter() - started
            copier.close()
            speeds.append(num_bytes / took / 1e9)
    yield Result("pinning the host pool", "GB/s", speeds, note="includes timing the copy methods")
