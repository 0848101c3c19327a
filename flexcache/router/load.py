"""Follows what each worker is busy with: the requests that were sent to it and have not ended.

A worker computes prompts one after the other, in the order they came. Its backlog is therefore the
predicted service time of the requests that have no first token yet, less the time that the first of
them, the head, has been running. The time from becoming the head to the first token is what the
request cost the worker; `ServiceTime` learns from it.

Workers are numbered by the caller; the numbers index the arrays. Pure: the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexcache.errors import InternalError

FloatArray = np.ndarray

_IDLE = -np.inf
_RECENT = 64
"""Requests per worker that count as recent."""
_LARGEST_WEIGHT = 1e100
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Work:
    """What a request is expected to cost its worker.

    Attributes:
        num_tokens: Length of the prompt.
        dram_tokens: Tokens of it that the worker loads from DRAM; ``disk_tokens`` likewise.
        new_tokens: Tokens that it computes.
        service_s: Predicted time from becoming the head to the first token.
    """

    num_tokens: int
    new_tokens: int
    dram_tokens: int = 0
    disk_tokens: int = 0
    service_s: float = 0.0


class Served(NamedTuple):
    """A measured service time.

    Attributes:
        seconds: From becoming the head to the first token.
    """

    worker: int
    work: Work
    seconds: float


@dataclass(slots=True)
class _Request:
    worker: int
    work: Work
    owner: str
    expires: float
    has_first_token: bool = False


class Load:
    """Requests in flight by worker, those of other deciders included.

    Each call takes constant time. The arrays have an entry per worker, kept up to date:

    Attributes:
        num_requests: Requests in flight.
        num_waiting: Those without a first token.
        new_tokens: Tokens that the waiting requests have to compute.
        held_tokens: Prompt tokens of all requests in flight.

    Args:
        lease_s: A request counts for this long after it was added or renewed, and not for ever, in
            case its end is never reported.
    """

    def __init__(self, num_workers: int = 0, *, lease_s: float = 3600.0) -> None:
        self.num_requests: FloatArray = np.zeros(0)
        self.num_waiting: FloatArray = np.zeros(0)
        self.new_tokens: FloatArray = np.zeros(0)
        self.held_tokens: FloatArray = np.zeros(0)
        self._recent: FloatArray = np.zeros(0)  # in units that grow with every request
        self._recent_unit = 1.0
        self._free_at: FloatArray = np.zeros(0)  # if the head takes as long as predicted
        self._behind_head_s: FloatArray = np.zeros(0)  # predicted service of the other waiting ones
        self._head_since: list[float] = []
        self._waiting: list[OrderedDict[str, Work]] = []  # without a first token, oldest first
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # by expiry
        self._lease_s = lease_s
        self.resize(num_workers)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_workers(self) -> int:
        return len(self._waiting)

    def resize(self, num_workers: int) -> None:
        """Make room for workers ``0 .. num_workers - 1``. Numbers are never taken away."""
        more = num_workers - len(self._waiting)
        if more <= 0:
            return
        for name in ("num_requests", "num_waiting", "new_tokens", "held_tokens", "_behind_head_s"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(more)))
        usual = self._recent.mean() if len(self._recent) else 0.0
        self._recent = np.append(self._recent, np.full(more, usual))
        self._free_at = np.append(self._free_at, np.full(more, _IDLE))
        self._head_since += [0.0] * more
        self._waiting += [OrderedDict() for _ in range(more)]

    @property
    def mean_requests(self) -> float:
        """Requests in flight per worker."""
        return len(self._requests) / max(self.num_workers, 1)

    def recent(self) -> FloatArray:
        """Return how many requests each worker got of late: the older, the less one counts."""
        counts: FloatArray = self._recent / self._recent_unit
        return counts

    def wait_s(self, now: float) -> FloatArray:
        """Return the backlog of each worker in seconds."""
        wait: FloatArray = self._free_at - now
        np.maximum(wait, self._behind_head_s, out=wait)
        return wait

    def add(self, request_id: str, worker: int, now: float, work: Work, owner: str = "") -> None:
        """Count a request as load of a worker. One that is in flight already is moved.

        Args:
            owner: Decider that sent it, if it was another one.
        """
        self.end(request_id, now)
        self._requests[request_id] = _Request(worker, work, owner, now + self._lease_s)
        self._count_recent(worker)
        self.num_requests[worker] += 1
        self.num_waiting[worker] += 1
        self.new_tokens[worker] += work.new_tokens
        self.held_tokens[worker] += work.num_tokens
        waiting = self._waiting[worker]
        waiting[request_id] = work
        if len(waiting) == 1:
            self._head_since[worker] = now
            self._free_at[worker] = now + work.service_s
        else:
            self._free_at[worker] += work.service_s
            self._behind_head_s[worker] += work.service_s

    def first_token(self, request_id: str, now: float) -> Served | None:
        """Note the first token of a request; returns its service time.

        Returns:
            None if the request is unknown, had its first token already, or was overtaking others,
            so that its share of the time is unknown.
        """
        request = self._requests.get(request_id)
        if request is None or request.has_first_token:
            return None
        request.has_first_token = True
        since = self._leave_queue(request_id, request, now)
        return None if since is None else Served(request.worker, request.work, max(now - since, 0))

    def end(self, request_id: str, now: float) -> bool:
        """Forget a request, with or without its first token; returns whether it was in flight."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if not request.has_first_token:
            self._leave_queue(request_id, request, now)
        self.num_requests[request.worker] -= 1
        self.held_tokens[request.worker] -= request.work.num_tokens
        return True

    def work(self, request_id: str) -> Work | None:
        """Return what a request in flight is expected to cost; None if it is unknown."""
        request = self._requests.get(request_id)
        return None if request is None else request.work

    def renew(self, request_id: str, now: float) -> None:
        """Extend the lease of a request."""
        request = self._requests.get(request_id)
        if request is not None:
            request.expires = now + self._lease_s
            self._requests.move_to_end(request_id)

    def expire(self, now: float) -> list[str]:
        """Forget requests whose lease is over; returns their ids."""
        expired = []
        for request_id, request in self._requests.items():
            if request.expires > now:
                break
            expired.append(request_id)
        for request_id in expired:
            self.end(request_id, now)
        return expired

    def forget_owner(self, owner: str, now: float) -> int:
        """Forget the requests of another decider; returns their number."""
        theirs = [name for name, request in self._requests.items() if request.owner == owner]
        return sum(self.end(name, now) for name in theirs)

    def forget_worker(self, worker: int, now: float) -> int:
        """Forget the requests of a worker that is gone; returns their number."""
        self._recent[worker] = self._recent.mean()  # another one may get the number
        its = [name for name, request in self._requests.items() if request.worker == worker]
        return sum(self.end(name, now) for name in its)

    def _count_recent(self, worker: int) -> None:
        self._recent_unit *= 1.0 + 1.0 / (_RECENT * self.num_workers)
        if self._recent_unit > _LARGEST_WEIGHT:
            self._recent /= self._recent_unit
            self._recent_unit = 1.0
        self._recent[worker] += self._recent_unit

    def _leave_queue(self, request_id: str, request: _Request, now: float) -> float | None:
        """Take a request out of its worker's queue.

        Returns:
            Since when it was the head; None if it was not.
        """
        worker, service_s = request.worker, request.work.service_s
        waiting = self._waiting[worker]
        was_head = next(iter(waiting)) == request_id
        del waiting[request_id]
        self.num_waiting[worker] -= 1
        self.new_tokens[worker] -= request.work.new_tokens
        if not was_head:
            self._free_at[worker] -= service_s
            self._behind_head_s[worker] -= service_s
            return None
        since = self._head_since[worker]
        self._head_since[worker] = now
        if waiting:
            head_s = next(iter(waiting.values())).service_s
            self._free_at[worker] = now + self._behind_head_s[worker]
            self._behind_head_s[worker] -= head_s
            if len(waiting) == 1:  # shed what rounding left
                self._behind_head_s[worker] = 0.0
        else:
            self._free_at[worker] = _IDLE
            self._behind_head_s[worker] = 0.0
        return since

    def check(self) -> None:
        """Compare the arrays with the requests that they sum up.

        Raises:
            InternalError: They differ.
        """
        for worker, queue in enumerate(self._waiting):
            its = {k: r for k, r in self._requests.items() if r.worker == worker}
            waiting = {k: r.work for k, r in its.items() if not r.has_first_token}
            if waiting != dict(queue):
                raise InternalError(f"worker {worker}: {list(queue)} wait, not {list(waiting)}")
            sums = {
                "num_requests": len(its),
                "num_waiting": len(waiting),
                "new_tokens": sum(each.new_tokens for each in waiting.values()),
                "held_tokens": sum(each.work.num_tokens for each in its.values()),
            }
            for name, expected in sums.items():
                if getattr(self, name)[worker] != expected:
                    raise InternalError(f"worker {worker}: {name} is not {expected}")
            self._check_seconds(worker, [each.service_s for each in queue.values()])

    def _check_seconds(self, worker: int, services_s: list[float]) -> None:
        behind_s = sum(services_s[1:])
        free_at = self._head_since[worker] + sum(services_s) if services_s else _IDLE
        kept = self._behind_head_s[worker], self._free_at[worker]
        if not np.allclose(kept, (behind_s, free_at), rtol=_TOLERANCE, atol=_TOLERANCE):
            raise InternalError(f"worker {worker}: backlog {kept}, not {(behind_s, free_at)}")
