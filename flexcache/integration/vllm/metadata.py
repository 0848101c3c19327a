"""Metadata that the scheduler's side sends to the workers' side, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class Load:
    """A request's blocks that a task fills. ``task_id`` is None if it could not be started.

    With ``by_layer`` the load runs within the step of this metadata, otherwise between steps. In a
    model with groups, ``num_needed`` blocks of the cache must arrive, or the request starts over;
    ``block_ids`` are for other models.
    """

    request_id: str
    task_id: int | None
    block_ids: list[int]
    by_layer: bool = False
    num_needed: int = 0


@dataclass
class FlexCacheMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Tasks launched since the last step.

    Attributes:
        stores: Puts, whose blocks the steps before this one have computed.
        idle: The engine computes nothing in this step.
        begins_late: No copy may begin before vLLM has prepared the inputs of the step.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    idle: bool = False
    begins_late: bool = False
