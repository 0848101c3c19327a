"""Metadata that the scheduler's side and the workers' side exchange, once per engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from flexcache.tasks.instructions import PromisedLoad


class AdapterUse(NamedTuple):
    """The adapter that a load is for.

    Attributes:
        number: vLLM's number of it.
        digest: Of its files, or of what the ranks have loaded.
        reloads: vLLM loads it again when it runs the request.
        can_be_lost: vLLM can be told later that what was loaded is of no use.
    """

    number: int
    digest: str
    reloads: bool
    can_be_lost: bool


@dataclass(frozen=True)
class Load:
    """A request's blocks that a task fills. ``task_id`` is None if it could not be started.

    One that was ``promised`` runs within the step of this metadata, others between steps. In a
    model with groups, ``num_needed`` blocks of the cache must arrive, or the request starts over;
    ``block_ids`` are for other models.
    """

    request_id: str
    task_id: int | None
    block_ids: list[int]
    promised: PromisedLoad | None = None
    num_needed: int = 0
    adapter: AdapterUse | None = None


@dataclass
class FlexCacheMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Tasks launched since the last step.

    Attributes:
        stores: Puts, whose blocks the steps before this one have computed.
        idle: The engine computes nothing in this step.
        begins_late: No copy may begin before vLLM has prepared the inputs of the step.
        started: Requests whose load between steps has arrived, and that this step computes first;
            False for those that have ended instead.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    idle: bool = False
    begins_late: bool = False
    started: dict[str, bool] = field(default_factory=dict)


@dataclass
class LoadedAdapters(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the last step was computed with: the digest of each adapter that is loaded, by vLLM's
    number of it. A rank sends it when it is another."""

    digests: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine with another rank's: what they hold differently is of unknown content."""
        assert isinstance(other, LoadedAdapters)
        digests = {**other.digests, **self.digests}
        for number, digest in other.digests.items():
            if digests[number] != digest:
                digests[number] = ""
        return LoadedAdapters(digests)
