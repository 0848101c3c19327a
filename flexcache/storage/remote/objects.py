"""Objects of a remote store: the format of a block, a header and its bytes, and how they move.

    0    magic             8 bytes
    8    format version    uint16
    10   codec             uint16    0 none, 1 zstd, 2 lz4 frame
    12   header size       uint32    64
    16   raw length        uint64    of the block: all ranks' pieces, concatenated
    24   stored length     uint64    of what follows the header
    32   checksum          uint64    xxh3-64 of the raw bytes
    40   identity          16 bytes  xxh3-128 of root and key
    56   header checksum   uint64    xxh3-64 of the 56 bytes before
    64   the bytes

A model's layouts are noted beside its blocks, each once, at the first free place, by the first
cache that has it:

    v2/models/MODEL/0    "acme/model|bfloat16|...|tp=1|block=16|... as ..."
    v2/models/MODEL/1    "acme/model|bfloat16|...|tp=2|block=16|... as ..."

All integers are little endian. An object that differs from this format, or from what the reader
expects of the block, is recognised and never mistaken for the block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from flexcache.errors import FlexCacheError, MissingDependencyError
from flexcache.storage.compression import Codec, Compressor, open_compressor
from flexcache.storage.pieces import Parts, checksum, cut, first_bytes, num_bytes_of
from flexcache.storage.remote.base import ObjectOutcome, RemoteStore, Status, StoreUnavailableError

MAGIC = b"FlexCa\r\n"
FORMAT_VERSION = 2
"""docs/internals/formats.md describes how readers handle other versions."""
HEADER_BYTES = 64
_FIELDS = struct.Struct("<8sHHIQQQ16s")
_CHECKSUM = struct.Struct("<Q")


class UnreadableObjectError(FlexCacheError):
    """This program cannot read the object: newer version, or a codec that is not installed."""


class DamagedObjectError(FlexCacheError):
    """The object is not the block it should be, and useless to every reader."""


def room_bytes(block_bytes: int) -> int:
    """Return the size of the largest object of a block: more than that is never stored."""
    return HEADER_BYTES + block_bytes


def object_name(root: bytes, key: bytes) -> str:
    """Return the name of a block's object. The level below the root keeps directories small."""
    # One object per block: it is found by its key alone, and a bad object costs one block.
    return f"v{FORMAT_VERSION}/{root.hex()}/{key[:1].hex()}/{key.hex()}"


class BlockCodec:
    """Encodes blocks as objects and decodes them. Keeps compressors, so it is not thread-safe.

    Args:
        compression: Compression of new objects: none, zstd or lz4. It reads all of them.

    Raises:
        MissingDependencyError: The compression's library is not installed.
    """

    def __init__(self, compression: str = "none") -> None:
        self._codec = Codec.of(compression)
        self._compressors: dict[Codec, Compressor] = {}
        if self._codec is not Codec.NONE:
            self._compressor(self._codec)

    def encode(
        self, root: bytes, key: bytes, pieces: Parts, header: memoryview
    ) -> list[memoryview]:
        """Return the object's parts: the header, made in that memory, and the pieces themselves.

        A block that does not become smaller by compression is stored uncompressed.
        """
        raw_length = num_bytes_of(pieces)
        codec, length, parts = Codec.NONE, raw_length, [header, *pieces]
        if self._codec is not Codec.NONE:
            frame = self._compressor(self._codec).compress(pieces)
            if len(frame) < length:
                codec, length, parts = self._codec, len(frame), [header, memoryview(frame)]
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            codec,
            HEADER_BYTES,
            raw_length,
            length,
            checksum(pieces),
            _identity(root, key),
        )
        header[:] = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
        return parts

    def decode(
        self, root: bytes, key: bytes, header: memoryview, pieces: Parts, num_bytes: int,
        digest: int | None = None,
    ) -> None:  # fmt: skip
        """Restore the block from an object that was read into ``header`` and then the pieces.

        Args:
            num_bytes: Size of the whole object.
            digest: `checksum` of what was read into the pieces, if the store computed it.

        Raises:
            UnreadableObjectError: This program cannot read it; another one may.
            DamagedObjectError: It is not this block, and the pieces hold nothing useful.
        """
        if num_bytes < HEADER_BYTES:
            raise DamagedObjectError(f"{num_bytes} bytes are less than a header")
        magic, version, codec, header_bytes, raw_length, length, expected, identity = (
            _FIELDS.unpack_from(header)
        )
        if magic != MAGIC:
            raise DamagedObjectError("not a FlexCache object")
        (header_checksum,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
        if header_checksum != xxhash.xxh3_64_intdigest(header[: _FIELDS.size]):
            raise DamagedObjectError("the header is damaged")
        if version != FORMAT_VERSION:
            raise UnreadableObjectError(f"format version {version}, expected {FORMAT_VERSION}")
        if identity != _identity(root, key):
            raise DamagedObjectError("another block's object")
        if header_bytes != HEADER_BYTES or raw_length != num_bytes_of(pieces):
            raise DamagedObjectError(f"a block of {raw_length} bytes, not {num_bytes_of(pieces)}")
        if num_bytes != HEADER_BYTES + length:
            raise DamagedObjectError(f"{num_bytes} of {HEADER_BYTES + length} bytes are present")
        if codec != Codec.NONE:
            self._decompress(codec, first_bytes(pieces, length), pieces)
            digest = None
        elif length != raw_length:
            raise DamagedObjectError(f"{length} of {raw_length} bytes were stored")
        if (checksum(pieces) if digest is None else digest) != expected:
            raise DamagedObjectError("checksum mismatch")

    def _decompress(self, codec: int, content: Parts, pieces: Parts) -> None:
        try:
            compressor = self._compressor(Codec(codec))
        except (ValueError, MissingDependencyError) as error:
            raise UnreadableObjectError(str(error)) from None
        frame = b"".join(content)  # copied, because the block may overwrite it
        try:
            compressor.decompress(frame, pieces)
        except ValueError as error:
            raise DamagedObjectError(f"cannot be decompressed: {error}") from None

    def _compressor(self, codec: Codec) -> Compressor:
        if codec not in self._compressors:
            self._compressors[codec] = open_compressor(codec)
        return self._compressors[codec]


def _identity(root: bytes, key: bytes) -> bytes:
    return xxhash.xxh3_128_digest(len(root).to_bytes(2, "little") + root + key)


_BATCH_BYTES = 16 << 20
_LARGEST_BATCH = 256


@dataclass(frozen=True, slots=True)
class BlocksMoved:
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
    ) -> BlocksMoved:  # fmt: skip
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
                    return BlocksMoved(start + i, f"{names[i]}: {error}", bad_block=True)
                except UnreadableObjectError as error:
                    return BlocksMoved(start + i, f"{names[i]}: {error}", bad_block=True)
                except StoreUnavailableError as error:
                    return BlocksMoved(start + i, f"{names[i]}: {error}")
        return BlocksMoved(len(keys))

    def save(
        self, store: RemoteStore, root: bytes, keys: Sequence[bytes], blocks: Sequence[Parts],
        deadline: float,
    ) -> BlocksMoved:  # fmt: skip
        """Store the blocks, up to the first that cannot be stored."""
        for start, names in self._batches(root, keys):
            parts = (
                self._codec.encode(root, keys[start + i], blocks[start + i], header)
                for i, header in enumerate(self._headers[: len(names)])
            )
            for i, outcome in enumerate(store.write_from(names, parts, deadline)):
                if outcome.status is not Status.OK:
                    return BlocksMoved(start + i, f"{names[i]}: {outcome.reason}")
        return BlocksMoved(len(keys))

    def _batches(self, root: bytes, keys: Sequence[bytes]) -> Iterator[tuple[int, list[str]]]:
        size = len(self._headers)
        for start in range(0, len(keys), size):
            yield start, [object_name(root, key) for key in keys[start : start + size]]

    def _accept(
        self, outcome: ObjectOutcome, root: bytes, key: bytes, header: memoryview, pieces: Parts
    ) -> None:
        if outcome.status is Status.FAILED:
            raise StoreUnavailableError(outcome.reason)
        if outcome.status is Status.MISSING:
            raise UnreadableObjectError(outcome.reason)
        if outcome.status is Status.TOO_LARGE:
            raise DamagedObjectError(outcome.reason)
        self._codec.decode(root, key, header, pieces, outcome.num_bytes, outcome.digest)


_MOST_LAYOUTS = 16
_LONGEST_TEXT = 4096  # bytes


def note_layout(store: RemoteStore, model: bytes, text: str, deadline: float) -> list[str]:
    """Note that the store has a model in a layout; return the other layouts that were noted.

    Blocks of another layout have other names: this explains a miss between two fleets. A note is a
    hint: two caches that begin at the same time may overwrite one, and its blocks may be gone.

    Args:
        model: Digest that identifies the model's weights.
        text: Names the layout; what is longer than 4,096 bytes is cut.

    Raises:
        StoreUnavailableError: The store did not answer, or not in time.
    """
    names = [f"v{FORMAT_VERSION}/models/{model.hex()}/{i}" for i in range(_MOST_LAYOUTS)]
    own = text.encode()[:_LONGEST_TEXT]
    noted: set[bytes] = set()
    for _ in names:
        noted, free = _read_notes(store, names, deadline)
        if own in noted or not free:
            break
        # Then it is looked at again: who came first may stay.
        (written,) = store.write_from(free[:1], [[memoryview(own)]], deadline)
        if written.status is not Status.OK:
            break  # it may be full, or ours to read only
    return sorted(each.decode(errors="replace") for each in noted - {own})


def _read_notes(
    store: RemoteStore, names: Sequence[str], deadline: float
) -> tuple[set[bytes], list[str]]:
    """Return the notes, and the names that are free."""
    rooms = [bytearray(_LONGEST_TEXT) for _ in names]
    found = store.read_into(names, [[memoryview(room)] for room in rooms], deadline)
    for outcome in found:
        if outcome.status is Status.FAILED:
            raise StoreUnavailableError(outcome.reason)
    # Of what is missing, or no note of ours, 0 bytes count as read.
    read = zip(rooms, found, strict=True)
    noted = {bytes(room[: outcome.num_bytes]) for room, outcome in read} - {b""}
    statuses = [outcome.status for outcome in found]
    free = [name for name, s in zip(names, statuses, strict=True) if s is Status.MISSING]
    return noted, free
