"""Checksums of pieces in a GPU's memory: xxh3-64, as `storage.pieces` computes it on the host.

xxh3 reads its input in groups of 1 KiB and keeps eight lanes of 64 bits. What a group adds to the
lanes does not depend on them; only the mixing between two groups does. So all multiprocessors read
the input at once, and what remains is a chain of one short step per KiB, for all pieces at once:

    piece   | 1 KiB   | 1 KiB   | 1 KiB   | ...          `add_up_groups`: 16 words for each
    lanes   start -> mix, add -> mix, add -> mix, add    `chain_groups`: 8 lanes for each piece
    digest  of the last lanes, on the host               `finish`

What was written through DRAM can so be read past it, and the other way round. A second checksum,
made for GPUs, would have cost a field of each record, and a computation of each write.

The constants are those of xxHash's specification. Needs Triton. Never run on a GPU.
"""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Words = npt.NDArray[np.uint64]

PIECE_BYTES = 4096
"""Pieces are a multiple of this, and begin at a multiple of 16."""
_GROUP_BYTES = 1024
_LANES = 8
_STRIPES = 16  # of a group; each has a word for every lane
_GROUPS_PER_PROGRAM = 8
_PIECES_PER_PROGRAM = 4  # with eight lanes each, a warp
_UNROLLED = PIECE_BYTES // _GROUP_BYTES  # steps of the chain whose sums are loaded together

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1 = 0x9E3779B185EBCA87
_START = (
    _PRIME32_3, _PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, _PRIME32_2,
    0x27D4EB2F165667C5, _PRIME32_1,
)  # fmt: skip
_AVALANCHE = 0x165667919E3779F9
_WORD = (1 << 64) - 1


def _secret(offset: int) -> list[int]:
    """Return eight words of the secret."""
    return list(struct.unpack_from(f"<{_LANES}Q", _SECRET, offset))


_MIXING = _secret(len(_SECRET) - 8 * _LANES)
_LAST_STRIPE = _secret(len(_SECRET) - 8 * _LANES - 7)
_MERGING = _secret(11)


def _before_mixing(lane: int, key: int) -> int:
    """Return what becomes ``lane`` by mixing, so that the chain may begin with it."""
    mixed = lane * pow(_PRIME32_1, -1, 1 << 64) & _WORD ^ key
    return mixed ^ mixed >> 47


class Tables:
    """The constants in a device's memory.

    Attributes:
        keys: For each stripe of a group, and then for the last stripe of a piece, a key per lane.
        chain: First lanes, and the keys of the mixing.
    """

    def __init__(self, device: torch.device) -> None:
        keys = [*(_secret(8 * stripe) for stripe in range(_STRIPES)), _LAST_STRIPE]
        first = [_before_mixing(*each) for each in zip(_START, _MIXING, strict=True)]
        self.keys = _on_device(keys, device)
        self.chain = _on_device([first, _MIXING], device)


def _on_device(words: list[list[int]], device: torch.device) -> torch.Tensor:
    signed = torch.from_numpy(np.array(words, np.uint64).view(np.int64))
    return torch.empty(signed.shape, dtype=torch.int64, device=device).copy_(signed)


@cache
def tables_on(device: torch.device) -> Tables:
    return Tables(device)


def workspace(num_pieces: int, length: int, device: torch.device) -> torch.Tensor:
    """Return memory for the checksums of up to so many pieces at once, for use on one stream.

    An eighth of what the pieces have. Made in advance: if the GPU is full, torch would first empty
    its cache, which stalls the model.
    """
    shape = (num_pieces, length // _GROUP_BYTES, 2, _LANES)
    return torch.empty(shape, dtype=torch.int64, device=device)


def start(addresses: npt.NDArray[np.int64], length: int, space: torch.Tensor) -> torch.Tensor:
    """Queue the checksums of pieces on the calling thread's current stream.

    Args:
        addresses: Where each piece begins in the device's memory. At least one.
        length: Bytes of each piece.
        space: A `workspace` that is large enough.

    Returns:
        For `finish`, in page-locked memory that the stream has not written yet.
    """
    on_host = space.device.type == "cpu"
    # Page-locked: from other memory the copy would not be asynchronous.
    staged = torch.empty(len(addresses), dtype=torch.int64, pin_memory=not on_host)
    staged.numpy()[:] = addresses
    pieces = staged.to(space.device, non_blocking=True)
    lanes = launch(pieces, length, space, tables_on(space.device))
    last = torch.empty(lanes.shape, dtype=torch.int64, pin_memory=not on_host)
    return last.copy_(lanes, non_blocking=True)


def launch(pieces: torch.Tensor, length: int, sums: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Start the kernels on a table of addresses; return the last lanes ``(pieces, 8)``."""
    num_pieces, num_groups = len(pieces), length // _GROUP_BYTES
    lanes = torch.empty((num_pieces, _LANES), dtype=torch.int64, device=pieces.device)
    add_up_groups[(triton.cdiv(num_groups, _GROUPS_PER_PROGRAM), num_pieces)](
        pieces, num_groups, tables.keys, sums, _GROUPS_PER_PROGRAM, _STRIPES, _LANES, num_warps=4
    )
    chain_groups[(triton.cdiv(num_pieces, _PIECES_PER_PROGRAM),)](
        sums, num_groups, num_pieces, tables.chain, lanes, _PIECES_PER_PROGRAM, _LANES, _UNROLLED,
        _PRIME32_1, num_warps=1,
    )  # fmt: skip
    return lanes


def finish(lanes: torch.Tensor, length: int) -> Words:
    """Return the digests from the result of `start`, once the stream has written it."""
    words = lanes.numpy().view(np.uint64).tolist()
    return np.array([_merge(each, length) for each in words], dtype=np.uint64)


def _merge(lanes: list[int], length: int) -> int:
    digest = length * _PRIME64_1
    for left in range(0, _LANES, 2):
        product = (lanes[left] ^ _MERGING[left]) * (lanes[left + 1] ^ _MERGING[left + 1])
        digest += product & _WORD ^ product >> 64
    digest &= _WORD
    digest = (digest ^ digest >> 37) * _AVALANCHE & _WORD
    return digest ^ digest >> 32


# Not specialized, or each new class of numbers would compile the kernels again.
@triton.jit(do_not_specialize=["num_groups"])  # type: ignore[untyped-decorator]
def add_up_groups(  # type: ignore[no-untyped-def]
    pieces, num_groups, keys, sums,
    GROUPS: tl.constexpr, STRIPES: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Sum up each group's products and words by lane."""
    piece = tl.program_id(1)
    start = tl.load(pieces + piece).to(tl.pointer_type(tl.int64))
    # Lets Triton load 16 bytes at once.
    start = tl.multiple_of(start, 16)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    stripe = tl.arange(0, STRIPES)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    group_of = group[:, None, None]
    is_group = tl.broadcast_to(group_of < num_groups, (GROUPS, STRIPES, LANES))
    words = tl.load(start + (group_of * STRIPES + stripe) * LANES + lane, mask=is_group, other=0)
    is_last = (group_of == num_groups - 1) & (stripe == STRIPES - 1)
    # The last stripe of a piece has keys of its own.
    row = stripe + is_last.to(tl.int32)
    keyed = (words ^ tl.load(keys + row * LANES + lane)).to(tl.uint64, bitcast=True)
    product = (keyed & 0xFFFFFFFF) * (keyed >> 32)
    place = (piece.to(tl.int64) * num_groups + group)[:, None] * (2 * LANES)
    place = sums + place + tl.arange(0, LANES)[None, :]
    tl.store(place, tl.sum(product.to(tl.int64, bitcast=True), 1), mask=group[:, None] < num_groups)
    tl.store(place + LANES, tl.sum(words, 1), mask=group[:, None] < num_groups)


@triton.jit(do_not_specialize=["num_groups", "num_pieces"])  # type: ignore[untyped-decorator]
def chain_groups(  # type: ignore[no-untyped-def]
    sums, num_groups, num_pieces, chain, last,
    PIECES: tl.constexpr, LANES: tl.constexpr, UNROLLED: tl.constexpr, PRIME: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Mix and add, group by group. A word counts for the lane beside its own."""
    piece = (tl.program_id(0) * PIECES + tl.arange(0, PIECES))[:, None]
    lane = tl.arange(0, LANES)[None, :]
    is_piece = tl.broadcast_to(piece < num_pieces, (PIECES, LANES))
    key = tl.load(chain + LANES + lane).to(tl.uint64, bitcast=True)
    lanes = tl.load(chain + lane).to(tl.uint64, bitcast=True)
    lanes = tl.broadcast_to(lanes, (PIECES, LANES))
    place = sums + piece.to(tl.int64) * num_groups * (2 * LANES)
    prime = tl.full((1, 1), PRIME, tl.uint64)
    for first in range(0, num_groups, UNROLLED):
        for step in tl.static_range(UNROLLED):
            at = place + (first + step) * (2 * LANES)
            products = tl.load(at + lane, mask=is_piece, other=0)
            words = tl.load(at + LANES + (lane ^ 1), mask=is_piece, other=0)
            lanes = (lanes ^ (lanes >> 47) ^ key) * prime
            lanes += (products + words).to(tl.uint64, bitcast=True)
    tl.store(last + piece * LANES + lane, lanes.to(tl.int64, bitcast=True), mask=is_piece)
