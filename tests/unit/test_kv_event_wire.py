"""KV events on the wire, against the bytes of vLLM's structs of both generations."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from builders import ROOT
from hypothesis import given
from hypothesis import strategies as st

from flexcache.cache.journal import Change, Cleared, Medium, Removed, Stored
from flexcache.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
    describe,
    encode_batch,
    low_64_bits,
)
from flexcache.ids import BlockKey, RequestInfo

DIGEST = bytes(31) + b"\x07"
EVENTS: list[Event] = [
    BlockStored([1], None, [1, 2, 3, 4], 4, None, "CPU", None),
    BlockStored(
        [DIGEST], 1, [5, 6, 7, 8], 4, None, "STORAGE", None,
        extra_keys=[["salt"]], group_idx=0, kv_cache_spec_kind="full_attention",
    ),
    BlockRemoved([1], "CPU"),
    AllBlocksCleared(),
]  # fmt: skip
GOLDEN = {
    "map": (
        "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101"
        "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a"
        "6504a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c08ba474797065ab426c6f63"
        "6b53746f726564ac626c6f636b5f68617368657391c420000000000000000000000000000000000000000000"
        "0000000000000000000007b1706172656e745f626c6f636b5f6861736801a9746f6b656e5f69647394050607"
        "08aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da753544f52414745a96c6f72615f6e"
        "616d65c0aa65787472615f6b6579739191a473616c74a967726f75705f69647800b26b765f63616368655f73"
        "7065635f6b696e64ae66756c6c5f617474656e74696f6e83a474797065ac426c6f636b52656d6f766564ac62"
        "6c6f636b5f6861736865739101a66d656469756da343505581a474797065b0416c6c426c6f636b73436c6561"
        "72656400"
    ),
    "legacy_array": (
        "93cb3ff8000000000000949cab426c6f636b53746f7265649101c0940102030404c0a3435055c0c0c0c0c09c"
        "ab426c6f636b53746f72656491c4200000000000000000000000000000000000000000000000000000000000"
        "00000701940506070804c0a753544f52414745c09191a473616c7400ae66756c6c5f617474656e74696f6ec0"
        "94ac426c6f636b52656d6f7665649101a3435055c091b0416c6c426c6f636b73436c656172656400"
    ),
}


def test_a_batch_is_encoded_as_vllm_does() -> None:
    # Headers of maps may be wider: their width follows from the fields that a struct could have.
    read = msgspec.msgpack.decode
    batch, vllms = read(encode_batch(1.5, EVENTS, 0)), read(bytes.fromhex(GOLDEN["map"]))
    assert batch == vllms
    assert [list(event) for event in batch[1]] == [list(event) for event in vllms[1]]


@pytest.mark.parametrize("layout", GOLDEN)
def test_what_vllm_encodes_is_read(layout: str) -> None:
    batch = decode_batch(bytes.fromhex(GOLDEN[layout]))
    assert (batch.ts, batch.events, batch.data_parallel_rank) == (1.5, EVENTS, 0)


@pytest.mark.parametrize("length", range(6, 15))
def test_stored_arrays_of_every_length_are_read(length: int) -> None:
    array = ["BlockStored", [3], None, [1, 2], 2, None, "GPU", "lora", None, 5, "mamba", 7, "x"]
    array += ["y"]
    (event,) = decode_batch(msgspec.msgpack.encode([1, [array[:length]]])).events
    expected = BlockStored(
        [3], None, [1, 2], 2, None,
        "GPU" if length > 6 else None, "lora" if length > 7 else None, None,
        5 if length > 9 else None, "mamba" if length > 10 else None, 7 if length > 11 else None,
    )  # fmt: skip
    assert event == expected


@pytest.mark.parametrize("length", range(2, 7))
def test_removed_arrays_of_every_length_are_read(length: int) -> None:
    array = ["BlockRemoved", [3], "CPU", 1, "LOCAL", "me"]
    (event,) = decode_batch(msgspec.msgpack.encode([1, [array[:length]]])).events
    assert event == BlockRemoved([3], "CPU" if length > 2 else None, 1 if length > 3 else None)


def test_a_batch_may_be_a_map_and_events_may_have_more_fields() -> None:
    newer = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "ownership": "x"}
    content = {"ts": 2.0, "events": [newer], "data_parallel_rank": 3, "later": 1}
    batch = decode_batch(msgspec.msgpack.encode(content))
    assert (batch.events, batch.data_parallel_rank) == ([BlockRemoved([1], "GPU")], 3)


def test_events_of_unknown_types_are_left_out_and_counted() -> None:
    content = [0.0, [["BlockMoved", 1], {"type": "BlockMoved"}, ["AllBlocksCleared"]], None]
    batch = decode_batch(msgspec.msgpack.encode(content))
    assert (batch.events, batch.num_unknown) == ([AllBlocksCleared()], 2)


@pytest.mark.parametrize(
    "content",
    [
        1, None, "text", [], [1.0], {}, ["now", []], [1.0, 5], [1.0, [7]], [1.0, [[]]],
        [1.0, [[["BlockStored"]]]], [1.0, [["BlockStored"]]], [1.0, [{"block_hashes": []}]],
        [1.0, [["BlockRemoved", "no hashes"]]], [1.0, [], "rank"],
    ],
)  # fmt: skip
def test_a_payload_that_is_not_a_batch_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode_batch(msgspec.msgpack.encode(content))


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_read_or_refused(payload: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_batch(payload)


def test_a_cut_message_is_refused() -> None:
    whole = bytes.fromhex(GOLDEN["map"])
    for end in range(len(whole)):
        with pytest.raises(ValueError):
            decode_batch(whole[:end])


def key(number: int) -> BlockKey:
    return BlockKey(b"a long digest" + number.to_bytes(8, "big"))


BIG = (1 << 64) - 2


def test_changes_become_events_with_all_known_fields() -> None:
    info = RequestInfo(lora_id=3, lora_name="adapter")
    changes: list[Change] = [
        Stored(
            Medium.CPU, ROOT, key(9), [key(1), key(BIG)], 2, [5, 6, 7, 8], info, [None, ["salt"]]
        ),
        Stored(Medium.STORAGE, ROOT, None, [key(4)], 2),
        Removed(Medium.STORAGE, ROOT, [key(1), key(BIG)]),
        Cleared(),
    ]
    payload = encode_batch(1.0, [describe(change, "int") for change in changes])
    batch = decode_batch(payload)
    assert batch.data_parallel_rank is None
    assert batch.events == [
        BlockStored([1, BIG], 9, [5, 6, 7, 8], 2, 3, "CPU", "adapter", [None, ["salt"]]),
        BlockStored([4], None, [], 2, None, "STORAGE", None),
        BlockRemoved([1, BIG], "STORAGE"),
        AllBlocksCleared(),
    ]


def test_hashes_are_whole_keys_on_request_and_name_the_same_blocks() -> None:
    change = Stored(Medium.CPU, ROOT, key(9), [key(1), key(BIG)], 2)
    event = describe(change, "bytes")
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [key(1), key(BIG)] and event.parent_block_hash == key(9)
    assert [low_64_bits(block) for block in event.block_hashes] == [1, BIG]
    assert decode_batch(encode_batch(1.0, [event])).events == [event]


def test_sglangs_hashes_are_the_first_bytes_with_a_sign() -> None:
    digest = BlockKey(b"\xff" * 7 + b"\xfe" + bytes(24))
    assert describe(Removed(Medium.CPU, ROOT, [digest]), "int_first") == BlockRemoved([-2], "CPU")


def test_pairs_of_tokens_are_read_as_their_first() -> None:
    """SGLang hashes each token with the next where it drafts with EAGLE."""
    pairs = [[5, 6], [6, 7], [7, 8], [8, 9]]
    event = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": pairs}
    (read,) = decode_batch(msgspec.msgpack.encode([1.0, [{**event, "block_size": 2}]])).events
    assert isinstance(read, BlockStored)
    assert read.token_ids == [5, 6, 7, 8] and read.lookahead_token_ids == [[7], [9]]


def test_short_keys_are_hashes_too() -> None:
    event = describe(Removed(Medium.CPU, ROOT, [BlockKey(b"\x01\x02"), BlockKey(b"")]), "int")
    assert event == BlockRemoved([0x0102, 0], "CPU")


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_integers_and_digests_of_a_block_have_the_same_low_bits(number: int) -> None:
    digest = b"first" + (number % (1 << 64)).to_bytes(8, "big")
    assert low_64_bits(number) == low_64_bits(digest) == number % (1 << 64)
