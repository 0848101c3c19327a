"""What `KVManager` needs of whoever keeps the tasks: this process, or a server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import PromptKeys
from flexcache.cache.journal import Change
from flexcache.ids import TaskKind, TierName
from flexcache.request_info import PromptDetail
from flexcache.tasks.instructions import TaskResult


class MatchedTask(NamedTuple):
    """A task for blocks ``start`` to ``start + num_blocks`` of a prompt, and who supplies them."""

    task_id: int
    start: int
    num_blocks: int
    sources: dict[TierName, int]


class Backend(Protocol):
    """Thread-safe. Ids that were never given out are a `KeyError`."""

    @property
    def endpoint(self) -> str:
        """What a `KVTPClient` connects to."""

    @property
    def fingerprint(self) -> str:
        """Of the model and block size."""

    @property
    def wanted(self) -> PromptDetail:
        """How much of what prompts are about somebody is told."""

    def start(self) -> None:
        """Begin; returns at once."""

    def is_ready(self) -> bool:
        """Whether all ranks and workers are there."""

    def wait_ready(self, timeout: float | None) -> None:
        """Wait for them. Raises `TimeoutError` or `RegistrationError`."""

    def match(
        self,
        kind: TaskKind,
        keys: PromptKeys,
        start: int,
        stop: int,
        num_tokens: int,
        retain_s: float = 0.0,
        look_up: bool = True,
        may_wait: bool = True,
    ) -> MatchedTask | None:
        """Make a task for what can be done of blocks ``[start, stop)``.

        With ``look_up`` the remote store is asked first. None, only where the caller must not be
        made to wait: it was asked, and has yet to answer.
        """

    def report_prefill(self, blocks_per_s: float) -> None:
        """How fast the engine computes."""

    def launch(
        self, task_ids: Sequence[int], gpu_blocks: Sequence[npt.NDArray[np.int64]], gated: bool
    ) -> None:
        """Start tasks; all are checked before any is started."""

    def cancel(self, task_ids: Iterable[int]) -> None:
        """Stop what has not started. Idempotent."""

    def results(
        self, task_ids: Iterable[int], timeout: float | None, completely: bool
    ) -> dict[int, TaskResult]:
        """Results of those that are over within ``timeout`` s (None: wait for all)."""

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call."""

    def clear(self, tier: str | None) -> int:
        """Drop what nobody holds, of one tier or of all."""

    def stats(self) -> dict[str, Any]:
        """Plain numbers and strings."""

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""

    def shutdown(self) -> None:
        """Give everything back. Idempotent."""
