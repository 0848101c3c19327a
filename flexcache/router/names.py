"""Names of blocks: the hashes by which engines and caches call them, and what they stand for.

Equal content mostly has equal names, so the names of one block size are shared by all publishers;
one that hashes with another seed just adds names. A holder may have blocks whose keys are unknown:
a cache restored them from SSD without tokens, or the events before them were lost. Such holdings
are kept by name until any publisher tells tokens and parent. Pure.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from flexcache.errors import InternalError
from flexcache.router.fleet import Tier
from flexcache.router.index import BlockForm, Holder, IndexPart, KeyChain, KVIndexer, Mask


class DiskNames:
    """Names by key, the reverse of `NamedBlocks`.

    So that they can be asked to load them. Kept only for sources that can be asked.

    Attributes:
        sources: Those whose names are kept, from the next events on.
    """

    def __init__(self) -> None:
        self.sources: frozenset[str] = frozenset()
        self._names: dict[Holder, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))

    def keep(self, sources: Iterable[str]) -> None:
        """Keep the names of these sources, and of no others."""
        self.sources = frozenset(sources)
        for holder in [each for each in self._names if each.source not in self.sources]:
            del self._names[holder]

    def stored(self, holder: Holder, names: Sequence[int], keys: Sequence[int]) -> None:
        """Note that a holder has blocks whose names and keys are known."""
        if holder.tier is Tier.DISK and holder.source in self.sources:
            self._names.setdefault(holder, {}).update(zip(keys, names, strict=False))

    def removed(self, holder: Holder, keys: Iterable[int]) -> None:
        """Note that a holder no longer has these blocks."""
        names = self._names.get(holder)
        if names is not None:
            for key in keys:
                names.pop(key, None)

    def forget(self, holder: Holder) -> None:
        """Drop what a holder had."""
        self._names.pop(holder, None)

    def find(self, holder: Holder, key: int) -> int | None:
        """Return the name by which a holder knows a block; None if it is not known."""
        return self._names.get(holder, {}).get(key)

    def masks(self, index: KVIndexer, names: Sequence[int], keys: Sequence[int]) -> list[Mask]:
        """Return the holders of blocks, without those that are asked for them by other names."""
        bits = {index.holders.bit(holder): known for holder, known in self._names.items()}
        asked = sum(1 << bit for bit in bits if bit is not None)
        masks = index.masks(keys)
        for at, mask in enumerate(masks):
            for bit in index.holders.positions(mask & asked).tolist() if mask & asked else ():
                if bits[bit].get(keys[at]) != names[at]:
                    masks[at] &= ~(1 << bit)
        return masks

    def check(self) -> None:
        """Raise `InternalError` if names are kept that nothing asks for."""
        for holder in self._names:
            if holder.tier is not Tier.DISK or holder.source not in self.sources:
                raise InternalError(f"names of {holder} are kept")


_NUM_SHARDS = 1024
_SHIFT = 32
_MASK = _NUM_SHARDS - 1
_NAME_BYTES = 48
_SLACK = 10_000
"""Names without blocks that are not worth a sweep."""
_PART = 2048  # names: what holds for a page, its holders, is made once for so many
_STAGE = 1 << 20
_SLICE = 512  # blocks: half a millisecond


class NamedRun(NamedTuple):
    """Consecutive blocks of a prompt as a publisher tells them.

    Attributes:
        names: One per block.
        parent: Name of the block before them; None: a prompt's start.
        packed: All of their tokens, from `keys.pack`.
        extra_keys: From `keys.pack_extra_keys`.
        run_blocks: Blocks that each name stands for, of which it is the last one's.
    """

    chain: KeyChain
    names: Sequence[int]
    parent: int | None
    packed: bytes
    extra_keys: Sequence[bytes] = ()
    run_blocks: int = 1

    def keys_after(self, parent: int | None) -> list[int]:
        """Return the keys of the named blocks, after the block with this key."""
        keys = self.chain.extend(parent, self.packed, self.extra_keys)
        return keys[self.run_blocks - 1 :: self.run_blocks]


class NamedBlocks:
    """Names of the blocks of one size.

    Args:
        index: Where the holders of blocks are noted once their keys are known.
        max_waiting: Holdings with unknown keys at most; further ones are refused.
        max_loose: Blocks with tokens and an unknown parent at most; the oldest are dropped.
        on_disk: Follows the names of blocks below DRAM, where those are needed.
    """

    def __init__(
        self,
        index: KVIndexer,
        *,
        max_waiting: int = 1_000_000,
        max_loose: int = 100_000,
        on_disk: DiskNames | None = None,
    ) -> None:
        self._index = index
        self._on_disk = DiskNames() if on_disk is None else on_disk
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self.num_names = 0
        """Not counting those that stand for another block at one holder."""
        self._own: dict[Holder, dict[int, int]] = {}
        """Names that stand for another block than they do elsewhere."""
        self.waiting = KVIndexer(max_waiting)
        """Holdings by name instead of key."""
        self._loose: OrderedDict[tuple[int, int], NamedRun] = OrderedDict()
        """Runs by the names of their parent and their first block."""
        self._loose_after: dict[int, dict[int, None]] = {}
        """By parent: the first names of its loose runs."""
        self._num_loose = 0
        self._max_loose = max_loose
        self._hand = 0
        """The shard that a sweep is at."""
        self._has_stale = False
        self._sweep_at = _SLACK

    def __bool__(self) -> bool:
        return bool(self.num_names or self.waiting.num_blocks or self._loose)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of names and holdings; keys are the index's."""
        shards = sum(map(sys.getsizeof, self._shards))
        return shards + _NAME_BYTES * self.num_names + self.waiting.num_bytes

    def key(self, holder: Holder, name: int) -> int | None:
        """Return the key of the block that a holder calls ``name``; None if unknown."""
        if self._own:
            own = self._own.get(holder, {}).get(name)
            if own is not None:
                return own
        return self._shards[name >> _SHIFT & _MASK].get(name)

    # -- changes ---------------------------------------------------------------------------------

    def stored(self, holder: Holder, run: NamedRun) -> None:
        """Note that a holder has a run of blocks."""
        parent = None if run.parent is None else self.key(holder, run.parent)
        if run.parent is not None and parent is None:
            self._keep_loose(run.parent, run)
            self.stored_by_name(holder, run.names)
            return
        keys = run.keys_after(parent)
        taken = self._index.stored(holder, keys)
        names = run.names[:taken]
        self._learn(holder, names, keys)
        if self._loose or self.waiting.num_blocks:
            self._settle(zip(names, keys, strict=False))

    def stored_by_name(self, holder: Holder, names: Sequence[int]) -> None:
        """Note that a holder has blocks of which only names are told."""
        known, keys, unknown = [], [], []
        for name in names:
            key = self.key(holder, name)
            if key is None:
                unknown.append(name)
            else:
                known.append(name)
                keys.append(key)
        if known:
            taken = self._index.stored(holder, keys)
            self._on_disk.stored(holder, known[:taken], keys)
        if unknown:
            self.waiting.stored(holder, unknown)

    def removed(self, holder: Holder, names: Sequence[int]) -> None:
        """Note that a holder no longer has these blocks."""
        own = self._own.get(holder)
        known, keys, unknown = [], [], []
        for name in names:
            key = self._shards[name >> _SHIFT & _MASK].get(name)
            if own:
                key = own.pop(name, key)
            if key is None:
                unknown.append(name)
            else:
                known.append(name)
                keys.append(key)
        if unknown:
            self.waiting.removed(holder, unknown)
        self._on_disk.removed(holder, keys)
        gone = set(self._index.removed(holder, keys))
        if gone:
            for name, key in zip(known, keys, strict=True):
                shard = self._shards[name >> _SHIFT & _MASK]
                if key in gone and shard.get(name) == key:
                    del shard[name]
                    self.num_names -= 1

    def forget(self, holder: Holder) -> None:
        """Drop what only concerns a holder whose blocks the index forgets."""
        self.waiting.forget(holder)
        self._on_disk.forget(holder)
        self._own.pop(holder, None)
        self._has_stale = True

    def part(
        self, at: int, sources: Container[str], form: BlockForm
    ) -> tuple[IndexPart | None, int | None]:
        """Return names, keys and holders of some blocks.

        Args:
            at: 0, or what the call before returned.
            sources: Only what these have.

        Returns:
            They, if there are any, and where the next ones begin; None: these were the last.
        """
        stage, at = divmod(at, _STAGE)
        if stage == 0:
            # First: an event that tells their tokens later moves them to the shards.
            part, after = self.waiting.part_at(at, sources, form)
            return part, _STAGE if after is None else after
        if stage == 1:
            names: list[int] = []
            keys: list[int] = []
            while at < _NUM_SHARDS and len(names) < _PART:
                names += self._shards[at]
                keys += self._shards[at].values()
                at += 1
            part = self._part(self._index.holders_of(sources), names, keys, form)
            return part, _STAGE + at if at < _NUM_SHARDS else 2 * _STAGE
        own = [(each, n) for each, own in self._own.items() for n in range(0, len(own), _PART)]
        if at >= len(own):
            return None, None
        holder, first = own[at]
        pairs = dict(islice(self._own[holder].items(), first, first + _PART))
        chosen = [holder] if holder.source in sources else []
        return self._part(chosen, list(pairs), list(pairs.values()), form), 2 * _STAGE + at + 1

    def _part(
        self, chosen: list[Holder], names: list[int], keys: list[int], form: BlockForm
    ) -> IndexPart | None:
        masks = self._on_disk.masks(self._index, names, keys)
        return self._index.part(chosen, keys, masks, names, form)

    def take(self, part: IndexPart, sources: Container[str]) -> Iterator[None]:
        """Note what a part of another index says of these sources, a slice at a time."""
        for holders, names, keys in part.slices(_SLICE):
            for holder in holders:
                if holder.source not in sources:
                    continue
                if not part.names:
                    self.stored_by_name(holder, names)
                    continue
                taken = self._index.stored(holder, keys)
                self._learn(holder, names[:taken], keys)
                if self._loose or self.waiting.num_blocks:
                    self._settle(zip(names[:taken], keys, strict=False))
            yield

    def _learn(self, holder: Holder, names: Sequence[int], keys: Sequence[int]) -> None:
        """Note the keys of names of blocks that a holder has."""
        self._on_disk.stored(holder, names, keys)
        shards, own = self._shards, self._own.get(holder)
        for name, key in zip(names, keys, strict=False):
            shard = shards[name >> _SHIFT & _MASK]
            known = shard.get(name)
            if known is None or (known != key and known not in self._index):
                shard[name] = key
                self.num_names += known is None
            elif known != key:
                own = self._own.setdefault(holder, {})
                own[name] = key
                continue
            if own:
                own.pop(name, None)

    def _settle(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Attach what waited for these names, and for those that become known thereby."""
        todo = deque(pairs)
        while todo:
            name, key = todo.popleft()
            for waiter in self.waiting.holders.of(self.waiting.mask(name)):
                self._index.stored(waiter, [key])
                self.waiting.removed(waiter, [name])
                self._learn(waiter, [name], [key])
            for run in self._take_loose(name):
                todo.extend(zip(run.names, run.keys_after(key), strict=False))

    def _keep_loose(self, parent: int, run: NamedRun) -> None:
        """Keep a run until its parent is known, in place of a shorter one."""
        first = run.names[0]
        known = self._loose.get((parent, first))
        if known is not None and len(known.names) >= len(run.names):
            return
        if known is None:
            self._loose_after.setdefault(parent, {})[first] = None
        else:
            self._num_loose -= len(known.names)
        self._loose[parent, first] = run
        self._num_loose += len(run.names)
        while self._num_loose > self._max_loose:
            self._drop_loose(next(iter(self._loose)))

    def _take_loose(self, parent: int) -> list[NamedRun]:
        firsts = list(self._loose_after.get(parent, ()))
        return [self._drop_loose((parent, first)) for first in firsts]

    def _drop_loose(self, at: tuple[int, int]) -> NamedRun:
        run = self._loose.pop(at)
        self._num_loose -= len(run.names)
        parent, first = at
        firsts = self._loose_after[parent]
        del firsts[first]
        if not firsts:
            del self._loose_after[parent]
        return run

    def sweep(self, num_blocks: int) -> bool:
        """Free the memory of names whose blocks no holder has any more, a slice at a time.

        Args:
            num_blocks: Visit about this many names: one shard at least.

        Returns:
            Whether there is more to do.
        """
        has_waiting = self.waiting.sweep(num_blocks)
        if self._hand == 0:
            if not self._has_stale and self.num_names <= self._sweep_at:
                return has_waiting
            self._has_stale = False
        while num_blocks > 0:
            before = len(self._shards[self._hand])
            shard = self._shards[self._hand] = self._living(self._shards[self._hand])
            self.num_names -= before - len(shard)
            num_blocks -= before + 1
            self._hand += 1
            if self._hand == _NUM_SHARDS:
                self._hand = 0
                self._own = {holder: self._living(own) for holder, own in self._own.items()}
                self._sweep_at = 2 * self.num_names + _SLACK
                return has_waiting or self._has_stale
        return True

    def _living(self, names: dict[int, int]) -> dict[int, int]:
        index = self._index
        stale = [name for name, key in names.items() if key not in index]
        for name in stale:
            del names[name]
        return dict(names) if len(stale) > len(names) else names  # deleting frees no memory

    def check(self) -> None:
        """Raise `InternalError` if names are misplaced or the bounds are exceeded."""
        self.waiting.check()
        for number, shard in enumerate(self._shards):
            for name, key in shard.items():
                if name >> _SHIFT & _MASK != number:
                    raise InternalError(f"the name {name:x} is misplaced")
                if name in self.waiting and key in self._index:
                    raise InternalError(f"a holder waits for the name {name:x}, which is known")
        if self.num_names != sum(map(len, self._shards)):
            raise InternalError(f"{self.num_names} names is the wrong number")
        self._check_loose()

    def _check_loose(self) -> None:
        runs = [(parent, first) for parent, after in self._loose_after.items() for first in after]
        if len(runs) != len(self._loose) or set(runs) != set(self._loose):
            raise InternalError("runs without a parent and their parents disagree")
        num_loose = sum(len(run.names) for run in self._loose.values())
        if num_loose != self._num_loose or num_loose > self._max_loose:
            raise InternalError(f"{num_loose} blocks without a parent, counted {self._num_loose}")
