"""Runs a `Consolidator`: follows several publishers and publishes their merged events."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import zmq

from flexcache.events.batch_publisher import Address, BatchPublisher
from flexcache.events.consolidator import Consolidator
from flexcache.events.subscriber import KVEventSubscriber, News, Received, SnapshotPart
from flexcache.events.wire import BatchEncoder, Event

_NUM_KEPT = _NUM_QUEUED = 10_000


class Consolidation:
    """Merges the events of several publishers. Use it from one thread; `run` occupies that thread.

    Args:
        sources: Endpoint of each publisher, and its replay endpoint or None.
        address: Where the merged events are published.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(self, sources: Sequence[tuple[str, str | None]], address: Address) -> None:
        self._consolidator = Consolidator()
        self._publisher: BatchPublisher[Event] = BatchPublisher(
            address, BatchEncoder().encode, num_kept=_NUM_KEPT, num_queued=_NUM_QUEUED
        )
        self._subscribers: list[KVEventSubscriber] = []
        try:
            for source in sources:
                self._subscribers.append(KVEventSubscriber(*source, snapshots=True))
            self._publisher.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Consolidation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> Address:
        return self._publisher.address

    def run(self) -> None:
        """Merge and publish events forever."""
        poller = zmq.Poller()
        for subscriber in self._subscribers:
            subscriber.register(poller)
        while True:
            for subscriber in self._subscribers:
                self._take(subscriber)
            poller.poll()

    def _take(self, subscriber: KVEventSubscriber) -> None:
        """Process all events that a source has sent by now."""
        source = subscriber.endpoint
        while (news := subscriber.receive(0)) is not None:
            merged: list[Event] = []
            if not isinstance(news, Received) and not _continues(news):
                # Some of its earlier events are out of date, and it is unknown which.
                merged += self._consolidator.forget(source)
            if isinstance(news, Received | SnapshotPart):
                merged += self._consolidator.take(source, news.batch.events)
            if merged:
                self._publisher.publish(merged)

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for subscriber in self._subscribers:
            subscriber.close()
        self._publisher.close()


def _continues(news: News) -> bool:
    return isinstance(news, SnapshotPart) and not news.is_first
