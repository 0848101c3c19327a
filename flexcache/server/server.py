"""KVServer: serves one model's KV cache. Composes hub, event loop, workers and observers.

    ranks, schedulers --ROUTER--> EventLoop --> Hub --> KVTaskEngine --> Outbox --> EventLoop
    disk, remote worker --ROUTER-----+                       ^
                                                             +-- session(): callers in this process

As a process of its own (`flexcache server`) it serves many engines, and its event loop runs on the
main thread. Inside an engine's scheduler it serves that one, whose calls come by `session`. Hub,
task engine and outbox are used under one condition's lock only, by the loop and by every session;
its waiters are notified when a look-up ends or an engine's readiness changes. The sockets belong to
the loop, which sends after it has released the lock.

    new --start()--> serving --stop(), SIGTERM, idle--> draining --> stopped
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flexcache.cache.journal import Change
from flexcache.cache.prompt import random_version
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ClosedError
from flexcache.ids import SessionId, TaskId, TaskIds, __version__, new_epoch
from flexcache.logs import log_event
from flexcache.processes import ServiceThread, tell_of_forks
from flexcache.protocol.endpoints import check_endpoint, private_endpoint
from flexcache.protocol.fence import Fence, Scratch
from flexcache.protocol.messages import MAX_FRAME_BYTES, Weights, pid_namespace
from flexcache.server.cache import ServedCache
from flexcache.server.hub import Hub
from flexcache.server.loop import EventLoop, IdleExit
from flexcache.server.observers import Observers
from flexcache.server.operator import open_http
from flexcache.server.outbox import (
    BackgroundJob,
    BackgroundThread,
    LocalLines,
    error_of,
    serve_lines,
    withdraw_lines,
)
from flexcache.server.reactor import Endpoint, Reactor
from flexcache.server.state import Answers, HubConfig, ServerState
from flexcache.server.workers import WorkerPool
from flexcache.stats import ServerStats, Stats
from flexcache.storage.shards import Shards
from flexcache.tasks.engine import KVTaskEngine

logger = logging.getLogger(__name__)


class KVServer:
    """Serves one model's KV cache.

    Args:
        config: How much is kept where.
        endpoint: Address to serve at; the config's, or a private one, if None.
        model: What the KV looks like; None to take it from the first engine that greets.
        engine: Name of the engine in this process that calls by `session`, if there is one.
        idle_exit_s: Stop once the last client has left, or this long after it has died.
        is_needed: Whether a server that has had no client yet may still get one.

    Raises:
        ConfigError: The endpoint must not be served, or a size fits neither model nor machine.
    """

    def __init__(
        self,
        config: CacheConfig,
        endpoint: str | None = None,
        *,
        model: ModelConfig | None = None,
        engine: str | None = None,
        idle_exit_s: float | None = None,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        if engine is None:  # no caller takes them here: they are published or not recorded
            config = dataclasses.replace(config, kv_events=False)
        self.config = config
        self.endpoint = endpoint or config.endpoint or private_endpoint()
        check_endpoint(self.endpoint, has_keys=config.curve_keys is not None)
        self._model = model
        self._cache: ServedCache | None = None
        if model is not None and not model.sized_by_ranks:  # wrong sizes are refused at once
            shards = Shards.of_model(model, config.tokens_per_block)
            self._cache = ServedCache(model, config, shards)
        self._engine_name = engine
        self._idle_exit_s = idle_exit_s
        self._is_needed = is_needed
        self._clearing = threading.Lock()  # held while a caller of `clear` erases files
        self._reactor = Reactor()
        hub_config = HubConfig(
            epoch=new_epoch(),
            server_pid=os.getpid(),
            pid_namespace=pid_namespace(),
            client_timeout_s=config.client_timeout_s,
            owner=engine,
            prompt_detail=config.prompt_detail,
        )
        host = LocalHost(self._reactor, lambda identity, now: self.hub.peer_died(identity, now))
        self._state = ServerState(hub_config, host, self._open_cache)
        self.lock, self._changed = self._state.lock, self._state.changed
        self.hub = Hub(self._state, self._own_stats)
        if engine is not None:
            self._state.weights.begin(engine, config.model_version or "")
        self._lines = LocalLines(self.hub, self._reactor)
        self._observers = Observers(config)
        self._pool = WorkerPool(self._reactor, self.hub)
        self._background = BackgroundThread(self._end_job)
        self._endpoint: Endpoint | None = None
        self._thread: ServiceThread | None = None
        self._ends = threading.RLock()  # held by a caller of `shutdown`
        self._started_s = 0.0
        self._stopped = False

    # -- for the process that owns it ------------------------------------------------------------

    def start(self, answers: Answers | None = None) -> TaskIds | None:
        """Bind, make the pools and serve on a thread; returns at once.

        Args:
            answers: Receives the answers to the engine in this process.

        Returns:
            What numbers the tasks of the engine in this process, if there is one.

        Raises:
            ConfigError: The endpoint or a directory is another process's, or cannot be used.
        """
        loop, ids = self._open(answers)
        self._thread = ServiceThread(self._run, "flexcache-server", loop)
        self._thread.start()
        return ids

    def serve(self, began: Callable[[str], None] = lambda _: None) -> None:
        """As `start`, but on the calling thread, until `stop` or idleness ends it. ``began`` is
        called with the address once that is bound."""
        loop, _ = self._open()
        self._reactor.spins = True
        try:
            began(self.endpoint)
            failure = self._run(loop)
        finally:
            self._release()
            self._stopped = True
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """Have `serve` come to its orderly end. Safe in a signal handler and on any thread."""
        self._reactor.stop()

    def shutdown(self) -> None:
        """Cancel what has not started, let moving bytes land, stop the workers. Idempotent, from
        any thread, also by the handler of a signal that came during another call."""
        if self._stopped:
            return
        with self._ends, _given_away(self.lock):
            if self._stopped:
                return
            with self.lock:
                self._reactor.stopping = True
                self._changed.notify_all()
            if self._thread is not None:
                self.stop()
                self._thread.wait()
            if not self._stopped:  # by a nested call meanwhile
                self._release()
                self._stopped = True

    def forked(self) -> None:
        self._stopped = self._reactor.stopping = True

    def _run(self, loop: EventLoop) -> Exception | None:
        failure = loop.run()
        if failure is None:
            log_event(logger, logging.INFO, "server_ended", endpoint=self.endpoint)
        return failure

    def _open(self, answers: Answers | None = None) -> tuple[EventLoop, TaskIds | None]:
        if self._endpoint is not None:
            raise ValueError("the server was started before")
        ids = None
        try:
            self._endpoint = Endpoint(self.endpoint, self.config.curve_keys)
            self.endpoint = self._endpoint.address
            serve_lines(self.endpoint, self._lines)
            self._reactor.open(self._endpoint.socket)
            if self.config.has_workers:
                self._pool.bind(self._endpoint.context, self._endpoint.worker_address)
            if self._model is not None:
                with self.lock:
                    self._state.slot.expect(
                        self._model, self.config.tokens_per_block, self._engine_name
                    )
                    if self._engine_name is not None:
                        ids = self._state.open_local(self._engine_name, answers)
            if self.config.http_endpoint is not None:
                self._observers.open_http(partial(open_http, self))
        except BaseException:
            self._release()
            raise
        tell_of_forks(self)
        self._started_s = now = time.monotonic()
        idle_exit = None
        if self._idle_exit_s is not None:
            idle_exit = IdleExit(self._idle_exit_s, self._is_needed, now)
        loop = EventLoop(
            self.hub, self._reactor, self._endpoint.socket, self._pool, self._background, idle_exit
        )
        log_event(logger, logging.INFO, "server_began", endpoint=self.endpoint)
        return loop, ids

    def _open_cache(self, model: ModelConfig, tokens_per_block: int, shards: Shards) -> ServedCache:
        """Open the tiers, and start what serves and observes them."""
        cache = self._cache
        if cache is None:
            config = dataclasses.replace(self.config, tokens_per_block=tokens_per_block)
            cache = ServedCache(model, config, shards)
        store, endpoint = cache.store, self._endpoint
        assert endpoint is not None

        def begin_workers() -> None:
            self._pool.add_store_workers(store, endpoint.worker_address)
            self._pool.start_due(time.monotonic())

        try:
            cache.open(begin_workers)
        except BaseException:
            self._pool.discard()  # they hold the directories' locks, and the next try makes others
            raise
        self._cache = cache
        self._state.feed = self._observers.follow(cache)
        return cache

    # -- calls from this process -----------------------------------------------------------------

    def session(self) -> contextlib.AbstractContextManager[KVTaskEngine]:
        """Use of the task engine, with `lock` held. At its end `LocalLines.pass_on` has the hub
        carry out what the engine has decided."""
        return _EngineUse(self)

    def wait_for_change(self, timeout: float | None) -> None:
        """Inside `session`: release the lock until a look-up has ended, or for ``timeout`` s."""
        self._changed.wait(timeout)

    @property
    def cache(self) -> ServedCache | None:
        """None until an engine or the config has said what is cached."""
        with self.lock:
            return self.hub.cache

    @property
    def is_open(self) -> bool:
        """Whether there are tiers: what an engine of this process asks for before is a miss."""
        return self._cache is not None

    def fence_path(self, engine: str) -> str | None:
        """Where others find the fence of an engine, if it has a peer."""
        with self.lock:
            found = self._state.engines.get(engine)
            return None if found is None else found.fence.path

    def next_id(self, ids: TaskIds) -> TaskId:
        """Number a task of an engine in this process, before there are tiers."""
        with self.lock:
            return ids.next()

    @property
    def stopping(self) -> bool:
        return self._reactor.stopping

    def missing(self, engine: str) -> list[str]:
        """Ranks and workers that an engine still waits for."""
        with self.lock:
            return self.hub.greeter.missing(engine)

    def wait_ready(self, engine: str, timeout: float | None) -> None:
        """Wait until every rank of an engine and the disk worker serve. Raises what
        `Greeter.require` does."""
        with self.lock:
            greeter = self.hub.greeter
            self._changed.wait_for(lambda: self.stopping or greeter.is_settled(engine), timeout)
            if self.stopping:
                raise ClosedError("the cache was shut down")
            greeter.require(engine, timeout)

    def new_weights(self, engine: str, version: str) -> Weights:
        """Rename an engine's weights; return the name with its generation. At any time."""
        with self.lock:
            weights = self._state.weights.rename(engine, version, time.monotonic())
            if self._thread is not None:
                self._lines.pass_on()
        return weights

    def engines(self) -> list[str]:
        """Names of the engines in session."""
        with self.lock:
            return [name for name, _, _ in self._state.engines_in_session()]

    def versions(self) -> list[str]:
        """What the weights of engines in session are called; the configured name without any."""
        with self.lock:
            engines = [name for name, _, _ in self._state.engines_in_session()]
            versions = dict.fromkeys(self._state.weights.of(name).version for name in engines)
        return list(versions) or [self.config.model_version or ""]

    def clear(self, tier: str | None, engine: str | None = None) -> int:
        """Drop the blocks of one tier, or of all, that are not in use; how many.

        With all, the ``engine`` that asks for it has its weights renamed.
        """
        if not self.is_open:
            return 0
        with self._clearing:
            with self.lock, self.session():
                assert self._cache is not None
                clearing = self._cache.clear(tier)
                if tier is None and engine is not None:
                    self._state.weights.rename(engine, random_version(), time.monotonic())
            error = error_of(clearing.work)
            with self.lock:  # also while the cache is shut down: dirty blocks wait for it
                return clearing.end(error)

    def stats(self, session: SessionId | None = None) -> Stats:
        """Statistics of the server as a whole and, if one is named, of a session."""
        with self.lock:
            if self.stopping:
                raise ClosedError("the cache was shut down")
            return self.hub.stats(time.monotonic(), session)

    def health(self) -> dict[str, Any]:
        """Whether the server is at work, and which of its parts are missing."""
        with self.lock:
            missing = self._pool.missing() + self.hub.greeter.absentees() + self._observers.absent
            return {"serving": not self.stopping, "missing": missing}

    def open_session(self, name: str) -> TaskIds:
        """Open a session for calls from this process; there must be a model."""
        with self.lock:
            return self._state.open_local(name)

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call, with ``kv_events``."""
        with self.lock:
            return self._observers.take_changes()

    def _own_stats(self) -> ServerStats:
        pids, restarts = self._pool.pids(), self._pool.restarts()
        return ServerStats(
            version=__version__,
            uptime_s=time.monotonic() - self._started_s,
            endpoint=self.endpoint,
            server_pid=os.getpid(),
            workers=self.hub.workers() | pids,
            worker_restarts=restarts,
            worker_up={name: name in pids for name in restarts},
            events=self._observers.event_stats(),
            trace=self._observers.trace_stats(),
        )

    # -- the end ---------------------------------------------------------------------------------

    def _end_job(self, job: BackgroundJob, error: Exception | None) -> None:
        with self.lock:
            job.end(error)
            self._reactor.wake()

    def _release(self) -> None:
        withdraw_lines(self.endpoint, self._lines)
        self._observers.close_http()
        jobs_are_done = self._background.close()
        with self.lock:
            self.hub.close()
        self._pool.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._reactor.close()
        self._observers.close()
        if self._cache is not None and jobs_are_done:  # else its files are still written to
            with self._clearing:  # it writes to the files, and HTTP does not wait for it
                self._cache.store.close()
        if self._endpoint is not None:
            self._endpoint.unlock()


class _EngineUse:
    """What `KVServer.session` returns. A class, since a generator takes three times as long.

        with server.lock, server.session() as tasks: ...

    It does not take the lock: an interrupt may come between any two steps of a method written in
    Python, and only the lock's own methods then still let go of it.
    """

    __slots__ = ("_server",)

    def __init__(self, server: KVServer) -> None:
        self._server = server

    def __enter__(self) -> KVTaskEngine:
        server = self._server
        if server._reactor.stopping:
            raise ClosedError("the cache was shut down")
        assert server._cache is not None
        return server._cache.tasks

    def __exit__(self, *error: object) -> None:
        self._server._lines.pass_on()


@contextlib.contextmanager
def _given_away(lock: threading.RLock) -> Iterator[None]:
    """Let other threads have a lock that this one may hold, in a call that a signal has stopped."""
    num_held = 0
    with contextlib.suppress(RuntimeError):  # once it holds no more
        while True:
            lock.release()
            num_held += 1
    try:
        yield
    finally:
        for _ in range(num_held):
            lock.acquire()


class LocalHost:
    """A `Host` that watches processes with the event loop and makes real shared memory.

    Args:
        died: Called with a peer's identity and the time when its process has ended.
    """

    def __init__(self, reactor: Reactor, died: Callable[[bytes, float], None]) -> None:
        self._reactor = reactor
        self._died = died

    def watch(self, identity: bytes, pid: int) -> None:
        # A process of another pid namespace is not seen: heartbeats and deadlines have to do.
        self._reactor.watch_process(identity, pid, partial(self._died, identity))

    def unwatch(self, identity: bytes) -> None:
        self._reactor.unwatch_process(identity)

    def make_fence(self) -> Fence:
        return Fence.create()

    def map_scratch(self, pid: int, fd: int) -> Scratch | None:
        return Scratch.open(pid, fd, MAX_FRAME_BYTES)
