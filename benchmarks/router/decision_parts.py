"""Routers that know less than the simulator's own: guessed caches, several deciders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flexcache.router.dispatcher import GPU, Dispatcher, MatchedPrompt
from flexcache.router.fleet import Tier
from flexcache.router.index import Holder, KVIndexer
from flexcache.router.load import FloatArray, Running, Work
from flexcache.router.placements import Placements, guesses_about
from flexcache.router.policy import Pick, make_policy
from flexcache.router.service_time import ServiceTime
from flexcache.router.simulate.engine import Engine
from flexcache.router.simulate.workload import SimRequest

_MIX = 0x9E3779B97F4A7C15


class GuessedView:
    """Approximate mode: the router judges from its own decisions.

    Args:
        num_blocks: Capacity that it assumes of an engine.
    """

    def __init__(self, engines: Sequence[Engine], block_tokens: int, num_blocks: int) -> None:
        self._block_tokens = block_tokens
        self._index = KVIndexer()
        self._placements = Placements(self._index)
        self._names = [f"{i}" for i in range(len(engines))]
        self._running: dict[str, Running] = {}
        for name in self._names:
            self._placements.set_capacity(name, num_blocks, block_tokens)

    def match(self, request: SimRequest) -> FloatArray:
        matched = np.zeros((3, len(self._names)))
        keys = self._keys(request)
        depths = self._index.depths(self._index.match(keys))
        for i, name in enumerate(self._names):
            bit = self._index.holders.bit(Holder(guesses_about(name), Tier.GPU))
            if bit is not None:
                matched[GPU, i] = depths[bit] * self._block_tokens
        usable = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        return np.minimum(matched, usable)

    def placed(self, request: SimRequest, worker: int) -> None:
        running = Running(request.request_id, worker, Work(0, 0), 0, 0, self._names[worker])
        self._running[request.request_id] = running
        self._placements.place(running, self._keys(request))

    def ended(self, request: SimRequest, cached_tokens: int) -> None:
        running = self._running.pop(request.request_id)
        self._placements.ended(running, cached_tokens=cached_tokens)

    def _keys(self, request: SimRequest) -> list[int]:
        whole = request.keys[: request.num_tokens // self._block_tokens]
        return [hash(key) * _MIX % 2**64 for key in whole]


class Deciders:
    """Several routers that share the requests in turn, and tell each other after a delay.

    Args:
        delay_s: Time until the others know; None: they never do.
    """

    def __init__(self, count: int, num_workers: int, delay_s: float | None) -> None:
        self._all = [Dispatcher(make_policy("ours"), num_workers, seed=i) for i in range(count)]
        self._delay_s = delay_s
        self._next = 0
        self._owner: dict[str, int] = {}
        self._mail: deque[tuple[float, int, Callable[[Dispatcher, float], object]]] = deque()

    def choose(self, request_id: str, prompt: MatchedPrompt, now: float) -> tuple[Pick, Running]:
        self._deliver(now)
        own = self._owner[request_id] = self._next
        self._next = (own + 1) % len(self._all)
        pick, running = self._all[own].choose(request_id, prompt, now)
        self._tell(own, now, lambda other, at: other.add(replace(running, since_s=at), at))
        return pick, running

    def first_token(self, request_id: str, now: float) -> None:
        self._deliver(now)
        own = self._owner[request_id]
        self._all[own].first_token(request_id, now)
        self._tell(own, now, lambda other, at: other.first_token(request_id, at))

    def ended(self, request_id: str, now: float) -> None:
        self._deliver(now)
        own = self._owner.pop(request_id)
        self._all[own].ended(request_id, now)
        self._tell(own, now, lambda other, at: other.ended(request_id, at))

    def _tell(self, own: int, now: float, change: Callable[[Dispatcher, float], object]) -> None:
        if self._delay_s is not None:
            self._mail.append((now + self._delay_s, own, change))

    def _deliver(self, now: float) -> None:
        while self._mail and self._mail[0][0] <= now:
            at, own, change = self._mail.popleft()
            for i, other in enumerate(self._all):
                if i != own:
                    change(other, at)


class KnownTime(ServiceTime):
    """The simulated engines' own constants, never learned."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self._used = [0.03, 83e-6, 2.2e-9, 4e-3 / 512, 1e-4]
        self.num_samples = 1_000_000

    def learn(self, served: object) -> None:
        """Know it all."""
