"""Identity of KV bytes: blocks of the same model and layout are interchangeable."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Digests of model and layout, 16 bytes each; equal digests mean interchangeable bytes.

    Attributes:
        text: Readable form of both, for display. May be truncated if it was read from a record.
    """

    model: bytes
    layout: bytes
    text: str = field(default="", compare=False)

    @classmethod
    def of(cls, fingerprint: str, layout: str) -> KVIdentity:
        """Digest a `ModelConfig.fingerprint` and a `BlockLayout.signature`."""
        return cls(digest(fingerprint), digest(layout), f"{fingerprint} as {layout}")


def digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())
