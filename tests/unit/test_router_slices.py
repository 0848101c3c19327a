"""Slices of a batch are small and say the same, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from flexcache.router.feed import MAX_BLOCKS, slices

SIZE = 2


def stored(first: int, count: int, has_tokens: bool, has_extra: bool) -> BlockStored:
    hashes = list(range(first, first + count))
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=first - 1 if first else None,
        token_ids=[token for block in hashes for token in (block, -block)] if has_tokens else [],
        block_size=SIZE,
        lora_id=None,
        medium="GPU",
        lora_name="adapter",
        extra_keys=[(block,) for block in hashes] if has_extra else None,
        group_idx=0,
    )


some_count = st.integers(1, 3 * MAX_BLOCKS)
some_event = st.one_of(
    st.builds(stored, st.integers(0, 9), some_count, st.booleans(), st.booleans()),
    st.builds(lambda count: BlockRemoved(list(range(count)), "CPU"), some_count),
    st.just(AllBlocksCleared()),
)


def told(event: Event) -> list[object]:
    """Return one entry for each block of an event."""
    match event:
        case BlockStored(hashes, parent):
            parents = [parent, *hashes[:-1]]
            return [
                (
                    event.medium, event.lora_name, event.group_idx, block, before,
                    tuple(event.token_ids[i * SIZE : (i + 1) * SIZE]),
                    None if event.extra_keys is None else event.extra_keys[i],
                )
                for i, (block, before) in enumerate(zip(hashes, parents, strict=True))
            ]  # fmt: skip
        case BlockRemoved(hashes, medium):
            return [(medium, block) for block in hashes]
    return ["cleared"]


@given(st.lists(some_event, max_size=6))
def test_slices_are_small_and_say_the_same(events: list[Event]) -> None:
    batch = EventBatch(1.0, events, 3, num_unknown=2)
    parts = list(slices(batch))
    assert sum(part.num_unknown for part in parts) == 2
    for part in parts:
        assert (part.ts, part.data_parallel_rank) == (1.0, 3)
        num_blocks = sum(len(told(event)) for event in part.events)
        assert num_blocks <= MAX_BLOCKS
        assert num_blocks or part.num_unknown
    assert [block for part in parts for event in part.events for block in told(event)] == [
        block for event in events for block in told(event)
    ]


def test_an_event_whose_tokens_belong_to_no_block_stays_whole() -> None:
    count = MAX_BLOCKS + 1
    sparse = BlockStored(list(range(count)), None, [1, 2, 3], SIZE, None, "GPU", None, group_idx=1)
    (part,) = slices(EventBatch(1.0, [sparse]))
    assert part.events == [sparse]
