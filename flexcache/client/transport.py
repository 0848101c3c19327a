"""Transport: the way from an engine's scheduler to its cache.

Method calls where the cache is in this process, or sockets to a server that engines share. Checking
calls and remembering results is the same for both (`ClientTasks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flexcache.cache.control import CacheCall
from flexcache.cache.journal import Change
from flexcache.cache.prompt import Prompt
from flexcache.client.arguments import BlockIds
from flexcache.client.remote import RemoteTransport
from flexcache.client.tasks import ClientTasks
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.values import server_of
from flexcache.ids import PromptDetail
from flexcache.protocol.endpoints import check_endpoint, private_endpoint
from flexcache.protocol.messages import engine_name, new_engine_id
from flexcache.server.operator import LocalSession
from flexcache.server.server import KVServer
from flexcache.stats import to_plain
from flexcache.tasks.instructions import Offer, PromisedLoad


class Transport(Protocol):
    """Thread-safe. Tasks that it is given are known to be in order: `ClientTasks` has checked.

    What becomes of tasks is pushed into the client's `ClientTasks` by the transport, on any thread,
    in the order in which it happens.
    """

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
        self, prompt: Prompt, look_up: bool, may_wait: bool, awaits_loads: bool
    ) -> Offer | None:
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

    def control(self, call: CacheCall) -> Any:
        """Carry out a user's call about what is cached; its answer, as the server makes it."""

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


class LocalTransport(LocalSession):
    """The engine's session, and the life of the server that is its alone.

    Calls (`LocalSession`) and answers (`ClientTasks.answer`) are method calls under the server's
    lock.
    """

    def __init__(
        self, endpoint: str | None, model: ModelConfig, config: CacheConfig, engine: str
    ) -> None:
        super().__init__(KVServer(config, endpoint, model=model, engine=engine))
        self.prompt_detail: PromptDetail = config.prompt_detail
        self._engine = engine

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def fence_path(self) -> str | None:
        with self.server.lock:
            found = self.server.state.engines.get(self._engine)
            return None if found is None else found.fence.path

    def start(self, tasks: ClientTasks) -> None:
        ids = self.server.start(tasks)
        assert ids is not None
        self.ids = ids
        with self.server.lock:  # later names come after this one
            weights = self.server.state.weights.of(self._engine)
            tasks.renamed(weights.generation, weights.version)

    def is_ready(self) -> bool:
        if self.server.stopping:
            return False
        with self.server.lock:
            return not self.server.hub.greeter.missing(self._engine)

    def wait_ready(self, timeout: float | None) -> None:
        self.server.wait_ready(self._engine, timeout)

    def take_changes(self) -> list[Change]:
        with self.server.lock:
            return self.server.state.observers.take_changes()

    def clear(self, tier: str | None) -> int:
        return self.server.clear(tier, self._engine)

    def new_weights(self, version: str) -> None:
        self.server.new_weights(self._engine, version)

    def stats(self) -> dict[str, Any]:
        return to_plain(self.server.stats(self.ids.session))

    def check(self) -> None:
        if not self.server.is_open:
            return
        with self.server.lock, self.server.session() as tasks:
            tasks.check()

    def close(self) -> None:
        self.server.shutdown()


_OTHERS_START_AFTER_S = 5.0


def local_endpoint(engine_id: str) -> str:
    """Where the ranks of an engine that keeps its own cache find it."""
    # Derived from the engine's id: vLLM cannot hand an address from the scheduler to workers that
    # start before it.
    return private_endpoint(f"engine-{engine_id}" if engine_id else None)


def open_transport(
    model: ModelConfig, config: CacheConfig, address: str | None, engine_id: str, dp_rank: int
) -> tuple[Transport, str]:
    """The way to a cache, which is not started yet, and the engine id that it goes by.

    The cache is shared if there is an ``address`` or more than one data-parallel rank.
    """
    # An engine alone keeps its own cache, whose calls need no round trip; with an address, never.
    if address is None and model.dp_size == 1:
        name = engine_name(engine_id, dp_rank)
        return LocalTransport(local_endpoint(engine_id), model, config, name), engine_id
    if address is None:
        group = engine_id or model.fingerprint(config.tokens_per_block)
        endpoint = private_endpoint(f"group-{group}")
    else:
        endpoint = server_of(address)
    check_endpoint(endpoint, has_keys=config.curve_keys is not None)
    engine_id = engine_id or new_engine_id()
    name = engine_name(engine_id, dp_rank)
    patience_s = 0.0 if dp_rank == 0 else _OTHERS_START_AFTER_S
    return RemoteTransport(endpoint, model, config, name, patience_s), engine_id
