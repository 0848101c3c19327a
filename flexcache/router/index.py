"""Index of blocks: which holders have which block, for all engines and tiers together. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from itertools import compress, pairwise
from struct import Struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from flexcache.errors import InternalError
from flexcache.router.fleet import Tier

Tokens = Sequence[int] | npt.NDArray[Any]
"""Token ids, each at least 0 and below 2**32."""

_TOKEN_BYTES = 4
_hash = xxhash.xxh3_64_intdigest
_encode = msgspec.msgpack.encode


class BlockForm(NamedTuple):
    """How an engine cuts and names prompts.

    Attributes:
        size: Tokens per block.
        lookahead: Tokens after a block that it must share with a prompt to be found: what a draft
            model (EAGLE, MTP) has stored for the block's last token depends on them.
        run_blocks: Only the last one of so many blocks is noted.
    """

    size: int
    lookahead: int = 0
    run_blocks: int = 1


class Space(NamedTuple):
    """What prompts must have in common to share blocks.

    Attributes:
        block_size: Tokens per block.
        adapter: Name of the LoRA adapter, or its number where the publisher gives no name; None:
            the base model.
        lookahead: See `BlockForm`.
    """

    block_size: int
    adapter: str | int | None = None
    lookahead: int = 0


def pack(tokens: Tokens) -> bytes:
    """Return token ids as integers of four bytes.

    Raises:
        ValueError: A token id is out of range.
    """
    try:
        if not isinstance(tokens, np.ndarray):
            return array("I", tokens).tobytes()
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 32:
            raise ValueError("token ids must be at least 0 and below 2**32")
        return tokens.astype(np.uint32).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"not token ids: {error}") from None


def pack_extra_keys(extra_keys: Sequence[Any]) -> list[bytes]:
    """Return what the KV of each block depends on besides its tokens and its space (images, salt,
    embeddings) as bytes; none for a block without such.

    Raises:
        ValueError: An entry cannot be encoded.
    """
    try:
        return [_encode(entry) if entry else b"" for entry in extra_keys]
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not extra keys: {error}") from None


class KeyChain:
    """Computes the keys of one space. Immutable.

    A key, the identity of a prompt's prefix that ends with a block, is the xxh3-64 hash of the
    block's tokens, those of its lookahead and extra keys, seeded with the key of the block before
    it. The first block's
    seed is a digest of the `Space`. Keys are hints, not identities of bytes: two prefixes with
    equal keys would send a request to the wrong engine, no more.
    """

    __slots__ = ("_block", "_root", "space")

    def __init__(self, space: Space) -> None:
        self.space = space
        self._root = _hash(_encode(space))
        self._block = Struct(f"{_TOKEN_BYTES * space.block_size}s")

    def block_keys(self, tokens: Tokens, *, salt: str | None = None) -> list[int]:
        """Return the keys of a prompt's whole blocks.

        Args:
            tokens: The prompt, or the part of it before the first image.
            salt: vLLM's ``cache_salt``.

        Raises:
            ValueError: A token id is out of range.
        """
        size, lookahead = self.space.block_size, self.space.lookahead
        count = (len(tokens) - lookahead) // size
        if count < 1:
            return []
        stop = count * size + lookahead
        packed = pack(tokens if stop == len(tokens) else tokens[:stop])
        return self.extend(None, packed, pack_extra_keys([[salt]]) if salt else ())

    def extend(
        self, parent: int | None, packed: bytes, extra_keys: Sequence[bytes] = ()
    ) -> list[int]:
        """Return the keys of the blocks after the block ``parent`` (None: a prompt's start).

        Args:
            packed: Tokens of whole blocks and the last one's lookahead, from `pack`.
            extra_keys: From `pack_extra_keys`, one entry per block; may end early.
        """
        key = self._root if parent is None else parent
        blocks = self._block.iter_unpack(packed) if not self.space.lookahead else self._cut(packed)
        if not extra_keys:
            return [key := _hash(block, key) for (block,) in blocks]
        keys = []
        for extra, (block,) in zip(extra_keys, blocks, strict=False):
            key = _hash(block + extra, key)
            keys.append(key)
        return keys + [key := _hash(block, key) for (block,) in blocks]

    def _cut(self, packed: bytes) -> Iterator[tuple[bytes]]:
        """Yield the tokens of each block and its lookahead, as far as those are there."""
        step, more = self._block.size, _TOKEN_BYTES * self.space.lookahead
        for start in range(0, len(packed) - step - more + 1, step):
            yield (packed[start : start + step + more],)


@lru_cache(maxsize=10_000)
def chain_of(space: Space) -> KeyChain:
    """Return the one chain of a space."""
    return KeyChain(space)


Mask = int
"""A set of holders: one bit each."""

_MAX_CACHED = 1 << 16


class Holder(NamedTuple):
    """Where blocks are.

    Attributes:
        source: Endpoint of the publisher, or another unique name.
        rank: Data-parallel rank that the publisher gives; None: it has none.
        is_remote: Its blocks are on other hosts, and go without those of the tier on this one.
    """

    source: str
    tier: Tier
    rank: int | None = None
    is_remote: bool = False


class Holders:
    """Gives bits to holders and computes masks.

    A holder is one tier of one source of events. Forgetting a holder takes its bit out of
    ``alive``, at once, however many blocks carry it; the bit can be given to another holder after a
    sweep has cleared it from all blocks.
    """

    def __init__(self) -> None:
        self.alive: Mask = 0
        """Bits of all holders that are not forgotten."""
        self.version = 0
        """Changes when a holder gets a bit or loses it."""
        self._bits: dict[Holder, int] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._sweeping: list[int] = []
        """Retired bits that the sweep in progress clears."""
        self._num_bits = 0
        self._masks: dict[Mask, Mask] = {}
        """One object for equal masks, to save memory."""
        self._positions: dict[Mask, npt.NDArray[np.intp]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._bits

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._bits)

    @property
    def num_bits(self) -> int:
        """Positions of bits are below this."""
        return self._num_bits

    @property
    def free_bits(self) -> Mask:
        """Bits that no holder has and no block may carry."""
        return sum(1 << bit for bit in self._free)

    @property
    def has_retired(self) -> bool:
        """Whether blocks may carry bits that are no longer alive."""
        return bool(self._retired or self._sweeping)

    def bit(self, holder: Holder) -> int | None:
        """Return the position of a holder's bit; None if it has none."""
        return self._bits.get(holder)

    def make_bit(self, holder: Holder) -> int:
        """Return the position of a holder's bit, which it gets if it has none."""
        bit = self._bits.get(holder)
        if bit is None:
            if not self._free:
                self._free.append(self._num_bits)
                self._num_bits += 1
            bit = self._bits[holder] = self._free.pop()
            self.alive |= 1 << bit
            self.version += 1
        return bit

    def retire(self, holder: Holder) -> int | None:
        """Take a holder's bit away; returns its position."""
        bit = self._bits.pop(holder, None)
        if bit is not None:
            self.alive &= ~(1 << bit)
            self._retired.append(bit)
            self.version += 1
        return bit

    def begin_sweep(self) -> bool:
        """Return whether there are retired bits to clear; `end_sweep` follows if so."""
        self._sweeping, self._retired = self._retired, []
        return bool(self._sweeping)

    def end_sweep(self) -> None:
        """Make the bits that were retired before the sweep available: no block carries them."""
        self._free += self._sweeping
        self._sweeping = []
        self._masks.clear()
        self._positions.clear()

    def one(self, mask: Mask) -> Mask:
        """Return the one object that stands for equal masks."""
        if len(self._masks) >= _MAX_CACHED:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def positions(self, mask: Mask) -> npt.NDArray[np.intp]:
        """Return the positions of a mask's bits, ascending."""
        found = self._positions.get(mask)
        if found is None:
            if len(self._positions) >= _MAX_CACHED:
                self._positions.clear()
            data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
            found = np.flatnonzero(np.unpackbits(data, bitorder="little"))
            self._positions[mask] = found
        return found

    def of(self, mask: Mask) -> list[Holder]:
        """Return the holders whose bits are in a mask."""
        return [holder for holder, bit in self._bits.items() if mask >> bit & 1] if mask else []

    def check(self) -> None:
        """Raise `InternalError` if a bit has no or several uses."""
        used = [*self._bits.values(), *self._free, *self._retired, *self._sweeping]
        if sorted(used) != list(range(self._num_bits)):
            raise InternalError(f"of {self._num_bits} bits, these are in use: {sorted(used)}")
        if self.alive != sum(1 << bit for bit in self._bits.values()):
            raise InternalError("the mask of living holders is wrong")


# Python rehashes a dictionary that grows: the worst batch of 512 blocks took 303 ms of CPU with one
# dictionary of 6 million blocks, and 2.4 ms with these.
_NUM_SHARDS = 1024
_SHIFT = 64 - 10
_NEVER = object()
_KEY_BYTES = 48

Depths = npt.NDArray[np.int64]

Segments = list[tuple[int, Mask]]
"""``(depth, holders)``: these holders have at least the first ``depth`` blocks. Depths ascend, and
each set is a subset of the one before."""


class IndexPart(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A part of an index's snapshot.

    Attributes:
        holders: Holders that the sets refer to by position.
        sets: Sets of holders.
        keys: Block keys, 8 bytes each.
        set_of: For each key, the position of its set, 4 bytes each.
        names: For each key, what publishers call the block, 8 bytes each; empty: they are left out,
            or there is a form, and the keys themselves are names whose keys are unknown.
        form: What the blocks with these names are.
    """

    holders: list[Holder]
    sets: list[list[int]]
    keys: bytes
    set_of: bytes
    names: bytes = b""
    form: BlockForm | None = None

    def slices(self, most: int) -> Iterator[tuple[list[Holder], list[int], list[int]]]:
        """Yield holders, and the names and keys of up to ``most`` blocks that all of them have.

        Raises:
            IndexError, ValueError: It makes no sense.
        """
        set_of = np.frombuffer(self.set_of, np.uint32)
        order = np.argsort(set_of, kind="stable")
        names = np.frombuffer(self.names or self.keys, np.uint64)[order].tolist()
        keys = np.frombuffer(self.keys, np.uint64)[order].tolist()
        set_of = set_of[order]
        bounds = [0, *(np.flatnonzero(np.diff(set_of)) + 1).tolist(), len(keys)]
        for start, stop in pairwise(bounds):
            holders = [self.holders[at] for at in self.sets[set_of[start]]]
            for first in range(start, stop, most):
                last = min(first + most, stop)
                yield holders, names[first:last], keys[first:last]


class KVIndexer:
    """Which holders have which blocks.

    A dictionary from block key to the mask of its holders, in shards, so that no operation takes
    long: neither growing a dictionary, nor a step of a sweep, nor a part of a snapshot.

    A match relies on a rule: who holds a block holds all before it. Depths are found by
    bisection, in O(log blocks) probes for each that differs, where a tree would walk all blocks.
    Publishers may break that rule: vLLM reports a removal when one of a block's copies goes.
    Such a hole is stepped over unless a probe hits it; counting copies instead would keep blocks
    for ever once vLLM reports only the last one. A depth is therefore at least the number of blocks
    before the holder's first hole, and the last block within it is always held.

    When the index is full, new blocks are refused, and with them those that follow in the same
    call: what it knows of a prompt stays a prefix. Removals make room. The oldest entries are the
    beginnings of prompts, without which the rest is not found: to evict them would cost most.

    Args:
        max_blocks: Different blocks at most.
    """

    def __init__(self, max_blocks: int = 10_000_000) -> None:
        self.max_blocks = max_blocks
        self.holders = Holders()
        self.num_blocks = 0
        """Different blocks, including those that only a sweep removes."""
        self.num_refused = 0
        """Blocks that were not taken because the index was full."""
        self._shards: list[dict[int, Mask]] = [{} for _ in range(_NUM_SHARDS)]
        self._num_held: list[int] = []
        """By bit."""
        self._hand = 0
        """The shard that a sweep is at."""

    def __contains__(self, key: int) -> bool:
        return self.mask(key) != 0

    def mask(self, key: int) -> Mask:
        """Return the holders of a block."""
        return self._shards[key >> _SHIFT].get(key, 0) & self.holders.alive

    def masks(self, keys: Sequence[int]) -> list[Mask]:
        """Return the holders of each block."""
        shards, alive = self._shards, self.holders.alive
        return [shards[key >> _SHIFT].get(key, 0) & alive for key in keys]

    def num_held(self, holder: Holder) -> int:
        """Return how many blocks a holder has."""
        bit = self.holders.bit(holder)
        return 0 if bit is None else self._num_held[bit]

    @property
    def num_holdings(self) -> int:
        """Blocks of all holders: a block counts for each holder that has it."""
        return sum(self._num_held)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of dictionaries and keys; masks are few and shared."""
        return sum(map(sys.getsizeof, self._shards)) + _KEY_BYTES * self.num_blocks

    # -- changes ---------------------------------------------------------------------------------

    def stored(self, holder: Holder, keys: Sequence[int]) -> int:
        """Note that a holder has consecutive blocks.

        Returns:
            How many of them were taken; fewer only if the index is full.
        """
        bit = self.holders.make_bit(holder)
        if bit == len(self._num_held):
            self._num_held.append(0)
        shards, room = self._shards, self.max_blocks - self.num_blocks
        before: object = _NEVER
        after = num_new = num_added = 0
        taken = len(keys)
        for position, key in enumerate(keys):
            shard = shards[key >> _SHIFT]
            mask = shard.get(key)
            if mask is None:
                if num_new >= room:
                    taken = position
                    break
                num_new += 1
            if mask is not before:
                before, after = mask, self._with(mask, bit)
            if after is not mask:
                shard[key] = after
                num_added += 1
        self.num_blocks += num_new
        self._num_held[bit] += num_added
        self.num_refused += len(keys) - taken
        return taken

    def _with(self, mask: Mask | None, bit: int) -> Mask:
        if mask is None:
            return self.holders.one(1 << bit)
        if mask >> bit & 1:
            return mask
        return self.holders.one(mask | 1 << bit)

    def removed(self, holder: Holder, keys: Sequence[int]) -> list[int]:
        """Note that a holder no longer has these blocks.

        Returns:
            Those of them that no holder has any more.
        """
        bit = self.holders.bit(holder)
        if bit is None:
            return []
        gone = []
        num_removed = 0
        for key in keys:
            shard = self._shards[key >> _SHIFT]
            mask = shard.get(key)
            if mask is None or not mask >> bit & 1:
                continue
            num_removed += 1
            after = mask & self.holders.alive & ~(1 << bit)
            if after:
                shard[key] = self.holders.one(after)
            else:
                del shard[key]
                gone.append(key)
        self.num_blocks -= len(gone)
        self._num_held[bit] -= num_removed
        return gone

    def forget(self, holder: Holder) -> None:
        """Drop all blocks of a holder. O(1); `sweep` frees their memory later."""
        bit = self.holders.retire(holder)
        if bit is not None:
            self._num_held[bit] = 0

    def sweep(self, num_blocks: int) -> bool:
        """Free the memory of forgotten holders' blocks, a slice at a time.

        Args:
            num_blocks: Visit about this many blocks: one shard at least.

        Returns:
            Whether there is more to do.
        """
        if self._hand == 0 and not self.holders.begin_sweep():
            return False
        while num_blocks > 0:
            num_blocks -= len(self._shards[self._hand]) + 1
            self._sweep_shard()
            self._hand += 1
            if self._hand == _NUM_SHARDS:
                self._hand = 0
                self.holders.end_sweep()
                return self.holders.has_retired
        return True

    def _sweep_shard(self) -> None:
        shard, alive = self._shards[self._hand], self.holders.alive
        stale = [(key, mask & alive) for key, mask in shard.items() if mask & ~alive]
        num_gone = 0
        for key, mask in stale:
            if mask:
                shard[key] = self.holders.one(mask)
            else:
                del shard[key]
                num_gone += 1
        self.num_blocks -= num_gone
        if num_gone > len(shard):
            self._shards[self._hand] = dict(shard)  # deleting alone frees no memory

    # -- questions -------------------------------------------------------------------------------

    def match(self, keys: Sequence[int]) -> Segments:
        """Find how many leading blocks of a prompt each holder has.

        Args:
            keys: The prompt's blocks, first to last.
        """
        segments: Segments = []
        if not keys:
            return segments
        shards, last = self._shards, len(keys) - 1
        mask = self.mask(keys[0])
        low = 0  # all of ``mask`` hold this block
        # blocks after it and their holders, the nearest one at the end
        probed = [(last, self.mask(keys[last]))] if last else []
        while mask:
            while probed and probed[-1][1] & mask == mask:
                low = probed.pop()[0]
            if not probed:
                segments.append((last + 1, mask))
                break
            high = probed[-1][0]
            while high - low > 1:
                middle = (low + high) >> 1
                key = keys[middle]
                holders = shards[key >> _SHIFT].get(key, 0)
                if holders & mask == mask:
                    low = middle
                else:
                    probed.append((middle, holders))
                    high = middle
            segments.append((low + 1, mask))
            low, holders = probed.pop()
            mask &= holders
        return segments

    def depths(self, segments: Segments) -> Depths:
        """Return the depth of each holder in blocks, by position of its bit; the last entry is 0
        and belongs to none."""
        depths = np.zeros(self.holders.num_bits + 1, np.int64)
        for depth, mask in segments:
            depths[self.holders.positions(mask)] = depth
        return depths

    # -- snapshots -------------------------------------------------------------------------------

    def snapshot(self, sources: Container[str]) -> Iterator[IndexPart]:
        """Yield the blocks of some sources in parts of up to some thousands.

        The index may change in between. All parts, and then all changes since the first one, give
        the index as it is then.
        """
        at: int | None = 0
        while at is not None:
            part, at = self.part_at(at, sources)
            if part is not None:
                yield part

    def part_at(
        self, at: int, sources: Container[str], form: BlockForm | None = None
    ) -> tuple[IndexPart | None, int | None]:
        """Return some blocks of some sources, and where the next ones begin; None: these were the
        last.

        Args:
            at: 0, or what the call before returned.
            form: See `IndexPart`.
        """
        while at < _NUM_SHARDS:
            shard, at = self._shards[at], at + 1
            if shard:
                chosen = self.holders_of(sources)
                return self.part(chosen, list(shard), list(shard.values()), form=form), at
        return None, None

    def holders_of(self, sources: Container[str]) -> list[Holder]:
        """Return the holders of some sources."""
        return [holder for holder in self.holders if holder.source in sources]

    def part(
        self,
        chosen: Sequence[Holder],
        keys: Sequence[int],
        masks: Sequence[Mask],
        names: Sequence[int] = (),
        form: BlockForm | None = None,
    ) -> IndexPart | None:
        """Return which of some blocks some holders have; None: none.

        Args:
            masks: Holders of each block, and maybe others.
            names: See `IndexPart`, as ``form``.
        """
        bits = [self.holders.make_bit(holder) for holder in chosen]
        position = {bit: at for at, bit in enumerate(bits)}
        wanted = sum(1 << bit for bit in bits)
        masks = [mask & wanted for mask in masks]
        sets = {mask: number for number, mask in enumerate(dict.fromkeys(filter(None, masks)))}
        return IndexPart(
            list(chosen),
            [[position[int(bit)] for bit in self.holders.positions(mask)] for mask in sets],
            np.fromiter(compress(keys, masks), np.uint64).tobytes(),
            np.fromiter(map(sets.__getitem__, filter(None, masks)), np.uint32).tobytes(),
            np.fromiter(compress(names, masks), np.uint64).tobytes(),
            form,
        ) if sets else None  # fmt: skip

    def check(self) -> None:
        """Raise `InternalError` if masks, counts and shards disagree."""
        self.holders.check()
        num_held = [0] * self.holders.num_bits
        free_bits = self.holders.free_bits
        for number, shard in enumerate(self._shards):
            for key, mask in shard.items():
                if key >> _SHIFT != number or not mask:
                    raise InternalError(f"block {key:x} with the holders {mask:b} is misplaced")
                for bit in self.holders.positions(mask & self.holders.alive):
                    num_held[int(bit)] += 1
                if mask & free_bits:
                    raise InternalError(f"block {key:x} is held by nothing: {mask:b}")
        if num_held != self._num_held or self.num_blocks != sum(map(len, self._shards)):
            raise InternalError("the numbers of blocks are wrong")
        if self.num_blocks > self.max_blocks:
            raise InternalError(f"{self.num_blocks} blocks, more than {self.max_blocks}")
