"""Wire format of KV events: msgpack, in the layouts of vLLM and compatible publishers.

A batch is an array ``[time, events, data-parallel rank]``. Its events are maps with the key `type`
(SGLang, and vLLM from 0.24 on) or, to be read only, positional arrays that begin with the type.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flexcache.cache.journal import Change, Cleared, Removed, Stored
from flexcache.ids import BlockKey

BlockHash = int | bytes
_LOW_64_BITS = (1 << 64) - 1


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    pass


class BlockStored(_Event, frozen=True):
    """Consecutive blocks of a prompt can be found in ``medium``. Fields, and their order, are
    vLLM's.

    Attributes:
        parent_block_hash: Hash of the block before them; None at the prompt's start.
        token_ids: ``block_size`` per block; empty if the tokens are unknown.
        extra_keys: What was hashed besides tokens, per block.
        locality: ``LOCAL`` or ``REMOTE``, seen from the publisher; None: not told.
        session_id: Conversation whose request stored the blocks.
        lookahead_token_ids: Tokens after each block that its hash covers too: a draft model (EAGLE,
            MTP) reads them. None: the hash covers no more than the block.
        cache_salt: SGLang's salt, which vLLM has among the first block's ``extra_keys``.
        run_blocks: FlexCache's: each hash stands for so many blocks, of which it is the last one's.
            There are as many times more tokens and extra keys. None: for one.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    run_blocks: int | None = None

    @property
    def blocks_a_hash(self) -> int:
        """How many blocks each hash stands for."""
        return max(1, self.run_blocks or 1)


class BlockRemoved(_Event, frozen=True):
    """Blocks can no longer be found in ``medium``."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(_Event, frozen=True):
    """No block of this publisher can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_TYPES: Mapping[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_ONLY_IN_MAPS = ("locality", "session_id", "lookahead_token_ids", "cache_salt", "run_blocks")
"""Fields of SGLang and FlexCache, and those that vLLM has had since its events became maps."""
_POSITIONS = {
    name: [field for field in kind.__struct_fields__ if field not in _ONLY_IN_MAPS]
    for name, kind in _TYPES.items()
}
"""Fields in the order of arrays."""


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events in the order in which they happened.

    Attributes:
        ts: When they were passed to the publisher, in seconds since 1970.
        num_unknown: Number of events left out because their type is unknown here.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    num_unknown: int = 0


def low_64_bits(block_hash: BlockHash) -> int:
    """Return the bits that integer hashes and digests of the same block share."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & _LOW_64_BITS


# -- to the wire ---------------------------------------------------------------------------------


_HASH_BYTES = 8


def _ends(keys: Sequence[BlockKey]) -> tuple[int, ...]:
    """Return the last bytes of each key as big-endian integers, in one pass."""
    ends = b"".join([key[-_HASH_BYTES:].rjust(_HASH_BYTES, b"\0") for key in keys])
    return struct.unpack(f">{len(keys)}Q", ends)


def _last_integers(keys: Sequence[BlockKey]) -> list[BlockHash]:
    return list(_ends(keys))


def _first_integers(keys: Sequence[BlockKey]) -> list[BlockHash]:
    """Return the first bytes of each key as signed big-endian integers, SGLang's block hashes."""
    starts = b"".join([key[:_HASH_BYTES].rjust(_HASH_BYTES, b"\0") for key in keys])
    return list(struct.unpack(f">{len(keys)}q", starts))


_HASHES: Mapping[str, Callable[[Sequence[BlockKey]], list[BlockHash]]] = {
    "int": _last_integers,
    "int_first": _first_integers,
    "bytes": list,
}


def names_of(keys: Sequence[BlockKey], hashes: str) -> list[int]:
    """Return the low 64 bits of the hashes under which blocks are published.

    Args:
        hashes: As for `describe`.
    """
    if hashes == "int_first":
        return [low_64_bits(each) for each in _first_integers(keys)]
    return list(_ends(keys))


def describe(change: Change, hashes: str) -> Event:
    """Return the event for a change.

    Args:
        hashes: Form of block hashes: int, vLLM's default; int_first, SGLang's; or bytes, the
            whole key.
    """
    hashes_of = _HASHES[hashes]
    match change:
        case Stored():
            medium, locality = change.medium.value
            return BlockStored(
                block_hashes=hashes_of(change.keys),
                parent_block_hash=None if change.parent is None else hashes_of([change.parent])[0],
                token_ids=list(change.token_ids),
                block_size=change.block_size,
                lora_id=change.info.lora_id,
                medium=medium,
                lora_name=change.info.lora_name,
                extra_keys=change.extra_keys,
                locality=locality,
                run_blocks=None if change.run_blocks == 1 else change.run_blocks,
            )
        case Removed(place, _, keys):
            medium, locality = place.value
            return BlockRemoved(hashes_of(keys), medium, locality=locality)
        case Cleared():
            return AllBlocksCleared()


def encode_batch(
    ts: float, events: Sequence[Event], data_parallel_rank: int | None = None
) -> bytes:
    """Return a batch's payload. The rank is the publisher's, if it has one."""
    return msgspec.msgpack.encode((ts, events, data_parallel_rank))


# -- from the wire -------------------------------------------------------------------------------

_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_OPTIONAL = {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None}
"""Fields that older publishers omit."""


_decode_current = msgspec.msgpack.Decoder(EventBatch).decode


def decode_batch(payload: bytes) -> EventBatch:
    """Read a batch of any version: batch and events are arrays or maps with any number of fields.

    Raises:
        ValueError: The payload is not a batch.
    """
    try:
        batch = _decode_current(payload)  # a sixth of the time, for what publishers send today
    except (msgspec.MsgspecError, RecursionError):
        return _decode_any(payload)
    # A fourth field of another version is not our count.
    return _decode_any(payload) if batch.num_unknown else batch


def _decode_any(payload: bytes) -> EventBatch:
    try:
        content = msgspec.msgpack.decode(payload)
        if isinstance(content, list):
            content = dict(zip(_BATCH_FIELDS, content, strict=False))
        events = [_read_event(event) for event in content["events"]]
        known = [event for event in events if event is not None]
        return EventBatch(
            msgspec.convert(content["ts"], float),
            known,
            msgspec.convert(content.get("data_parallel_rank"), int | None),
            len(events) - len(known),
        )
    except (
        msgspec.MsgspecError, RecursionError, LookupError, TypeError, ValueError, AttributeError
    ) as error:  # fmt: skip
        raise ValueError(f"not a batch of KV events: {error!r}") from None


def _read_event(content: Any) -> Event | None:
    """Return the event; None if its type is unknown."""
    if isinstance(content, list):
        name, *values = content
        if name not in _TYPES:
            return None
        fields = dict(zip(_POSITIONS[name], values, strict=False))
    else:
        fields = dict(content)
        name = fields.pop("type")
        if name not in _TYPES:
            return None
    tokens = fields.get("token_ids")
    if tokens and isinstance(tokens[0], list):  # SGLang with EAGLE: each token with the next
        fields["token_ids"] = [token for token, _ in tokens]
        last = tokens[fields["block_size"] - 1 :: fields["block_size"]]
        fields["lookahead_token_ids"] = [[following] for _, following in last]
    return msgspec.convert({**_OPTIONAL, **fields, "type": name}, _TYPES[name])


# -- snapshots on a replay socket: all that a publisher holds, page by page ------------------------
#
# A request has the form of a replay request, whose number begins with the byte fe and goes on with
# a cursor: 0, then what each answer names. An answer is one message, under its request's number.
# A publisher without snapshots finds that it has no batches from that number on, and answers with
# the end of a replay.

NUMBER_BYTES = 8
END_OF_REPLAY = b"\xff" * NUMBER_BYTES
"""Takes the place of the number, with an empty payload, after the last resent batch."""

MARK = 0xFE
"""First byte of a request; another one for pages of another form."""

_FIRST = MARK << 8 * (NUMBER_BYTES - 1)
_CURSORS = 1 << 8 * (NUMBER_BYTES - 1)


class Page(msgspec.Struct, frozen=True, array_like=True):
    """Part of a snapshot.

    Attributes:
        publisher: Identifies the publisher's process.
        number: What is held is as of all batches before this one.
        cursor: Where the next page begins; None: this is the last.
        batch: Payload of a batch that stores what is held.
    """

    publisher: bytes
    number: int
    cursor: int | None
    batch: bytes


def pack_request(cursor: int) -> bytes:
    return (_FIRST | cursor).to_bytes(NUMBER_BYTES, "big")


def cursor_of(number: int) -> int | None:
    """Return what a request asks for; None if it asks for a replay."""
    return number - _FIRST if 0 <= number - _FIRST < _CURSORS else None
