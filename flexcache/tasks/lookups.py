"""Look-ups at the remote store, and at peers, before a match: at most one question per prefix at a
time.

A question has a deadline of some milliseconds. It ends once, with an answer or without one; then
the matches that wait for it go on. Repeated failures open the store's circuit breaker; until it
closes only trials are asked.

    look_up --> RunLookUp --> [worker] --> looked_up | deadline | worker gone --> LookUpEnded

Pure: calls and events with the time in, instructions out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedList

from flexcache.breaker import CircuitBreaker
from flexcache.cache.block_keys import PromptContent
from flexcache.cache.load_cost import LoadCost
from flexcache.cache.load_plan import AskedTail
from flexcache.cache.prompt import Prompt
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import UNKNOWN_TTL_S, RemoteTier
from flexcache.ids import BlockKey, OpKind, RootId
from flexcache.stats import LookUpStats
from flexcache.tasks.instructions import (
    PEER,
    REMOTE,
    AskToStage,
    Instruction,
    LookUpEnded,
    RunLookUp,
)
from flexcache.tasks.model import WORKERS
from flexcache.transfer.messages import LookedUp

_MAX_KEYS = 8192
_TRIAL_ROOT = b"\0" * 16
_TRIAL_KEY = BlockKey(b"flexcache-trial")
_TRIAL_TIMEOUT_S = 1.0
_STAGED_COST = 2.0  # a read from a peer's SSD, over one from its DRAM
_AWAITED_AGAIN_S = 0.03
"""How soon it is asked again for what another engine computes at this moment."""


@dataclass(frozen=True, slots=True)
class _LookUp:
    root: RootId
    parent: BlockKey | None
    keys: Sequence[BlockKey]
    root_at_store: bytes
    num_deletes: int
    asked_s: float
    deadline_s: float
    first: int = 0
    content: PromptContent | None = None
    tails: Sequence[AskedTail] = ()
    is_awaited: bool = False
    prefill_blocks_per_s: float = 0.0

    @property
    def is_trial(self) -> bool:
        return not self.keys and not self.tails

    @property
    def name(self) -> BlockKey:
        """Key of the first block or tail that it asks for."""
        return self.keys[0] if self.keys else self.tails[0].last_unit

    def num_needed(self, tail: AskedTail) -> int:
        """How many of its keys must be there for a tail to be of use."""
        return 0 if tail.has_blocks else tail.position - self.first


def look_ups_of(
    cache: TieredCache, breaker: CircuitBreaker, timeout_s: float
) -> dict[str, RemoteLookUps]:
    """Return the questions to peers and to the remote store, by who asks them.

    Args:
        breaker: That of the remote store.
    """
    tiers, cost = cache.tiers, cache.loads.cost
    ids, found = itertools.count(1), dict[str, RemoteLookUps]()
    for tier in tiers.beyond:
        own = breaker if tier is tiers.remote else None  # each peer has one
        name = WORKERS[tier.name]
        found[name] = RemoteLookUps(tier, own, timeout_s, ids, name, cost)
    return found


class RemoteLookUps:
    """Open questions to one store, or to all peers.

    Args:
        tier: Learns the answers.
        breaker: The store's; None if it is not for this to say whether anything is asked.
        timeout_s: How long a match may wait for one.
        ids: Numbers the questions, where others number theirs likewise.
        executor: Who asks.
        cost: Estimates how long loads take, if slow ones are not to be made.
    """

    def __init__(
        self, tier: RemoteTier, breaker: CircuitBreaker | None, timeout_s: float,
        ids: Iterator[int] | None = None, executor: str = REMOTE, cost: LoadCost | None = None,
    ) -> None:  # fmt: skip
        self.tier = tier
        self._cost = cost
        self._breaker = breaker
        self._timeout_s = timeout_s
        self._ids = itertools.count(1) if ids is None else ids
        self.executor = executor
        self._open: dict[int, _LookUp] = {}
        self._by_key: dict[tuple[RootId, BlockKey], int] = {}
        # Nearly all are answered long before their deadline. In a heap, which is faster by a few
        # microseconds, the stale entry woke an idle server once more.
        self._deadlines: SortedList[tuple[float, int]] = SortedList()
        """One for each open question, the earliest first."""
        self._has_trial = False
        self.counters = LookUpStats()

    def look_up(
        self, prompt: Prompt, now: float, instructions: list[Instruction],
        tails: Sequence[AskedTail] = (), prefill_blocks_per_s: float = 0.0,
    ) -> int | None:  # fmt: skip
        """Ask about the unknown ones of a prompt's blocks up to its ``stop``, and about its tails.

        Args:
            prefill_blocks_per_s: How fast its engine computes; 0 if unknown.

        Returns:
            The open question to wait for; None if there is nothing to ask.
        """
        if self._breaker is not None and not self._breaker.is_closed:
            return None
        keys, stop, awaited = prompt.keys, prompt.stop, prompt.hand_over
        first = self.tier.first_unknown(keys, stop, now)
        if first is None:
            # No block is left to ask for: a tail that needs an unknown one is of no use.
            tails = [tail for tail in tails if tail.has_blocks]
            if not tails:
                return None
            first = stop
        name = keys.key(first) if first < stop else tails[0].last_unit
        found = self._by_key.get((keys.root, name))
        if found is not None:
            return found
        parent = keys.key(first - 1) if first else None
        wanted = keys.slice(first, min(stop, first + _MAX_KEYS))
        at_store = self.tier.root_at_store(keys.root)
        deadline_s = now + self._timeout_s
        question = _LookUp(
            keys.root, parent, wanted, at_store, self.tier.num_deletes(keys.root), now, deadline_s,
            first, keys.content, tails, now < awaited.until_s, prefill_blocks_per_s,
        )  # fmt: skip
        lookup_id = self._ask(question)
        self._by_key[keys.root, question.name] = lookup_id
        asked = [(question.num_needed(tail), tail.key, tail.num_units) for tail in tails]
        instructions.append(
            RunLookUp(lookup_id, at_store, wanted, asked, self.executor, awaited.source)
        )
        self.counters.asked += 1
        return lookup_id

    def succeed(self, former: RemoteLookUps, instructions: list[Instruction]) -> None:
        """Number on after everything was forgotten; the former questions have ended."""
        self._ids = former._ids
        self.counters = former.counters
        told = {left.lookup_id for left in instructions if isinstance(left, LookUpEnded)}
        for lookup_id, question in former._open.items():
            if not question.is_trial and lookup_id not in told:
                instructions.append(LookUpEnded(lookup_id))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, lookup_id: int) -> bool:
        return lookup_id in self._open

    def looked_up(
        self, answer: LookedUp, now: float, instructions: list[Instruction], peer: str = ""
    ) -> None:
        """Take the worker's answer, or a ``peer``'s; one that comes too late is ignored."""
        question = self._open.get(answer.lookup_id)
        if question is None:
            return
        self._end(answer.lookup_id, instructions)
        num_present, error = min(max(0, answer.num_present), len(question.keys)), answer.error
        self._judge(question, error, now)
        if question.is_trial or not self._is_current(question):
            return
        is_coming = answer.num_coming > 0 or self._stage(question, answer, now, peer, instructions)
        if num_present < len(question.keys):
            self.tier.note_coming(question.root, question.keys[num_present], now, is_coming)
        present = question.keys[:num_present]
        num_known = self.tier.learn(
            question.root, question.parent, present, question.first, question.content, peer
        )
        if num_known < len(question.keys):
            ttl_s = None if error is None else UNKNOWN_TTL_S
            if question.is_awaited and error is None:  # a store is not asked so often
                ttl_s = _AWAITED_AGAIN_S if self.executor == PEER else UNKNOWN_TTL_S
            self.tier.learn_absent(question.root, question.keys[num_known], now, ttl_s)
        if error is None:
            self._learn_tails(question, answer, now, peer)

    def _stage(
        self, question: _LookUp, answer: LookedUp, now: float, peer: str,
        instructions: list[Instruction],
    ) -> bool:  # fmt: skip
        """Have a peer bring to DRAM what it has on SSD; whether it has just been asked to."""
        num_won, tails = answer.num_on_ssd, question.tails
        stop, num_units = answer.num_present + num_won, 0
        if tails and 0 <= answer.ssd_tail < len(tails):
            tail = tails[answer.ssd_tail]
            key, num_units, num_won = tail.key, tail.num_units, tail.position
        elif not tails and num_won > 0 and 0 < stop <= len(question.keys):
            key = question.keys[stop - 1]
        else:
            return False
        num_read, rate = answer.num_on_ssd + num_units, question.prefill_blocks_per_s
        if self._cost is not None:
            seconds = self._cost.seconds(OpKind.PEER2H, num_read, now, peer=peer)
            if seconds is not None and _STAGED_COST * seconds * rate > num_won:
                return False
        # Once: if its next answer does not say that it is coming, it had no room.
        if not self.tier.may_stage(question.root, key, now):
            return False
        instructions.append(AskToStage(peer, question.root_at_store, key, num_units))
        return True

    def _judge(self, question: _LookUp, error: str | None, now: float) -> None:
        """Inform the breaker of an answer."""
        took_s = now - question.asked_s
        if self._breaker is None:
            return
        if error is not None:
            self._breaker.failed(f"look-up: {error}", now)
        # A store that answers too late for a match is of no use, even if it is well.
        elif question.is_trial and took_s > self._timeout_s:
            self._breaker.failed(f"look-up took {took_s:.3f} s", now)
        else:
            self._breaker.succeeded(now)

    def _is_current(self, question: _LookUp) -> bool:
        """Whether nothing of its root was deleted since it was asked, and the tier not cleared."""
        root, tier = question.root, self.tier
        at_store = (tier.root_at_store(root), tier.num_deletes(root))
        return at_store == (question.root_at_store, question.num_deletes)

    def _learn_tails(self, question: _LookUp, answer: LookedUp, now: float, peer: str) -> None:
        """Remember the one tail that was found, and that those asked for before it are missing."""
        for number, asked in enumerate(question.tails):
            if question.num_needed(asked) > answer.num_present:
                continue  # of no use: the worker did not look for it
            if number == answer.tail:
                self.tier.learn_tail(question.root, asked.key, asked.num_units, peer)
                return
            self.tier.learn_absent(question.root, asked.last_unit, now)
            self.tier.discard_tail(question.root, asked.key)

    def tick(self, now: float, worker_is_up: bool, instructions: list[Instruction]) -> None:
        """Let deadlines pass, and try a store again that was given up."""
        while self._deadlines and self._deadlines[0][0] <= now:
            lookup_id = self._deadlines[0][1]
            question = self._open[lookup_id]
            self.counters.late += not question.is_trial
            self._give_up(lookup_id, now, instructions)
            if self._breaker is not None:
                self._breaker.failed(f"no answer within {now - question.asked_s:.3f} s", now)
        if self._breaker is None:
            return
        if worker_is_up and not self._has_trial and self._breaker.wants_trial(now):
            trial = _LookUp(RootId(b""), None, (), _TRIAL_ROOT, 0, now, now + _TRIAL_TIMEOUT_S)
            lookup_id = self._ask(trial)
            self._has_trial = True
            instructions.append(RunLookUp(lookup_id, _TRIAL_ROOT, [_TRIAL_KEY]))

    def give_up(self, now: float, instructions: list[Instruction]) -> None:
        """End all questions: the worker is gone and will not answer."""
        for lookup_id in list(self._open):
            self._give_up(lookup_id, now, instructions)

    def next_deadline(self, worker_is_up: bool) -> float | None:
        """When `tick` has something to do at the earliest."""
        times = [moment for moment, _ in self._deadlines[:1]]
        retry = None if self._breaker is None else self._breaker.next_deadline()
        if retry is not None and worker_is_up and not self._has_trial:
            times.append(retry)
        return min(times) if times else None

    def _ask(self, question: _LookUp) -> int:
        lookup_id = next(self._ids)
        self._open[lookup_id] = question
        self._deadlines.add((question.deadline_s, lookup_id))
        return lookup_id

    def _give_up(self, lookup_id: int, now: float, instructions: list[Instruction]) -> None:
        question = self._open[lookup_id]
        self._end(lookup_id, instructions)
        if not question.is_trial:
            self.tier.learn_absent(question.root, question.name, now, UNKNOWN_TTL_S)

    def _end(self, lookup_id: int, instructions: list[Instruction]) -> None:
        question = self._open[lookup_id]
        if not question.is_trial:  # first: a question that is not open has been answered
            instructions.append(LookUpEnded(lookup_id))
        del self._open[lookup_id]
        self._deadlines.remove((question.deadline_s, lookup_id))
        if question.is_trial:
            self._has_trial = False
        else:
            del self._by_key[question.root, question.name]

    def check(self) -> bool:
        """Whether every open question can be found by its key, and has a deadline."""
        open_ids = {number for number, q in self._open.items() if not q.is_trial}
        waiting = [number for _, number in self._deadlines]
        return open_ids == set(self._by_key.values()) and sorted(self._open) == sorted(waiting)
