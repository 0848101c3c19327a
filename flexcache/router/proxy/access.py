"""Who may send requests: clients with one of the configured keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

_SCHEME = "bearer"


class ApiKeys:
    """The keys of clients. Comparing takes the same time for all that is presented.

    Args:
        keys: Empty: anyone is let in.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has a valid key.

        Args:
            headers: Case-insensitive.
        """
        if not self._digests:
            return True
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == _SCHEME else headers.get("x-api-key", "")
        digest = _digest(presented)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
