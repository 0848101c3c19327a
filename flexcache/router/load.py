"""Load of workers: the requests that were sent to each and have not ended.

A worker computes prompts one after the other, in the order they came. Its backlog is therefore the
predicted service time of the requests that have no first token yet, less the time that the first of
them, the head, has been running. The time from becoming the head to the first token is what the
request cost the worker; `ServiceTime` learns from it.

Workers are numbered by the caller; the numbers index the arrays. Pure: the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
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


GONE = -1
"""In place of a worker's number: the worker is gone, or not known yet."""


@dataclass(eq=False, slots=True)
class Running:
    """A request at a worker, from its choice to its end: the one record of it in this process.

    Attributes:
        request_id: Unique among all that run.
        number: Its worker's; `GONE` while the worker is unknown: it is no load then.
        work: What it is expected to cost.
        since_s: When it was placed.
        expires_s: When it is given up, in case its end is never reported.
        worker: Name of its worker.
        owner: Who will report its end: a proxy process or another router; empty: this process.
        is_peers: Another router sent it: it is load here, and no more.
        is_handed_over: Another worker computes its prompt: it waits for that, and no other for it.
        predicted_tokens: Predicted cached tokens; None if the prompt's tokens are unknown.
        ttft_s: Predicted; None if it is unknown.
        was_served: The engine began to answer.
        first_token_s: When its first token came; None: not yet, or that cannot be told.
        keys: Blocks that its worker is assumed to have because of it.
        noted_in: The accounts that count these blocks; None: none does.
        uses: What `Placements` must restore if the engine refuses it; ``tick`` likewise.
    """

    request_id: str
    number: int
    work: Work
    since_s: float
    expires_s: float
    worker: str = ""
    owner: str = ""
    is_peers: bool = False
    is_handed_over: bool = False
    predicted_tokens: int | None = None
    ttft_s: float | None = None
    was_served: bool = False
    first_token_s: float | None = None
    keys: Sequence[int] = ()
    noted_in: object = None
    uses: Sequence[int] = ()
    tick: int = 0


class WorkerLoad:
    """Requests in flight by worker, those of other deciders included.

    Each call takes constant time. The arrays have an entry per worker, kept up to date:

    Attributes:
        num_requests: Requests in flight.
        num_waiting: Those without a first token.
        new_tokens: Tokens that the waiting requests have to compute.
        held_tokens: Prompt tokens of all requests in flight.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self.num_requests: FloatArray = np.zeros(0)
        self.num_waiting: FloatArray = np.zeros(0)
        self.new_tokens: FloatArray = np.zeros(0)
        self.held_tokens: FloatArray = np.zeros(0)
        self._recent: FloatArray = np.zeros(0)  # in units that grow with every request
        self._recent_unit = 1.0
        self._free_at: FloatArray = np.zeros(0)  # if the head takes as long as predicted
        self._behind_head_s: FloatArray = np.zeros(0)  # predicted service of the other waiting ones
        self._head_since: list[float] = []
        self._waiting: list[OrderedDict[Running, None]] = []  # no first token yet, oldest first
        self._size = 0
        self.resize(num_workers)

    def __len__(self) -> int:
        return self._size

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
        return self._size / max(self.num_workers, 1)

    def recent(self) -> FloatArray:
        """Return how many requests each worker got of late: the older, the less one counts."""
        counts: FloatArray = self._recent / self._recent_unit
        return counts

    def wait_s(self, now: float) -> FloatArray:
        """Return the backlog of each worker in seconds."""
        wait: FloatArray = self._free_at - now
        np.maximum(wait, self._behind_head_s, out=wait)
        return wait

    def add(self, running: Running, now: float) -> None:
        """Count a request as load of its worker."""
        worker, work = running.number, running.work
        self._size += 1
        self._count_recent(worker)
        self.num_requests[worker] += 1
        self.num_waiting[worker] += 1
        self.new_tokens[worker] += work.new_tokens
        self.held_tokens[worker] += work.num_tokens
        waiting = self._waiting[worker]
        waiting[running] = None
        if len(waiting) == 1:
            self._head_since[worker] = now
            self._free_at[worker] = now + work.service_s
        else:
            self._free_at[worker] += work.service_s
            self._behind_head_s[worker] += work.service_s

    def first_token(self, running: Running, now: float) -> Served | None:
        """Note the first token of a request; returns its service time.

        Returns:
            None if it had its first token already, or was overtaking others, so that its share of
            the time is unknown.
        """
        if running not in self._waiting[running.number]:
            return None
        since = self._leave_queue(running, now)
        return None if since is None else Served(running.number, running.work, max(now - since, 0))

    def end(self, running: Running, now: float) -> None:
        """Count a request no longer, with or without its first token."""
        if running in self._waiting[running.number]:
            self._leave_queue(running, now)
        self._size -= 1
        self.num_requests[running.number] -= 1
        self.held_tokens[running.number] -= running.work.num_tokens

    def forget_worker(self, worker: int) -> None:
        """Forget what a worker did before: another one may get its number."""
        self._recent[worker] = self._recent.mean()

    def _count_recent(self, worker: int) -> None:
        self._recent_unit *= 1.0 + 1.0 / (_RECENT * self.num_workers)
        if self._recent_unit > _LARGEST_WEIGHT:
            self._recent /= self._recent_unit
            self._recent_unit = 1.0
        self._recent[worker] += self._recent_unit

    def _leave_queue(self, running: Running, now: float) -> float | None:
        """Take a request out of its worker's queue.

        Returns:
            Since when it was the head; None if it was not.
        """
        worker, service_s = running.number, running.work.service_s
        waiting = self._waiting[worker]
        was_head = next(iter(waiting)) is running
        del waiting[running]
        self.num_waiting[worker] -= 1
        self.new_tokens[worker] -= running.work.new_tokens
        if not was_head:
            self._free_at[worker] -= service_s
            self._behind_head_s[worker] -= service_s
            return None
        since = self._head_since[worker]
        self._head_since[worker] = now
        if waiting:
            head_s = next(iter(waiting)).work.service_s
            self._free_at[worker] = now + self._behind_head_s[worker]
            self._behind_head_s[worker] -= head_s
            if len(waiting) == 1:  # shed what rounding left
                self._behind_head_s[worker] = 0.0
        else:
            self._free_at[worker] = _IDLE
            self._behind_head_s[worker] = 0.0
        return since

    def check(self, in_flight: Iterable[Running]) -> None:
        """Compare the arrays with the requests that they sum up.

        Args:
            in_flight: All that were added and have not ended.

        Raises:
            InternalError: They differ.
        """
        its: list[list[Running]] = [[] for _ in self._waiting]
        for running in in_flight:
            its[running.number].append(running)
        for worker, queue in enumerate(self._waiting):
            waiting = [each.work for each in queue]
            if not set(queue) <= set(its[worker]):
                raise InternalError(f"worker {worker}: {list(queue)} wait, not {its[worker]}")
            sums = {
                "num_requests": len(its[worker]),
                "num_waiting": len(waiting),
                "new_tokens": sum(work.new_tokens for work in waiting),
                "held_tokens": sum(each.work.num_tokens for each in its[worker]),
            }
            for name, expected in sums.items():
                if getattr(self, name)[worker] != expected:
                    raise InternalError(f"worker {worker}: {name} is not {expected}")
            self._check_seconds(worker, [work.service_s for work in waiting])
        if self._size != sum(map(len, its)):
            raise InternalError(f"{self._size} in flight, not {sum(map(len, its))}")

    def _check_seconds(self, worker: int, services_s: list[float]) -> None:
        behind_s = sum(services_s[1:])
        free_at = self._head_since[worker] + sum(services_s) if services_s else _IDLE
        kept = self._behind_head_s[worker], self._free_at[worker]
        if not np.allclose(kept, (behind_s, free_at), rtol=_TOLERANCE, atol=_TOLERANCE):
            raise InternalError(f"worker {worker}: backlog {kept}, not {(behind_s, free_at)}")
