"""Copy of what the tiers hold, made from the changes that are published: the source of snapshots.

Kept by the publisher's thread, so that a snapshot costs the cache itself nothing, and is exact for
a number: it has the changes of all batches before that number and of no later one.

A snapshot is read in pages, in the order in which blocks were stored, and changes go on meanwhile:
each page is right for the number at its time. A reader that applies all pages and then every batch
from the first page's number on ends up right: a block that changed in between is in those batches,
and one that did not is in a page.

SSD and store may be told by runs: one name, that of the last block, for 16 blocks from a prompt's
start on. A run is there while its last block is, since a tier that has a block has all before it.
Readers never learn of more than what is held. Tokens are left out where they are known: what is
written was in DRAM. A snapshot has them.

Pure.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

from flexcache.cache.journal import Change, Cleared, Medium, Removed, Stored
from flexcache.errors import InternalError
from flexcache.events.wire import names_of
from flexcache.ids import BlockKey, RootId
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

BLOCKS_A_RUN = 16
MAX_TOKENS = 64 << 20  # 256 MiB
_MEMORY = (Medium.CPU, Medium.LOCAL_CPU)
_RUN_BLOCKS = 1024
_PAGE_BLOCKS = 2048
_PAGE_TOKENS = 32 << 10  # takes 1 ms to encode


@dataclass(slots=True)
class _Run:
    """Blocks stored together, without those removed since, which are always the last.

    Attributes:
        stored: What was stored, without its tokens.
        tokens: The tokens of all its blocks, or nothing.
        length: Number of blocks still held.
        first: Position of its first block in the prompt, for blocks told by runs; None: block by
            block.
    """

    stored: Stored
    tokens: array[int]
    length: int
    first: int | None = None

    @property
    def ends(self) -> range:
        """Positions of those that end a run."""
        if self.first is None:
            return range(0)
        return range(-(self.first + 1) % BLOCKS_A_RUN, self.length, BLOCKS_A_RUN)

    def position(self, key: BlockKey) -> int:
        """Return where one of its blocks is among them."""
        keys = self.stored.keys
        return self.length - 1 if keys[self.length - 1] == key else keys.index(key)

    def describe(self) -> Stored:
        """Return what is still held, block by block."""
        stored, size = self.stored, self.stored.block_size
        return replace(
            stored,
            keys=stored.keys[: self.length],
            token_ids=self.tokens[: self.length * size].tolist(),
            extra_keys=None if stored.extra_keys is None else stored.extra_keys[: self.length],
        )


class HeldBlocks:
    """Follows changes and lists, at any time, what is held.

    Args:
        max_tokens: Tokens kept; beyond it the blocks stored first are listed without theirs.
        by_runs: Tell what SSD and store hold by runs.

    Attributes:
        num_blocks: Blocks held; a block in both media counts twice.
        num_tokens: Tokens kept for them.
        is_whole: Whether all changes since the last `Cleared` are known.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, *, by_runs: bool = False) -> None:
        self.is_whole = True
        self._max_tokens = max_tokens
        self._by_runs = by_runs
        self._next_id = 0
        self._clear()

    def _clear(self) -> None:
        self.num_blocks = self.num_tokens = 0
        self._runs: SortedDict[int, _Run] = SortedDict()
        self._places: dict[tuple[Medium, RootId], dict[BlockKey, int]] = {}
        """Run of each block."""
        self._ends: dict[tuple[Medium, RootId], set[BlockKey]] = {}
        """Blocks that stand for a run."""
        self._first_with_tokens = self._next_id

    def apply(self, changes: Sequence[Change]) -> list[Change]:
        """Follow changes, in order; return what there is to tell of them. 0.3 us a block of 16
        tokens."""
        told: list[Change] = []
        for change in changes:
            match change:
                case Stored():
                    runs = [self._store(part) for part in _parts(change)] if self.is_whole else []
                    if runs and runs[0].first is not None:
                        for run in runs:
                            told += self._told(run, with_tokens=False)
                    else:
                        told.append(change)
                case Removed():
                    told += self._told_removal(change)
                    self._remove(change)
                case Cleared():
                    self._clear()
                    self.is_whole = True
                    told.append(change)
        return told

    def missed(self) -> None:
        """Take note that changes were lost: there is nothing to list until the next `Cleared`."""
        self._clear()
        self.is_whole = False

    def page(self, cursor: int) -> tuple[list[Stored], int | None]:
        """Return some of what is held, each block after its parent if that is in the same medium.

        Args:
            cursor: 0, or what the call before returned.

        Returns:
            Blocks, and where the next page begins; None: these are the last.
        """
        found: list[Stored] = []
        num_blocks = num_tokens = 0
        for run_id in self._runs.irange(minimum=cursor):
            if num_blocks >= _PAGE_BLOCKS or num_tokens >= _PAGE_TOKENS:
                return found, run_id
            for stored in self._told(self._runs[run_id], with_tokens=True):
                found.append(stored)
                num_tokens += len(stored.token_ids)
            num_blocks += self._runs[run_id].length
        return found, None

    def _store(self, stored: Stored) -> _Run:
        run_id, self._next_id = self._next_id, self._next_id + 1
        bare = Stored(
            stored.medium, stored.root, stored.parent, stored.keys, stored.block_size, (),
            stored.info, stored.extra_keys,
        )  # fmt: skip
        run = _Run(bare, _pack(stored.token_ids), len(stored.keys))
        place = (stored.medium, stored.root)
        places = self._places.setdefault(place, {})
        if self._by_runs and stored.medium not in _MEMORY:
            run.first = self._position_after(stored.parent, places)
        if run.first is not None:
            ends = [stored.keys[end] for end in run.ends]
            self._ends.setdefault(place, set()).update(ends)
        self._runs[run_id] = run
        places.update(dict.fromkeys(stored.keys, run_id))
        self.num_blocks += run.length
        self.num_tokens += len(run.tokens)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest_tokens()
        return run

    def _position_after(
        self, parent: BlockKey | None, places: Mapping[BlockKey, int]
    ) -> int | None:
        """Return where a block is in its prompt; None if those before it are told block by
        block, or are not known."""
        if parent is None:
            return 0
        before = self._runs.get(places.get(parent, -1))
        return None if before is None or before.first is None else (
            before.first + before.position(parent) + 1
        )  # fmt: skip

    def _told(self, run: _Run, *, with_tokens: bool) -> list[Stored]:
        """Return what to tell of blocks that were stored together: those that end a run."""
        if run.first is None:
            return [run.describe()]
        if not run.ends:
            return []
        stored, stop = run.stored, run.ends[-1] + 1
        parent, tokens, extra = self._before(run, run.first % BLOCKS_A_RUN)
        tokens += run.tokens[: stop * stored.block_size]
        extra += (stored.extra_keys or [None] * stop)[:stop]
        is_known = with_tokens and len(tokens) == len(extra) * stored.block_size
        return [
            replace(
                stored,
                parent=parent,
                keys=[stored.keys[end] for end in run.ends],
                token_ids=tokens.tolist() if is_known else (),
                extra_keys=extra if is_known and any(extra) else None,
                run_blocks=BLOCKS_A_RUN,
            )
        ]

    def _before(self, run: _Run, count: int) -> tuple[BlockKey | None, array[int], list[Any]]:
        """Return the block before the last ``count`` blocks before a run, and what is known of
        these: tokens and extra keys."""
        key, tokens = run.stored.parent, array("I")
        extra: list[Any] = []
        places = self._places[run.stored.medium, run.stored.root]
        while count and key in places:
            before = self._runs[places[key]]
            stop = before.position(key) + 1
            start, size = max(0, stop - count), before.stored.block_size
            tokens = before.tokens[start * size : stop * size] + tokens
            extra = (before.stored.extra_keys or [None] * stop)[start:stop] + extra
            count -= stop - start
            key = before.stored.keys[start - 1] if start else before.stored.parent
        return key, tokens, extra

    def _told_removal(self, removed: Removed) -> list[Removed]:
        place = (removed.medium, removed.root)
        ends, places = self._ends.get(place), self._places.get(place, {})
        if ends is None:
            return [removed]
        runs = [self._runs.get(places.get(key, -1)) for key in removed.keys]
        keys = [
            key
            for key, run in zip(removed.keys, runs, strict=True)
            if key in ends or run is None or run.first is None
        ]
        ends.difference_update(keys)
        return [replace(removed, keys=keys)] if keys else []

    def _drop_oldest_tokens(self) -> None:
        run_id = next(self._runs.irange(minimum=self._first_with_tokens))
        run = self._runs[run_id]
        self.num_tokens -= len(run.tokens)
        run.tokens = array("I")
        self._first_with_tokens = run_id + 1

    def _remove(self, removed: Removed) -> None:
        place = (removed.medium, removed.root)
        places = self._places.get(place, {})
        for key in removed.keys:
            run_id = places.pop(key, None)
            if run_id is None:
                continue
            run = self._runs[run_id]
            run.length -= 1
            self.num_blocks -= 1
            if not run.length:
                self.num_tokens -= len(run.tokens)
                del self._runs[run_id]
        if not places:
            self._places.pop(place, None)
            self._ends.pop(place, None)

    def check(self) -> None:
        """Raise `InternalError` if runs, places and counts disagree. O(blocks)."""
        held = {
            (run.stored.medium, run.stored.root, key): run_id
            for run_id, run in self._runs.items()
            for key in run.stored.keys[: run.length]
        }
        places = {
            (*place, key): run_id
            for place, keys in self._places.items()
            for key, run_id in keys.items()
        }
        if held != places or len(held) != self.num_blocks:
            raise InternalError("runs and places of held blocks disagree")
        if self.num_tokens != sum(len(run.tokens) for run in self._runs.values()):
            raise InternalError("tokens of held blocks are miscounted")
        self._check_ends()

    def _check_ends(self) -> None:
        kept = {(*place, key) for place, keys in self._ends.items() for key in keys}
        ends = {
            (run.stored.medium, run.stored.root, run.stored.keys[end])
            for run in self._runs.values()
            for end in run.ends
        }
        if kept != ends:
            raise InternalError("blocks that stand for runs are not those that end one")


def _parts(stored: Stored) -> Iterator[Stored]:
    """Yield long runs in parts, so that pages are small."""
    count, size, extra = len(stored.keys), stored.block_size, stored.extra_keys
    if count <= _RUN_BLOCKS:
        yield stored
        return
    for start in range(0, count, _RUN_BLOCKS):
        stop = start + _RUN_BLOCKS
        yield replace(
            stored,
            parent=stored.keys[start - 1] if start else stored.parent,
            keys=stored.keys[start:stop],
            token_ids=stored.token_ids[start * size : stop * size],
            extra_keys=None if extra is None else extra[start:stop],
        )


def _pack(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError):  # not a tokenizer's
        log_event(logger, logging.DEBUG, "kv_events_tokens_not_kept", tokens=len(token_ids))
        return array("I")


class PublishedBlock(NamedTuple):
    root: RootId
    key: BlockKey


class PublishedNames:
    """Finds the blocks that KV events have named, for readers that ask for one.

    Kept for SSD and remote store only: what is in DRAM need not be brought there. Some 90 bytes a
    block.

    Args:
        hashes: Form of block hashes in the events.
    """

    def __init__(self, hashes: str) -> None:
        self._hashes = hashes
        self._keys: dict[tuple[Medium, RootId], dict[int, BlockKey]] = {}
        """By place and root; those to which something was stored last come last."""

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def apply(self, changes: Sequence[Change]) -> None:
        """Follow changes, in order. 0.4 us a block below DRAM."""
        for change in changes:
            if isinstance(change, Cleared):
                self._keys.clear()
            elif change.medium in _MEMORY:
                continue
            elif isinstance(change, Stored):
                place = (change.medium, change.root)
                keys = self._keys[place] = self._keys.pop(place, {})
                keys.update(zip(names_of(change.keys, self._hashes), change.keys, strict=True))
            else:
                self._remove(change)

    def _remove(self, removed: Removed) -> None:
        keys = self._keys.get((removed.medium, removed.root))
        if keys is None:
            return
        for name in names_of(removed.keys, self._hashes):
            keys.pop(name, None)
        if not keys:
            del self._keys[removed.medium, removed.root]

    def find(self, name: int) -> PublishedBlock | None:
        """Return the block below DRAM with this name, the low 64 bits of its published hash.

        Where several roots (namespaces, say) have one, that of the root to which something was
        stored last. O(roots).
        """
        for (_, root), keys in reversed(self._keys.items()):
            key = keys.get(name)
            if key is not None:
                return PublishedBlock(root, key)
        return None

    def check(self) -> None:
        """Raise `InternalError` if a name is another block's, or a root has no blocks."""
        for keys in self._keys.values():
            if not keys:
                raise InternalError("a root without blocks is kept")
            if list(keys) != names_of(list(keys.values()), self._hashes):
                raise InternalError("a name is another block's")
