"""Metrics of the index and of the publishers that feed it."""

from __future__ import annotations

from collections.abc import Iterator

from flexcache.metrics.metric import Sample, counter, gauge
from flexcache.router.metrics.readers import TIERS, each, one, per_source
from flexcache.router.stats import RouterStats


def _held_blocks(stats: RouterStats) -> Iterator[Sample]:
    for source, tiers in stats.index.held_blocks.items():
        for tier in TIERS:
            yield (source, tier), tiers.get(tier, 0)


INDEX = (
    gauge("router_index_blocks", "Different blocks.", one(lambda stats: stats.index.blocks)),
    gauge(
        "router_index_max_blocks",
        "Blocks at which the oldest are forgotten.",
        one(lambda stats: stats.index.max_blocks),
    ),
    gauge(
        "router_index_bytes",
        "Memory of the index, estimated.",
        one(lambda stats: stats.index.bytes),
    ),
    gauge(
        "router_held_blocks",
        "Blocks that a source holds, by tier.",
        _held_blocks,
        "source",
        "tier",
    ),
    gauge(
        "router_orphan_blocks",
        "Blocks that wait for the tokens of their parents.",
        one(lambda stats: stats.index.orphans),
    ),
    counter(
        "router_refused_blocks",
        "Blocks not taken because the index was full.",
        one(lambda stats: stats.index.refused_blocks),
    ),
    counter(
        "router_events",
        "KV events applied, by kind.",
        each(lambda stats: stats.index.events, ("stored", "removed", "cleared")),
        "kind",
    ),
    counter(
        "router_event_blocks",
        "Blocks in those events.",
        each(lambda stats: stats.index.event_blocks, ("stored", "removed")),
        "kind",
    ),
    counter(
        "router_ignored_events",
        "KV events that were ignored, by reason.",
        each(lambda stats: stats.index.ignored_events, ("medium",)),
        "reason",
    ),
)

SOURCES = (
    gauge(
        "router_source_connected",
        "1 while the router is connected to the publisher.",
        per_source(lambda source: int(source.is_connected)),
        "source",
    ),
    gauge(
        "router_source_silent",
        "1 if its workers answer requests and it has published nothing for too long.",
        per_source(lambda source: int(source.is_silent)),
        "source",
    ),
    gauge(
        "router_source_unmatched",
        "1 if its workers report cached tokens and none of them was predicted.",
        per_source(lambda source: int(source.is_unmatched)),
        "source",
    ),
    gauge(
        "router_source_last_batch_age_seconds",
        "Time since its last batch; no sample before the first.",
        per_source(lambda source: source.last_batch_age_s),
        "source",
    ),
    counter(
        "router_source_batches",
        "Batches received.",
        per_source(lambda source: source.batches),
        "source",
    ),
    gauge(
        "router_source_waiting_batches",
        "Batches received and not applied yet.",
        per_source(lambda source: source.waiting_batches),
        "source",
    ),
    counter(
        "router_source_gaps",
        "Gaps in the numbers of batches.",
        per_source(lambda source: source.gaps),
        "source",
    ),
    counter(
        "router_source_losses",
        "Gaps that were not filled: the source's blocks were forgotten.",
        per_source(lambda source: source.losses),
        "source",
    ),
    counter(
        "router_source_replayed_batches",
        "Batches that filled gaps.",
        per_source(lambda source: source.replayed_batches),
        "source",
    ),
    counter(
        "router_source_restarts",
        "Restarts of the publisher.",
        per_source(lambda source: source.restarts),
        "source",
    ),
    counter(
        "router_source_snapshots",
        "Snapshots of all blocks that were received.",
        per_source(lambda source: source.snapshots),
        "source",
    ),
    counter(
        "router_source_bad_batches",
        "Batches that could not be decoded.",
        per_source(lambda source: source.bad_batches),
        "source",
    ),
)
