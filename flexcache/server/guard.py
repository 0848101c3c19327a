"""One guard for every socket: nothing that a peer sends makes the server raise.

A message is handled only if it is small enough, complete, and of a type that the socket takes. A
handler that fails costs this message and nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from flexcache.logs import log_event
from flexcache.protocol.messages import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

_MAX_TEXT = 500

Buffer = bytes | memoryview
Message = TypeVar("Message")


class SocketGuard(Generic[Message]):
    """Decodes what peers send and hands it on.

    Args:
        types: The union of messages that the socket takes.
        counters: Counts the handler's failures, as ``failed_messages``.
        handle: Handles a message of a sender, with its data frame (or its only one) and the time.
        refuse: Answers or counts what is not a message; gets the sender, a reason in a word
            (``oversized``, ``malformed``) and a text.
        undecodable: Gets a sender and a frame that is none of ``types``; returns whether it has
            answered. If not, ``refuse`` is called.
        failed: Called with the sender, the message and the error if ``handle`` has raised.
        has_data: Whether a frame of raw data follows a message.
    """

    def __init__(
        self,
        types: Any,
        counters: Counter[str],
        *,
        handle: Callable[[bytes, Message, Buffer, float], None],
        refuse: Callable[[bytes, str, str], None],
        undecodable: Callable[[bytes, Buffer], bool] | None = None,
        failed: Callable[[bytes, Message, Exception], None] | None = None,
        has_data: Callable[[Message], bool] | None = None,
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(types)
        self._counters = counters
        self._handle = handle
        self._refuse = refuse
        self._undecodable = undecodable
        self._failed = failed
        self._has_data = has_data

    def take(self, sender: bytes, frames: Sequence[Buffer], now: float) -> None:
        """Take in one message. Never raises for its contents."""
        if sum(len(frame) for frame in frames) > MAX_FRAME_BYTES:
            self._refuse(sender, "oversized", f"more than {MAX_FRAME_BYTES} bytes")
            return
        try:
            message = self._decoder.decode(frames[0]) if frames else None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also of bad UTF-8
            if self._undecodable is None or not self._undecodable(sender, frames[0]):
                self._refuse(sender, "malformed", str(error)[:_MAX_TEXT])  # it may quote the frame
            return
        if message is None or len(frames) != 1 + self._is_followed(message):
            self._refuse(sender, "malformed", f"{len(frames)} frames")
            return
        self.pass_on(sender, message, frames[-1], now)

    def pass_on(self, sender: bytes, message: Message, data: Buffer, now: float) -> None:
        """Have a decoded message handled. Never raises."""
        try:
            self._handle(sender, message, data, now)
        except Exception as error:  # one peer's message must not cost the others their server
            log_event(
                logger, logging.ERROR, "message_failed", message=type(message).__name__,
                identity=sender.hex(), exc_info=True,
            )  # fmt: skip
            self._counters["failed_messages"] += 1
            if self._failed is not None:
                self._failed(sender, message, error)

    def _is_followed(self, message: Message) -> bool:
        return self._has_data is not None and self._has_data(message)
