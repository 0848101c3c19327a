"""The one cache of a server, which may become known only with the first engine that greets.

no model --first engine, or the config--> waits for sizes --the engine's ranks greet--> open
                                   (skipped if the model tells them)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flexcache.config import ModelConfig
from flexcache.config.model import UnitShape
from flexcache.errors import FlexCacheError, StorageError
from flexcache.ids import SessionId
from flexcache.logs import log_event
from flexcache.protocol.messages import HelloRank
from flexcache.server.background import BackgroundJob
from flexcache.server.outbox import Outbox
from flexcache.server.rank_sizes import RankSizes
from flexcache.server.registry import Rank
from flexcache.server.served_cache import Clearing, ServedCache
from flexcache.storage.shards import Shards
from flexcache.tasks.engine import KVTaskEngine

logger = logging.getLogger(__name__)

OpenCache = Callable[[ModelConfig, int, Shards], ServedCache]


@dataclass(frozen=True, slots=True)
class _Expected:
    """A cache to be opened with the sizes of an engine's ranks; None: of any engine."""

    model: ModelConfig
    tokens_per_block: int
    engine: str | None


class CacheSlot:
    """Opens the cache when its model and the sizes of its blocks are known.

    Args:
        open_cache: Makes the tiers for a model, a number of tokens per block and its shards. Raises
            `ConfigError` if that is impossible, `RegistrationError` or `DirectoryInUseError` if it
            is for now.

    Attributes:
        awaited: What has to be known before the cache opens.
        failure: Why the cache that `expect` announced could not be opened.
    """

    def __init__(self, open_cache: OpenCache, outbox: Outbox) -> None:
        self._open_cache = open_cache
        self._outbox = outbox
        self._sizes = RankSizes()
        self._expected: _Expected | None = None
        self._sessions: list[tuple[SessionId, str]] = []
        """Opened before the cache."""
        self._weights: dict[str, int] = {}
        """Generations of engines whose weights had another name before the cache opened."""
        self.cache: ServedCache | None = None
        self.awaited = ["a model"]
        self.failure: Exception | None = None

    @property
    def tasks(self) -> KVTaskEngine:
        assert self.cache is not None
        return self.cache.tasks

    def expect(self, model: ModelConfig, tokens_per_block: int, engine: str | None) -> None:
        """Open the cache of a model that is known before any engine greets, or once the ranks of
        the engine (None: of any) have told their sizes."""
        if model.sized_by_ranks:
            self._expected = _Expected(model, tokens_per_block, engine)
            self.awaited = [f"rank {rank}" for rank in range(model.num_ranks)]
        else:
            self.open(model, tokens_per_block, "", 0.0)

    def hear(self, hello: HelloRank, now: float) -> None:
        """A rank greets: its size may be what the cache waits for."""
        if self.cache is not None:
            return
        self._sizes.tell(hello.engine, hello.rank, hello.block_bytes, now)
        expected = self._expected
        if expected is None or expected.engine not in (None, hello.engine):
            return
        try:
            self.open(expected.model, expected.tokens_per_block, hello.engine, now)
        except (FlexCacheError, OSError) as error:
            self.failure, self._expected = error, None

    def open(
        self, model: ModelConfig, tokens_per_block: int, engine: str, now: float
    ) -> ServedCache | None:
        """The cache; the first call decides what it holds.

        Returns:
            None while the model leaves sizes to the ranks and those of the engine have not told
            them all.
        """
        if self.cache is None:
            shards = self._shards(model, tokens_per_block, engine, now)
            if shards is None:
                return None
            self.cache = self._open_cache(model, tokens_per_block, shards)
            for session, name in self._sessions:
                self.tasks.add_session(session, name)
            for name, generation in self._weights.items():
                self.tasks.set_weights(name, generation, False, now)
        return self.cache

    def _shards(
        self, model: ModelConfig, tokens_per_block: int, engine: str, now: float
    ) -> Shards | None:
        if not model.sized_by_ranks:
            return Shards.of_model(model, tokens_per_block)
        sizes = self._sizes.of(engine, range(model.num_ranks), now)
        self.awaited = [f"rank {rank}" for rank in range(model.num_ranks) if rank not in sizes]
        if self.awaited:
            return None
        per_unit = UnitShape(model.groups, tokens_per_block).blocks_per_unit
        return Shards.of_ranks(model, [per_unit * size for size in sizes.values()])

    def add_session(self, session: SessionId, engine: str) -> None:
        """Let an engine make tasks, as soon as there is a cache."""
        if self.cache is None:
            self._sessions.append((session, engine))
        else:
            self.tasks.add_session(session, engine)

    def set_weights(self, engine: str, generation: int, is_other: bool, now: float) -> None:
        """See `KVTaskEngine.set_weights`."""
        if self.cache is None:
            self._weights[engine] = generation
        else:
            self.tasks.set_weights(engine, generation, is_other, now)

    def adopt_layout(self, rank: Rank, layout: str, is_first: bool, now: float) -> str | None:
        """Have the cache keep blocks of a rank's layout; returns why it cannot.

        Args:
            is_first: No other rank serves.
        """
        assert self.cache is not None
        layouts, shard = self.cache.layouts, self.cache.shards.of_rank(rank.rank)
        layouts.set(shard, layout, is_first)
        if (whole := layouts.whole) is None:
            return None  # the engine does not move anything before all its ranks serve
        try:
            clearing = self.cache.adopt_layout(whole, now)
        except FlexCacheError as error:
            layouts.forget(shard)
            return str(error)
        if clearing is not None:  # what a restart may bring back is under its own layout
            self._carry_out(clearing)
        return None

    def forgotten(self) -> None:
        """The task engine has forgotten everything: make what is recorded on SSD void too."""
        assert self.cache is not None
        self._carry_out(self.cache.erase(None, 0))

    def _carry_out(self, clearing: Clearing) -> None:
        if clearing.needs_work:
            self._outbox.begin(BackgroundJob(clearing.work, partial(_cleared, clearing)))


def _cleared(clearing: Clearing, error: Exception | None) -> None:
    try:
        clearing.end(error)
    except StorageError as failure:
        log_event(logger, logging.WARNING, "ssd_not_cleared_for_good", error=failure)
