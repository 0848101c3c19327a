"""Moves blocks between DRAM and a remote store, as objects of the format in `object_format`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexcache.storage.remote.base import (
    Outcome,
    Parts,
    RemoteStore,
    Status,
    StoreUnavailableError,
    num_bytes_of,
)
from flexcache.storage.remote.object_format import (
    HEADER_BYTES,
    BlockCodec,
    DamagedObjectError,
    UnreadableObjectError,
    object_name,
    room_bytes,
)

_BATCH_BYTES = 16 << 20
_LARGEST_BATCH = 256


@dataclass(frozen=True, slots=True)
class Moved:
    """The first ``num_ok`` blocks were moved; the next one failed with ``error``.

    ``bad_block``: that one is missing from the store, or damaged.
    """

    num_ok: int
    error: str | None = None
    bad_block: bool = False


def batch_size(block_bytes: int) -> int:
    """Return how many blocks of this size go into one call of the store."""
    return max(1, min(_LARGEST_BATCH, _BATCH_BYTES // block_bytes))


class BlockMover:
    """Moves blocks for one thread: it makes headers and joined blocks in its own memory.

    A block of small pieces is joined there with its header, for stores to which many transfers
    cost more than a copy.

    Args:
        codec: Encodes and decodes objects; not shared.
        room: Memory for one batch: `batch_size` times `room_bytes`.
        block_bytes: Size of one block over all ranks.
    """

    def __init__(self, codec: BlockCodec, room: memoryview, block_bytes: int) -> None:
        self._codec = codec
        size = room_bytes(block_bytes)
        self._rooms = [
            room[start : start + size] for start in range(0, size * batch_size(block_bytes), size)
        ]

    def load(
        self, store: RemoteStore, root: bytes, keys: Sequence[bytes], blocks: Sequence[Parts],
        deadline: float,
    ) -> Moved:  # fmt: skip
        """Fill the blocks, up to the first that cannot be read. Removes a damaged object."""
        joined = _is_joined(store, blocks)
        for start, names in self._batches(root, keys):
            batch = blocks[start : start + len(names)]
            rooms = [room if joined else room[:HEADER_BYTES] for room in self._rooms[: len(names)]]
            parts = [
                [room] if joined else [room, *pieces]
                for room, pieces in zip(rooms, batch, strict=True)
            ]
            outcomes = store.read_into(names, parts, deadline)
            for i, outcome in enumerate(outcomes):
                try:
                    self._accept(outcome, root, keys[start + i], rooms[i], batch[i])
                except DamagedObjectError as error:
                    store.discard([names[i]], deadline)
                    return Moved(start + i, f"{names[i]}: {error}", bad_block=True)
                except UnreadableObjectError as error:
                    return Moved(start + i, f"{names[i]}: {error}", bad_block=True)
                except StoreUnavailableError as error:
                    return Moved(start + i, f"{names[i]}: {error}")
        return Moved(len(keys))

    def save(
        self, store: RemoteStore, root: bytes, keys: Sequence[bytes], blocks: Sequence[Parts],
        deadline: float,
    ) -> Moved:  # fmt: skip
        """Store the blocks, up to the first that cannot be stored."""
        joined = _is_joined(store, blocks)
        for start, names in self._batches(root, keys):
            parts = [
                self._codec.encode(root, keys[start + i], blocks[start + i], room, joined)
                for i, room in enumerate(self._rooms[: len(names)])
            ]
            for i, outcome in enumerate(store.write_from(names, parts, deadline)):
                if outcome.status is not Status.OK:
                    return Moved(start + i, f"{names[i]}: {outcome.reason}")
        return Moved(len(keys))

    def _batches(self, root: bytes, keys: Sequence[bytes]) -> Iterator[tuple[int, list[str]]]:
        size = len(self._rooms)
        for start in range(0, len(keys), size):
            yield start, [object_name(root, key) for key in keys[start : start + size]]

    def _accept(
        self, outcome: Outcome, root: bytes, key: bytes, room: memoryview, pieces: Parts
    ) -> None:
        if outcome.status is Status.FAILED:
            raise StoreUnavailableError(outcome.reason)
        if outcome.status is Status.MISSING:
            raise UnreadableObjectError(outcome.reason)
        if outcome.status is Status.TOO_LARGE:
            raise DamagedObjectError(outcome.reason)
        header, behind = room[:HEADER_BYTES], room[HEADER_BYTES:]
        self._codec.decode(
            root, key, header, pieces, outcome.num_bytes,
            joined=behind or None, digest=outcome.digest,
        )  # fmt: skip


def _is_joined(store: RemoteStore, blocks: Sequence[Parts]) -> bool:
    """Whether the pieces, which are alike in all blocks, are small for the store."""
    return bool(blocks) and num_bytes_of(blocks[0]) < store.joins_below * len(blocks[0])
