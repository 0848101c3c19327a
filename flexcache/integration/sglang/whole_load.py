"""WholeLoad: a load that the model waits for as a whole, before its first layer.

For models with several groups, whose blocks are not loaded layer by layer. It has what SGLang's KV
pools and `LayerWaits` need of a `LayerLoad`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flexcache.client.rank import KVTPClient

_PATIENCE_S = 1.0


class WholeLoad:
    """A launched load whose gate is opened by making this.

    Args:
        cancel: Has a task end, copies under way included.
    """

    def __init__(self, client: KVTPClient, task_id: int, cancel: Callable[[int], None]) -> None:
        self._client = client
        self._task_id = task_id
        self._cancel = cancel
        self._num_ok: int | None = None
        client.open_gates([task_id])

    def wait_layer(self, name: str, timeout: float) -> bool:
        """Wait for all layers; return whether they are loaded."""
        return self.wait_all(timeout)

    def wait_all(self, timeout: float) -> bool:
        deadline_s = time.monotonic() + timeout
        while self._num_ok is None:
            self._num_ok = self._client.take_ended([self._task_id]).get(self._task_id)
            left_s = deadline_s - time.monotonic()
            if self._num_ok is not None or left_s <= 0:
                break
            self._client.wait_ended(left_s, [self._task_id])
        return bool(self._num_ok)  # all or nothing

    def give_up(self) -> None:
        """End the load: no copy runs afterwards, and none starts."""
        self._cancel(self._task_id)
        while self._num_ok is None:  # every op has a deadline
            self.wait_all(_PATIENCE_S)
