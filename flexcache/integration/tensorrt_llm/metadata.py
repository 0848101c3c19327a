"""What the scheduler's side sends to every rank, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class When(Enum):
    """When a load runs."""

    BY_LAYER = "within the step that computes with it, layer by layer"
    FIRST = "before the step that computes with it"
    BETWEEN = "while the request is parked"


@dataclass(frozen=True)
class Load:
    """Blocks that a task fills. ``task_id`` is None if it could not be started."""

    request_id: int
    task_id: int | None
    num_blocks: int
    when: When


@dataclass(frozen=True)
class StepMetadata:
    """Pickled by TensorRT-LLM.

    Attributes:
        endpoint: Where the ranks find the cache.
        loads: Loads launched since the last step.
        first_computed: Requests that compute for the first time with what was loaded for them.
    """

    endpoint: str
    loads: list[Load] = field(default_factory=list)
    first_computed: list[int] = field(default_factory=list)
