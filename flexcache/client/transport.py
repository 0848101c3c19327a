"""How an `EngineClient` reaches the cache: in this process, or at a server.

What becomes of tasks is pushed into the client's `ClientTasks` by the transport, on any thread, in
the order in which it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flexcache.cache.journal import Change
from flexcache.cache.prompt import Prompt
from flexcache.client.slots import BlockIds
from flexcache.client.tasks import ClientTasks
from flexcache.ids import PromptDetail, TaskKind
from flexcache.tasks.instructions import MatchedTask, PromisedLoad


class Transport(Protocol):
    """Thread-safe. Tasks that it is given are known to be in order: `ClientTasks` has checked."""

    @property
    def endpoint(self) -> str:
        """Address for a `KVTPClient`."""

    @property
    def prompt_detail(self) -> PromptDetail:
        """How much of a prompt the cache's observers need."""

    def start(self, tasks: ClientTasks) -> None:
        """Connect, and push answers into ``tasks`` from now on. Returns at once."""

    def is_ready(self) -> bool:
        """Whether all ranks and workers serve."""

    def wait_ready(self, timeout: float | None) -> None:
        """Wait until they do. Raises `TimeoutError`, `RegistrationError` or `ClosedError`."""

    def match(
        self, kind: TaskKind, prompt: Prompt, look_up: bool, may_wait: bool, awaits_loads: bool
    ) -> MatchedTask | None:
        """Make a task for what can be done of a prompt.

        With ``look_up`` the remote store is asked first. None if it has yet to answer, and the
        caller may not wait. With ``awaits_loads`` also None while what a get needs is being loaded
        early.
        """

    def look_up(self, prompt: Prompt) -> None:
        """Begin to ask the remote store about a prompt; no task is made."""

    def launch(self, task_ids: Sequence[int], gpu_blocks: Sequence[BlockIds], gated: bool) -> None:
        """Start open tasks."""

    @property
    def fence_path(self) -> str | None:
        """Where the engine's fence is; None if it has no rank, or there is no server."""

    def promise(self, task_id: int) -> PromisedLoad | None:
        """Start a get from DRAM that the engine has its ranks carry out, if that can be promised.

        Raises:
            FlexCacheError: It cannot, since there is no server.
        """

    def cancel(self, task_ids: Sequence[int]) -> None:
        """Stop what has not started of tasks. Idempotent."""

    def report_prefill(self, blocks_per_s: float) -> None:
        """Report how fast the engine computes."""

    def session_hint(self, session_id: str, over: bool, returns_in_s: float | None) -> bool:
        """Pass on what a user says of its session; whether the session is known."""

    def new_weights(self, version: str) -> None:
        """Name the engine's weights. At any time; what was named before `start` counts from it."""

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call."""

    def clear(self, tier: str | None) -> int:
        """Drop the blocks of one tier, or of all, that are not in use; how many."""

    def stats(self) -> dict[str, Any]:
        """Plain numbers and strings."""

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""

    def close(self) -> None:
        """Cancel open tasks, disconnect and release everything. Idempotent."""
