"""KV tensors of groups that overlay each other in one allocation, as vLLM makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

Tensors = dict[str, torch.Tensor]
Contents = Mapping[str, int]
"""Layer names of a group, with the bytes that each layer uses of its page."""


class OverlaidTensors:
    """Pages of several layers for each block; groups have their layers' bytes in the same pages.

    A layer of index ``i`` in its group has page ``i`` of a block, and uses the page's first bytes:
    all of them is attention, fewer a state in a padded page.

    Args:
        groups: May have different numbers of layers.
        page_bytes: At least the contents of any layer.
        place: Moves the allocation to where the engine has it; see `engine_memory`.
    """

    def __init__(
        self, groups: Sequence[Contents], num_blocks: int, page_bytes: int,
        place: Callable[[Tensors], Tensors] = dict,
    ) -> None:  # fmt: skip
        self.num_blocks = num_blocks
        num_pages = max(len(group) for group in groups)
        self.raw = torch.empty((num_pages, num_blocks, page_bytes), dtype=torch.int8)
        self.raw.random_(-128, 128, generator=torch.Generator().manual_seed(3))
        self.raw = place({"raw": self.raw})["raw"]
        self.layers = [list(group) for group in groups]
        self.tensors: Tensors = {}
        for group in groups:
            for page, (name, content) in enumerate(group.items()):
                if content == page_bytes:  # 2 heads, 4 tokens
                    view = self.raw[page].view(torch.bfloat16).view(num_blocks, 2, 4, -1)
                else:
                    view = self.raw[page, :, None, None, :content]
                self.tensors[name] = view

    def read(self, group: int, block: int) -> bytes:
        """Return the bytes that a group has in a block."""
        views = (self.tensors[name][block] for name in self.layers[group])
        return b"".join(v.contiguous().view(torch.int8).numpy().tobytes() for v in views)

    def untouched(self, group: int, block: int) -> Iterator[bytes]:
        """Yield the bytes of a block that a group does not use."""
        for page in range(len(self.raw)):
            used = 0
            if page < len(self.layers[group]):
                view = self.tensors[self.layers[group][page]][block]
                used = view.numel() * view.element_size()
            yield self.raw[page, block, used:].numpy().tobytes()
