"""State that the scheduler's side keeps for each vLLM request."""

from __future__ import annotations

from dataclasses import dataclass

from flexcache.ids import TierName
from flexcache.integration.vllm.names import RequestName


@dataclass(slots=True)
class Get:
    """An open get of a request.

    Attributes:
        num_computed: Tokens that the engine had when it asked; the get covers the following ones.
        num_tokens: Tokens found; 0 if none.
        sources: Tokens that each tier supplies.
        by_layer: Last answer to vLLM: whether the load runs within the request's first step.
        name: What the request's KV was called when it was matched.
    """

    task_id: int
    num_computed: int
    num_tokens: int
    sources: dict[TierName, int]
    matched_s: float
    name: RequestName
    launched: bool = False
    by_layer: bool = False


@dataclass(slots=True)
class StepLoad:
    """A load within a step: the position and key of its first block, and all blocks from it on."""

    first: int
    key: bytes
    block_ids: list[int]


@dataclass(slots=True)
class RequestRecord:
    """A request, until vLLM has finished it and the step that loads for it has ended.

    Attributes:
        get: Its open get: at most one, however often vLLM asks.
        asked_s: When the remote store was first queried for it; None unless an answer is pending.
        has_lost_load: A load was lost. No other is offered: each could be lost in turn, endlessly.
        step_load: Its load within the step that is now scheduled or computed.
        has_ended: Whether vLLM has finished it.
    """

    get: Get | None = None
    asked_s: float | None = None
    has_lost_load: bool = False
    step_load: StepLoad | None = None
    has_ended: bool = False
