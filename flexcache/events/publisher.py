"""Publishes what the cache's tiers store and lose, for routers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from flexcache.cache.journal import Change
from flexcache.config import CacheConfig
from flexcache.errors import ConfigError
from flexcache.events.batch_publisher import Address, BatchPublisher
from flexcache.events.held_blocks import HeldBlocks
from flexcache.events.wire import BatchEncoder, describe

_GATHER_S = 0.005  # a delay that routers tolerate
_MORE_THAN_A_NAME = "|"  # separates the name from the rest of the identity: revision, dtypes


class _Held:
    """What the tiers hold, in the form of batches."""

    def __init__(self, encode: Callable[[float, Sequence[Change]], bytes]) -> None:
        self.blocks = HeldBlocks()
        self._encode = encode

    def missed(self) -> None:
        self.blocks.missed()

    def page(self, cursor: int) -> tuple[bytes, int | None] | None:
        if not self.blocks.is_whole:
            return None
        stored, following = self.blocks.page(cursor)
        return self._encode(time.time(), stored), following


class KVEventPublisher(BatchPublisher[Change]):
    """Publishes changes at the config's ``kv_events_endpoint``.

    Args:
        config: Addresses, format and bounds (``kv_events_*``).
        model_id: The part before the first ``|`` names the model in the topic.
        pod: Name of this publisher in the topic, as routers know it; None: the host's name (in
            Kubernetes the pod's). The config's ``kv_events_topic`` replaces the whole topic.
        data_parallel_rank: Rank in every batch; None for a cache that ranks share.
    """

    def __init__(
        self,
        config: CacheConfig,
        model_id: str,
        pod: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> None:
        if config.kv_events_endpoint is None:
            raise ConfigError("kv_events_endpoint = None: needed to publish KV events")
        topic = config.kv_events_topic
        if topic is None:
            name = model_id.partition(_MORE_THAN_A_NAME)[0]
            topic = f"kv@{pod or socket.gethostname()}@{name}"
        self._hashes = config.kv_events_hashes
        self._encoder = BatchEncoder(config.kv_events_format, data_parallel_rank)
        self._held: _Held | None = None
        if config.kv_events_replay_endpoint is not None:
            self._held = _Held(self._encode_changes)
        super().__init__(
            Address(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic),
            self._follow_and_encode,
            num_kept=config.kv_events_buffer,
            num_queued=config.kv_events_queue,
            gather_s=_GATHER_S,
            snapshots=self._held,
        )

    def _follow_and_encode(self, ts: float, changes: Sequence[Change]) -> bytes:
        if self._held is not None:
            self._held.blocks.apply(changes)
        return self._encode_changes(ts, changes)

    def _encode_changes(self, ts: float, changes: Sequence[Change]) -> bytes:
        return self._encoder.encode(ts, [describe(change, self._hashes) for change in changes])
