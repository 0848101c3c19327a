"""Messages between the scheduler's process and the executors of ops, and the names of GPU blocks.

One tagged msgspec struct per message; a block list is one binary array (int64, little endian), as
are checksums (uint64). New fields go last, with defaults.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.ids import OpKind

CHECKSUM_BYTES = 8


class BlockNames(msgspec.Struct, frozen=True):
    """Names of an op's blocks in storage that outlives the process.

    ``keys`` are those of consecutive blocks of one prompt, the first at position ``first``;
    ``parent`` is the key of the block before it, empty if there is none. ``used_s`` is when all of
    them had last been used, in seconds of the machine's monotonic clock; None for now. ``era``:
    how often the SSD tier had been reset when they were named. ``peer``: the endpoint of the host
    that has them; ``tail``: where they are units of a tail there, the key of the block before it.
    """

    root: bytes
    first: int
    parent: bytes
    keys: list[bytes]
    used_s: float | None = None
    era: int = 0
    peer: str = ""
    tail: bytes = b""


class Execute(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Move ``src`` blocks to ``dst`` blocks, and answer with `Done`.

    Blocks on the GPU are named with their group (`name_blocks`). A ``gated`` op waits until
    the engine's worker opens the gate of ``task_id``. H2DISK, H2REMOTE, REMOTE2H and PEER2H have
    ``names``; block ids on the remote side have no meaning.

    ``weights``: the number of the rank's weights that the op is for; a rank that has others refuses
    it. ``adapter``: the digest of an adapter, without which it refuses it too.
    """

    op_id: int
    kind: OpKind
    src: bytes
    dst: bytes
    task_id: int
    gated: bool = False
    checksums: bytes = b""
    names: BlockNames | None = None
    weights: int = 0
    adapter: str = ""


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Drop the part of an op that has not started. `Done` still follows."""

    op_id: int


class LookUp(msgspec.Struct, tag=True, frozen=True):
    """Ask how many of these blocks, from the first on, the remote store has. See `LookedUp`.

    ``tails``: and which of these tails it has, the last positions first. Of each, the number of
    ``keys`` that must be there for it to be of use, and the key of its last unit.
    """

    lookup_id: int
    root: bytes
    keys: list[bytes]
    tails: list[tuple[int, bytes]] = []


class LookedUp(msgspec.Struct, tag=True, frozen=True):
    """The store has the first ``num_present`` blocks; with an ``error``, the rest is unknown.

    ``tail``: the first of the tails that is there and of use; -1 for none. At a peer so many more
    are on their way (``num_coming``), or could be brought from its SSD (``num_on_ssd``), and with
    them another tail (``ssd_tail``).
    """

    lookup_id: int
    num_present: int
    error: str | None = None
    tail: int = -1
    num_coming: int = 0
    num_on_ssd: int = 0
    ssd_tail: int = -1


class Discard(msgspec.Struct, tag=True, frozen=True):
    """Remove these blocks from the remote store, best effort. Not answered."""

    root: bytes
    keys: list[bytes]


class NoteLayout(msgspec.Struct, tag=True, frozen=True):
    """Note in the remote store that it has a model, by its digest, in the layout that the text
    names. `LayoutsNoted` answers, once the store can be reached."""

    model: bytes
    text: str


class SendBlocks(msgspec.Struct, tag=True, frozen=True):
    """Send these blocks of the host pool to the peer that shows the token, until ``ends_s`` of the
    machine's monotonic clock."""

    token: bytes
    blocks: bytes
    ends_s: float


class SendNoMore(msgspec.Struct, tag=True, frozen=True):
    """The peer may not read what it has this token for any more."""

    token: bytes


class PeerFailed(msgspec.Struct, tag=True, frozen=True):
    """A peer could not be read from, or has sent wrong bytes."""

    peer: str
    reason: str


class LayoutsNoted(msgspec.Struct, tag=True, frozen=True):
    """In which other layouts the remote store has the model."""

    others: list[str]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Finish running transfers and exit."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """An executor process is up; ``detail`` describes how it works, for the log."""

    detail: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """An op has ended with its first ``num_ok`` blocks moved.

    ``bad_block``: the next one could not be read or has wrong bytes. ``checksums``: those of the
    written blocks, for a tier that verifies them on reading. ``device_bytes``: what the disk worker
    moved on the device, where blocks may be compressed. ``seconds``: how long a gated load from
    DRAM took once it could begin; 0 if that is not known.
    """

    op_id: int
    num_ok: int
    error: str | None = None
    bad_block: bool = False
    checksums: bytes = b""
    device_bytes: int = 0
    seconds: float = 0.0


def pack_ids(blocks: npt.NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(blocks, dtype="<i8").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(data, dtype="<i8")


def pack_checksums(checksums: npt.NDArray[np.uint64]) -> bytes:
    return np.ascontiguousarray(checksums, dtype="<u8").tobytes()


def unpack_checksums(data: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, dtype="<u8")


# ------------------------------------------------------------------------------------------------
# GPU blocks of a model with several groups, each named with its group in one number.
#
# The engine keeps the blocks of all groups in one pool, so the id of a block does not tell whose
# bytes it holds. In tasks and ops the upper half of the number is the group, the lower half the id.
# Block ids of a model without groups are those of group 0.

BlockIds = npt.NDArray[np.int64]

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def name_blocks(group: int, blocks: BlockIds) -> BlockIds:
    """Name blocks of a group by their ids; -1, a block not to be copied, stays.

    Raises:
        ValueError: An id is out of range.
    """
    if len(blocks) and (int(blocks.min()) < -1 or int(blocks.max()) > _ID_MASK):
        raise ValueError(f"ids of GPU blocks must be -1 or within [0, {_ID_MASK}]")
    if group == 0:
        return blocks
    return np.where(blocks < 0, blocks, blocks | group << _ID_BITS)


def groups_of(names: BlockIds) -> BlockIds:
    """Return the group of each block; that of -1 is -1."""
    return names >> _ID_BITS


def ids_of(names: BlockIds) -> BlockIds:
    """Return the engine's id of each block."""
    return names & _ID_MASK
