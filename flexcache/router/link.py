"""Link between proxy processes and the decider: both ends of a private socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from flexcache.errors import UntrustedError
from flexcache.logs import log_event
from flexcache.processes import end_context
from flexcache.protocol.endpoints import listen_privately
from flexcache.protocol.trust import find_listener
from flexcache.router.chooser import (
    UNKNOWN,
    Arrival,
    Choice,
    NotRouted,
    Outcome,
    Usage,
    WorkerAddress,
)
from flexcache.router.decider import Decider
from flexcache.router.fleet import listed_name
from flexcache.router.load import Work
from flexcache.router.messages import (
    BEAT_S,
    DECIDER_TIMEOUT_S,
    PROXY_LEASE_S,
    Alive,
    Beat,
    Began,
    Choose,
    Chosen,
    End,
    FirstToken,
    Hello,
    ModelsChanged,
    NotChosen,
    ProxyCounters,
    RunningRequest,
    StoredTold,
    ToDecider,
    ToProxy,
    Workers,
    decode_to_decider,
    decode_to_proxy,
    encode,
    told,
)
from flexcache.router.stored import StoredIds
from flexcache.router.tokens.body import named_model
from flexcache.router.waiting import Turns, is_set_within

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Proxy:
    pid: int
    heard_s: float
    pidfd: int = -1
    counters: ProxyCounters = field(default_factory=ProxyCounters)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)


class LinkServer:
    """Serves proxies. For the decider's event loop.

    Args:
        endpoint: ``ipc://`` path in a private directory.

    Raises:
        OSError: It cannot be bound.
    """

    def __init__(self, decider: Decider, endpoint: str) -> None:
        self._decider = decider
        self._endpoint = endpoint
        self._proxies: dict[bytes, _Proxy] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        # No limit: beyond one an answer would be dropped, and its request would wait for ever.
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.USE_FD, listen_privately(endpoint))
        self._socket.bind(endpoint)
        self._serving: asyncio.Task[None] | None = None
        self.num_lost = 0

    def start(self) -> None:
        """Begin to serve."""
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Stop serving; proxies go on by themselves."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for identity in list(self._proxies):
            self._lose(identity, "closed")
        self._socket.close()
        end_context(self._context)
        Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    @property
    def counters(self) -> list[ProxyCounters]:
        """Counters of each linked proxy."""
        return [proxy.counters for proxy in self._proxies.values()]

    def announce(self) -> None:
        """Send every proxy the workers that take requests now."""
        message = self._workers()
        for identity in self._proxies:
            self._send(identity, message)

    def _workers(self, pid: int | None = None) -> Workers:
        decider = self._decider
        return Workers(decider.addresses(), decider.models(), decider.cards(), pid)

    def expire(self) -> None:
        """Give up proxies that have been silent for too long."""
        now = time.monotonic()
        for identity, proxy in list(self._proxies.items()):
            if now - proxy.heard_s > PROXY_LEASE_S:
                self._lose(identity, "silent")

    async def _serve(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                self._take(identity, decode_to_decider(frames[-1]))
            except Exception as error:  # of another version, say; the others are served on
                log_event(
                    logger, logging.ERROR, "link_message_bad", error=repr(error), exc_info=True
                )

    def _take(self, identity: bytes, message: ToDecider) -> None:
        owner = identity.hex()
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        proxy = self._proxies.get(identity)
        if proxy is None:  # for a decider before this one
            return
        proxy.heard_s = time.monotonic()
        if isinstance(message, Choose):
            arrival = message.arrival
            task = asyncio.create_task(self._choose(identity, proxy, arrival))
            proxy.tasks[arrival.request_id] = task
        elif isinstance(message, FirstToken):
            self._decider.first_token(message.request_id, tells_time=message.tells_time)
        elif isinstance(message, End):
            task_of = proxy.tasks.pop(message.request_id, None)
            if task_of is not None:
                task_of.cancel()
            self._decider.ended(message.request_id, Outcome(message.outcome), message.usage)
        elif isinstance(message, Began):
            self._decider.adopt(message.running, owner)
        elif isinstance(message, StoredTold):
            self._decider.stored(message.url, message.ids)
        elif isinstance(message, ModelsChanged):
            self._decider.models_changed()
        else:
            proxy.counters = message.counters
            self._send(identity, Alive())

    def _greet(self, identity: bytes, hello: Hello) -> None:
        proxy = self._proxies[identity] = _Proxy(hello.pid, time.monotonic())
        with contextlib.suppress(OSError):  # in another pid namespace its silence shows its end
            proxy.pidfd = os.pidfd_open(hello.pid)
            loop = asyncio.get_running_loop()
            loop.add_reader(proxy.pidfd, self._lose, identity, "died")
        for running in hello.running:
            self._decider.adopt(running, identity.hex())
        log_event(logger, logging.INFO, "proxy_linked", proxy=hello.pid, running=len(hello.running))
        for name, url in hello.stored.items():
            self._decider.stored(url, (name,))
        self._send(identity, self._workers(os.getpid()))

    async def _choose(self, identity: bytes, proxy: _Proxy, arrival: Arrival) -> None:
        name = arrival.request_id
        try:
            choice = await self._decider.choose(arrival, owner=identity.hex())
        except NotRouted as refusal:
            self._send(
                identity, NotChosen(name, refusal.status, str(refusal), refusal.retry_after_s)
            )
        except Exception as error:  # every request is answered
            log_event(logger, logging.ERROR, "choice_failed", error=repr(error), exc_info=True)
            self._send(identity, NotChosen(name, 503, "the router failed to choose a worker", None))
        else:
            running, first = self._decider.running, choice.prefill
            prefill = None if first is None else told(running[first.request_id])
            self._send(identity, Chosen(told(running[name]), choice, prefill))
        finally:
            if proxy.tasks.get(name) is asyncio.current_task():
                del proxy.tasks[name]

    def _lose(self, identity: bytes, reason: str) -> None:
        proxy = self._proxies.pop(identity)
        if proxy.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(proxy.pidfd)
            os.close(proxy.pidfd)
        for task in proxy.tasks.values():
            task.cancel()
        self.num_lost += 1
        num_ended = self._decider.end_all(identity.hex())
        log_event(
            logger, logging.INFO, "proxy_lost", proxy=proxy.pid, reason=reason, ended=num_ended
        )

    def _send(self, identity: bytes, message: ToProxy) -> None:
        self._socket.send_multipart([identity, encode(message)])


_SHUN_S = 2.0
"""While the decider is away, a worker that failed is avoided for this long."""
_RETRY_S = 1.0
_RECONNECT_S = 0.1
_BYTES_PER_TOKEN = 4

Answer = Chosen | NotChosen | None
"""None: the decider is away."""


class RemoteChooser:
    """Implements `Chooser` in a proxy process. For one event loop, between `open` and `close`.

    While the decider is away, requests go to the worker with the fewest requests of this proxy
    among those that list the model.

    Args:
        endpoint: Of the decider's `LinkServer`.
        count: Returns what this proxy counts, for the decider's statistics.
    """

    def __init__(self, endpoint: str, count: Callable[[], ProxyCounters] = ProxyCounters) -> None:
        self._endpoint = endpoint
        self._count = count
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._linking: asyncio.Task[None] | None = None
        self._pidfd = -1
        self._heard_s = 0.0
        self._is_linked = asyncio.Event()
        self._gone = asyncio.Event()
        self._workers: list[WorkerAddress] = []
        self._models: set[str] = set()
        self._cards: dict[str, bytes] = {}
        self._stored = StoredIds()
        self._failed_s: dict[str, float] = {}
        self._asked: dict[str, asyncio.Future[Answer]] = {}
        self._running: dict[str, RunningRequest] = {}
        self._distrusted = ""
        self.num_unsupervised = 0

    @property
    def is_linked(self) -> bool:
        """Whether the decider answers."""
        return self._is_linked.is_set()

    @property
    def has_workers(self) -> bool:
        """Whether a worker took requests when the decider last said so."""
        return bool(self._workers)

    async def open(self) -> None:
        """Connect, and wait until the decider has welcomed this proxy."""
        self._linking = asyncio.create_task(self._keep_linked())
        await self._is_linked.wait()

    async def close(self) -> None:
        """Disconnect. Running requests must have ended."""
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.gather(self._linking, return_exceptions=True)
        self._context.term()

    # -- the contract ------------------------------------------------------------------------------

    async def choose(self, arrival: Arrival) -> Choice:
        """Have a worker chosen; see `Chooser`."""
        name = arrival.request_id
        answer = await self._ask(arrival) if self.is_linked else None
        if isinstance(answer, NotChosen):
            raise NotRouted(answer.status, answer.message, answer.retry_after_s)
        if answer is None:
            return self._choose_alone(arrival)
        self._running[name] = answer.running
        if (prefill := answer.prefill) is not None:
            self._running[prefill.request_id] = prefill
        return answer.choice

    async def _ask(self, arrival: Arrival) -> Answer:
        name = arrival.request_id
        future: asyncio.Future[Answer]
        future = self._asked[name] = asyncio.get_running_loop().create_future()
        self._send(Choose(arrival))
        try:
            return await future
        except asyncio.CancelledError:  # the client left
            self._send(End(name, Outcome.ABORTED.value))
            if future.done() and not future.cancelled():
                self._end_prefill(future.result())
            raise
        finally:
            self._asked.pop(name, None)

    def _end_prefill(self, answer: Answer) -> None:
        """End what another engine was to compute for a choice that is not used."""
        if isinstance(answer, Chosen) and answer.prefill is not None:
            self._send(End(answer.prefill.request_id, Outcome.ABORTED.value))

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None:
        """See `Chooser`."""
        running = self._running.get(request_id)
        if running is not None and not running.has_first_token:
            self._running[request_id] = msgspec.structs.replace(running, has_first_token=True)
            self._send(FirstToken(request_id, tells_time))

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None:
        """See `Chooser`."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if outcome in (Outcome.REFUSED, Outcome.BROKEN):
            self._failed_s[running.worker] = time.monotonic()
        self._send(End(request_id, outcome.value, usage))

    # -- engines -----------------------------------------------------------------------------------

    def addresses(self) -> list[WorkerAddress]:
        """See `Chooser`."""
        return self._workers

    def cards(self) -> dict[str, bytes]:
        """See `Chooser`."""
        return self._cards

    def stored(self, url: str, ids: Iterable[str]) -> None:
        """See `Chooser`."""
        names = list(ids)
        self._stored.note(url, names)  # for a decider that takes this one's place
        self._send(StoredTold(url, names))

    def models_changed(self) -> None:
        """See `Chooser`."""
        self._send(ModelsChanged())

    # -- without the decider -----------------------------------------------------------------------

    def _choose_alone(self, arrival: Arrival) -> Choice:
        """Choose the worker with the fewest of this proxy's requests."""
        workers = self._able(named_model(arrival))
        url = self._stored.url(arrival, {worker.url for worker in self._workers})
        workers = [worker for worker in workers if url in (None, worker.url)]
        workers = [worker for worker in workers if worker.role != "prefill"] or workers
        if not workers:
            raise NotRouted(503, "no worker is known and the decider is away", _RETRY_S)
        load = dict.fromkeys((worker.name for worker in workers), 0)
        for running in self._running.values():
            if running.worker in load:
                load[running.worker] += 1
        now = time.monotonic()

        def rank(worker: WorkerAddress) -> tuple[bool, bool, int, float]:
            is_shunned = now - self._failed_s.get(worker.name, -_SHUN_S) < _SHUN_S
            return worker.name in arrival.tried, is_shunned, load[worker.name], random.random()

        best, *others = sorted(workers, key=rank)
        num_tokens = len(arrival.body) // _BYTES_PER_TOKEN
        running = RunningRequest(arrival.request_id, best.name, Work(num_tokens, num_tokens))
        self._running[arrival.request_id] = running
        self._send(Began(running))  # a decider that is starting learns of it after `Hello`
        self.num_unsupervised += 1
        return Choice(
            worker=best.name, url=best.url, headers=best.headers, matched_tokens=None,
            others=tuple(dict.fromkeys(each.url for each in others)),
        )  # fmt: skip

    def _able(self, model: str | None) -> list[WorkerAddress]:
        """Return the workers that may serve a model; see `Fleet.eligible`."""
        name = None if model is None else listed_name(model, self._models)
        if not name:
            return self._workers
        return [worker for worker in self._workers if name in worker.models]

    # -- the connection ----------------------------------------------------------------------------

    async def _keep_linked(self) -> None:
        """Connect, stay connected while the decider lives, and start over."""
        while True:
            socket = None
            try:
                socket = self._connect()
            except Exception:  # no descriptors left, say: try again
                log_event(logger, logging.ERROR, "link_failed", exc_info=True)
            if socket is not None:
                receiving = asyncio.create_task(self._receive(socket))
                try:
                    await self._beat(receiving)
                except Exception:  # a fault in a counter, say: link again
                    log_event(logger, logging.ERROR, "link_failed", exc_info=True)
                finally:
                    self._lose("silent")
                    self._socket = None
                    receiving.cancel()
                    await asyncio.gather(receiving, return_exceptions=True)
                    socket.close()
            await asyncio.sleep(_RECONNECT_S)

    def _connect(self) -> zmq.asyncio.Socket | None:
        """Connect to the decider if it is there, under an unguessable identity."""
        try:
            if find_listener(self._endpoint, has_keys=False) is None:
                return None
        except UntrustedError as error:
            if str(error) != self._distrusted:
                self._distrusted = str(error)
                log_event(logger, logging.ERROR, "decider_not_trusted", reason=error)
            return None
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        # New for each connection: when the decider gives an old one up, it ends what is under it.
        socket.identity = uuid.uuid4().hex.encode()
        socket.connect(self._endpoint)
        self._socket = socket
        self._heard_s = time.monotonic()
        self._gone.clear()
        running = list(self._running.values())
        self._send(Hello(os.getpid(), running, self._stored.items()))
        return socket

    async def _beat(self, receiving: asyncio.Task[None]) -> None:
        """Send beats until the decider has died or is silent."""
        while not receiving.done() and time.monotonic() - self._heard_s < DECIDER_TIMEOUT_S:
            if await is_set_within(self._gone, BEAT_S):
                return
            self._send(Beat(self._count()))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        turns = Turns("link")
        while True:
            content = await socket.recv()
            self._heard_s = time.monotonic()
            with turns.turn():
                self._take(decode_to_proxy(content))

    def _take(self, message: ToProxy) -> None:
        if isinstance(message, Workers):
            self._workers, self._models = message.workers, message.models
            self._cards = message.cards
            if message.pid is not None:
                self._watch(message.pid)
                log_event(logger, logging.INFO, "decider_linked", decider=message.pid)
                self._is_linked.set()
        elif isinstance(message, NotChosen):
            self._resolve(message.request_id, message)
        elif isinstance(message, Chosen):
            name = message.running.request_id
            if self._resolve(name, message):
                return
            self._end_prefill(message)
            actual = self._running.get(name)  # the answer came too late
            self._send(End(name, Outcome.ABORTED.value) if actual is None else Began(actual))

    def _resolve(self, name: str, answer: Answer) -> bool:
        future = self._asked.get(name)
        if future is None or future.done():
            return False
        future.set_result(answer)
        return True

    def _watch(self, pid: int) -> None:
        """Notice the decider's death at once. In another pid namespace its silence shows it."""
        self._unwatch()
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._lose, "died")

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _lose(self, reason: str) -> None:
        """Give the decider up: those who wait for its answer do without."""
        if self.is_linked:
            log_event(
                logger, logging.WARNING, "decider_lost", reason=reason,
                effect="requests go to the worker with the fewest",
            )  # fmt: skip
        self._is_linked.clear()
        self._gone.set()
        self._unwatch()
        for name in list(self._asked):
            self._resolve(name, None)

    def _send(self, message: ToDecider) -> None:
        """Send without waiting; while the decider is away nothing is sent."""
        if self._socket is not None:
            self._socket.send(encode(message))  # the queue is unbounded, so this is done at once
