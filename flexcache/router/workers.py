"""What the router knows of the engines that it sends requests to: their names and addresses."""

from __future__ import annotations

from enum import Enum

import msgspec


class Tier(str, Enum):
    """Where an engine finds a block, fastest first."""

    GPU = "gpu"
    DRAM = "dram"
    DISK = "disk"
    """SSD and remote store together, which KV events do not tell apart."""


class EventSource(msgspec.Struct, frozen=True):
    """A publisher of KV events: an engine, or a cache that several engines share.

    Attributes:
        endpoint: ZMQ endpoint of its PUB socket. It identifies the source.
        replay: Endpoint at which missed batches are requested; None: nowhere.
        topic: Prefix of the topics to follow.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, or one data-parallel rank of an engine.

    Attributes:
        name: Unique: the URL, and for a rank ``URL#RANK``.
        url: Base URL, without a path.
        data_parallel_rank: Sent as ``X-data-parallel-rank``; None: the engine has one rank.
        sources: Publishers of the blocks that this worker can use.
        cache_url: HTTP API of its cache, without a path; None: it is not asked for anything.
    """

    name: str
    url: str
    data_parallel_rank: int | None = None
    sources: tuple[EventSource, ...] = ()
    cache_url: str | None = None


class WorkerState(str, Enum):
    """Whether requests are sent to a worker."""

    UP = "up"
    DRAINING = "draining"
    """Finishes its requests and gets no new ones."""
    DOWN = "down"
