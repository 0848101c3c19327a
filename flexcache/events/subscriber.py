"""Follows one publisher of KV events, FlexCache's or vLLM's, and detects missed batches."""

from __future__ import annotations

from dataclasses import dataclass

from flexcache.events import batch_subscriber
from flexcache.events.batch_subscriber import (
    BatchSubscriber,
    Lost,
    PublisherRestarted,
    Received,
    SnapshotPart,
    SubscriberCounters,
)
from flexcache.events.wire import EventBatch, decode_batch

__all__ = [
    "KVEventCounters",
    "KVEventSubscriber",
    "Lost",
    "News",
    "PublisherRestarted",
    "Received",
    "SnapshotPart",
]

News = batch_subscriber.News[EventBatch]


@dataclass(slots=True)
class KVEventCounters(SubscriberCounters):
    """Counts of batches, and of events of unknown types, which were left out."""

    unknown_events: int = 0


class KVEventSubscriber(BatchSubscriber[EventBatch]):
    """Yields a publisher's events, from its first batch on.

    Args:
        endpoint: The publisher's endpoint; one with ``*`` is bound, for publishers that connect.
        replay_endpoint: Where to request missed batches; None: nowhere.
        topic: Prefix of the topics to receive.
        replay_timeout_s: A replay ends when the publisher is silent this long.
        snapshots: Begin with a snapshot of what is held, if the publisher makes any (FlexCache's
            does). `SnapshotPart` is then among the news.

    Raises:
        ConfigError: An address cannot be used.
    """

    counters: KVEventCounters

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_timeout_s: float = 2.0,
        snapshots: bool = False,
    ) -> None:
        super().__init__(
            endpoint, self._decode_events, replay_endpoint, topic, replay_timeout_s, snapshots
        )
        self.counters = KVEventCounters()

    def _decode_events(self, payload: bytes) -> EventBatch:
        batch = decode_batch(payload)
        self.counters.unknown_events += batch.num_unknown
        return batch
