"""Messages between the processes of a router, and between routers: msgpack over ZMQ.

Proxies (DEALER) and decider (ROUTER):

    proxy                          decider
    Hello(pid, running)       ->
                              <-   Workers(pid)
    Choose(request)           ->
                              <-   Chosen | Refused
    Began, FirstToken, End  ->
    Stored, ModelsChanged     ->
    Beat(counters)            ->
                              <-   Workers, when they change; Alive after each beat

Every `Choose` is answered, unless `End` comes first. A proxy says hello again when the decider was
replaced, and names its running requests; the new decider counts them as load.

Other routers follow the life of a router's requests in batches of events. A snapshot of all running
requests comes every few seconds, so what a follower missed for good is right again after the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flexcache.router.chooser import UNKNOWN, Arrival, Choice, Outcome, Usage, WorkerAddress
from flexcache.router.load import Running, Work


class _Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    pass


class RunningRequest(msgspec.Struct, frozen=True, gc=False):
    """A request at a worker.

    Attributes:
        work: What it is expected to cost.
        has_first_token: Whether its answer has begun.
        is_handed_over: See `Running`.
    """

    request_id: str
    worker: str
    work: Work
    has_first_token: bool = False
    is_handed_over: bool = False


def told(running: Running) -> RunningRequest:
    """Return a running request as others are told of it."""
    return RunningRequest(
        running.request_id, running.worker, running.work, running.first_token_s is not None,
        running.is_handed_over,
    )  # fmt: skip


class ProxyCounters(msgspec.Struct, frozen=True):
    """What a proxy counts, since its start.

    Attributes:
        is_serving: Whether it accepts connections.
    """

    is_serving: bool = False
    open_requests: int = 0
    retries: int = 0
    rejected: dict[str, int] = {}
    unsupervised: int = 0


class Hello(_Message, frozen=True):
    """
    Attributes:
        pid: Process to watch.
        stored: What engines keep, as far as this proxy saw: id to the engine's URL.
    """

    pid: int
    running: list[RunningRequest]
    stored: Mapping[str, str] = {}


class Choose(_Message, frozen=True):
    """A request that the decider is to place."""

    arrival: Arrival


class FirstToken(_Message, frozen=True):
    """Arguments of `Chooser.first_token`."""

    request_id: str
    tells_time: bool = True


class End(_Message, frozen=True):
    """A request ended, or is no longer wanted. Fields of `Chooser.ended`."""

    request_id: str
    outcome: str = Outcome.DONE.value
    usage: Usage = UNKNOWN


class Began(_Message, frozen=True):
    """A request was sent to a worker. A proxy says so of one that it placed itself, since the
    decider's answer did not come or came too late."""

    running: RunningRequest


class StoredTold(_Message, frozen=True):
    """Arguments of `Chooser.stored`."""

    url: str
    ids: list[str]


class ModelsChanged(_Message, frozen=True):
    """Engines may serve other models than before."""


class Beat(_Message, frozen=True):
    counters: ProxyCounters


class Workers(_Message, frozen=True):
    """What the decider knows of workers: to all proxies when it changes, and to one that greets.

    Attributes:
        workers: Those that take requests.
        models: Names of all models that are known, also of those that none of them serves.
        cards: What they say of each model that they serve.
        pid: In answer to `Hello`: process to watch.
    """

    workers: list[WorkerAddress]
    models: set[str]
    cards: dict[str, bytes]
    pid: int | None = None


class Chosen(_Message, frozen=True):
    """A choice, and what to name its parts with in a later `Hello`: the request, and what another
    engine computes of it."""

    running: RunningRequest
    choice: Choice
    prefill: RunningRequest | None = None


class NotChosen(_Message, frozen=True):
    """Fields of `NotRouted`."""

    request_id: str
    status: int
    message: str
    retry_after_s: float | None


class Alive(_Message, frozen=True):
    pass


ToDecider = Hello | Choose | FirstToken | End | Began | StoredTold | ModelsChanged | Beat
ToProxy = Workers | Chosen | NotChosen | Alive

encode = msgspec.msgpack.Encoder().encode
decode_to_decider = msgspec.msgpack.Decoder(ToDecider).decode
decode_to_proxy = msgspec.msgpack.Decoder(ToProxy).decode

BEAT_S = 0.5
"""Time between beats."""
DECIDER_TIMEOUT_S = 3.0
"""A decider silent for this long is considered away."""
PROXY_LEASE_S = 10.0
"""The requests of a proxy that is silent for this long are ended."""

TOPIC = "router-sync"


class AllRunning(_Message, frozen=True):
    """All running requests; there are no others."""

    requests: list[RunningRequest]


Life = Began | FirstToken | End | AllRunning | Alive

_encode_batch = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(tuple[float, list[Life]]).decode


def encode_life(ts: float, events: Sequence[Life]) -> bytes:
    """Return the payload of a batch. With the time no two are equal, which would hide a restart."""
    return _encode_batch((ts, events))


def decode_life(payload: bytes) -> list[Life]:
    """
    Raises:
        ValueError: The payload is not a batch.
    """
    try:
        return _decode_batch(payload)[1]
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a batch of a router: {error}") from None
