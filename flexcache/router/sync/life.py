"""Life of a router's requests as other routers follow it: batches of events, msgpack.

A snapshot of all running requests comes every few seconds, so what a follower missed for good is
right again after the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flexcache.router.link.messages import RunningRequest

TOPIC = "router-sync"


class Began(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A request was sent to a worker."""

    request: RunningRequest


class AnswerBegan(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Its first token came."""

    request_id: str


class Over(msgspec.Struct, frozen=True, tag=True, gc=False):
    """It ended, for whatever reason."""

    request_id: str


class Snapshot(msgspec.Struct, frozen=True, tag=True, gc=False):
    """All running requests; there are no others."""

    requests: list[RunningRequest]


class Alive(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Nothing happened."""


Life = Began | AnswerBegan | Over | Snapshot | Alive

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[float, list[Life]]).decode


def encode(ts: float, events: Sequence[Life]) -> bytes:
    """Return the payload of a batch. With the time no two are equal, which would hide a restart."""
    return _encode((ts, events))


def decode(payload: bytes) -> list[Life]:
    """
    Raises:
        ValueError: The payload is not a batch.
    """
    try:
        return _decode(payload)[1]
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a batch of a router: {error}") from None
