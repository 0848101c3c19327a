"""The requests of one other router, as they count here. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexcache.errors import InternalError
from flexcache.router.link.messages import RunningRequest
from flexcache.router.load import Work
from flexcache.router.stats import PeerStats
from flexcache.router.sync.life import AnswerBegan, Began, Life, Over, Snapshot

LEASE_S = 10.0
"""The requests of a router that is silent for this long are dropped."""


class LoadBook(Protocol):
    """The part of `KVRouter` that counts load."""

    def follow(self, owner: str, request_id: str, worker: str, work: Work, now: float) -> bool: ...

    def first_token(self, request_id: str, now: float) -> None: ...

    def ended(self, request_id: str, now: float) -> None: ...


class Peer:
    """Another router.

    Args:
        name: Its endpoint.
        book: Counts its requests.
    """

    def __init__(self, name: str, book: LoadBook) -> None:
        self.name = name
        self._book = book
        self._requests: dict[str, tuple[str, bool]] = {}
        """Worker of each request that counts, and whether its answer has begun. One at a worker
        that is not known here yet is left out, and counts from a later snapshot on."""
        self._heard_s: float | None = None
        self._num_batches = 0
        self._num_gaps = 0
        self._is_known = False

    @property
    def is_known(self) -> bool:
        """Whether all its requests are known: nothing was lost since its last snapshot."""
        return self._is_known

    def apply(self, events: Sequence[Life], now: float) -> None:
        """Apply a batch."""
        self._heard_s = now
        self._num_batches += 1
        for event in events:
            match event:
                case Began(request):
                    self._begin(request, now)
                case AnswerBegan(request_id):
                    self._answer(request_id, now)
                case Over(request_id):
                    self._end(request_id, now)
                case Snapshot(requests):
                    self._is_known = True
                    self._replace(requests, now)

    def lost(self) -> None:
        """Note that batches were lost for good: a snapshot will follow."""
        self._num_gaps += 1
        self._is_known = False

    def restarted(self, now: float) -> None:
        """Note that the router restarted: its requests of before are unknown to it."""
        self._replace([], now)

    def expire(self, now: float) -> bool:
        """Drop the requests of a router that is silent; returns whether it was given up now."""
        if self._heard_s is None or now - self._heard_s < LEASE_S:
            return False
        self._heard_s = None
        self._replace([], now)
        return True

    def stats(self, now: float) -> PeerStats:
        return PeerStats(
            is_up=self._heard_s is not None,
            requests=len(self._requests),
            batches=self._num_batches,
            gaps=self._num_gaps,
            last_batch_age_s=None if self._heard_s is None else max(0.0, now - self._heard_s),
        )

    def check(self, in_flight: set[str]) -> None:
        """Compare with the ids in flight that begin with this peer's name.

        Raises:
            InternalError: Others count as load than run.
        """
        known = {self._local(name) for name in self._requests}
        if known != in_flight:
            raise InternalError(f"peer {self.name}: {known ^ in_flight}")

    def _local(self, request_id: str) -> str:
        """Return the name of a request here: ids of several routers may be equal."""
        return f"{self.name} {request_id}"

    def _begin(self, request: RunningRequest, now: float) -> None:
        self._end(request.request_id, now)  # a retry has the same id, and its end may be lost
        local = self._local(request.request_id)
        if not self._book.follow(self.name, local, request.worker, request.work, now):
            return
        self._requests[request.request_id] = (request.worker, False)
        if request.has_first_token:
            self._answer(request.request_id, now)

    def _answer(self, request_id: str, now: float) -> None:
        worker, has_begun = self._requests.get(request_id, ("", True))
        if not has_begun:
            self._requests[request_id] = (worker, True)
            self._book.first_token(self._local(request_id), now)

    def _end(self, request_id: str, now: float) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._book.ended(self._local(request_id), now)

    def _replace(self, requests: Sequence[RunningRequest], now: float) -> None:
        named = {request.request_id: request for request in requests}
        for request_id in self._requests.keys() - named.keys():
            self._end(request_id, now)
        for request_id, request in named.items():
            known = self._requests.get(request_id)
            if known == (request.worker, False) and request.has_first_token:
                self._answer(request_id, now)
            elif known != (request.worker, request.has_first_token):
                self._begin(request, now)
