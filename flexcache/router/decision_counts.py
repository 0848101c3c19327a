"""Counts decisions and the tokens in them, in total and by worker. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from flexcache.router.request import Decision
from flexcache.router.workers import Tier


@dataclass(slots=True)
class TokenCounts:
    """Decisions for one worker, or for all."""

    decisions: int = 0
    prompt_tokens: int = 0
    matched_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    def add(self, decision: Decision) -> None:
        self.decisions += 1
        self.prompt_tokens += decision.num_tokens
        for tier, tokens in decision.matched.items():
            self.matched_tokens[tier] += tokens


class DecisionCounts:
    """What was decided since startup."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.total = TokenCounts()
        self._by_worker: dict[str, TokenCounts] = {}

    def add(self, decision: Decision) -> None:
        self.reasons[decision.reason] += 1
        self.total.add(decision)
        self._by_worker.setdefault(decision.worker, TokenCounts()).add(decision)

    def of_worker(self, worker: str) -> TokenCounts:
        return self._by_worker.get(worker) or TokenCounts()

    def keep(self, workers: Collection[str]) -> None:
        """Forget the counts of all other workers."""
        self._by_worker = {k: v for k, v in self._by_worker.items() if k in workers}
