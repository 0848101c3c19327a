"""KV events of all kinds of publishers, applied to the router's index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from builders import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.cache.journal import Change, Cleared, Medium, Removed, Stored
from flexcache.events.held_blocks import HeldBlocks
from flexcache.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode_batch,
    describe,
    encode_batch,
)
from flexcache.ids import BlockKey, RequestInfo
from flexcache.router import names
from flexcache.router.events import TIER_OF, EventApplier
from flexcache.router.fleet import Tier
from flexcache.router.holdings import find
from flexcache.router.index import BlockForm, Holder, IndexPart, KeyChain, KVIndexer, Space
from flexcache.router.names import NamedBlocks

SIZE = 4


def name_of(tokens: Sequence[int], seed: str = "") -> int:
    """Return the name of the block that ends a prompt."""
    text = f"{seed}{list(tokens)}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def names_of(tokens: Sequence[int], seed: str = "", size: int = SIZE) -> list[int]:
    return [name_of(tokens[:stop], seed) for stop in range(size, len(tokens) + 1, size)]


def stored(
    tokens: Sequence[int],
    medium: str | None = "GPU",
    *,
    start: int = 0,
    size: int = SIZE,
    seed: str = "",
    has_tokens: bool = True,
    **fields: Any,
) -> BlockStored:
    """Return the event for a prompt's blocks from ``start`` on."""
    names = names_of(tokens, seed, size)
    return BlockStored(
        block_hashes=list(names[start:]),
        parent_block_hash=names[start - 1] if start and has_tokens else None,
        token_ids=list(tokens[start * size : len(names) * size]) if has_tokens else [],
        block_size=size,
        lora_id=None,
        medium=medium,
        lora_name=fields.pop("lora_name", None),
        **fields,
    )


def batch(*events: Event, rank: int | None = None) -> EventBatch:
    return EventBatch(0.0, list(events), rank)


def make(*told: tuple[str, Event]) -> EventApplier:
    applier = EventApplier(KVIndexer())
    for source, event in told:
        applier.apply(source, batch(event))
    applier.check()
    return applier


def depths(
    applier: EventApplier, tokens: Sequence[int] | np.ndarray, **prompt: Any
) -> dict[tuple[str, str], int]:
    """Return the tokens that each source has of a prompt, by tier."""
    found = find(applier.index, applier.forms, tokens, **prompt).tokens
    return {
        (holder.source, holder.tier.value): int(found[bit])
        for holder in applier.index.holders
        if (bit := applier.index.holders.bit(holder)) is not None and found[bit]
    }


PROMPT = list(range(100, 124))
"""Six blocks."""


def test_blocks_are_found_in_their_tiers() -> None:
    applier = make(
        ("e", stored(PROMPT[:8])),
        ("e", stored(PROMPT[:12], None)),
        ("e", stored(PROMPT, "CPU")),
        ("cache", stored(PROMPT[:16], "STORAGE")),
    )
    assert depths(applier, PROMPT) == {
        ("e", "gpu"): 12, ("e", "dram"): 24, ("cache", "disk"): 16
    }  # fmt: skip
    assert depths(applier, np.array(PROMPT[:9] + [0] * 9)) == {
        ("e", "gpu"): 8, ("e", "dram"): 8, ("cache", "disk"): 8
    }  # fmt: skip
    applier.apply("e", batch(BlockRemoved([names_of(PROMPT)[2]], "GPU")))
    assert depths(applier, PROMPT)["e", "gpu"] == 8
    applier.check()


def test_the_last_token_is_computed_if_the_caller_says_so() -> None:
    applier = make(("e", stored(PROMPT)))
    assert depths(applier, PROMPT, limit=len(PROMPT) - 1) == {("e", "gpu"): 20}


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("CPU_PINNED", "dram"), ("CPU_TIER1", "dram"), ("DISK", "disk"), ("CPU_TIER2", "disk"),
     ("EXTERNAL", "disk"), ("FS", "disk"), ("cpu", "dram")],
)  # fmt: skip
def test_media_of_other_publishers(medium: str, tier: str) -> None:
    assert depths(make(("e", stored(PROMPT, medium))), PROMPT) == {("e", tier): 24}


def test_an_unknown_medium_is_counted() -> None:
    applier = make(("e", stored(PROMPT, "TAPE")), ("e", BlockRemoved([1], "TAPE")))
    assert applier.ignored == {"medium": 2}
    assert applier.unknown_media == {"TAPE"}
    assert depths(applier, PROMPT) == {}


def test_removals_of_a_batch_are_applied_in_order() -> None:
    names = names_of(PROMPT)
    applier = make(("e", stored(PROMPT)), ("e", stored(PROMPT, "CPU")))
    applier.apply(
        "e",
        batch(
            BlockRemoved(list(names[5:]), "GPU"),
            BlockRemoved(list(names[4:5]), "GPU"),
            BlockRemoved(list(names[2:]), "CPU"),
            stored(PROMPT[:20], start=4),
            BlockRemoved(list(names[1:2]), "CPU"),
        ),
    )
    applier.check()
    assert depths(applier, PROMPT) == {("e", "gpu"): 20, ("e", "dram"): 4}
    assert applier.applied == {"stored": 3, "removed": 4}
    assert applier.blocks == {"stored": 13, "removed": 7}


def test_names_go_with_their_blocks() -> None:
    applier = make(("e", stored(PROMPT)), ("f", stored(PROMPT, "CPU")))
    table = applier._names[BlockForm(SIZE)]
    applier.apply("e", batch(BlockRemoved(list(names_of(PROMPT)), "GPU")))
    assert table.num_names == 6
    applier.apply("f", batch(BlockRemoved(list(names_of(PROMPT)), "CPU")))
    assert table.num_names == 0
    assert applier.index.num_blocks == 0


# -- what must not match -------------------------------------------------------------------------


def test_salts_adapters_and_images_do_not_match_each_other() -> None:
    image = [None, [["picture", 2]], [["picture", -2]], None, None, None]
    other = [None, [["painting", 2]], [["painting", -2]], None, None, None]
    applier = make(
        ("plain", stored(PROMPT)),
        ("salt", stored(PROMPT, seed="s", extra_keys=[["pepper"], *[None] * 5])),
        ("lora", stored(PROMPT, seed="l", extra_keys=[["tuned"]] * 6, lora_name="tuned")),
        ("both", stored(PROMPT, seed="b", lora_name="tuned",
                        extra_keys=[["tuned", "pepper"], *[["tuned"]] * 5])),
        ("image", stored(PROMPT, seed="i", extra_keys=image)),
        ("other", stored(PROMPT, seed="o", extra_keys=other)),
        ("embedded", stored(PROMPT, seed="e", extra_keys=[[b"digest"]] * 6)),
    )  # fmt: skip

    def holders(tokens: Sequence[int], **prompt: Any) -> dict[str, int]:
        return {source: depth for (source, _), depth in depths(applier, tokens, **prompt).items()}

    assert holders(PROMPT) == {"plain": 24, "image": 4, "other": 4}
    assert holders(PROMPT[:5]) == {"plain": 4, "image": 4, "other": 4}, "up to the image"
    assert holders(PROMPT, salt="pepper") == {"salt": 24}
    assert holders(PROMPT, salt="tuned") == {}
    assert holders(PROMPT, adapter="tuned") == {"lora": 24}
    assert holders(PROMPT, adapter="pepper") == {}
    assert holders(PROMPT, adapter="tuned", salt="pepper") == {"both": 24}
    assert holders(PROMPT, salt="digest") == {}


def test_an_image_goes_on_after_its_blocks() -> None:
    """Blocks behind an image depend on it through their parents, also in an event of their own."""
    extra = [None, [["picture", 2]]]
    applier = make(
        ("plain", stored(PROMPT)),
        ("image", stored(PROMPT[:8], seed="i", extra_keys=extra)),
        ("image", stored(PROMPT, seed="i", start=2)),
    )
    assert depths(applier, PROMPT) == {("plain", "gpu"): 24, ("image", "gpu"): 4}
    assert applier.index.num_blocks == 6 + 5


def test_an_adapter_without_a_name_is_not_the_base_model() -> None:
    applier = make(("e", msgspec.structs.replace(stored(PROMPT), lora_id=3)))
    assert depths(applier, PROMPT) == {}
    assert depths(applier, PROMPT, adapter="3") == {}


def test_extra_keys_of_only_some_blocks_are_not_believed() -> None:
    applier = make(("e", stored(PROMPT, extra_keys=[None])))
    assert depths(applier, PROMPT) == {}
    assert applier.num_waiting == 6


# -- block sizes ---------------------------------------------------------------------------------


def test_depths_of_different_block_sizes_are_compared_in_tokens() -> None:
    """The names of large blocks are those of their last small ones, as in vLLM."""
    applier = make(
        ("e", stored(PROMPT[:12])),
        ("e", stored(PROMPT, "CPU", size=8)),
        ("f", stored(PROMPT[:16], size=16)),
    )
    assert depths(applier, PROMPT) == {("e", "gpu"): 12, ("e", "dram"): 24, ("f", "gpu"): 16}
    assert depths(applier, PROMPT[:15]) == {("e", "gpu"): 12, ("e", "dram"): 8}
    applier.apply("e", batch(BlockRemoved([name_of(PROMPT[:8])], "GPU")))
    assert depths(applier, PROMPT[:11]) == {("e", "gpu"): 4, ("e", "dram"): 8}
    applier.apply("e", batch(BlockRemoved([name_of(PROMPT[:8])], "CPU")))
    assert depths(applier, PROMPT[:11]) == {("e", "gpu"): 4}
    applier.check()


def test_too_many_block_sizes_are_counted() -> None:
    sizes = range(1, 12)
    applier = make(*[("e", stored(PROMPT, size=size)) for size in sizes])
    assert applier.forms == [BlockForm(size) for size in range(1, 9)]
    assert applier.ignored == {"block_size": 3}
    applier.forget("e")
    while applier.sweep(1000):
        pass
    assert applier.forms == [], "no time is spent on sizes of which there are no blocks"
    applier.apply("f", batch(stored(PROMPT, size=12)))
    assert applier.forms == [BlockForm(12)]
    assert depths(applier, PROMPT) == {("f", "gpu"): 24}
    applier.apply("e", batch(msgspec.structs.replace(stored(PROMPT), block_size=0)))
    assert applier.ignored["malformed"] == 1


def test_a_publisher_whose_block_size_is_one_too_many_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Eight sizes of one publisher hide the blocks of another."""
    applier = make(*[("greedy", stored(PROMPT, size=size)) for size in range(1, 9)])
    for _ in range(3):
        applier.apply("hidden", batch(stored(PROMPT, size=12)))
    assert depths(applier, PROMPT).keys() == {("greedy", "gpu")}
    (line,) = caplog.messages
    assert "block_size_ignored publisher=hidden block_size=12" in line
    assert "known=" in line
    applier.forget("hidden")  # it restarted
    applier.apply("hidden", batch(stored(PROMPT, size=12)))
    assert len(caplog.messages) == 2


# -- groups of layers ----------------------------------------------------------------------------


def test_only_groups_of_full_attention_count() -> None:
    """All groups of a hybrid model use the same names."""
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    applier = make(("e", stored(PROMPT, **window)), ("e", stored(PROMPT[:16], **full)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 16}
    names = names_of(PROMPT)
    applier.apply("e", batch(BlockRemoved(list(names), "GPU", 0)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 16}
    applier.apply("e", batch(BlockRemoved(list(names[1:]), "GPU", 1)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 4}
    assert applier.ignored == {"group": 2}


def test_blocks_of_offloading_without_size_tokens_or_kind() -> None:
    """vLLM publishes such for some blocks that it moved below its GPU, with the GPU's groups."""
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}

    def moved(group: int) -> BlockStored:
        event = stored(PROMPT[:12], "CPU", has_tokens=False, group_idx=group)
        return msgspec.structs.replace(event, block_size=0)

    applier = make(("e", moved(1)))
    assert applier.ignored == {"group": 1}
    applier = make(("e", stored(PROMPT, **window)), ("e", stored(PROMPT, **full)))
    applier.apply("e", batch(moved(0)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 24}
    applier.apply("e", batch(moved(1)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 24, ("e", "dram"): 12}
    applier.apply("e", batch(BlockRemoved(list(names_of(PROMPT)), "GPU", 0)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 24, ("e", "dram"): 12}
    applier.apply("new", batch(msgspec.structs.replace(moved(0), block_hashes=[9])))
    assert applier.ignored["malformed"] == 1, "it published no size before"


@pytest.mark.parametrize(("group", "depth"), [(None, 24), (0, 24), (1, 0)])
def test_groups_without_a_kind_count_if_they_are_the_first(group: int | None, depth: int) -> None:
    applier = make(("e", stored(PROMPT, group_idx=group)))
    assert depths(applier, PROMPT).get(("e", "gpu"), 0) == depth
    applier.apply("e", batch(BlockRemoved(list(names_of(PROMPT)), "GPU", group)))
    assert depths(applier, PROMPT) == {}


# -- clearing, forgetting, ranks -----------------------------------------------------------------


def test_an_engines_clearing_means_its_gpu_and_a_caches_all_it_has() -> None:
    told = [(source, stored(PROMPT, medium)) for source, medium in (
        ("engine", "GPU"), ("engine", "CPU"), ("cache", "CPU"), ("cache", "STORAGE"),
    )]  # fmt: skip
    applier = make(*told)
    applier.apply("engine", batch(AllBlocksCleared()))
    assert depths(applier, PROMPT) == {
        ("engine", "dram"): 24, ("cache", "dram"): 24, ("cache", "disk"): 24
    }  # fmt: skip
    applier.apply("cache", batch(AllBlocksCleared()))
    assert depths(applier, PROMPT) == {("engine", "dram"): 24}
    assert applier.blocks["cleared"] == 18
    applier.apply("engine", batch(stored(PROMPT[:8])))
    assert depths(applier, PROMPT) == {("engine", "gpu"): 8, ("engine", "dram"): 24}
    applier.check()


def test_a_forgotten_source_is_learned_again() -> None:
    applier = make(("e", stored(PROMPT)), ("f", stored(PROMPT[:8])))
    applier.forget("e")
    assert depths(applier, PROMPT) == {("f", "gpu"): 8}
    applier.apply("e", batch(stored(PROMPT[:12])))
    assert depths(applier, PROMPT) == {("e", "gpu"): 12, ("f", "gpu"): 8}
    while applier.sweep(100):
        applier.check()
    assert depths(applier, PROMPT) == {("e", "gpu"): 12, ("f", "gpu"): 8}
    assert applier.index.num_blocks == 3
    assert applier._names[BlockForm(SIZE)].num_names == 3


def test_ranks_of_one_publisher_are_holders_of_their_own() -> None:
    applier = make()
    applier.apply("e", batch(stored(PROMPT), rank=0))
    applier.apply("e", batch(stored(PROMPT[:8]), rank=1))
    applier.apply("e", batch(AllBlocksCleared(), rank=0))
    assert applier.index.num_held(Holder("e", Tier.GPU, 0)) == 0
    assert applier.index.num_held(Holder("e", Tier.GPU, 1)) == 2


# -- names ---------------------------------------------------------------------------------------


def test_blocks_without_tokens_are_found_once_any_publisher_tells_them() -> None:
    restored = stored(PROMPT, "STORAGE", has_tokens=False)
    applier = make(("cache", restored))
    assert depths(applier, PROMPT) == {}
    assert applier.num_waiting == 6
    applier.apply("engine", batch(stored(PROMPT[:16])))
    assert depths(applier, PROMPT) == {("cache", "disk"): 16, ("engine", "gpu"): 16}
    assert applier.num_waiting == 2
    applier.apply("cache", batch(BlockRemoved(list(names_of(PROMPT)[5:]), "STORAGE")))
    assert applier.num_waiting == 1
    applier.apply("engine", batch(stored(PROMPT, start=4)))
    assert depths(applier, PROMPT) == {("cache", "disk"): 20, ("engine", "gpu"): 24}
    applier.check()


def test_blocks_without_tokens_that_are_known_already() -> None:
    applier = make(("engine", stored(PROMPT)))
    applier.apply("cache", batch(stored(PROMPT[:12], "STORAGE", has_tokens=False)))
    assert depths(applier, PROMPT) == {("cache", "disk"): 12, ("engine", "gpu"): 24}


def test_blocks_of_an_unknown_parent_wait_for_it() -> None:
    applier = make(("e", stored(PROMPT, start=4)), ("f", stored(PROMPT[:16], start=2)))
    assert depths(applier, PROMPT) == {}
    applier.apply("g", batch(stored(PROMPT[:8])))
    assert depths(applier, PROMPT) == {("g", "gpu"): 8}, "the others lack the first blocks"
    assert applier.num_waiting == 0
    applier.apply("f", batch(stored(PROMPT[:8])))
    applier.apply("e", batch(stored(PROMPT[:16])))
    assert depths(applier, PROMPT) == {("g", "gpu"): 8, ("f", "gpu"): 16, ("e", "gpu"): 24}
    applier.check()


def test_waiting_blocks_can_be_removed_and_forgotten() -> None:
    applier = make(("e", stored(PROMPT, start=2)), ("f", stored(PROMPT, start=2)))
    applier.apply("e", batch(BlockRemoved(list(names_of(PROMPT)[4:]), "GPU")))
    applier.forget("f")
    for source in "ef":
        applier.apply(source, batch(stored(PROMPT[:8])))
    assert depths(applier, PROMPT) == {("e", "gpu"): 16, ("f", "gpu"): 8}
    applier.check()


def test_other_seeds_add_names() -> None:
    applier = make(("e", stored(PROMPT)), ("f", stored(PROMPT[:16], seed="random")))
    assert applier.index.num_blocks == 6
    applier.apply("f", batch(BlockRemoved([name_of(PROMPT[:16], "random")], "GPU")))
    assert depths(applier, PROMPT) == {("e", "gpu"): 24, ("f", "gpu"): 12}
    applier.apply("e", batch(BlockRemoved(list(names_of(PROMPT)), "GPU")))
    assert depths(applier, PROMPT) == {("f", "gpu"): 12}
    applier.apply("f", batch(stored(PROMPT, seed="random", start=3)))
    assert depths(applier, PROMPT) == {("f", "gpu"): 24}
    applier.check()


def test_names_that_mean_other_blocks_elsewhere() -> None:
    """A publisher may number its blocks."""

    def numbered(tokens: list[int]) -> BlockStored:
        return msgspec.structs.replace(
            stored(tokens), block_hashes=list(range(1, len(tokens) // SIZE + 1))
        )

    other = list(range(300, 324))
    applier = make(("e", numbered(PROMPT)), ("f", numbered(other)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 24}
    assert depths(applier, other) == {("f", "gpu"): 24}
    applier.apply("f", batch(BlockRemoved([6], "GPU")))
    applier.apply("e", batch(BlockRemoved([5, 6], "GPU")))
    assert depths(applier, PROMPT) == {("e", "gpu"): 16}
    assert depths(applier, other) == {("f", "gpu"): 20}
    applier.check()
    applier.apply("f", batch(numbered(PROMPT), BlockRemoved([6], "GPU")))
    assert depths(applier, PROMPT)["f", "gpu"] == 20, "a number means what it was told to mean last"


def test_what_waits_is_bounded() -> None:
    index = KVIndexer()
    names = NamedBlocks(index, max_waiting=10, max_loose=8)
    holder = Holder("e", Tier.GPU)
    applier = EventApplier(index)
    for first in range(20):
        event = stored([first] * 12, start=1)
        run = applier._run(event, list(event.block_hashes))  # type: ignore[arg-type]
        assert run is not None
        names.stored(holder, run)
        names.check()
    assert names.waiting.num_blocks == 10
    assert names.waiting.num_refused == 30


def test_a_full_index_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    applier = EventApplier(KVIndexer(max_blocks=4))
    for first in range(0, 12, 2):
        tokens = [first] * 2 * SIZE
        event = BlockStored([first, first + 1], None, tokens, SIZE, None, "GPU", None)
        applier.apply("source", EventBatch(1.0, [event]))
    applier.check()
    assert applier.index.num_refused == 8
    (record,) = [each for each in caplog.records if "index_full" in each.message]
    assert "max_blocks=4" in record.message and "refused_blocks=2" in record.message


def test_malformed_events_do_no_harm() -> None:
    wrong = [
        msgspec.structs.replace(stored(PROMPT), token_ids=[-1] * 24),
        msgspec.structs.replace(stored(PROMPT), token_ids=PROMPT[:5]),
        msgspec.structs.replace(stored(PROMPT), block_hashes=[]),
        BlockRemoved([], "GPU"),
        BlockRemoved([-5, 2**70, b"", b"x" * 40], "GPU"),
    ]
    applier = make(*[("e", event) for event in wrong])
    assert depths(applier, PROMPT) == {}
    applier.apply("e", batch(stored(PROMPT)))
    assert depths(applier, PROMPT) == {("e", "gpu"): 24}


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3)
    | st.binary(max_size=3) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "New"]),
                "block_hashes": st.lists(st.integers(0, 3) | st.binary(max_size=9), max_size=3),
                "token_ids": st.lists(st.integers(-1, 2**32), max_size=6),
                "block_size": st.integers(-1, 3),
            },
            optional={
                "medium": st.sampled_from(["GPU", "gpu", "?", None]),
                "parent_block_hash": st.integers(0, 3),
                "lora_name": st.text(max_size=1),
                "lora_id": st.integers(),
                "extra_keys": st.lists(anything, max_size=3),
                "group_idx": st.integers(-1, 2),
                "kv_cache_spec_kind": st.text(max_size=3),
            },
        ),
        max_size=6,
    )
)
def test_whatever_can_be_decoded_can_be_applied(events: list[dict[str, Any]]) -> None:
    applier = make(("e", stored(PROMPT)))
    for event in events:
        try:
            decoded = decode_batch(msgspec.msgpack.encode([1.0, [event], 0]))
        except (ValueError, OverflowError):
            continue
        applier.apply("other", decoded)
        applier.check()
    assert depths(applier, PROMPT)["e", "gpu"] == 24


# -- publishers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hashes", ["int", "int_first", "bytes"])
def test_events_of_this_cache(hashes: str) -> None:
    keys = [BlockKey(hashlib.sha256(bytes([at])).digest()) for at in range(6)]
    info = RequestInfo(lora_name="tuned", lora_id=1)
    extra = [["tuned", "pepper"], *[["tuned"]] * 5]
    changes: list[Change] = [
        Stored(Medium.CPU, ROOT, None, keys[:4], SIZE, PROMPT[:16], info, list(extra[:4])),
        Stored(Medium.CPU, ROOT, keys[3], keys[4:], SIZE, PROMPT[16:], info, list(extra[4:])),
        Stored(Medium.STORAGE, ROOT, None, keys[:5], SIZE),
        Removed(Medium.CPU, ROOT, keys[5:]),
    ]
    applier = EventApplier(KVIndexer())

    def publish(changes: list[Change]) -> None:
        events = [describe(change, hashes) for change in changes]
        applier.apply("cache", decode_batch(encode_batch(1.0, events)))
        applier.check()

    publish(changes)
    found = {"adapter": "tuned", "salt": "pepper"}
    assert depths(applier, PROMPT, **found) == {("cache", "dram"): 20, ("cache", "disk"): 20}
    assert depths(applier, PROMPT) == {}
    publish([Cleared()])
    assert depths(applier, PROMPT, **found) == {}


@given(
    st.lists(st.sampled_from([1, 2]), min_size=4, max_size=24),
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_a_block_is_found_by_prompts_that_share_its_lookahead(
    prompt: list[int], other: list[int], lookahead: int, cut: int
) -> None:
    count = (len(prompt) - lookahead) // SIZE
    applier = EventApplier(KVIndexer())
    for start in range(0, count, cut):  # as an engine computes it, chunk by chunk
        ends = [at * SIZE for at in range(start + 1, min(start + cut, count) + 1)]
        event = msgspec.structs.replace(
            stored(prompt[: ends[-1]], start=start, seed=str(prompt)),
            lookahead_token_ids=[prompt[end : end + lookahead] for end in ends],
        )
        applier.apply("e", decode_batch(encode_batch(1.0, [event])))
    applier.check()
    for asked in (prompt, other, prompt[: len(other)] + other):
        shared = next((at for at, (a, b) in enumerate(zip(prompt, asked, strict=False)) if a != b),
                      min(len(prompt), len(asked)))  # fmt: skip
        found = max(0, min(count, (shared - lookahead) // SIZE))
        assert depths(applier, asked) == ({("e", "gpu"): found * SIZE} if found else {})


def test_ssd_and_store_go_one_by_one_if_locality_is_told() -> None:
    keys = [BlockKey(hashlib.sha256(bytes([at])).digest()) for at in range(6)]
    places = (Medium.LOCAL_CPU, Medium.LOCAL_STORAGE, Medium.REMOTE_STORAGE)
    applier = EventApplier(KVIndexer())

    def publish(*changes: Change) -> list[str | None]:
        payload = encode_batch(1.0, [describe(change, "int") for change in changes])
        read = decode_batch(payload)
        applier.apply("cache", read)
        applier.check()
        return [event.locality for event in read.events if not isinstance(event, AllBlocksCleared)]

    told = publish(*(Stored(place, ROOT, None, keys, SIZE, PROMPT) for place in places))
    assert told == ["LOCAL", "LOCAL", "REMOTE"]
    publish(Removed(Medium.LOCAL_STORAGE, ROOT, keys[2:]), Removed(Medium.LOCAL_CPU, ROOT, keys))
    found = find(applier.index, applier.forms, PROMPT).tokens
    assert sorted(found) == [0, 0, 8, 24]
    publish(Removed(Medium.REMOTE_STORAGE, ROOT, keys))
    assert depths(applier, PROMPT) == {("cache", "disk"): 8}


def test_sglangs_salt_is_a_field_of_its_own() -> None:
    """Each event of a salted prompt has it; it is hashed once."""
    begin = stored(PROMPT[: 2 * SIZE], seed="salted", cache_salt="pepper")
    rest = stored(PROMPT, start=2, seed="salted", cache_salt="pepper")
    applier = make(("e", begin), ("e", rest))
    assert depths(applier, PROMPT, salt="pepper") == {("e", "gpu"): 24}
    assert depths(applier, PROMPT) == depths(applier, PROMPT, salt="basil") == {}


def test_sglang_clears_its_host_pool_with_its_gpu() -> None:
    told = [("sglang", stored(PROMPT, medium)) for medium in ("GPU", "CPU_PINNED", "STORAGE")]
    applier = make(*told)
    applier.apply("sglang", batch(AllBlocksCleared()))
    assert depths(applier, PROMPT) == {("sglang", "disk"): 24}


def test_names_below_dram_are_kept_where_they_are_asked_for_as_long_as_blocks_are_held() -> None:
    applier = EventApplier(KVIndexer())
    applier.on_disk.keep(["a"])
    for source in ("a", "b"):
        for medium in ("GPU", "CPU", "STORAGE"):
            applier.apply(source, batch(stored(PROMPT, medium)))
    names = names_of(PROMPT)
    keys = KeyChain(Space(SIZE)).block_keys(PROMPT)
    holder = Holder("a", Tier.DISK)
    assert [applier.on_disk.find(holder, key) for key in keys] == names
    assert len(applier.on_disk) == len(names)
    applier.apply("a", batch(BlockRemoved(list(names[1:]), "STORAGE")))
    assert len(applier.on_disk) == 1
    applier.apply("a", batch(BlockRemoved(list(names), "CPU")))
    assert applier.on_disk.find(holder, keys[0]) == names[0]
    applier.on_disk.keep(["b"])
    assert len(applier.on_disk) == 0
    applier.check()


# -- against a model -----------------------------------------------------------------------------

SOURCES = ("a", "b", "c")
SEED = {"a": "", "b": "", "c": "of its own"}
ASKED = ("a", "c")
"""Sources whose blocks below DRAM are asked for by name."""
some_source = st.sampled_from(SOURCES)
some_medium = st.sampled_from(["GPU", "CPU", "STORAGE"])
some_path = st.lists(st.integers(0, 1), min_size=1, max_size=5)


class EventsMachine(RuleBasedStateMachine):
    """Any order of events, tokens and parents told or not: nothing is held that was not told, and
    nothing that was told gets lost."""

    def __init__(self) -> None:
        super().__init__()
        self.applier = EventApplier(KVIndexer())
        self.applier.on_disk.keep(ASKED)
        self.chain = KeyChain(Space(1))
        self.told: dict[tuple[str, str], set[tuple[int, ...]]] = {}

    def apply(self, source: str, event: Event) -> None:
        self.applier.apply(source, batch(event))

    def held(self, source: str, medium: str) -> set[tuple[int, ...]]:
        return self.told.setdefault((source, medium), set())

    @rule(source=some_source, medium=some_medium, path=some_path, start=st.integers(0, 4),
          has_tokens=st.booleans())  # fmt: skip
    def store(
        self, source: str, medium: str, path: list[int], start: int, has_tokens: bool
    ) -> None:
        start = min(start, len(path) - 1)
        event = stored(path, medium, start=start, size=1, seed=SEED[source], has_tokens=has_tokens)
        self.apply(source, event)
        self.held(source, medium).update(
            tuple(path[:stop]) for stop in range(start + 1, len(path) + 1)
        )

    @rule(source=some_source, medium=some_medium, paths=st.lists(some_path, max_size=4))
    def remove(self, source: str, medium: str, paths: list[list[int]]) -> None:
        names = [name_of(path, SEED[source]) for path in paths]
        self.apply(source, BlockRemoved(list(names), medium))
        self.held(source, medium).difference_update(map(tuple, paths))

    @rule(source=some_source)
    def clear(self, source: str) -> None:
        has_gpu = any(h.tier is Tier.GPU for h in self.applier.holders(source))
        self.apply(source, AllBlocksCleared())
        for (teller, medium), held in self.told.items():
            if teller == source and (medium == "GPU" or not has_gpu):
                held.clear()

    @rule(source=some_source)
    def forget(self, source: str) -> None:
        self.applier.forget(source)
        for (teller, _), held in self.told.items():
            if teller == source:
                held.clear()

    @rule(num_blocks=st.sampled_from([1, 700, 100_000]))
    def sweep(self, num_blocks: int) -> None:
        self.applier.sweep(num_blocks)

    @rule()
    def tell_all(self) -> None:
        """Once a source tells all tokens, every holding is found."""
        teller = {seed: f"teller {seed}" for seed in SEED.values()}
        for seed, source in teller.items():
            for number in range(2**5):
                path = [number >> at & 1 for at in range(5)]
                self.apply(source, stored(path, size=1, seed=seed))
        assert self.applier.num_waiting == 0
        for (source, medium), paths in self.told.items():
            assert self.indexed(source, medium) == {self.key(path) for path in paths}
        for source in teller.values():
            self.applier.forget(source)

    def key(self, path: tuple[int, ...]) -> int:
        return self.chain.block_keys(path)[-1]

    def indexed(self, source: str, medium: str) -> set[int]:
        """Return the keys that the index has for a holder."""
        bit = self.applier.index.holders.bit(Holder(source, TIER_OF[medium]))
        return {
            key
            for shard in self.applier.index._shards
            if shard
            for key, mask in shard.items()
            if bit is not None and mask >> bit & 1
        }

    @invariant()
    def holds_what_was_told(self) -> None:
        self.applier.check()
        for (source, medium), paths in self.told.items():
            indexed = self.indexed(source, medium)
            assert indexed <= {self.key(path) for path in paths}
            table = self.applier._names.get(BlockForm(1))
            waiting = table.waiting.num_held(Holder(source, TIER_OF[medium])) if table else 0
            assert len(indexed) + waiting == len(paths)

    @invariant()
    def knows_what_caches_call_their_blocks(self) -> None:
        on_disk = self.applier.on_disk
        num_known = 0
        for (source, medium), paths in self.told.items():
            holder, indexed = Holder(source, TIER_OF[medium]), self.indexed(source, medium)
            for path in paths:
                name = on_disk.find(holder, self.key(path))
                num_known += name is not None
                assert name in (None, name_of(path, SEED[source]))
                if source in ASKED and medium == "STORAGE":
                    assert (name is not None) == (self.key(path) in indexed)
        assert num_known == len(on_disk)


TestEvents = EventsMachine.TestCase
TestEvents.settings = settings(stateful_step_count=20)


class TakeoverMachine(RuleBasedStateMachine):
    """A router takes over what another knows, part by part, while events go on: with all events
    from the beginning of the takeover on, it has what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = mock.patch.multiple(names, _NUM_SHARDS=4, _MASK=3, _PART=2, _SLICE=2)
        self.shards.start()
        self.chain = KeyChain(Space(1))
        self.first = EventApplier(KVIndexer())
        self.first.on_disk.keep(ASKED)
        self.held: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        self.no_gpu: set[str] = set()
        """Sources that cleared before they told of a GPU: they never do. An event clears the GPU
        where one is known, and else all; an engine tells of its GPU first."""
        self.begin()

    def teardown(self) -> None:
        self.finish()
        self.shards.stop()

    def begin(self) -> None:
        self.second = EventApplier(KVIndexer())
        self.second.on_disk.keep(ASKED)
        for known in self.first.known(SOURCES):
            self.second.begin(known, self.first.runs)
        self.missed: list[tuple[str, Event | None]] = []
        self.cursor: int | None = 0

    def tell(self, source: str, event: Event | None) -> None:
        """Have a source publish; None: it restarts."""
        self.missed.append((source, event))
        self.note(self.first, source, event)

    def note(self, applier: EventApplier, source: str, event: Event | None) -> None:
        if event is None:
            applier.forget(source)
        else:
            applier.apply(source, batch(event))

    @rule(source=some_source, medium=some_medium, path=some_path, start=st.integers(0, 4),
          has_tokens=st.booleans())  # fmt: skip
    def store(
        self, source: str, medium: str, path: list[int], start: int, has_tokens: bool
    ) -> None:
        if medium == "GPU" and source in self.no_gpu:
            return
        held = self.held.setdefault((source, medium), set())
        start = min(start, len(path) - 1)
        event = stored(path, medium, start=start, size=1, seed=SEED[source], has_tokens=has_tokens)
        self.tell(source, event)
        held.update(tuple(path[:stop]) for stop in range(start + 1, len(path) + 1))

    @rule(source=some_source, medium=some_medium, path=some_path)
    def remove(self, source: str, medium: str, path: list[int]) -> None:
        held = self.held.setdefault((source, medium), set())
        gone = {each for each in held if each[: len(path)] == tuple(path)}
        self.tell(source, BlockRemoved([name_of(each, SEED[source]) for each in gone], medium))
        held -= gone

    @rule(source=some_source)
    def clear(self, source: str) -> None:
        self.tell(source, AllBlocksCleared())
        media = [medium for teller, medium in self.held if teller == source]
        if "GPU" not in media:
            self.no_gpu.add(source)
        for medium in ["GPU"] if "GPU" in media else media:
            self.held[source, medium].clear()

    @rule(source=some_source)
    def restart(self, source: str) -> None:
        self.no_gpu.discard(source)
        self.tell(source, None)
        self.held = {place: paths for place, paths in self.held.items() if place[0] != source}

    @rule(num_blocks=st.sampled_from([1, 100_000]))
    def sweep(self, num_blocks: int) -> None:
        self.first.sweep(num_blocks)

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        for _ in range(count):
            if self.cursor is None:
                return
            part, self.cursor = self.first.part(self.cursor, SOURCES)
            if part is not None:
                sent = msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=IndexPart)
                list(self.second.take(sent, SOURCES))
        self.second.check()

    @rule()
    def finish(self) -> None:
        while self.cursor is not None:
            self.take(1)
        for source, event in self.missed:
            self.note(self.second, source, event)
        self.second.check()
        for seed in SEED.values():  # once all tokens are told, every holding is found
            for number in range(2**5):
                path = [number >> at & 1 for at in range(5)]
                self.second.apply("teller", batch(stored(path, size=1, seed=seed)))
        assert self.second.num_waiting == 0
        for (source, medium), paths in self.held.items():
            keys = {self.chain.block_keys(path)[-1] for path in paths}
            holder = Holder(source, TIER_OF[medium])
            assert self.keys(self.second, holder) == keys
            asked = source in ASKED and medium == "STORAGE"
            for path in paths if asked else ():
                name = self.second.on_disk.find(holder, self.chain.block_keys(path)[-1])
                assert name == name_of(path, SEED[source])
        self.begin()

    @staticmethod
    def keys(applier: EventApplier, holder: Holder) -> set[int]:
        bit = applier.index.holders.bit(holder)
        shards = [] if bit is None else filter(None, applier.index._shards)
        return {key for shard in shards for key, mask in shard.items() if mask >> (bit or 0) & 1}


TestTakeover = TakeoverMachine.TestCase
TestTakeover.settings = settings(stateful_step_count=20)


def taken_over(first: EventApplier, max_blocks: int = 100) -> EventApplier:
    sources = [holder.source for holder in first.index.holders]
    second, cursor = EventApplier(KVIndexer(max_blocks)), 0
    second.on_disk.keep(first.on_disk.sources)
    for known in first.known(dict.fromkeys(sources)):
        second.begin(known, first.runs)
    while cursor is not None:
        part, cursor = first.part(cursor, sources)
        for _ in second.take(part, sources) if part else ():
            second.check()
    return second


def test_names_that_mean_another_block_at_one_source_are_taken_over() -> None:
    """Two engines call different blocks alike."""
    first = make(("a", stored(PROMPT)), ("b", stored(PROMPT, lora_name="x")))
    second = taken_over(first)
    for applier in (first, second):
        applier.apply("b", batch(BlockRemoved(list(names_of(PROMPT)[4:]), "GPU")))
        longer = [*PROMPT[:16], *range(8)]
        event = stored(longer, start=4, lora_name="x")
        event.block_hashes[:] = names_of(longer, "b's")[4:]
        applier.apply("b", batch(event))
        assert depths(applier, longer, adapter="x") == {("b", "gpu"): 24}
        assert depths(applier, PROMPT) == {("a", "gpu"): 24}
        assert depths(applier, PROMPT, adapter="x") == {("b", "gpu"): 16}
        applier.check()


@pytest.mark.parametrize("order", [("engine", "cache"), ("cache", "engine")])
def test_a_cache_is_asked_for_its_blocks_by_its_own_names(order: tuple[str, str]) -> None:
    first = EventApplier(KVIndexer())
    first.on_disk.keep(["cache"])
    for source in order:
        medium = "STORAGE" if source == "cache" else "GPU"
        first.apply(source, batch(stored(PROMPT, medium, seed=source)))
    second, holder = taken_over(first), Holder("cache", Tier.DISK)
    keys = KeyChain(Space(SIZE)).block_keys(PROMPT)
    assert [second.on_disk.find(holder, key) for key in keys] == names_of(PROMPT, "cache")
    assert depths(second, PROMPT) == {("engine", "gpu"): 24, ("cache", "disk"): 24}


def test_what_events_rely_on_is_taken_over() -> None:
    """Groups of layers, media, block sizes and runs that later events do not tell again."""
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    first = make(
        ("e", stored(PROMPT, **full)), ("e", stored(PROMPT[:8], **window)),
        ("sglang", stored(PROMPT)), ("sglang", stored(PROMPT, "CPU_PINNED")),
        ("sglang", stored(PROMPT, "STORAGE")),
    )  # fmt: skip
    second = taken_over(first)
    for applier in (first, second):
        applier.apply("e", batch(BlockRemoved(list(names_of(PROMPT)[1:]), "GPU", group_idx=0)))
        applier.apply("e", batch(BlockRemoved(list(names_of(PROMPT)[5:]), "GPU", group_idx=1)))
        applier.apply("sglang", batch(AllBlocksCleared()))
        no_size = msgspec.structs.replace(
            stored(PROMPT, "CPU", has_tokens=False), block_size=0, group_idx=1
        )
        applier.apply("e", batch(no_size))
        assert depths(applier, PROMPT) == {
            ("e", "gpu"): 20, ("e", "dram"): 24, ("sglang", "disk"): 24,
        }  # fmt: skip
        applier.check()


def test_a_full_index_takes_no_more_over() -> None:
    second = taken_over(make(("e", stored(PROMPT))), max_blocks=4)
    assert second.index.num_blocks == 4 and second.index.num_refused == 2
    second.forget("e")
    while second.sweep(100_000):
        pass
    assert second.index.num_blocks == 0


@pytest.mark.parametrize("locality", [False, True])
def test_a_cache_that_tells_its_ssd_by_runs_is_found_in_steps_of_a_run(locality: bool) -> None:
    """A publisher, live and by a snapshot: what is found is never more than what is there."""
    disk = Medium.LOCAL_STORAGE if locality else Medium.STORAGE
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 1000, 40 * SIZE).tolist()
    names = [BlockKey(name.to_bytes(8, "big")) for name in names_of(prompt)]
    info = RequestInfo(lora_name="tuned")
    found = {"adapter": "tuned", "salt": "pepper"}

    def store(medium: Medium, start: int, stop: int) -> Stored:
        extra = [["tuned", "pepper"] if not block else ["tuned"] for block in range(start, stop)]
        tokens = prompt[start * SIZE : stop * SIZE]
        parent = names[start - 1] if start else None
        return Stored(medium, ROOT, parent, names[start:stop], SIZE, tokens, info, extra)

    held = HeldBlocks(by_runs=True)
    live = make()

    def tell(*changes: Change) -> dict[tuple[str, str], int]:
        events = [describe(change, "int") for change in held.apply(changes)]
        live.apply("c", decode_batch(encode_batch(1.0, events)))
        live.check()
        held.check()
        late, cursor = make(), 0
        while cursor is not None:
            page, cursor = held.page(cursor)  # type: ignore[assignment]
            late.apply("c", EventBatch(1.0, [describe(change, "int") for change in page]))
        late.check()
        assert depths(late, prompt, **found) == depths(live, prompt, **found)
        assert live.num_waiting == late.num_waiting == 0
        return depths(live, prompt, **found)

    assert tell(store(disk, 0, 10)) == {}
    assert tell(store(Medium.CPU, 0, 40)) == {("c", "dram"): 40 * SIZE}
    assert tell(store(disk, 10, 20), store(disk, 20, 31))["c", "disk"] == 16 * SIZE
    assert tell(store(disk, 31, 40))["c", "disk"] == 32 * SIZE
    assert live.index.num_blocks == 40
    assert live.index.num_held(Holder("c", Tier.DISK)) == 2
    tell(Removed(disk, ROOT, names[33:]))
    told = tell(Removed(Medium.CPU, ROOT, names[10:]), Removed(disk, ROOT, names[31:33]))
    assert told == {("c", "dram"): 10 * SIZE, ("c", "disk"): 16 * SIZE}
    assert depths(live, prompt) == {}, "without adapter and salt it is another prompt"
    tell(store(Medium.CPU, 10, 40))  # what is written to SSD is in DRAM then
    assert tell(store(disk, 31, 40))["c", "disk"] == 32 * SIZE
    fork = [*names[:20], *(BlockKey(bytes([block]) * 8) for block in range(20))]
    tokens = list(range(5000, 5000 + 20 * SIZE))
    for medium in (Medium.CPU, disk):
        tell(Stored(medium, ROOT, names[19], fork[20:], SIZE, tokens, info, [["tuned"]] * 20))
    tell(Removed(Medium.CPU, ROOT, fork[20:]))
    assert depths(live, prompt[: 20 * SIZE] + tokens, **found) == {
        ("c", "dram"): 20 * SIZE, ("c", "disk"): 32 * SIZE,
    }  # fmt: skip
    assert tell(Cleared()) == {}


def test_runs_that_are_restored_without_tokens_are_found_once_these_are_known() -> None:
    prompt = list(range(40 * SIZE))
    names = [BlockKey(name.to_bytes(8, "big")) for name in names_of(prompt)]
    held, applier = HeldBlocks(by_runs=True), make()

    def tell(change: Change) -> None:
        events = [describe(each, "int") for each in held.apply([change])]
        applier.apply("c", EventBatch(1.0, events))
        held.check()

    tell(Stored(Medium.STORAGE, ROOT, None, names[:20], SIZE))
    tell(Stored(Medium.STORAGE, ROOT, names[19], names[20:], SIZE, prompt[20 * SIZE :]))
    assert depths(applier, prompt) == {}
    tell(Stored(Medium.CPU, ROOT, None, names, SIZE, prompt))  # now their tokens are known
    assert depths(applier, prompt) == {("c", "dram"): 40 * SIZE, ("c", "disk"): 32 * SIZE}
    tell(Removed(Medium.STORAGE, ROOT, names[20:]))
    assert depths(applier, prompt)["c", "disk"] == 16 * SIZE
