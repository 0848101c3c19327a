"""StorePresence: what is known of a remote store, chunk by chunk.

vLLM looks chunks up one by one, and asks again at its next step while the answer is missing. What
it asks for in one step is one question to the store:

    look_up(key) --> unknown, noted --step ends--> question --> answered | late | store gone

Answers are kept for a while. Repeated failures open a circuit breaker; until it closes, every chunk
is missing. Pure: the time is handed in.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

from flexcache.errors import InternalError
from flexcache.ids import BlockKey
from flexcache.server.outbox import WorkerInstruction
from flexcache.tasks.instructions import RunLookUp
from flexcache.transfer.breaker import CircuitBreaker

_MAX_KEYS = 8192
_TRIAL_KEY = BlockKey(b"flexcache-trial")


@dataclass(frozen=True, slots=True)
class _Question:
    keys: list[BlockKey]
    deadline_s: float
    is_trial: bool = False


class StorePresence:
    """Knowledge of one store, and open questions to it.

    Args:
        root: Root under which the chunks are kept.
        capacity: Chunks to remember at most.
        timeout_s: How long vLLM may be kept waiting for an answer.
        absent_ttl_s: How long a missing chunk is assumed to stay missing.
        instructions: Receives `RunLookUp`.
    """

    def __init__(
        self,
        root: bytes,
        capacity: int,
        timeout_s: float,
        absent_ttl_s: float,
        instructions: list[WorkerInstruction],
    ) -> None:
        self._root = root
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._absent_ttl_s = absent_ttl_s
        self._instructions = instructions
        self._known: OrderedDict[BlockKey, float | None] = OrderedDict()
        """None for a chunk that is there; for a missing one the time until which it is missing."""
        self._noted: dict[str, dict[BlockKey, None]] = {}
        self._ids = itertools.count(1)
        self._open: dict[int, _Question] = {}
        self._asked: set[BlockKey] = set()
        self.breaker = CircuitBreaker()
        self.is_up = False

    @property
    def takes_part(self) -> bool:
        return self.is_up and self.breaker.is_closed

    def look_up(self, asker: str, key: BlockKey, now: float) -> bool | None:
        """Return whether a chunk is there; None if the store has yet to say.

        Args:
            asker: What one asker asks for in a step is one question: until the first chunk that is
                missing.
        """
        if not self.takes_part:
            return False
        if key in self._known:
            until = self._known[key]
            if until is None or until > now:
                return until is None
            del self._known[key]
        if key not in self._asked:
            self._noted.setdefault(asker, {})[key] = None
        return None

    def is_there(self, key: BlockKey) -> bool:
        """Whether a chunk was there when last heard of."""
        return self.takes_part and key in self._known and self._known[key] is None

    def learn(self, key: BlockKey, is_there: bool, now: float) -> None:
        """Remember that a chunk was stored, found, or not found."""
        self._known[key] = None if is_there else now + self._absent_ttl_s
        self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def ask(self, now: float) -> None:
        """Ask the store about what was noted."""
        noted, self._noted = self._noted, {}
        for keys in noted.values():
            new = [key for key in keys if key not in self._asked][:_MAX_KEYS]
            if new and self.takes_part:
                self._asked.update(new)
                self._put(_Question(new, now + self._timeout_s))

    def op_ended(self, is_well: bool, reason: str, now: float) -> None:
        """Inform the breaker how an op of the store went. What was under way when it opened is no
        trial."""
        if not self.breaker.is_closed:
            return
        if is_well:
            self.breaker.succeeded(now)
        else:
            self.breaker.failed(reason, now)

    def answered(self, lookup_id: int, num_present: int, error: str | None, now: float) -> None:
        """Take an answer; one that comes too late is ignored."""
        question = self._open.pop(lookup_id, None)
        if question is None:
            return
        self._asked.difference_update(question.keys)
        if error is not None:
            self.breaker.failed(f"look-up: {error}", now)
        else:
            self.breaker.succeeded(now)
        if question.is_trial:
            return
        num_present = min(max(0, num_present), len(question.keys))
        for key in question.keys[:num_present]:
            self.learn(key, True, now)
        for key in question.keys[num_present : num_present + 1]:
            self.learn(key, False, now)
        if error is not None:
            self._assume_absent(question.keys[num_present:], now)

    def tick(self, now: float) -> None:
        """Let deadlines pass, and try a store again that was given up."""
        late = [number for number, q in self._open.items() if q.deadline_s <= now]
        for number in late:
            question = self._open.pop(number)
            self._asked.difference_update(question.keys)
            self._assume_absent(question.keys, now)
            self.breaker.failed("no answer in time", now)
        has_trial = any(question.is_trial for question in self._open.values())
        if self.is_up and not has_trial and self.breaker.wants_trial(now):
            self._put(_Question([_TRIAL_KEY], now + self._timeout_s, is_trial=True))

    def went_down(self, reason: str, now: float) -> None:
        """The store's worker is gone: nothing that was asked will be answered."""
        self.is_up = False
        self.breaker.trip(reason, now)
        self._open.clear()
        self._asked.clear()
        self._noted.clear()

    def next_deadline(self) -> float | None:
        times = [question.deadline_s for question in self._open.values()]
        retry = self.breaker.next_deadline()
        if retry is not None and self.is_up:
            times.append(retry)
        return min(times, default=None)

    def _assume_absent(self, keys: list[BlockKey], now: float) -> None:
        for key in keys:
            if key != _TRIAL_KEY and self._known.get(key, now) is not None:
                self.learn(key, False, now)

    def _put(self, question: _Question) -> None:
        lookup_id = next(self._ids)
        self._open[lookup_id] = question
        self._instructions.append(RunLookUp(lookup_id, self._root, question.keys))

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        asked = [key for q in self._open.values() if not q.is_trial for key in q.keys]
        if sorted(asked) != sorted(self._asked):
            raise InternalError("a chunk is asked about twice, or by no question")
        if len(self._known) > self._capacity:
            raise InternalError("more chunks are remembered than allowed")
