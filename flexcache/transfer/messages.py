"""What the scheduler's process and the executors of ops say to each other.

One tagged msgspec struct per message; block lists travel as one binary array each (int64, little
endian), checksums likewise (uint64). New fields go last, with defaults.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.ids import OpKind


class BlockNames(msgspec.Struct, frozen=True):
    """What the blocks of an op are called, where they go to or come from what outlives a process.

    ``keys`` are of consecutive blocks of one prompt, the first at position ``first``; ``parent``
    is the key of the block before it, empty where there is none.
    """

    root: bytes
    first: int
    parent: bytes
    keys: list[bytes]


class Execute(msgspec.Struct, tag=True, frozen=True):
    """Move ``src`` blocks to ``dst`` blocks, and answer with `Done`.

    A ``gated`` op waits until the engine's worker opens the gate of ``task_id``. ``names`` are
    given to H2DISK, H2REMOTE and REMOTE2H; the ids on the remote side mean nothing.
    """

    op_id: int
    kind: OpKind
    src: bytes
    dst: bytes
    task_id: int
    gated: bool = False
    checksums: bytes = b""
    names: BlockNames | None = None


class Drop(msgspec.Struct, tag=True, frozen=True):
    """What of the op has not started is not wanted any more. `Done` is still due."""

    op_id: int


class LookUp(msgspec.Struct, tag=True, frozen=True):
    """How many of these blocks, from the first on, does the remote store have? See `LookedUp`."""

    lookup_id: int
    root: bytes
    keys: list[bytes]


class LookedUp(msgspec.Struct, tag=True, frozen=True):
    """The first ``num_present`` are there; with an ``error``, nothing is known of the others."""

    lookup_id: int
    num_present: int
    error: str | None = None


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Finish what is moving and go."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """An executor process is up; ``detail`` says how it works (for the log)."""

    detail: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """An op has ended with its first ``num_ok`` blocks moved.

    ``bad_block``: the one after them could not be read or has wrong bytes. ``checksums``: of the
    blocks written, where a tier verifies them when they are read.
    """

    op_id: int
    num_ok: int
    error: str | None = None
    bad_block: bool = False
    checksums: bytes = b""


def pack_ids(blocks: npt.NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(blocks, dtype="<i8").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(data, dtype="<i8")


def pack_checksums(checksums: npt.NDArray[np.uint64]) -> bytes:
    return np.ascontiguousarray(checksums, dtype="<u8").tobytes()


def unpack_checksums(data: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, dtype="<u8")
