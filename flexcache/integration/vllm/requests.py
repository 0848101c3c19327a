"""What the scheduler's side remembers of each request of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from flexcache.ids import TierName


@dataclass(slots=True)
class Get:
    """An open get of a request.

    Attributes:
        num_computed: Tokens that the engine had when it asked; the get covers what follows.
        num_tokens: 0 if nothing was found.
        sources: Tokens that each tier supplies.
        by_layer: The last answer to vLLM: whether the load runs within the request's first step.
    """

    task_id: int
    num_computed: int
    num_tokens: int
    sources: dict[TierName, int]
    matched_s: float
    launched: bool = False
    by_layer: bool = False


@dataclass(slots=True)
class StepLoad:
    """A load within a step: its first block's position and key, and all blocks from there on."""

    first: int
    key: bytes
    block_ids: list[int]


@dataclass(slots=True)
class RequestRecord:
    """A request, until vLLM has finished it and the step that loads for it is over.

    Attributes:
        get: Its open get: at most one, however often vLLM asks.
        asked_s: When the remote store was first asked for it; None unless an answer is awaited.
        has_lost_load: Another load is not offered: it could be lost in turn, without end.
        step_load: Its load within the step that is scheduled or computed at present.
        has_ended: Whether vLLM has finished it.
    """

    get: Get | None = None
    asked_s: float | None = None
    has_lost_load: bool = False
    step_load: StepLoad | None = None
    has_ended: bool = False
