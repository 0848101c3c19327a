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
    cut,
)
from flexcache.storage.remote.object_format import (
    HEADER_BYTES,
    BlockCodec,
    DamagedObjectError,
    UnreadableObjectError,
    object_name,
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
    """Moves blocks for one thread: it makes headers in its own memory.

    Args:
        codec: Encodes and decodes objects; not shared.
        block_bytes: Size of one block over all ranks.
    """

    def __init__(self, codec: BlockCodec, block_bytes: int) -> None:
        self._codec = codec
        sizes = [HEADER_BYTES] * batch_size(block_bytes)
        self._headers = cut(memoryview(bytearray(sum(sizes))), sizes)

    def load(
        self, store: RemoteStore, root: bytes, keys: Sequence[bytes], blocks: Sequence[Parts],
        deadline: float,
    ) -> Moved:  # fmt: skip
        """Fill the blocks, up to the first that cannot be read. Removes a damaged object."""
        for start, names in self._batches(root, keys):
            batch = blocks[start : start + len(names)]
            headers = self._headers[: len(names)]
            parts = [[header, *pieces] for header, pieces in zip(headers, batch, strict=True)]
            for i, outcome in enumerate(store.read_into(names, parts, deadline)):
                try:
                    self._accept(outcome, root, keys[start + i], headers[i], batch[i])
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
        for start, names in self._batches(root, keys):
            parts = (
                self._codec.encode(root, keys[start + i], blocks[start + i], header)
                for i, header in enumerate(self._headers[: len(names)])
            )
            for i, outcome in enumerate(store.write_from(names, parts, deadline)):
                if outcome.status is not Status.OK:
                    return Moved(start + i, f"{names[i]}: {outcome.reason}")
        return Moved(len(keys))

    def _batches(self, root: bytes, keys: Sequence[bytes]) -> Iterator[tuple[int, list[str]]]:
        size = len(self._headers)
        for start in range(0, len(keys), size):
            yield start, [object_name(root, key) for key in keys[start : start + size]]

    def _accept(
        self, outcome: Outcome, root: bytes, key: bytes, header: memoryview, pieces: Parts
    ) -> None:
        if outcome.status is Status.FAILED:
            raise StoreUnavailableError(outcome.reason)
        if outcome.status is Status.MISSING:
            raise UnreadableObjectError(outcome.reason)
        if outcome.status is Status.TOO_LARGE:
            raise DamagedObjectError(outcome.reason)
        self._codec.decode(root, key, header, pieces, outcome.num_bytes, outcome.digest)
