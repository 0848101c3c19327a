"""Publishes what the cache's tiers store and lose, for routers."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from flexcache.cache.journal import Change
from flexcache.config import CacheConfig
from flexcache.errors import ConfigError
from flexcache.events.batch_publisher import Address, BatchPublisher
from flexcache.events.wire import BatchEncoder, describe

_GATHER_S = 0.005  # a router does not mind
_MORE_THAN_A_NAME = "|"  # begins what else an engine's KV depends on: revision, dtypes


class KVEventPublisher(BatchPublisher[Change]):
    """Publishes changes at the config's ``kv_events_endpoint``.

    Args:
        config: Addresses, format and bounds (``kv_events_*``).
        model_id: Names the model in the topic, by what is before the first ``|``.
        pod: Names this publisher in the topic, as routers know it; the host's name (in Kubernetes
            the pod's) if None. The config's ``kv_events_topic`` replaces all of it.
        data_parallel_rank: Goes into every batch. A cache that ranks share has none.
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
        super().__init__(
            Address(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic),
            self._encode_changes,
            num_kept=config.kv_events_buffer,
            num_queued=config.kv_events_queue,
            gather_s=_GATHER_S,
        )

    def _encode_changes(self, ts: float, changes: Sequence[Change]) -> bytes:
        return self._encoder.encode(ts, [describe(change, self._hashes) for change in changes])
