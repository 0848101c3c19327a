"""Consolidator of KV events: merges what several sources say of the same blocks. An engine reports
its GPU, FlexCache the tiers below.

The merged events show whether a block can be found anywhere: it is stored when the first place
gets it, and removed when the last place loses it. Blocks are the same if the low 64 bits of their
hashes are, and the merged events have these 64 bits as hashes.

Pure: takes events, returns events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import zmq

from flexcache.errors import InternalError
from flexcache.events.publisher import NUM_KEPT, NUM_QUEUED, Address, BatchPublisher
from flexcache.events.subscriber import KVEventSubscriber, News, Received, SnapshotPart
from flexcache.events.wire import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    encode_batch,
    low_64_bits,
)

Place = tuple[str | None, str | None, int | None]
"""Medium, locality and group of a source."""


@dataclass(slots=True)
class _Block:
    medium: str | None
    """Medium of the place that got it first, which all merged events of the block name."""
    has_tokens: bool
    num_holders: int = 0


class Consolidator:
    """Counts the places that hold each block. O(1) per block of an event."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._held: dict[str, dict[tuple[int, Place], None]] = {}
        """By source: its blocks and their places."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        return low_64_bits(block_hash) in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, source: str, events: Iterable[Event]) -> list[Event]:
        """Apply a source's events and return the resulting merged events."""
        merged: list[Event] = []
        for event in events:
            match event:
                case BlockStored():
                    merged += self._stored(source, event)
                case BlockRemoved(hashes, medium, group, locality):
                    place = (medium, locality, group)
                    merged += self._removed(source, [(low_64_bits(h), place) for h in hashes])
                case AllBlocksCleared():
                    merged += self.forget(source)
        return merged

    def forget(self, source: str) -> list[Event]:
        """Drop all blocks of a source that cleared everything or restarted, or whose events were
        lost."""
        return self._removed(source, list(self._held.get(source, ())))

    def check(self) -> None:
        """Raise `InternalError` if a block's number of holders differs from its count."""
        counts: dict[int, int] = {}
        for held in self._held.values():
            for block, _ in held:
                counts[block] = counts.get(block, 0) + 1
        if counts != {hashed: block.num_holders for hashed, block in self._blocks.items()}:
            raise InternalError("holders and their counts disagree")

    def _stored(self, source: str, event: BlockStored) -> list[Event]:
        """Return one event for each stretch of new blocks."""
        size = event.block_size
        hashes = [low_64_bits(block) for block in event.block_hashes]
        has_tokens = len(event.token_ids) == size * len(hashes)  # false for a sparse group
        held = self._held.setdefault(source, {})
        place = (event.medium, event.locality, event.group_idx)
        is_news = []
        for hashed in hashes:
            block = self._blocks.get(hashed)
            is_news.append(block is None or (has_tokens and not block.has_tokens))
            if block is None:
                block = self._blocks[hashed] = _Block(event.medium, has_tokens)
            block.has_tokens |= has_tokens
            if (hashed, place) not in held:
                held[hashed, place] = None
                block.num_holders += 1
        return [
            self._describe(event, hashes, start, stop, has_tokens)
            for start, stop in self._stretches(hashes, is_news)
        ]

    def _stretches(self, hashes: Sequence[int], is_news: Sequence[bool]) -> list[tuple[int, int]]:
        """Return runs of consecutive new blocks with the same medium."""
        stretches: list[tuple[int, int]] = []
        for i, hashed in enumerate(hashes):
            if not is_news[i]:
                continue
            medium = self._blocks[hashed].medium
            if (
                stretches
                and stretches[-1][1] == i
                and (self._blocks[hashes[i - 1]].medium == medium)
            ):
                stretches[-1] = (stretches[-1][0], i + 1)
            else:
                stretches.append((i, i + 1))
        return stretches

    def _describe(
        self, event: BlockStored, hashes: list[int], start: int, stop: int, has_tokens: bool
    ) -> BlockStored:
        before = hashes[start - 1] if start else event.parent_block_hash
        size, extra_keys, lookahead = event.block_size, event.extra_keys, event.lookahead_token_ids
        return BlockStored(
            block_hashes=list(hashes[start:stop]),
            parent_block_hash=None if before is None else low_64_bits(before),
            token_ids=event.token_ids[start * size : stop * size] if has_tokens else [],
            block_size=size,
            lora_id=event.lora_id,
            medium=self._blocks[hashes[start]].medium,
            lora_name=event.lora_name,
            extra_keys=extra_keys[start:stop] if extra_keys is not None else None,
            session_id=event.session_id,
            lookahead_token_ids=lookahead[start:stop] if lookahead is not None else None,
        )

    def _removed(self, source: str, lost: Sequence[tuple[int, Place]]) -> list[Event]:
        """Return one event for each medium under which now lost blocks were announced."""
        gone: dict[str | None, list[BlockHash]] = {}
        held = self._held.get(source, {})
        for hashed, place in lost:
            if (hashed, place) not in held:
                continue
            del held[hashed, place]
            block = self._blocks[hashed]
            block.num_holders -= 1
            if block.num_holders == 0:
                gone.setdefault(block.medium, []).append(hashed)
                del self._blocks[hashed]
        return [BlockRemoved(hashes, medium) for medium, hashes in gone.items()]


class Consolidation:
    """Merges the events of several publishers. Use it from one thread; `run` occupies that thread.

    Args:
        sources: Endpoint of each publisher, and its replay endpoint or None.
        address: Where the merged events are published.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(self, sources: Sequence[tuple[str, str | None]], address: Address) -> None:
        self._consolidator = Consolidator()
        self._publisher: BatchPublisher[Event] = BatchPublisher(
            address, encode_batch, num_kept=NUM_KEPT, num_queued=NUM_QUEUED
        )
        self._subscribers: list[KVEventSubscriber] = []
        try:
            for source in sources:
                self._subscribers.append(KVEventSubscriber(*source, snapshots=True))
            self._publisher.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Consolidation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> Address:
        return self._publisher.address

    def run(self) -> None:
        """Merge and publish events forever."""
        poller = zmq.Poller()
        for subscriber in self._subscribers:
            subscriber.register(poller)
        while True:
            for subscriber in self._subscribers:
                self._take(subscriber)
            poller.poll()

    def _take(self, subscriber: KVEventSubscriber) -> None:
        """Process all events that a source has sent by now."""
        source = subscriber.endpoint
        while (news := subscriber.receive(0)) is not None:
            merged: list[Event] = []
            if not isinstance(news, Received) and not _continues(news):
                # Some of its earlier events are out of date, and it is unknown which.
                merged += self._consolidator.forget(source)
            if isinstance(news, Received | SnapshotPart):
                merged += self._consolidator.take(source, news.batch.events)
            if merged:
                self._publisher.publish(merged)

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for subscriber in self._subscribers:
            subscriber.close()
        self._publisher.close()


def _continues(news: News) -> bool:
    return isinstance(news, SnapshotPart) and not news.is_first
