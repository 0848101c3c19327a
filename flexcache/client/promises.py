"""What the steps of an engine count on: loads that cannot be lost any more.

Some engines cannot go back once a step is scheduled (vLLM with asynchronous scheduling). So before
a step is scheduled with a load, the scheduler makes sure of all that the load needs:

* Every rank has the pool mapped, and leaves no sooner than `StepPromises.end`. This holds whatever
  becomes of the server and the session, since it is a lock between the scheduler and the ranks.
* The server *promises* the load: until the ranks have reported it, its blocks stay as they are.
  Nothing else ends it but a cancel by the engine that asked.

The engine then hands the promised load to its ranks with the step. A rank copies it by itself: it
asks neither whether the task was revoked meanwhile, nor whether the weights have changed. What a
step computes belongs to the weights that it was scheduled with, as with the engine's own cache.
"""

from __future__ import annotations

import threading

from flexcache.errors import RegistrationError
from flexcache.protocol.fence import Fence


class StepPromises:
    """Keeps the ranks of one engine from leaving. Thread-safe.

    Args:
        num_ranks: Ranks that all execute a load.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._lock = threading.Lock()
        self._fences: dict[str, Fence] = {}

    def begin(self, path: str | None) -> bool:
        """Keep the ranks that the fence at ``path`` is of until `end`; return whether all are kept,
        which they are not while one has no pool, or weights that the server has not heard of."""
        if path is None:
            return False
        with self._lock:
            fence = self._fences.get(path)
            if fence is not None:  # a step counts on them already; one may want to leave after it
                return fence.count_on(self._ranks)
            try:
                fence = Fence.open(path)
            except RegistrationError:  # its server is gone
                return False
            if not fence.count_on(self._ranks):
                fence.close()
                return False
            self._fences[path] = fence
            return True

    def end(self) -> None:
        """No step that is under way, or about to be scheduled, counts on a rank. Idempotent."""
        with self._lock:
            while self._fences:
                self._fences.popitem()[1].close()
