"""Copy of what the tiers hold, made from the changes that are published: the source of snapshots.

Kept by the publisher's thread, so that a snapshot costs the cache itself nothing, and is exact for
a number: it has the changes of all batches before that number and of no later one.

A snapshot is read in pages, in the order in which blocks were stored, and changes go on meanwhile:
each page is right for the number at its time. A reader that applies all pages and then every batch
from the first page's number on ends up right: a block that changed in between is in those batches,
and one that did not is in a page.

Pure.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sortedcontainers import SortedDict

from flexcache.cache.journal import Change, Cleared, Medium, Removed, Stored
from flexcache.errors import InternalError
from flexcache.events.wire import names_of
from flexcache.ids import BlockKey, RootId
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

MAX_TOKENS = 64 << 20  # 256 MiB
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
    """

    stored: Stored
    tokens: array[int]
    length: int

    def describe(self) -> Stored:
        """Return what is still held, as it would be published."""
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

    Attributes:
        num_blocks: Blocks held; a block in both media counts twice.
        num_tokens: Tokens kept for them.
        is_whole: Whether all changes since the last `Cleared` are known.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.is_whole = True
        self._max_tokens = max_tokens
        self._next_id = 0
        self._clear()

    def _clear(self) -> None:
        self.num_blocks = self.num_tokens = 0
        self._runs: SortedDict[int, _Run] = SortedDict()
        self._places: dict[tuple[Medium, RootId], dict[BlockKey, int]] = {}
        """Run of each block."""
        self._first_with_tokens = self._next_id

    def apply(self, changes: Sequence[Change]) -> None:
        """Follow changes, in order. 0.3 us a block of 16 tokens."""
        for change in changes:
            match change:
                case Stored():
                    for part in _parts(change):
                        self._store(part)
                case Removed():
                    self._remove(change)
                case Cleared():
                    self._clear()
                    self.is_whole = True

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
            stored = self._runs[run_id].describe()
            found.append(stored)
            num_blocks += len(stored.keys)
            num_tokens += len(stored.token_ids)
        return found, None

    def _store(self, stored: Stored) -> None:
        if not self.is_whole:
            return
        run_id, self._next_id = self._next_id, self._next_id + 1
        bare = Stored(
            stored.medium, stored.root, stored.parent, stored.keys, stored.block_size, (),
            stored.info, stored.extra_keys,
        )  # fmt: skip
        run = _Run(bare, _pack(stored.token_ids), len(stored.keys))
        self._runs[run_id] = run
        places = self._places.setdefault((stored.medium, stored.root), {})
        places.update(dict.fromkeys(stored.keys, run_id))
        self.num_blocks += run.length
        self.num_tokens += len(run.tokens)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest_tokens()

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
            elif change.medium in (Medium.CPU, Medium.LOCAL_CPU):
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
