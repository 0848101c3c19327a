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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flexcache.cache.control import CacheCall
from flexcache.cache.prompt import random_version
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ClosedError
from flexcache.ids import SessionId, TaskIds, __version__
from flexcache.logs import log_event
from flexcache.processes import ServiceThread, tell_of_forks
from flexcache.protocol.endpoints import check_endpoint, private_endpoint
from flexcache.protocol.messages import Weights, WeightsChanged
from flexcache.server.cache import ServedCache
from flexcache.server.hub import Hub
from flexcache.server.loop import EventLoop, IdleExit
from flexcache.server.observers import Observers
from flexcache.server.operator import open_http
from flexcache.server.outbox import (
    BackgroundJob,
    BackgroundThread,
    LocalLine,
    error_of,
    serve_lines,
    withdraw_lines,
)
from flexcache.server.peers import PeerLinks
from flexcache.server.reactor import Endpoint, Reactor
from flexcache.server.state import Answers, ServerState
from flexcache.server.workers import WorkerPool
from flexcache.stats import ServerStats, Stats
from flexcache.storage.shards import Shards
from flexcache.tasks.engine import KVTaskEngine
from flexcache.transfer.messages import Done

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
        self._model = model = model and model.in_shards(config.store_shards)
        self._cache: ServedCache | None = None
        if model is not None and not model.sized_by_ranks:  # wrong sizes are refused at once
            shards = Shards.of_model(model, config.tokens_per_block)
            self._cache = ServedCache(model, config, shards)
        self._idle_exit: Callable[[float], IdleExit] | None = None
        if idle_exit_s is not None:
            self._idle_exit = partial(IdleExit, idle_exit_s, is_needed)
        self._clearing = threading.Lock()  # held while a caller of `clear` erases files
        self._reactor = Reactor()
        self._observers = Observers(config)
        self.state = ServerState(
            config, self._reactor, self._observers, self._open_cache, owner=engine
        )
        self.lock, self._changed = self.state.lock, self.state.changed
        self.hub = Hub(self.state, self._own_stats)
        if engine is not None:
            self.state.weights.begin(engine, config.model_version or "")
        self._pool = WorkerPool(self._reactor, self.hub)
        self._background = BackgroundThread(self._end_job)
        self._endpoint: Endpoint | None = None
        self.peers: PeerLinks | None = None
        """Lines to other hosts' caches, if there are any."""
        self._thread: ServiceThread | None = None
        self._ends = threading.RLock()  # held by a caller of `shutdown`
        self._started_s = 0.0
        self._stopped = False
        self._use = _EngineUse(self)

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
        # This process has no other use for the interpreter.
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
            serve_lines(self.endpoint, self)
            self._reactor.open(self._endpoint.socket)
            if self.config.has_peers:
                self.peers = PeerLinks(self.config, self.state, self._reactor)
                self._pool.on_peer_failed = self.peers.failed
            if self.config.has_workers:
                self._pool.bind(self._endpoint.context, self._endpoint.worker_address)
            if self._model is not None:
                with self.lock:
                    owner = self.state.owner
                    self.state.slot.expect(self._model, self.config.tokens_per_block, owner)
                    if owner is not None:
                        ids = self.state.open_local(owner, answers)
                        self.state.names_keys_by(owner, self._model.engine_keys)
            if self.config.http_endpoint is not None:
                self._observers.open_http(partial(open_http, self))
        except BaseException:
            self._release()
            raise
        # A child has neither its threads nor the right to its files.
        tell_of_forks(self)
        self._started_s = now = time.monotonic()
        # Its patience begins here: to open the tiers may have taken seconds.
        idle_exit = None if self._idle_exit is None else self._idle_exit(now)
        loop = EventLoop(
            self.hub, self._reactor, self._endpoint.socket, self._pool, self._background, idle_exit,
            self.peers,
        )  # fmt: skip
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
            peer_fd = None if self.peers is None else self.peers.listen_fd
            self._pool.add_store_workers(store, endpoint.worker_address, peer_fd)
            self._pool.start_due(time.monotonic())

        try:
            # Workers start while the blocks are indexed: both may take seconds.
            cache.open(begin_workers)
        except BaseException:
            self._pool.discard()  # they hold the directories' locks, and the next try makes others
            raise
        self._cache = cache
        self._observers.follow(cache)
        return cache

    # -- calls from this process -----------------------------------------------------------------

    def session(self) -> contextlib.AbstractContextManager[KVTaskEngine]:
        """Use of the task engine, with `lock` held. At its end `pass_on` has the hub
        carry out what the engine has decided."""
        return self._use

    def pass_on(self) -> None:
        """Pass on what the task engine has decided, and wake the loop if it has a part in that.

        Called under the lock, by other threads than the loop's.
        """
        self.hub.route(time.monotonic())
        # Else it sleeps on: to wake it costs more than a match. It takes the interpreter from the
        # caller, finds nothing to send, and holds the lock when the next match comes.
        if self._reactor.stopping or not self.hub.outbox.is_empty:
            self._reactor.wake()
        elif (cache := self.hub.cache) is not None:
            self._reactor.wake_by(cache.tasks.executors.next_deadline())

    def connect(self, line: LocalLine) -> None:
        """Pass messages to a greeted rank by this line, until the hub forgets the rank."""
        with self.lock:
            if line.identity in self.state.peers:
                self.hub.outbox.lines[line.identity] = line

    def take_reports(self, identity: bytes, reports: Sequence[Done | WeightsChanged]) -> None:
        """Take in that ops of a rank have ended, or that its weights are others. Ignored from a
        rank that the hub has lost."""
        with self.lock:
            if identity not in self.hub.outbox.lines:
                return
            now = time.monotonic()
            try:
                for report in reports:
                    self.hub.take_message(identity, report, now)
            finally:  # also when the engine's thread was interrupted
                self.pass_on()
        with self.lock:
            if (cache := self.hub.cache) is not None:
                cache.tasks.record_lookups()  # the answers did not wait for it

    @property
    def cache(self) -> ServedCache | None:
        """None until an engine or the config has said what is cached."""
        with self.lock:
            return self.hub.cache

    @property
    def is_open(self) -> bool:
        """Whether there are tiers: what an engine of this process asks for before is a miss."""
        return self._cache is not None

    @property
    def stopping(self) -> bool:
        return self._reactor.stopping

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
            weights = self.state.weights.rename(engine, version, time.monotonic())
            if self._thread is not None:
                self.pass_on()
        return weights

    def control(self, call: CacheCall, session: SessionId | None = None) -> Any:
        """Carry out a user's call about what is cached (`ServedCache.control`)."""
        if not self.is_open:  # nothing is cached yet
            call.check()
            return {"lookup": {}, "pin": None, "unpin": False, "delete": {}}[call.name]
        # Only a delete waits for others that erase files; a look-up must not wait for the disk.
        with self._clearing if call.name == "delete" else contextlib.nullcontext():
            with self.lock, self.session():
                assert self._cache is not None
                clearing = self._cache.control(call, session, time.monotonic())
            error = error_of(clearing.work)
            with self.lock:
                return clearing.end(error)

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
                    self.state.weights.rename(engine, random_version(), time.monotonic())
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
            return {"serving": not self.stopping, "missing": self._missing()}

    def _missing(self) -> list[str]:
        return self._pool.missing() + self.hub.greeter.absentees() + self._observers.absent

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
            missing=self._missing(),
        )

    # -- the end ---------------------------------------------------------------------------------

    def _end_job(self, job: BackgroundJob, error: Exception | None) -> None:
        with self.lock:
            job.end(error)
            self._reactor.wake()

    def _release(self) -> None:
        # First: ranks and HTTP call what is closed after them.
        withdraw_lines(self.endpoint, self)
        self._observers.close_http()
        jobs_are_done = self._background.close()
        with self.lock:
            self.hub.close()
        # Before its context ends, which waits for sockets that are open.
        self._pool.close()
        if self.peers is not None:
            self.peers.close()
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
    """What `KVServer.session` returns, the same for all. A class, since a generator takes three
    times as long.

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
        self._server.pass_on()


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
