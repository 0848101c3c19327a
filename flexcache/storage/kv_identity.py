"""What decides which KV bytes are interchangeable: the model and the layout within a block."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Digests of both, 16 bytes each; equal digests mean interchangeable bytes.

    Attributes:
        text: Both, to be shown. May have been cut short where it was recorded.
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
