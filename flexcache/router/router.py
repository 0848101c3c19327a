"""`KVRouter`: chooses the worker that will answer a request soonest.

Joins what the workers' caches hold (index, filled by KV events or by its own decisions) with what
they are busy with (dispatcher), by name instead of number. Changes only its own tables: the caller
passes the time, in seconds of one monotonic clock, and calls from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from flexcache.events.wire import BlockStored, EventBatch
from flexcache.router.chooser import Decision, RouteRequest
from flexcache.router.dispatcher import GPU, LEASE_S, Dispatcher, MatchedPrompt, Stages
from flexcache.router.fleet import Fleet, Tier, WorkerSpec, WorkerState
from flexcache.router.holdings import Found, Holdings
from flexcache.router.load import GONE, Running
from flexcache.router.messages import RunningRequest
from flexcache.router.policy import Pick, make_policy
from flexcache.router.stats import (
    RouterStats,
    RoutingStats,
    ServiceTimeStats,
    WorkerStats,
)

T = TypeVar("T")

_MAX_SESSIONS = 100_000
_WORTH_A_FETCH = 2048
"""Tokens that another engine must have more: below that computing them is about as fast. For models
with much KV a token it pays later, from some 8,000 on."""
_MAX_OTHERS = 8  # ranks of one engine are several; the picker names two other engines


def prefill_id(request_id: str, attempt: int) -> str:
    """Return the id of the part of a divided request that computes its prompt."""
    return f"{request_id}-prefill-{attempt}"


class WorkerScore(NamedTuple):
    """What a request would find at a worker.

    Attributes:
        cost: The policy's, the lower the better; None: the worker may not be chosen.
        ttft_s: Predicted; None before the service time is known.
    """

    worker: str
    cost: float | None
    matched: dict[Tier, int]
    ttft_s: float | None


class KVRouter:
    """Chooses workers and follows requests.

    Args:
        policy: ``ours``, or another of `policy.make_policy`, to compare.
        seed: Of the choice among equals.
        max_blocks: Different blocks in the index at most.
        approximate: When a worker's blocks are guessed from the router's own decisions: ``auto``,
            if it publishes no events; ``always``; ``never``.
        max_requests: A worker with so many requests in flight gets no more; None: unbounded.
        max_wait_s: Nor does one with a longer backlog; None: unbounded.
    """

    def __init__(
        self,
        *,
        policy: str = "ours",
        seed: int = 0,
        max_blocks: int = 10_000_000,
        approximate: Literal["auto", "always", "never"] = "auto",
        max_requests: int | None = None,
        max_wait_s: float | None = None,
    ) -> None:
        self.policy = policy
        self.fleet = Fleet()
        self.holdings = Holdings(max_blocks, approximate)
        self.dispatcher = Dispatcher(make_policy(policy), seed=seed)
        self.counts = RoutingStats(policy=policy)
        self._worker_counts: dict[str, WorkerStats] = {}
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._sessions: OrderedDict[str, str] = OrderedDict()
        """Worker of each session's last request: chosen here, or else told by its events."""
        self._turns: OrderedDict[bytes, str] = OrderedDict()
        """Worker to which a conversation went that begins so; only of those without tokens."""

    @property
    def running(self) -> dict[str, Running]:
        """Every request that runs, by its id, those of other routers included."""
        return self.dispatcher.running

    # -- workers -----------------------------------------------------------------------------------

    def set_workers(self, specs: Sequence[WorkerSpec], now: float = 0.0) -> None:
        """Replace the set of workers; those that stay keep what is known of them.

        Raises:
            ConfigError: Two have one name.
        """
        for number in self.fleet.set_workers(specs):
            self.dispatcher.forget_worker(number, now)
        self.dispatcher.resize(self.fleet.num_numbers)
        self.holdings.set_workers(self.fleet.by_number())
        counts = self._worker_counts
        self._worker_counts = {spec.name: counts.get(spec.name) or WorkerStats() for spec in specs}

    def set_state(self, worker: str, state: WorkerState) -> None:
        """Say whether a worker may be chosen. One that is down may come back without its cache, so
        what was guessed of it is dropped."""
        self.fleet.set_state(worker, state)
        if state is WorkerState.DOWN:
            self.holdings.forget_guesses(worker)

    def set_models(
        self, worker: str, models: Collection[str], adapters: Collection[str] = ()
    ) -> None:
        """Say which models and adapters a worker serves (empty: any), and which are adapters."""
        self.fleet.set_models(worker, models, adapters)

    def set_capacity(self, worker: str, num_blocks: int, block_size: int) -> None:
        """Say how many blocks a worker's own cache has: needed where its blocks are guessed."""
        self.holdings.placements.set_capacity(worker, num_blocks, block_size)

    def set_lower_tiers(
        self, cache_url: str, num_blocks: Mapping[Tier, int], block_size: int
    ) -> None:
        """Say how many blocks the tiers of a cache have: needed where its blocks are guessed."""
        if cache_url in self.holdings.guessed_caches:
            self.holdings.lower_tiers.set_capacities(cache_url, num_blocks, block_size)

    # -- events ------------------------------------------------------------------------------------

    def apply(self, source: str, batch: EventBatch) -> None:
        """Apply a batch of events that a source published."""
        self.holdings.apply(source, batch)
        for event in batch.events:
            # What this router decided is newer than what its decision made an engine store.
            if (
                isinstance(event, BlockStored)
                and event.session_id is not None
                and event.session_id not in self._sessions
                and (worker := self.holdings.only_user(source, batch.data_parallel_rank))
            ):
                _remember(self._sessions, [event.session_id], worker)

    def forget(self, source: str) -> None:
        """Drop what a source holds: its events were lost for good, or it began again."""
        self.holdings.applier.forget(source)

    def sweep(self, num_blocks: int) -> bool:
        """Free memory of forgotten blocks, a slice at a time; returns whether there is more."""
        return self.holdings.applier.sweep(num_blocks)

    # -- requests ----------------------------------------------------------------------------------

    def choose(
        self,
        request: RouteRequest,
        now: float,
        *,
        tried: Collection[str] = (),
        only: Collection[str] | None = None,
        may_divide: bool = False,
    ) -> Decision | None:
        """Choose a worker; the request counts as its load from now on, until `ended`.

        Args:
            tried: Workers that failed this request: chosen only if there are no others.
            only: Workers to choose from; None: all.
            may_divide: Whether another may be chosen besides that computes the prompt: then that
                part counts as a request of its own, by the id of `prefill_id`.

        Returns:
            None: no worker may be chosen, or all are busy.
        """
        eligible = self._eligible(request, now, tried, only)
        if eligible is None:
            return None
        found = self.holdings.find(request)
        prompt = self._prompt(request, found)
        before = self.running.get(request.request_id)
        if before is not None:  # it moves
            self.holdings.expectations.settle(before)
        stages = self._stages(request, prompt, now, eligible, tried) if may_divide else None
        if stages is not None:
            return self._divided(request, prompt, found, stages, now, len(tried))
        assumed, holder = self._with_turns(request, prompt) if request.turns else (prompt, None)
        pick, running = self.dispatcher.choose(request.request_id, assumed, now, eligible)
        decision = self._decision(request, prompt, pick, found, now)
        if pick.worker == holder and decision.reason == "load":
            decision = replace(decision, reason="conversation")
        if request.token_ids is not None:
            running.predicted_tokens = decision.matched_tokens
        self.counts.add(decision)
        self._placed(running, decision, found)
        if request.session_id is not None:
            _remember(self._sessions, [request.session_id], decision.worker)
        if request.turns:
            _remember(self._turns, [turn.key for turn in request.turns], decision.worker)
        return decision

    def _placed(self, running: Running, decision: Decision, found: Found | None) -> None:
        running.worker, running.ttft_s = decision.worker, decision.ttft_s
        self._worker_counts[decision.worker].add(decision)
        self.holdings.placed(running, found)

    def _stages(
        self, request: RouteRequest, prompt: MatchedPrompt, now: float, eligible: np.ndarray,
        tried: Collection[str],
    ) -> Stages | None:  # fmt: skip
        """Return where to compute a request's prompt and where to decode it; None: at one worker.
        Only our policy has costs in seconds."""
        prefilling = self.fleet.prefilling(request.model, tried)
        prefilling = None if prefilling is None else self._with_room(prefilling, now)
        if prefilling is None or request.token_ids is None or self.policy != "ours":
            return None
        return self.dispatcher.divide(prompt, now, eligible, prefilling, self.fleet.like)

    def _divided(
        self, request: RouteRequest, prompt: MatchedPrompt, found: Found | None, stages: Stages,
        now: float, attempt: int,
    ) -> Decision:  # fmt: skip
        """Count a request at both workers."""
        ids = prefill_id(request.request_id, attempt), request.request_id
        first, second = self.dispatcher.begin_stages(ids, prompt, stages, now)
        decisions = [
            Decision(
                worker=self.fleet.name(number), others=(), num_tokens=request.num_tokens,
                matched=_by_tier(prompt._replace(matched=matched), number),
                ttft_s=ttft_s, reason="divided",
                richer_peer=self._richer_peer(request, prompt, number),
            )
            for number, matched, ttft_s in (
                (stages.prefill, prompt.matched, stages.prefill_s),
                (stages.decode, stages.matched, stages.ttft_s),
            )
        ]  # fmt: skip
        for running, decision in zip((first, second), decisions, strict=True):
            self._placed(running, decision, found)
            if not self.dispatcher.service_time.is_known:
                running.ttft_s = None  # it is not to be judged by that
        first.predicted_tokens = decisions[0].matched_tokens
        decision = replace(decisions[1], prefill=decisions[0], richer_peer=decisions[0].worker)
        self.counts.add(decision)
        if request.session_id is not None:
            _remember(self._sessions, [request.session_id], decision.worker)
        return decision

    def scores(self, request: RouteRequest, now: float) -> list[WorkerScore]:
        """Return what the request would find at each worker, best first; nothing is reserved."""
        eligible = self._eligible(request, now)
        if eligible is None:
            return []
        prompt = self._prompt(request, self.holdings.find(request))
        assumed, _ = self._with_turns(request, prompt)
        pick = self.dispatcher.score(assumed, now, eligible)
        ttft_s = self._ttft_s(prompt, now)
        scores = [
            WorkerScore(
                member.spec.name,
                cost if np.isfinite(cost := float(pick.costs[member.number])) else None,
                _by_tier(prompt, member.number),
                None if ttft_s is None else float(ttft_s[member.number]),
            )
            for member in self.fleet
        ]
        return sorted(scores, key=lambda score: (score.cost is None, score.cost or 0.0))

    def least_service_s(self, request: RouteRequest) -> float:
        """Return the predicted seconds of a request's prefill at the worker that needs least; 0 if
        none serves it."""
        serving = self.fleet.eligible(request.model)
        if serving is None:
            return 0.0
        prompt = self._prompt(request, self.holdings.find(request))
        own_s = self.dispatcher.service_time.predict(prompt.num_tokens, prompt.matched)
        return float(own_s[serving].min())

    def first_token(self, request_id: str, now: float, *, tells_time: bool = True) -> None:
        """Note the first token of a request's answer.

        Args:
            tells_time: See `Chooser.first_token`.
        """
        running = self.running.get(request_id)
        if running is None or running.was_served:
            return
        running.was_served = True
        self.holdings.expectations.settle(running)  # its blocks are there, and were published
        if tells_time:
            self.dispatcher.first_token(request_id, now)
            if running.ttft_s is not None:
                self.counts.ttft.add(running.ttft_s, now - running.since_s)

    def ended(self, request_id: str, now: float, *, cached_tokens: int | None = None) -> None:
        """Note the end of a request, for whatever reason; unknown ones are ignored.

        Args:
            cached_tokens: What the engine reported; None if it did not.
        """
        running = self.dispatcher.ended(request_id, now)
        if running is None:
            return
        if running.was_served:
            tokens = running.work.num_tokens
            self.counts.cached_tokens.add(running.predicted_tokens, cached_tokens, tokens)
        self.holdings.ended(running, cached_tokens)

    def expire(self, now: float) -> list[Running]:
        """Give up guesses that did not come true, and requests whose end was never reported.

        Returns:
            These requests, for the caller to end them too.
        """
        over = []
        for running in self.running.values():
            self.holdings.expectations.expire(running, now)
            if running.expires_s <= now:
                over.append(running)
        for running in over:
            self.counts.expired_requests += 1
            self.ended(running.request_id, now)
        return over

    def follow(
        self, request: RunningRequest, now: float, *, owner: str, is_peers: bool = False
    ) -> Running:
        """Count a request that was sent to a worker without this router, until `ended`.

        Args:
            owner: Who will report its end.
            is_peers: It is another router's. Ids of several routers may be equal, so that its id
                here begins with the owner's.
        """
        name = f"{owner} {request.request_id}" if is_peers else request.request_id
        number = self.fleet[request.worker].number if request.worker in self.fleet else GONE
        running = Running(
            name, number, request.work, now, now + LEASE_S, request.worker, owner, is_peers,
            request.is_handed_over,
        )  # fmt: skip
        self.ended(name, now)
        self.dispatcher.add(running, now)
        if request.has_first_token:
            running.was_served = True
            self.dispatcher.first_token(name, now, learns=False)  # when it came is not known here
        return running

    # -- reports -----------------------------------------------------------------------------------

    def stats(self, now: float) -> RouterStats:
        load, times = self.dispatcher.load, self.dispatcher.service_time
        wait_s = load.wait_s(now)
        base_s, token_s, attention_s, dram_s, disk_s = times.coefficients
        learned = ServiceTimeStats(
            samples=times.num_samples, is_learned=times.is_known, base_s=base_s, token_s=token_s,
            attention_s=attention_s, load_s={Tier.DRAM.value: dram_s, Tier.DISK.value: disk_s},
        )  # fmt: skip
        workers = {
            name: self._worker_counts[name].snapshot(
                url=member.spec.url,
                state=member.state,
                sources=[source.endpoint for source in member.spec.sources],
                requests=int(load.num_requests[member.number]),
                waiting_requests=int(load.num_waiting[member.number]),
                wait_s=float(wait_s[member.number]),
                speed_factor=float(times.factors[member.number]),
                is_approximate=self.holdings.is_guessed(name),
            )
            for member in self.fleet
            for name in (member.spec.name,)
        }
        return RouterStats(
            routing=self.counts.snapshot(service_time=learned),
            index=self.holdings.stats(),
            workers=workers,
        )

    def check(self) -> None:
        """Verify all parts.

        Raises:
            InternalError: They do not hold together.
        """
        self.fleet.check()
        self.holdings.check(self.running.values())
        self.dispatcher.check()

    # -- parts of a choice -------------------------------------------------------------------------

    def _eligible(
        self,
        request: RouteRequest,
        now: float,
        tried: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> np.ndarray | None:
        eligible = self.fleet.eligible(request.model, tried, only)
        return None if eligible is None else self._with_room(eligible, now)

    def _with_room(self, workers: np.ndarray, now: float) -> np.ndarray | None:
        """Return those of these workers that are not busy; None: all are."""
        load = self.dispatcher.load
        if self._max_requests is not None:
            workers = workers & (load.num_requests < self._max_requests)
        if self._max_wait_s is not None:
            workers = workers & (load.wait_s(now) <= self._max_wait_s)
        return workers if workers.any() else None

    def _prompt(self, request: RouteRequest, found: Found | None) -> MatchedPrompt:
        last = None
        if request.session_id is not None:
            name = self._sessions.get(request.session_id)
            last = self.fleet[name].number if name is not None and name in self.fleet else None
        return MatchedPrompt(request.num_tokens, self.holdings.matched(found), last)

    def _with_turns(
        self, request: RouteRequest, prompt: MatchedPrompt
    ) -> tuple[MatchedPrompt, int | None]:
        """Assume that the worker to which most of a conversation went before has that much of it.

        Returns:
            The prompt with what is assumed beside what is known, and the worker's number.
        """
        for turn in reversed(request.turns):
            name = self._turns.get(turn.key)
            if name is None or name not in self.fleet:
                continue
            number = self.fleet[name].number
            matched = prompt.matched.copy()
            more = min(turn.num_tokens, request.num_tokens - 1) - matched[:, number].sum()
            matched[GPU, number] += max(more, 0)
            return prompt._replace(matched=matched), number
        return prompt, None

    def _decision(
        self,
        request: RouteRequest,
        prompt: MatchedPrompt,
        pick: Pick,
        found: Found | None,
        now: float,
    ) -> Decision:
        spec = self.fleet[self.fleet.name(pick.worker)].spec
        matched = _by_tier(prompt, pick.worker)
        is_known = self.dispatcher.service_time.is_known
        # The request is part of the backlog by now.
        ttft_s = float(self.dispatcher.load.wait_s(now)[pick.worker]) if is_known else None
        return Decision(
            worker=spec.name,
            others=tuple(map(self.fleet.name, pick.next_best(_MAX_OTHERS))),
            num_tokens=request.num_tokens,
            matched=matched,
            ttft_s=ttft_s,
            reason="load" if request.token_ids is None else pick.reason,
            richer_peer=self._richer_peer(request, prompt, pick.worker),
            disk_block=self.holdings.disk_block(spec, found, matched[Tier.DISK]),
        )

    def _richer_peer(self, request: RouteRequest, prompt: MatchedPrompt, number: int) -> str | None:
        """Return the worker with the most of a prompt in GPU or DRAM, if that is clearly more than
        a worker has in all its tiers. vLLM's p2p tier serves what is in its DRAM, to which all
        that is computed is copied."""
        serving = self.fleet.eligible(request.model)
        held = prompt.matched[:2].sum(axis=0)
        needed = prompt.matched[:, number].sum() + _WORTH_A_FETCH
        own = self.fleet[self.fleet.name(number)].spec
        if own.peer_port is None:
            return None
        peers = [
            member
            for member in self.fleet
            if member.spec.peer_port is not None
            and member.spec.transfer == own.transfer
            and (serving is not None and serving[member.number])
            and held[member.number] >= needed
        ]
        waiting = self.dispatcher.load.num_waiting
        best = max(peers, key=lambda m: (held[m.number], -waiting[m.number]), default=None)
        return None if best is None else best.spec.name

    def _ttft_s(self, prompt: MatchedPrompt, now: float) -> np.ndarray | None:
        """Return the predicted time to the first token at each worker."""
        times = self.dispatcher.service_time
        if not times.is_known:
            return None
        ttft_s: np.ndarray = self.dispatcher.load.wait_s(now)
        ttft_s += times.predict(prompt.num_tokens, prompt.matched)
        return ttft_s


def _remember(workers: OrderedDict[T, str], keys: Iterable[T], worker: str) -> None:
    for key in keys:
        workers[key] = worker
        workers.move_to_end(key)
    while len(workers) > _MAX_SESSIONS:
        workers.popitem(last=False)


def _by_tier(prompt: MatchedPrompt, number: int) -> dict[Tier, int]:
    return {tier: int(n) for tier, n in zip(Tier, prompt.matched[:, number], strict=True)}
