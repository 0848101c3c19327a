"""The decider's end of the link: answers the proxies, and ends the requests of those that died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from flexcache.logs import log_event
from flexcache.protocol.endpoints import listen_privately
from flexcache.router.chooser import UNKNOWN, Arrival, Choice, NotRouted, Outcome, Usage
from flexcache.router.link.messages import (
    PROXY_LEASE_S,
    Alive,
    Choose,
    Chosen,
    End,
    FirstToken,
    Hello,
    ModelsChanged,
    Moved,
    ProxyCounters,
    Refused,
    RunningRequest,
    Stored,
    ToDecider,
    ToProxy,
    Welcome,
    WorkerAddress,
    Workers,
    decode_to_decider,
    encode,
)

logger = logging.getLogger(__name__)


class LinkedDecider(Protocol):
    """What the link needs of a `Decider`."""

    async def choose(self, arrival: Arrival, *, owner: str = "") -> Choice: ...

    def first_token(self, request_id: str, *, tells_time: bool = True) -> None: ...

    def ended(self, request_id: str, outcome: Outcome, usage: Usage = UNKNOWN) -> None: ...

    def describe(self, request_id: str) -> RunningRequest:
        """Return a running request as its proxy may announce it again."""
        ...

    def adopt(self, running: RunningRequest, owner: str) -> None:
        """Count a request that was sent to a worker without this decider."""
        ...

    def end_all(self, owner: str) -> int: ...

    def addresses(self) -> list[WorkerAddress]:
        """Return the workers that take requests."""
        ...

    def models(self) -> set[str]:
        """Return the names of the models that workers serve, or served before they went."""
        ...

    def cards(self) -> dict[str, bytes]: ...

    def stored(self, url: str, ids: Iterable[str]) -> None: ...

    def models_changed(self) -> None: ...


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

    def __init__(self, decider: LinkedDecider, endpoint: str) -> None:
        self._decider = decider
        self._endpoint = endpoint
        self._proxies: dict[bytes, _Proxy] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
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
        self._context.term()
        Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    @property
    def counters(self) -> list[ProxyCounters]:
        """Counters of each linked proxy."""
        return [proxy.counters for proxy in self._proxies.values()]

    def announce(self) -> None:
        """Send every proxy the workers that take requests now."""
        decider = self._decider
        message = Workers(decider.addresses(), decider.models(), decider.cards())
        for identity in self._proxies:
            self._send(identity, message)

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
            task = asyncio.create_task(self._choose(identity, proxy, message))
            proxy.tasks[message.request_id] = task
        elif isinstance(message, FirstToken):
            self._decider.first_token(message.request_id, tells_time=message.tells_time)
        elif isinstance(message, End):
            task_of = proxy.tasks.pop(message.request_id, None)
            if task_of is not None:
                task_of.cancel()
            self._decider.ended(message.request_id, Outcome(message.outcome), message.usage)
        elif isinstance(message, Moved):
            self._decider.adopt(message.running, owner)
        elif isinstance(message, Stored):
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
        decider = self._decider
        workers, models = decider.addresses(), decider.models()
        self._send(identity, Welcome(os.getpid(), workers, models, decider.cards()))

    async def _choose(self, identity: bytes, proxy: _Proxy, message: Choose) -> None:
        name = message.request_id
        arrival = Arrival(
            request_id=name, method=message.method, path=message.path, headers=message.headers,
            body=message.body, tried=message.tried,
        )  # fmt: skip
        try:
            choice = await self._decider.choose(arrival, owner=identity.hex())
        except NotRouted as refusal:
            self._send(identity, Refused(name, refusal.status, str(refusal), refusal.retry_after_s))
        except Exception as error:  # every request is answered
            log_event(logger, logging.ERROR, "choice_failed", error=repr(error), exc_info=True)
            self._send(identity, Refused(name, 503, "the router failed to choose a worker", None))
        else:
            chosen = Chosen(
                self._decider.describe(name), choice.url, dict(choice.headers),
                choice.matched_tokens, choice.others,
            )  # fmt: skip
            self._send(identity, chosen)
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
