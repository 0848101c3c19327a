"""An engine's KV tensors, which a rank lends to the cache.

Tensors of different groups overlay each other, since a block of the engine's pool belongs to one
group at a time. So each group has a layout of its own, made from its layers' tensors alone, and a
block has the size of the largest group's:

    the engine's block 7    | layer 0, attention: 128 KiB     |    if a group of attention has it
                            | layer 1, state: 67 KiB |             if a group of states has it; the
                                                                   rest is padding, and not moved

In an engine with a pool for each group, every group counts its own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

import torch

from flexcache.errors import UnsupportedLayoutError
from flexcache.storage.layout import (
    BlockLayout,
    bytes_per_block,
    bytes_per_index,
    describe_kv_caches,
)

Tensors = Mapping[str, torch.Tensor]


class LentTensors:
    """The engine's paged KV tensors. See `KVTPClient.register_kv_caches`.

    Attributes:
        block_bytes: Bytes of a block on this rank.
        stream: The stream that was current when they were lent; None on a CPU.

    Raises:
        UnsupportedLayoutError: A tensor cannot be moved as whole blocks; names it.
        ValueError: ``groups`` do not fit the other arguments.
    """

    def __init__(
        self,
        kv_caches: Tensors,
        block_dim: int = 0,
        description: str = "",
        num_blocks: int | Sequence[int] | None = None,
        groups: Sequence[Sequence[str]] | None = None,
    ) -> None:
        if not kv_caches:
            raise UnsupportedLayoutError("kv_caches = {}: a rank must hold some of the model's KV")
        self._kv_caches = dict(kv_caches)
        self._block_dim = block_dim
        self._description = description
        self._groups = None if groups is None else [self._select(names) for names in groups]
        held = [self._kv_caches] if self._groups is None else self._groups
        self._num_blocks = _counts(num_blocks, held)
        if self._num_blocks is not None:
            pairs = zip(held, self._num_blocks, strict=True)
            sizes = [bytes_per_block(each, count, block_dim) for each, count in pairs if each]
            self.block_bytes = max(sizes, default=0)
        elif groups is None:
            self.block_bytes = bytes_per_index(kv_caches, block_dim)
        else:
            raise ValueError("groups of layers need num_blocks")
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.current_stream(self.device) if on_gpu else None
        # A bad layout is refused by the call that lends it; the size is the server's to judge.
        self.layouts(self.block_bytes, 1 if groups is None else len(groups))

    @property
    def device(self) -> torch.device:
        return next(iter(self._kv_caches.values())).device

    def layouts(self, block_bytes: int, num_groups: int) -> list[BlockLayout]:
        """Return how they hold blocks of this size, for each of the model's groups.

        Raises:
            UnsupportedLayoutError: Their blocks have another size, or the layers other groups.
        """
        counts = self._num_blocks
        if self._groups is None:  # a block of any group has bytes in all tensors
            of_all = counts[0] if counts else None
            return [self._describe(self._kv_caches, of_all, block_bytes)] * num_groups
        if num_groups != len(self._groups):
            raise UnsupportedLayoutError(
                f"the layers are in {len(self._groups)} groups, but the model has {num_groups}"
            )
        if block_bytes != self.block_bytes:
            raise UnsupportedLayoutError(
                f"a block of the largest group has {self.block_bytes} bytes in the KV tensors, but "
                f"{block_bytes} in the cache: layers, heads, states or tokens per block do not "
                "agree"
            )
        assert counts is not None
        return [
            self._describe(tensors, count)
            for tensors, count in zip(self._groups, counts, strict=True)
        ]

    def _describe(
        self, tensors: Tensors, num_blocks: int | None, block_bytes: int | None = None
    ) -> BlockLayout:
        if block_bytes is None:
            assert num_blocks is not None
            if not tensors:
                return BlockLayout.of_no_layer(num_blocks)
            block_bytes = bytes_per_block(tensors, num_blocks, self._block_dim)
        return describe_kv_caches(
            tensors, block_bytes, self._block_dim, self._description, num_blocks
        )

    def _select(self, names: Sequence[str]) -> Tensors:
        missing = [name for name in names if name not in self._kv_caches]
        if missing:
            raise ValueError(f"layer {missing[0]} of a group has no KV tensor")
        return {name: self._kv_caches[name] for name in names}


def _counts(
    num_blocks: int | Sequence[int] | None, held: Sequence[Tensors]
) -> Sequence[int] | None:
    """Return the number of blocks for each group that the engine has. Raises `ValueError`."""
    if num_blocks is None:
        return None
    if isinstance(num_blocks, Integral):
        return [int(num_blocks)] * len(held)
    assert not isinstance(num_blocks, int)
    if len(num_blocks) != len(held):
        raise ValueError(f"num_blocks of {len(num_blocks)} groups, but there are {len(held)}")
    return num_blocks


def join_signatures(layouts: Sequence[BlockLayout]) -> str:
    """Return the signature of a rank's blocks: that of all groups if it is the same, or else the
    list of them."""
    signatures = [layout.signature for layout in layouts]
    return signatures[0] if len(set(signatures)) == 1 else " | ".join(signatures)
