"""Layouts in which a remote store has a model's KV, so that a miss between two fleets is explained.

    v2/models/MODEL/0    "acme/model|bfloat16|...|tp=1|block=16|... as ..."
    v2/models/MODEL/1    "acme/model|bfloat16|...|tp=2|block=16|... as ..."

Blocks of another layout have other names, and are not found. Each layout of a model is noted once,
at the first free place, by the first cache that has it. A note is a hint: two caches that begin at
the same time may overwrite one, and its blocks may be gone.
"""

from __future__ import annotations

from flexcache.storage.remote.base import RemoteStore, Status, StoreUnavailableError
from flexcache.storage.remote.objects import FORMAT_VERSION

_MOST_LAYOUTS = 16
_LONGEST_TEXT = 4096  # bytes


def note_layout(store: RemoteStore, model: bytes, text: str, deadline: float) -> list[str]:
    """Note that the store has a model in a layout; return the other layouts that were noted.

    Args:
        model: Digest that identifies the model's weights.
        text: Names the layout; what is longer than 4,096 bytes is cut.

    Raises:
        StoreUnavailableError: The store did not answer, or not in time.
    """
    names = [f"v{FORMAT_VERSION}/models/{model.hex()}/{i}" for i in range(_MOST_LAYOUTS)]
    own = text.encode()[:_LONGEST_TEXT]
    while True:
        rooms = [bytearray(_LONGEST_TEXT) for _ in names]
        found = store.read_into(names, [[memoryview(room)] for room in rooms], deadline)
        free, noted = [], []
        for name, room, outcome in zip(names, rooms, found, strict=True):
            if outcome.status is Status.FAILED:
                raise StoreUnavailableError(outcome.reason)
            if outcome.status is Status.MISSING:
                free.append(name)
            elif outcome.status is Status.OK:
                noted.append(bytes(room[: outcome.num_bytes]))
        if own in noted or not free:
            return [each.decode(errors="replace") for each in noted if each != own]
        (written,) = store.write_from(free[:1], [[memoryview(own)]], deadline)
        if written.status is not Status.OK:  # else it is looked at again: who came first stays
            raise StoreUnavailableError(written.reason)
