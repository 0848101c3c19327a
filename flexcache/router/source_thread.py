"""Follows one publisher of KV events on a thread of its own, and hands over what it says.

Receiving blocks while missed batches are requested, and decoding takes milliseconds for a long
prompt: neither may hold up the event loop that routes.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import zmq

from flexcache.events.subscriber import (
    KVEventSubscriber,
    Lost,
    News,
    PublisherRestarted,
    Received,
    SnapshotPart,
)
from flexcache.events.wire import EventBatch
from flexcache.logs import log_event
from flexcache.router.slices import slices
from flexcache.router.workers import EventSource

logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 1.0
_RETRY_S = 1.0
_STOP_PATIENCE_S = 0.1  # until a thread that waits for room looks whether it is to stop


class Unknown(Enum):
    """Takes the place of a batch: what the source said before no longer holds."""

    LOST = "lost"
    """Batches are missing for good."""
    RESTARTED = "restarted"
    """It restarted, or tells all that it holds in the batches that follow."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a source says, for the event loop. Batches are cut into slices."""

    source: SourceThread
    content: EventBatch | Unknown


class SourceThread:
    """Follows a source until `stop`.

    Args:
        source: The publisher.
        items: Takes what it says; its bound holds up this thread, and no other source.
        wake: Called, on this thread, after something was put there.

    Attributes:
        num_put: Items that it put into the queue so far.
        num_taken: Items that the event loop took from there, which counts them.
        num_losses: How often the source's blocks became unknown.
        last_batch_s: Monotonic time of the last batch; None: there was none.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(
        self, source: EventSource, items: queue.Queue[Item], wake: Callable[[], None]
    ) -> None:
        self.source = source
        self.num_put = self.num_taken = 0
        self.num_losses = 0
        self.last_batch_s: float | None = None
        self.subscriber = self._subscribe()
        self._items = items
        self._wake = wake
        self._stopping = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_connects = 0
        self._thread = threading.Thread(
            target=self._run, name=f"flexcache-feed {source.endpoint}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end; it may take `_REPLAY_TIMEOUT_S`. Idempotent."""
        if not self._stopping.is_set():
            os.eventfd_write(self._wake_fd, 1)  # first: a thread that ends closes it
            self._stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended, after `stop`."""
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except Exception as error:  # no descriptors left, say
                log_event(
                    logger, logging.ERROR, "kv_events_source_failed",
                    endpoint=self.source.endpoint, error=error, retry_s=_RETRY_S, exc_info=True,
                )  # fmt: skip
                self._lose()
                self._renew()
        self.subscriber.close()
        os.close(self._wake_fd)

    def _subscribe(self) -> KVEventSubscriber:
        source = self.source
        return KVEventSubscriber(
            source.endpoint, source.replay, source.topic, _REPLAY_TIMEOUT_S, snapshots=True
        )

    def _renew(self) -> None:
        """Subscribe again, with the counts of before."""
        counters = self.subscriber.counters
        self.subscriber.close()
        while not self._stopping.wait(_RETRY_S):
            try:
                self.subscriber = self._subscribe()
            except Exception:
                continue
            self.subscriber.counters = counters
            self._num_connects = 0
            return

    def _follow(self) -> None:
        poller = zmq.Poller()
        self.subscriber.register(poller)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping.is_set():
            news = self.subscriber.receive(0)
            self._note_connects()
            if news is None:
                poller.poll()
            else:
                self._hand_over(news)

    def _note_connects(self) -> None:
        """Without replay a publisher that was away may have restarted, or not: its blocks are
        unknown."""
        is_new = self.subscriber.num_connects != self._num_connects
        if is_new and self._num_connects and self.source.replay is None:
            self._lose()
        self._num_connects = self.subscriber.num_connects

    def _hand_over(self, news: News) -> None:
        match news:
            case PublisherRestarted():
                log_event(
                    logger, logging.INFO, "kv_events_source_restarted",
                    endpoint=self.source.endpoint,
                )  # fmt: skip
                self._put(Unknown.RESTARTED)
            case Lost(first, stop):
                # What was published before the first connection was never known here.
                if self.last_batch_s is not None:
                    log_event(
                        logger, logging.WARNING, "kv_events_lost",
                        endpoint=self.source.endpoint, batches=stop - first,
                    )  # fmt: skip
                    self._lose()
            case Received() | SnapshotPart():
                if isinstance(news, SnapshotPart) and news.is_first:
                    self._put(Unknown.RESTARTED)
                self.last_batch_s = time.monotonic()
                for part in slices(news.batch):
                    self._put(part)

    def _lose(self) -> None:
        self.num_losses += 1
        self._put(Unknown.LOST)

    def _put(self, content: EventBatch | Unknown) -> None:
        item = Item(self, content)
        while not self._stopping.is_set():
            try:
                self._items.put(item, timeout=_STOP_PATIENCE_S)
            except queue.Full:
                continue
            self.num_put += 1
            self._wake()
            return
