"""What the workers' caches hold of a prompt: from KV events, or guessed from the router's own
decisions.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from flexcache.events.wire import EventBatch
from flexcache.router.events import EventApplier
from flexcache.router.index import KVIndexer
from flexcache.router.load import FloatArray
from flexcache.router.lookup import WorkerTable, find
from flexcache.router.request import RouteRequest
from flexcache.router.workers import Tier, WorkerSpec

Approximate = Literal["auto", "always", "never"]

_NO_WORKER = WorkerSpec(name="", url="")


class Holdings:
    """Joins index, events and guesses.

    Args:
        max_blocks: Different blocks in the index at most.
        approximate: See `KVRouter`.
    """

    def __init__(self, max_blocks: int, approximate: Approximate) -> None:
        self.index = KVIndexer(max_blocks)
        self.applier = EventApplier(self.index)
        self._table = WorkerTable(self.index.holders)
        self._approximate = approximate
        self._num_workers = 0
        self._sources: set[str] = set()

    def is_guessed(self, spec: WorkerSpec) -> bool:
        """Return whether a worker's blocks are guessed."""
        if self._approximate == "auto":
            return not spec.sources
        return self._approximate == "always"

    def set_workers(self, specs: Sequence[WorkerSpec | None]) -> None:
        """Replace the workers.

        Args:
            specs: By number; None: the number is free.
        """
        self._num_workers = len(specs)
        self._table.set_workers([spec or _NO_WORKER for spec in specs])
        sources = {source.endpoint for spec in specs if spec for source in spec.sources}
        for gone in sorted(self._sources - sources):
            self.applier.forget(gone)
        self._sources = sources

    def apply(self, source: str, batch: EventBatch) -> None:
        self.applier.apply(source, batch)

    def forget(self, source: str) -> None:
        """Drop all blocks of a source."""
        self.applier.forget(source)

    def matched(self, request: RouteRequest) -> FloatArray:
        """Return the tokens that each tier of each worker supplies; shape (3, workers)."""
        if request.token_ids is None or not self.applier.block_sizes:
            return np.zeros((len(Tier), self._num_workers))
        known, _ = find(
            self.applier,
            request.token_ids,
            adapter=request.adapter,
            salt=request.cache_salt,
            limit=request.num_tokens - 1,
        )
        return np.array(self._table.matched(known), dtype=np.float64)

    def sweep(self, num_blocks: int) -> bool:
        """Free memory of forgotten blocks, a slice at a time; returns whether there is more."""
        return self.applier.sweep(num_blocks)

    def check(self) -> None:
        """Verify the index.

        Raises:
            InternalError: It does not hold together.
        """
        self.applier.check()
