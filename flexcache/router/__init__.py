"""Router: sends requests to the engine that will answer soonest. See docs/guide/router.md.

`KVRouter` is the whole as a library, without I/O; `KVIndexer` is its index of blocks.
"""

from flexcache.router.chooser import Decision, RouteRequest
from flexcache.router.fleet import EventSource, Tier, WorkerSpec, WorkerState
from flexcache.router.index import KVIndexer
from flexcache.router.router import KVRouter, WorkerScore

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
