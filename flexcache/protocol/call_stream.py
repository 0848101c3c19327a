"""Messages in a stream: what a scheduler and a server of the same host say on a Unix socket.

    | bytes of the message | bytes of its data, or -1 | message | data |    int32, little-endian

A stream takes a fraction of the time of zmq's sockets, which pass every message on by two threads.
"""

from __future__ import annotations

import struct

from flexcache.protocol.messages import MAX_FRAME_BYTES

_HEADER = struct.Struct("<ii")
_NO_DATA = -1


def pack_call(message: bytes, data: bytes | memoryview | None = None) -> bytes:
    """Return a message as a stream carries it, up to its data, which must follow it."""
    return _HEADER.pack(len(message), _NO_DATA if data is None else len(data)) + message


class CallReader:
    """Cuts what comes by a stream into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def read(self, received: bytes) -> list[list[bytes]]:
        """Take in bytes; return the messages that are now complete, each with its data, if any.

        Raises:
            ValueError: The stream carries no messages, or one that is too large.
        """
        rest, at = self._rest, 0
        rest += received
        messages = []
        while len(rest) - at >= _HEADER.size:
            message_bytes, data_bytes = _HEADER.unpack_from(rest, at)
            if not 0 <= message_bytes <= MAX_FRAME_BYTES or not -1 <= data_bytes <= MAX_FRAME_BYTES:
                raise ValueError(f"a message of {message_bytes} bytes with {data_bytes} of data")
            start = at + _HEADER.size
            middle = start + message_bytes
            end = middle + max(0, data_bytes)
            if len(rest) < end:
                break
            message = [bytes(rest[start:middle])]
            if data_bytes != _NO_DATA:
                message.append(bytes(rest[middle:end]))
            messages.append(message)
            at = end
        del rest[:at]
        return messages
