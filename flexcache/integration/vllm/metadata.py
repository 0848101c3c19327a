"""What the scheduler's side sends to the workers' side, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class Load:
    """A request's blocks that a task fills. ``task_id`` is None if it could not be started.

    ``by_layer``: within the step that this is sent with; else between steps.
    """

    request_id: str
    task_id: int | None
    block_ids: list[int]
    by_layer: bool = False


@dataclass(frozen=True)
class Store:
    """A finished request whose blocks a task copies before they are freed."""

    request_id: str
    task_id: int


@dataclass
class FlexCacheMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Tasks launched since the last step; ``idle``: the engine computes nothing in this one."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False
