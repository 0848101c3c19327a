"""The eviction policies by name: which cached blocks go first when room is needed.

lru     what was not used for longest
reuse   what is worth its place least, by how prompts of its kind came back so far
"""

from __future__ import annotations

from flexcache.cache.eviction_policy import EvictionPolicy, Lru
from flexcache.cache.eviction_reuse import Reuse


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy of a tier of ``capacity`` blocks.

    Raises:
        ValueError: There is no such policy.
    """
    match name:
        case "lru":
            return Lru()
        case "reuse":
            return Reuse(capacity)
    raise ValueError(f"no eviction policy {name!r}: lru or reuse")
