"""Snapshots on a replay socket: all that a publisher holds, page by page.

A request has the form of a replay request, whose number begins with the byte fe and goes on with a
cursor: 0, then what each answer names. An answer is one message, under the number of its request.
A publisher without snapshots finds that it has no batches from that number on, and answers with the
end of a replay.
"""

from __future__ import annotations

import os
from typing import Protocol

import msgspec

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


class Snapshots(Protocol):
    """What a publisher sends snapshots of; called on its thread."""

    def missed(self) -> None:
        """Take note that a batch was dropped before it was encoded."""

    def page(self, cursor: int) -> tuple[bytes, int | None] | None:
        """Return a batch's payload, and where the next page begins; None: what is held is
        unknown."""


def pack_request(cursor: int) -> bytes:
    return (_FIRST | cursor).to_bytes(NUMBER_BYTES, "big")


def cursor_of(number: int) -> int | None:
    """Return what a request asks for; None if it asks for a replay."""
    return number - _FIRST if 0 <= number - _FIRST < _CURSORS else None


class SnapshotWriter:
    """Makes the answers to requests.

    Args:
        content: What is held.
    """

    def __init__(self, content: Snapshots) -> None:
        self.content = content
        self._publisher = os.urandom(8)

    def write(self, cursor: int, number: int) -> bytes | None:
        """Return a page as of all batches before ``number``; None: what is held is unknown."""
        found = self.content.page(cursor)
        if found is None:
            return None
        batch, following = found
        return msgspec.msgpack.encode(Page(self._publisher, number, following, batch))
