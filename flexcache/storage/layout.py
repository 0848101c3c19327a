"""Location of the bytes of one GPU block in an engine's KV tensors.

Every layout (K and V split or joined, heads before tokens or after, a tensor per layer or views of
one shared buffer, MLA) has the same form: for block `b`, each *segment* `s` is `sizes[s]`
contiguous bytes at `bases[s] + b * strides[s]`. Shapes and strides alone determine it; the bytes
themselves are never interpreted. In the host pool the segments of a block are contiguous, with
layers in the order of registration:

    layers apart          | a b c |, | a b c | ...     a segment for each layer
    blocks outermost      | aaa bbb ccc | ...          one for all; by layer, one for each
    heads before layers   | abc abc abc | ...          one for all, and the host's order is the same

A rank may store its heads in several shards (`HeadShards`), each as a rank with as few heads would:

    heads 0 and 1, a shard each    | a0 b0 c0 | a1 b1 c1 |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from flexcache.errors import UnsupportedLayoutError

Addresses = npt.NDArray[np.int64]
_Identity = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class HeadShards:
    """How a rank's KV is cut into shards, each of some of its heads.

    Attributes:
        count: Shards of the rank.
        head_dim: The dimension of each tensor that counts heads; None if that is not known.
        apart: Bytes from one shard to the next in a host block.
    """

    count: int = 1
    head_dim: int | None = None
    apart: int = 0

    def cut(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a layer's tensor. Raises `UnsupportedLayoutError`."""
        if self.count == 1:
            return [tensor]
        if self.head_dim is None:
            raise UnsupportedLayoutError(
                f"{name}: store_shards divides this rank's heads in {self.count}, and which "
                "dimension of the KV tensors counts heads is not known here (head_dim)"
            )
        if not -tensor.dim() <= self.head_dim < tensor.dim():
            raise UnsupportedLayoutError(
                f"{name}: shape {tuple(tensor.shape)} has no dimension {self.head_dim} of heads"
            )
        num_heads = tensor.shape[self.head_dim]
        if num_heads % self.count:
            raise UnsupportedLayoutError(
                f"{name}: {num_heads} heads do not divide into the {self.count} shards that "
                "store_shards asks of this rank"
            )
        return list(tensor.split(num_heads // self.count, self.head_dim))


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """The segments of a block, and their places in the host pool.

    Attributes:
        bases: Address of each segment in block 0.
        strides: Bytes from a segment to the same one of the next block.
        sizes: Bytes of each segment.
        offsets: Start of each segment within a host block.
        num_blocks: Number of blocks of the engine.
        block_bytes: Bytes of one block on this rank, the sum of ``sizes``.
        signature: Equal signatures mean that two ranks' stored bytes are interchangeable.
        layer_ends: Maps a layer to the number of leading segments of `by_layer` that hold it and
            all before it.
        num_shards: Shards of the block on this rank, of equal size.
    """

    bases: Addresses
    strides: Addresses
    sizes: Addresses
    offsets: Addresses
    num_blocks: int
    block_bytes: int
    signature: str
    layer_ends: Mapping[str, int]
    num_shards: int = 1
    _by_layer: BlockLayout | None = None

    @property
    def by_layer(self) -> BlockLayout:
        """The same bytes in segments that end where layers end, if these are in one piece each."""
        return self._by_layer or self

    @classmethod
    def of_no_layer(cls, num_blocks: int) -> BlockLayout:
        """Make the layout of blocks that have no bytes on this rank."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, none, num_blocks, 0, "no layer", {})

    def gpu_addresses(self, blocks: npt.NDArray[np.int64]) -> Addresses:
        """Return the addresses of all segments of the blocks; shape ``(blocks, segments)``."""
        return self.bases[None, :] + blocks[:, None] * self.strides[None, :]

    def host_addresses(self, starts: Addresses) -> Addresses:
        """Return the addresses of all segments of host blocks that start at these addresses; shape
        ``(blocks, segments)``."""
        return starts[:, None] + self.offsets[None, :]


@dataclass(frozen=True, slots=True)
class _Segment:
    base: int
    stride: int
    size: int


def describe_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    block_bytes: int,
    block_dim: int = 0,
    description: str = "",
    num_blocks: int | None = None,
    shards: HeadShards = HeadShards(),
) -> BlockLayout:
    """Derive the layout from an engine's KV tensors.

    Only what the tensors show is moved: neither padding between blocks nor other layers' bytes.

    Args:
        kv_caches: Maps layer names to paged KV tensors, in the engine's order.
        block_bytes: Required size of a block on this rank.
        block_dim: The dimension of each tensor that counts blocks.
        num_blocks: Number of blocks of the engine, of which each tensor may count its own parts (an
            attention kernel's blocks, tokens). None: each index of ``block_dim`` is a block.
        description: The engine's description of the bytes beyond shapes and strides. Becomes part
            of the signature.
        shards: The signature is that of one shard: ranks with more heads or fewer have the same.

    Raises:
        UnsupportedLayoutError: A tensor cannot be moved as whole blocks; the message says why.
    """
    layers, hint = _without_aliases(kv_caches, block_dim), ""
    if num_blocks is None:
        num_blocks = _count_blocks(layers, block_dim)
        hint = "; or the tensors count parts of blocks, and num_blocks is missing"
    if bytes_per_block(kv_caches, num_blocks, block_dim) != block_bytes:
        raise UnsupportedLayoutError(
            f"a block has {bytes_per_block(kv_caches, num_blocks, block_dim)} bytes in the "
            f"{len(layers)} KV tensors, but {block_bytes} in the cache: layers, heads, head size, "
            f"dtype or tokens per block do not agree{hint}"
        )
    parts, forms, counts = _cut(layers, block_dim, num_blocks, shards)
    runs = [f"{len(list(group))}x{form}" for form, group in itertools.groupby(forms)]
    # Shards differ in their addresses alone, so all are joined alike.
    joined, orders = zip(*(_join(part, num_blocks) for part in parts), strict=True)
    ends = shards.count * np.cumsum(counts)
    if orders[0]:
        runs.append(orders[0])
        ends[:] = shards.count * len(joined[0])
    end_of = dict(zip(map(_identity, layers.values()), ends.tolist(), strict=True))
    layout = BlockLayout(
        *_arrays(joined, shards.apart),
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        signature=_signature(runs, layers, description),
        layer_ends={name: end_of[_identity(tensor)] for name, tensor in kv_caches.items()},
        num_shards=shards.count,
    )
    if orders[0] or (shards.count == 1 and len(joined[0]) == len(parts[0])):
        return layout
    # The first layer of every shard, the second of every shard, ...
    layer_of = np.tile(np.repeat(np.arange(len(layers)), counts), shards.count)
    order = np.argsort(layer_of, stable=True)
    bases, strides, sizes, offsets = (each[order] for each in _arrays(parts, shards.apart))
    by_layer = replace(layout, bases=bases, strides=strides, sizes=sizes, offsets=offsets)
    return replace(layout, _by_layer=by_layer)


def _cut(
    layers: Mapping[str, torch.Tensor], block_dim: int, num_blocks: int, shards: HeadShards
) -> tuple[list[list[_Segment]], list[str], list[int]]:
    """Return the segments of each shard, a text of each layer's form, and how many segments of a
    shard each layer has."""
    parts: list[list[_Segment]] = [[] for _ in range(shards.count)]
    forms, counts = [], []
    for name, tensor in layers.items():
        ratio, before = tensor.shape[block_dim] // num_blocks, len(parts[0])
        for part, cut in zip(parts, shards.cut(name, tensor), strict=True):
            stride, inner, form = _inner_segments(name, cut, block_dim, ratio)
            part.extend(_Segment(cut.data_ptr() + at, stride, size) for at, size in inner)
        forms.append(form)
        counts.append(len(parts[0]) - before)
    return parts, forms, counts


def _arrays(
    shards: Sequence[Sequence[_Segment]], apart: int
) -> tuple[Addresses, Addresses, Addresses, Addresses]:
    """Return bases, strides, sizes and offsets in the host pool, shard by shard."""
    rows = [(each.base, each.stride, each.size) for segments in shards for each in segments]
    bases, strides, sizes = np.array(rows, dtype=np.int64).T.copy()
    of_shard = sizes.reshape(len(shards), -1)
    starts = np.arange(len(shards), dtype=np.int64)[:, None] * apart
    return bases, strides, sizes, (starts + of_shard.cumsum(axis=1) - of_shard).ravel()


def _count_blocks(layers: Mapping[str, torch.Tensor], block_dim: int) -> int:
    """Return how many blocks all tensors count."""
    counts = {tensor.shape[block_dim] for tensor in layers.values()}
    if len(counts) != 1:
        raise UnsupportedLayoutError(
            f"KV tensors have {sorted(counts)} blocks in dimension {block_dim}; all must have "
            "the same number"
        )
    if counts == {0}:
        raise UnsupportedLayoutError(f"KV tensors have no block in dimension {block_dim}")
    return int(next(iter(counts)))


def _signature(forms: list[str], layers: Iterable[str], description: str) -> str:
    """Make the signature. It includes names: reordered layers would have the same forms."""
    names = xxhash.xxh3_64_hexdigest("\n".join(layers).encode())
    parts = [",".join(forms), f"layers {names}", description]
    return "; ".join(part for part in parts if part)


def bytes_per_block(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int, block_dim: int = 0
) -> int:
    """Return the bytes of a block in all tensors, without padding.

    Raises:
        UnsupportedLayoutError: A tensor does not hold the engine's number of blocks.
    """
    layers = _without_aliases(kv_caches, block_dim)
    for name, tensor in layers.items():
        if num_blocks < 1 or not tensor.numel() or tensor.shape[block_dim] % num_blocks:
            raise UnsupportedLayoutError(
                f"{name}: {tensor.shape[block_dim]} indices of dimension {block_dim} do not "
                f"divide into {num_blocks} blocks"
            )
    return sum(t.numel() * t.element_size() // num_blocks for t in layers.values())


def bytes_per_index(kv_caches: Mapping[str, torch.Tensor], block_dim: int = 0) -> int:
    """Return the bytes of one index of ``block_dim`` in all tensors: a block or a part of one."""
    layers = _without_aliases(kv_caches, block_dim).values()
    return sum(
        tensor.numel() // tensor.shape[block_dim] * tensor.element_size()
        for tensor in layers
        if tensor.shape[block_dim]
    )


def _without_aliases(
    kv_caches: Mapping[str, torch.Tensor], block_dim: int
) -> dict[str, torch.Tensor]:
    """Drop layers that share another's KV: they register the same tensor, which is moved once."""
    if not kv_caches:
        raise UnsupportedLayoutError("no KV tensors were given")
    seen: set[_Identity] = set()
    layers: dict[str, torch.Tensor] = {}
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayoutError(f"{name}: {type(tensor).__name__} is not a tensor")
        if not -tensor.dim() <= block_dim < tensor.dim():
            raise UnsupportedLayoutError(
                f"{name}: shape {tuple(tensor.shape)} has no block dimension {block_dim}"
            )
        if _identity(tensor) not in seen:
            seen.add(_identity(tensor))
            layers[name] = tensor
    devices = {tensor.device for tensor in layers.values()}
    if len(devices) != 1:
        raise UnsupportedLayoutError(
            f"KV tensors are on several devices: {sorted(map(str, devices))}"
        )
    return layers


def _identity(tensor: torch.Tensor) -> _Identity:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _inner_segments(
    name: str, tensor: torch.Tensor, block_dim: int, ratio: int
) -> tuple[int, list[tuple[int, int]], str]:
    """Return a block's stride, its contiguous pieces as (offset, size), and a text of its form."""
    item = tensor.element_size()
    block_dim %= tensor.dim()
    dims = [
        (tensor.stride(dim) * item, tensor.shape[dim], dim)
        for dim in range(tensor.dim())
        if dim != block_dim
    ]
    stride = tensor.stride(block_dim) * item
    if ratio > 1:
        dims.append((stride, ratio, block_dim))
        stride *= ratio
    dims.sort(reverse=True)
    form = f"{str(tensor.dtype).removeprefix('torch.')}" + "".join(
        f"[{count}@{dim}]" for _, count, dim in dims
    )
    dims = [entry for entry in dims if entry[1] != 1]
    if _overlap(item, [*dims, (stride, tensor.shape[block_dim] // ratio, block_dim)]):
        raise UnsupportedLayoutError(
            f"{name}: shape {tuple(tensor.shape)} with strides {tensor.stride()} overlaps itself"
        )
    size = item
    while dims and dims[-1][0] == size:
        size *= dims.pop()[1]
    offsets = [0]
    for dim_stride, count, _ in dims:
        offsets = [offset + i * dim_stride for offset in offsets for i in range(count)]
    return stride, [(offset, size) for offset in offsets], form


def _overlap(item: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether a step along some dimension stays within the range covered by smaller steps."""
    extent = item
    for stride, count, _ in sorted(dims):
        if count > 1:
            if stride < extent:
                return True
            extent += stride * (count - 1)
    return False


def _join(segments: list[_Segment], num_blocks: int) -> tuple[list[_Segment], str]:
    """Join segments for fewer, larger copies.

    Where all of a block is in one piece of the engine's memory, but its layers are not (heads come
    before layers), the host keeps that order. It is then part of the layout.

    Returns:
        The joined segments, and a text of their order unless it is that of the layers.
    """
    joined = _merge(segments)
    first, stride = min(segment.base for segment in segments), segments[0].stride
    last = max(segment.base + segment.size for segment in segments)
    share_a_row = all(segment.stride == stride for segment in segments) and last - first <= stride
    if num_blocks > 1 and share_a_row:
        order = sorted(range(len(segments)), key=lambda number: segments[number].base)
        as_in_memory = _merge([segments[number] for number in order])
        if len(as_in_memory) < len(joined):
            digest = xxhash.xxh3_64_hexdigest(np.array(order, dtype="<i8").tobytes())
            return as_in_memory, f"pieces {digest}"
    return joined, ""


def _merge(segments: list[_Segment]) -> list[_Segment]:
    """Join neighbours that are also contiguous on the GPU, for fewer, larger copies."""
    merged = [segments[0]]
    for segment in segments[1:]:
        last = merged[-1]
        grown = last.size + segment.size
        if (
            segment.base == last.base + last.size
            and segment.stride == last.stride
            and grown <= abs(last.stride)
        ):
            merged[-1] = _Segment(last.base, last.stride, grown)
        else:
            merged.append(segment)
    return merged
