"""A request to be routed, and where it was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flexcache.router.workers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What decides where a request goes.

    Attributes:
        request_id: Unique among the requests in flight.
        num_tokens: Length of the prompt, an estimate if ``token_ids`` does not cover it all.
        token_ids: The prompt, up to the first token whose KV depends on more than the tokens, an
            image, say; None if unknown: the request goes by load.
        model: Name in the request, of a model or an adapter; None: it names none.
        adapter: Name of the LoRA adapter.
        cache_salt: vLLM's ``cache_salt``; prompts of different salts share nothing.
        session_id: Conversation that it belongs to, a hint for ties.
    """

    request_id: str
    num_tokens: int
    token_ids: Sequence[int] | np.ndarray | None = None
    model: str | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and what is expected there.

    Attributes:
        worker: Name of the worker.
        others: The other eligible workers, best first.
        num_tokens: Length of the prompt.
        matched: Tokens that each tier supplies; a token counts for the fastest tier that has it.
        ttft_s: Predicted time to the first token; None before the service time is known.
        reason: Why: ``cost``, ``tie``, ``only_one``, ``load`` (tokens unknown), or a policy's own.
        disk_block: What the worker's cache calls the last block that it has on SSD or remote store
            only; None if that is unknown, or too little is there.
    """

    worker: str
    others: tuple[str, ...]
    num_tokens: int
    matched: Mapping[Tier, int]
    ttft_s: float | None
    reason: str
    disk_block: int | None = None

    @property
    def matched_tokens(self) -> int:
        """Tokens that the worker need not compute, over all tiers."""
        return sum(self.matched.values())
