"""Engine client (`EngineClient`): an engine's scheduler at its cache, in blocks and task ids.

It checks calls, remembers tasks and their results, and leaves the way to the cache to a
`Transport`: method calls in this process, or sockets to a shared server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flexcache.cache.journal import Change
from flexcache.cache.prompt import Prompt
from flexcache.client.gpu_blocks import BlockIds
from flexcache.client.remote import RemoteTransport
from flexcache.client.tasks import ClientTasks, Extent, StepPromises, Transport
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.values import server_of
from flexcache.errors import ClosedError
from flexcache.ids import PromptDetail, TaskKind
from flexcache.processes import tell_of_forks
from flexcache.protocol.endpoints import check_endpoint, private_endpoint
from flexcache.protocol.messages import engine_name, new_engine_id
from flexcache.server.operator import LocalSession, open_http
from flexcache.server.server import KVServer
from flexcache.stats import to_plain
from flexcache.tasks.instructions import MatchedTask, PromisedLoad, TaskResult


class LocalTransport(LocalSession):
    """The engine's session, and the life of the server that is its alone.

    Calls and answers are method calls under the server's lock.
    """

    def __init__(
        self, endpoint: str | None, model: ModelConfig, config: CacheConfig, engine: str
    ) -> None:
        super().__init__(
            KVServer(config, endpoint, model=model, engine=engine, open_http=open_http)
        )
        self.prompt_detail: PromptDetail = config.prompt_detail
        self._engine = engine

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def fence_path(self) -> str | None:
        return self.server.fence_path(self._engine)

    def start(self, tasks: ClientTasks) -> None:
        ids = self.server.start(tasks)
        assert ids is not None
        self.ids = ids
        with self.server.lock:  # later names come after this one
            weights = self.server.hub.weights.of(self._engine)
            tasks.renamed(weights.generation, weights.version)

    def is_ready(self) -> bool:
        return not self.server.stopping and not self.server.missing(self._engine)

    def wait_ready(self, timeout: float | None) -> None:
        self.server.wait_ready(self._engine, timeout)

    def take_changes(self) -> list[Change]:
        return self.server.take_changes()

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


_NOT_STARTED = "the cache was not started: call start() first"


class EngineClient:
    """Thread-safe. Task ids that were never given out are a `KeyError`.

    Before `start` and after `shutdown` whatever needs the cache raises a `ClosedError`.
    """

    def __init__(self, transport: Transport, num_ranks: int) -> None:
        self.transport = transport
        self._promises = StepPromises(num_ranks)
        self._tasks = ClientTasks()
        self._closed: str | None = _NOT_STARTED
        """Why there is no cache; None while there is one."""
        self._pid = os.getpid()
        self._is_parents = False
        """Whether this process is a child of the one whose cache it is."""

    @property
    def endpoint(self) -> str:
        """Address for a `KVTPClient`."""
        return self.transport.endpoint

    def start(self) -> None:
        """Connect; returns at once. Raises `ClosedError` after a shutdown."""
        if self._closed not in (None, _NOT_STARTED):
            raise ClosedError(self._closed)
        self._pid = os.getpid()
        tell_of_forks(self)
        self.transport.start(self._tasks)
        if self._closed is _NOT_STARTED:  # else it was shut down meanwhile
            self._closed = None

    def is_ready(self) -> bool:
        """Whether all ranks and workers serve."""
        return not self._is_parents and self.transport.is_ready()

    def wait_ready(self, timeout: float | None) -> None:
        """Wait until they do. Raises `TimeoutError`, `RegistrationError` or `ClosedError`."""
        self._require_open()
        self.transport.wait_ready(timeout)

    # -- tasks -----------------------------------------------------------------------------------

    def match(self, kind: TaskKind, prompt: Prompt) -> MatchedTask:
        """Make a task for what can be done of a prompt. Waits for the remote store's answer."""
        self._require_open()
        matched = self.transport.match(kind, prompt, True, True, False)
        assert matched is not None  # it may wait
        self._tasks.add(kind, matched, prompt.num_tokens)
        return matched

    def match_nowait(
        self, kind: TaskKind, prompt: Prompt, look_up: bool, awaits_loads: bool = False
    ) -> MatchedTask | None:
        """As `match`, but None if the remote store is asked (``look_up``) and has yet to answer, or
        (``awaits_loads``) while what a get needs is being loaded early."""
        self._require_open()
        matched = self.transport.match(kind, prompt, look_up, False, awaits_loads)
        if matched is not None:
            self._tasks.add(kind, matched, prompt.num_tokens)
        return matched

    def look_up(self, prompt: Prompt) -> None:
        """Begin to ask the remote store about a prompt that is going to be matched."""
        self._require_open()
        self.transport.look_up(prompt)

    def match_and_launch(
        self, kind: TaskKind, prompt: Prompt, choose: Callable[[MatchedTask], BlockIds]
    ) -> MatchedTask:
        """Match, and launch with the GPU blocks that ``choose`` returns.

        Raises:
            ValueError: ``choose`` did, or the number of blocks is wrong; the task is cancelled.
        """
        matched = self.match(kind, prompt)
        try:
            self.launch([matched.task_id], [choose(matched)], gated=False)
        except ValueError:
            self.cancel([matched.task_id])
            raise
        return matched

    def extent(self, task_id: int) -> Extent:
        """What a task moves."""
        return self._tasks.extent(task_id)

    def launch(self, task_ids: Sequence[int], gpu_blocks: Sequence[BlockIds], gated: bool) -> None:
        """Start tasks; all are checked before any is started.

        Raises:
            ValueError: A number of blocks is wrong, or a task was launched before.
        """
        positions = self._tasks.launch(task_ids, gpu_blocks)
        if positions:
            self.transport.launch(
                [task_ids[i] for i in positions], [gpu_blocks[i] for i in positions], gated
            )

    def promise(self, task_id: int) -> PromisedLoad | None:
        """Start a matched get of blocks in DRAM that the engine has its ranks carry out, if it can
        be neither lost nor cancelled by others until `end_promises`.

        Raises:
            FlexCacheError: The cache cannot be asked.
        """
        self._require_open()
        if not self._promises.begin(self.transport.fence_path):
            return None
        promised = self.transport.promise(task_id)
        if promised is not None:
            self._tasks.promised(task_id)
        return promised

    def end_promises(self) -> None:
        """No step under way counts on a promised load. Idempotent."""
        self._promises.end()

    def cancel(self, task_ids: Iterable[int]) -> None:
        """Stop what has not started. Idempotent."""
        are_open = self._tasks.cancel(task_ids)
        if are_open:
            self.transport.cancel(are_open)

    def results(
        self, task_ids: Iterable[int], timeout: float | None, completely: bool
    ) -> dict[int, TaskResult]:
        """The results of those tasks that are over within ``timeout`` s; None: wait for all."""
        return self._tasks.results(task_ids, timeout, completely)

    def on_weights(self, rename: Callable[[int, str], None]) -> None:
        """Call ``rename`` with each new generation of the engine's weights and their version, on
        any thread, before the first match that counts for it."""
        self._tasks.renamed = rename

    def new_weights(self, version: str) -> str:
        """Name the engine's weights; also before `start`, and while the server is away."""
        if self._is_parents:  # a thread that this process does not have may hold its locks
            self._require_open()
        self.transport.new_weights(version)
        return version

    # -- the cache as a whole --------------------------------------------------------------------

    def report_prefill(self, blocks_per_s: float) -> None:
        """Report how fast the engine computes."""
        self._require_open()
        self.transport.report_prefill(blocks_per_s)

    def session_hint(self, session_id: str, over: bool, returns_in_s: float | None) -> bool:
        """Pass on what a user says of its session; whether the session is known."""
        self._require_open()
        return self.transport.session_hint(session_id, over, returns_in_s)

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call."""
        return [] if self._is_parents else self.transport.take_changes()

    def clear(self, tier: str | None) -> int:
        """Drop the blocks of one tier, or of all, that are not in use; how many."""
        self._require_open()
        return self.transport.clear(tier)

    def stats(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        self._require_open()
        return self.transport.stats()

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        self._require_open()
        self.transport.check()

    def shutdown(self) -> None:
        """Wake waiting callers with a `ClosedError`, and leave the cache. Idempotent."""
        if self._is_parents:
            return
        self._closed = "the cache was shut down"
        self._promises.end()
        self._tasks.close()
        self.transport.close()

    def forked(self) -> None:
        self._is_parents = True
        self._closed = (
            f"the cache is that of process {self._pid}, of which this one is a fork: "
            "make a KVManager of its own here"
        )
        self._tasks = ClientTasks()  # a thread that this process does not have may use the others
        self._tasks.close()

    def _require_open(self) -> None:
        if self._closed is not None:
            raise ClosedError(self._closed)


_OTHERS_START_AFTER_S = 5.0


def local_endpoint(engine_id: str) -> str:
    """Where the ranks of an engine that keeps its own cache find it."""
    return private_endpoint(f"engine-{engine_id}" if engine_id else None)


def open_client(
    model: ModelConfig, config: CacheConfig, address: str | None, engine_id: str, dp_rank: int
) -> tuple[EngineClient, str]:
    """A client that is not started yet, and the engine id it goes by.

    The cache is shared if there is an ``address`` or more than one data-parallel rank.
    """
    if address is None and model.dp_size == 1:
        name = engine_name(engine_id, dp_rank)
        local = LocalTransport(local_endpoint(engine_id), model, config, name)
        return EngineClient(local, model.num_ranks), engine_id
    if address is None:
        group = engine_id or model.fingerprint(config.tokens_per_block)
        endpoint = private_endpoint(f"group-{group}")
    else:
        endpoint = server_of(address)
    check_endpoint(endpoint, has_keys=config.curve_keys is not None)
    engine_id = engine_id or new_engine_id()
    name = engine_name(engine_id, dp_rank)
    patience_s = 0.0 if dp_rank == 0 else _OTHERS_START_AFTER_S
    remote = RemoteTransport(endpoint, model, config, name, patience_s)
    return EngineClient(remote, model.num_ranks), engine_id
