"""Cuts batches of KV events into parts that an index applies in well under a millisecond."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec

from flexcache.events.wire import BlockRemoved, BlockStored, Event, EventBatch

MAX_BLOCKS = 256


def slices(batch: EventBatch) -> Iterator[EventBatch]:
    """Yield the batch in parts of at most `MAX_BLOCKS` blocks, in order.

    The last part has the number of unknown events.
    """
    events: list[Event] = []
    room = MAX_BLOCKS
    for event in batch.events:
        for piece in _pieces(event):
            size = _num_blocks(piece)
            if events and size > room:
                yield msgspec.structs.replace(batch, events=events, num_unknown=0)
                events, room = [], MAX_BLOCKS
            events.append(piece)
            room -= size
    if events or batch.num_unknown:
        yield msgspec.structs.replace(batch, events=events)


def _num_blocks(event: Event) -> int:
    return len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1


def _pieces(event: Event) -> Iterator[Event]:
    """Yield an event in parts; whole if its tokens cannot be assigned to its blocks."""
    if _num_blocks(event) <= MAX_BLOCKS:
        yield event
    elif isinstance(event, BlockRemoved):
        hashes = iter(event.block_hashes)
        while part := list(islice(hashes, MAX_BLOCKS)):
            yield msgspec.structs.replace(event, block_hashes=part)
    elif isinstance(event, BlockStored):
        count, size = len(event.block_hashes), event.block_size
        if len(event.token_ids) not in (0, count * size):
            yield event
            return
        for start in range(0, count, MAX_BLOCKS):
            stop = start + MAX_BLOCKS
            yield msgspec.structs.replace(
                event,
                block_hashes=event.block_hashes[start:stop],
                parent_block_hash=event.block_hashes[start - 1]
                if start
                else event.parent_block_hash,
                token_ids=event.token_ids[start * size : stop * size],
                extra_keys=None if event.extra_keys is None else event.extra_keys[start:stop],
            )
