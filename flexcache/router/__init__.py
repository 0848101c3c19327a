"""Routes requests to the engine that will answer them soonest. See docs/router.md.

`KVRouter` is the whole as a library, without I/O; `KVIndexer` is its index of blocks.
"""

from flexcache.router.index import KVIndexer
from flexcache.router.request import Decision, RouteRequest
from flexcache.router.router import KVRouter, WorkerScore
from flexcache.router.workers import EventSource, Tier, WorkerSpec, WorkerState

__all__ = [
    "Decision",
    "EventSource",
    "KVIndexer",
    "KVRouter",
    "RouteRequest",
    "Tier",
    "WorkerScore",
    "WorkerSpec",
    "WorkerState",
]
