"""One block on its way between a rank's KV tensors and a file, and how it ended."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.storage.block_io import Direction

Addresses = npt.NDArray[np.int64]

BAD_BLOCK_ERRORS = frozenset(
    {errno.EIO, errno.ENODATA, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ}
)
"""Errors of a read by which Linux says that the medium or the file system has lost the bytes."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A rank's part of a block: consecutive bytes of a file, scattered over KV tensors.

    Attributes:
        task_id: Its task, for the permit.
        offset: Where it begins in the file; in whole pages, as is ``length``.
        addresses: Its runs in the KV tensors, in the order of the bytes in the file.
        sizes: Theirs. What follows them up to ``length`` is padding: zeros when written.
        expected: Checksum of the ``length`` bytes to be read; 0 for a write.
    """

    token: int
    task_id: int
    direction: Direction
    fd: int
    offset: int
    length: int
    addresses: Addresses
    sizes: Addresses
    expected: int = 0


class Transferred(NamedTuple):
    """How a transfer ended.

    Without an ``error`` all of it was moved, and bytes that were read have the expected checksum
    and are in the KV tensors. ``checksum`` is that of the bytes written. ``is_bad``: what the file
    holds is at fault, not the way there.
    """

    token: int
    error: str | None
    checksum: int = 0
    is_bad: bool = False
