"""The eviction policies by name: which cached blocks are evicted first when room is needed.

lru     the least recently used
reuse   the least likely to be reused, estimated from the return times of similar prompts
"""

from __future__ import annotations

from flexcache.cache.eviction_policy import EvictionPolicy, Lru
from flexcache.cache.eviction_reuse import Reuse


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make the policy of a tier of ``capacity`` blocks.

    Raises:
        ValueError: There is no such policy.
    """
    match name:
        case "lru":
            return Lru()
        case "reuse":
            return Reuse(capacity)
    raise ValueError(f"no eviction policy {name!r}: lru or reuse")
