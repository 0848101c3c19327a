"""An engine's KV tensors on a CUDA device, a pinned pool, and copies between scattered blocks.

The tensors are like vLLM's: one per layer, so that a block of 2 MiB over 32 layers is 32 copies of
64 KiB, or views of one buffer. Blocks are in random order on both sides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from flexcache.bench.results import Unsupported
from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import describe_kv_caches
from flexcache.transfer.copy_ways import CopyWay
from flexcache.transfer.cuda_copier import CudaCopier

Runs = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

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
        return (on_gpu, on_host, sizes) if kind is OpKind.H2D else (on_host, on_gpu, sizes)

    def start(self, runs: Runs, kind: OpKind, way: CopyWay | None = None) -> torch.cuda.Event:
        """Submit copies behind the current stream, by default with the copier's choice."""
        return self.copier.start(*runs, kind, self.copier.fence(), way=way)

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
