"""The router's idea of a data-parallel rank agrees with vLLM's."""

from __future__ import annotations

import pytest

from flexcache.router.fleet import EventSource
from flexcache.router.listing import WorkerEntry, WorkerUrl

pytestmark = pytest.mark.whole


kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.7:5557", "tcp://[::1]:5557"])
def test_ports_of_ranks_are_those_of_vllm(endpoint: str) -> None:
    entry = WorkerEntry(url="http://h:1", data_parallel_size=4, events=(f"{endpoint},{endpoint}",))
    for rank, spec in enumerate(entry.specs(WorkerUrl.parse(entry.url))):
        expected = kv_events.ZmqEventPublisher.offset_endpoint_port(endpoint, rank)
        assert spec.sources == (EventSource(expected, expected),)
