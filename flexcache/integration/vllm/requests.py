"""State that the scheduler's side keeps for each vLLM request."""

from __future__ import annotations

from dataclasses import dataclass

from flexcache.ids import TierName
from flexcache.integration.vllm.names import RequestName
from flexcache.tasks.instructions import PromisedLoad


@dataclass(slots=True)
class Get:
    """An open get of a request.

    Attributes:
        num_computed: Tokens that the engine had when it asked; the get covers the following ones.
        num_tokens: Tokens found; 0 if none.
        sources: Tokens that each tier supplies.
        promised: The load, if the last answer to vLLM was that it runs within the request's first
            step.
        name: What the request's KV was called when it was matched.
    """

    task_id: int
    num_computed: int
    num_tokens: int
    sources: dict[TierName, int]
    matched_s: float
    name: RequestName
    launched: bool = False
    promised: PromisedLoad | None = None


@dataclass(slots=True)
class RequestRecord:
    """A request, until vLLM has finished it.

    Attributes:
        get: Its open get: at most one, however often vLLM asks.
        asked_s: When the remote store was first queried for it; None unless an answer is pending.
        has_lost_load: A load was lost. No other is offered: each could be lost in turn, endlessly.
    """

    get: Get | None = None
    asked_s: float | None = None
    has_lost_load: bool = False
