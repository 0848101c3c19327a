"""View of a router's statistics as tables that fit a width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from flexcache.counters import Histogram
from flexcache.ids import BreakerState
from flexcache.router.fleet import Tier, WorkerState
from flexcache.router.stats import PrefetchStats, RouterStats, SourceStats, WorkerStats
from flexcache.status.view import Column, duration, entry_name, listed, number, table_of, titled


@dataclass(frozen=True, slots=True)
class RouterRates:
    """Rates per second, averaged over ``seconds``."""

    seconds: float
    requests: float
    prompt_tokens: float
    matched_tokens: float


def rates_between(before: RouterStats, after: RouterStats, seconds: float) -> RouterRates | None:
    """Return the rates between two readings; None if another process answered."""
    if before.process is None or after.process is None or before.process.pid != after.process.pid:
        return None
    was, now = before.routing, after.routing

    def rate(then: Mapping[str, int], later: Mapping[str, int]) -> float:
        return (sum(later.values()) - sum(then.values())) / seconds

    return RouterRates(
        seconds,
        requests=rate(was.decisions, now.decisions),
        prompt_tokens=(now.prompt_tokens - was.prompt_tokens) / seconds,
        matched_tokens=rate(was.matched_tokens, now.matched_tokens),
    )


def render(stats: RouterStats, rates: RouterRates | None, width: int) -> Group:
    """Render one reading of a router.

    Args:
        rates: Changes since the previous reading; None if unknown.
        width: Characters per line.
    """
    tables = (
        _workers(stats, width), _sources(stats.sources, width), _caches(stats.caches, width),
    )  # fmt: skip
    return Group(
        _title(stats),
        *(Text(f"! {sentence}", "yellow") for sentence in stats.trouble),
        *filter(None, tables),
        *_requests(stats, rates),
        *_accuracy(stats),
        *_parts(stats),
    )


def _title(stats: RouterStats) -> Text:
    process = stats.process
    if process is None:
        return Text("router", "bold")
    text = Text(f"router at {process.address}, process {process.pid}", "bold")
    up = duration(process.uptime_s)
    return text.append(
        f"\nflexcache {process.version}, up {up}, policy {stats.routing.policy}", "not bold"
    )


def _workers(stats: RouterStats, width: int) -> Table | None:
    def state(_: str, worker: WorkerStats) -> Text:
        if worker.state == WorkerState.UP and worker.circuit in ("open", "half_open"):
            return Text("failing", "red")
        colours = {"up": "green", "draining": "yellow"}
        return Text(worker.state, colours.get(worker.state, "red"))

    def found(_: str, worker: WorkerStats) -> str:
        return _share(sum(worker.matched_tokens.values()), worker.prompt_tokens)

    def held(tier: Tier) -> Column[WorkerStats]:
        def blocks(worker: WorkerStats) -> int:
            held = stats.index.held_blocks
            return sum(held.get(source, {}).get(tier, 0) for source in worker.sources)

        return Column(f"{tier.value} blocks", number(blocks), 5)

    columns: list[Column[WorkerStats]] = [
        Column("engine", entry_name, is_number=False),
        Column("state", state, is_number=False),
        Column("running", number(lambda worker: worker.requests)),
        Column("no token yet", number(lambda worker: worker.waiting_requests), 2),
        Column("wait s", lambda _, worker: f"{worker.wait_s:.2f}", 1),
        Column("requests", number(lambda worker: worker.decisions), 3),
        Column("tokens found", found),
        *(held(tier) for tier in Tier),
        Column("time factor", lambda _, worker: f"{worker.speed_factor:.2f}", 4),
        Column("events", lambda _, w: "none" if w.is_approximate else "yes", 6, is_number=False),
    ]
    return table_of(columns, stats.workers, width)


def _sources(sources: Mapping[str, SourceStats], width: int) -> Table | None:
    def state(_: str, source: SourceStats) -> Text:
        if not source.is_connected:
            return Text("not connected", "red")
        if source.is_silent:
            return Text("silent", "red")
        return Text("unmatched", "red") if source.is_unmatched else Text("follows", "green")

    def age(_: str, source: SourceStats) -> str:
        return "-" if source.last_batch_age_s is None else duration(source.last_batch_age_s)

    def lag(_: str, source: SourceStats) -> str:
        return "-" if source.lag_s is None else f"{source.lag_s * 1e3:.0f} ms"

    columns: list[Column[SourceStats]] = [
        Column("publisher", entry_name, is_number=False),
        Column("state", state, is_number=False),
        Column("batches", number(lambda source: source.batches)),
        Column("last", age, 1),
        Column("lag", lag, 3),
        Column("gaps", number(lambda source: source.gaps)),
        Column("lost", number(lambda source: source.losses)),
        Column("restarts", number(lambda source: source.restarts), 2),
    ]
    return table_of(columns, sources, width)


def _caches(caches: Mapping[str, PrefetchStats], width: int) -> Table | None:
    def state(_: str, cache: PrefetchStats) -> Text:
        is_asked = cache.circuit == BreakerState.CLOSED
        return Text("asked", "green") if is_asked else Text("failing", "red")

    def dropped(cache: PrefetchStats) -> int:
        return cache.results.get("busy", 0) + cache.results.get("circuit", 0)

    columns: list[Column[PrefetchStats]] = [
        Column("cache", entry_name, is_number=False),
        Column("state", state, is_number=False),
        Column("early loads", number(lambda cache: cache.results.get("accepted", 0))),
        Column("tokens", number(lambda cache: cache.tokens), 2),
        Column("failed", number(lambda cache: cache.results.get("failed", 0))),
        Column("not asked", number(dropped), 1),
    ]
    return table_of(columns, caches, width)


def _requests(stats: RouterStats, rates: RouterRates | None) -> Iterator[Text]:
    routing = stats.routing
    if rates is not None:
        yield titled(
            f"last {rates.seconds:.1f} s",
            f"{rates.requests:,.1f} requests/s",
            f"{_share(rates.matched_tokens, rates.prompt_tokens)} of prompt tokens found",
        )
    yield titled("decisions", listed(routing.decisions) or "none yet")
    tiers = [
        f"{tier} {_share(n, routing.prompt_tokens)}"
        for tier, n in routing.matched_tokens.items()
        if n
    ]
    if routing.prompt_tokens:
        whole = _share(sum(routing.matched_tokens.values()), routing.prompt_tokens)
        yield titled("prompt tokens found", whole, *tiers)


def _accuracy(stats: RouterStats) -> Iterator[Text]:
    counts, ttft = stats.routing.cached_tokens, stats.routing.ttft
    compared = counts.exact + counts.over + counts.under
    if compared or counts.unreported:
        yield titled(
            "cached tokens",
            f"{counts.exact:,} of {compared:,} predictions right",
            f"predicted {_share(counts.predicted_tokens, counts.prompt_tokens)}",
            f"reported {_share(counts.actual_tokens, counts.prompt_tokens)}",
            listed({"not reported": counts.unreported}),
        )
    if sum(ttft.actual_s.counts):
        yield titled(
            "time to first token",
            f"mean {_mean(ttft.actual_s):.3f} s",
            f"predicted {_mean(ttft.predicted_s):.3f} s",
            f"off by {_mean(ttft.error_s):.3f} s on average",
        )
    learned = stats.routing.service_time
    if learned.is_learned:
        yield titled(
            "learned",
            f"{1e6 * learned.token_s:.1f} us/token",
            f"{1e3 * learned.base_s:.1f} ms each",
        )


def _parts(stats: RouterStats) -> Iterator[Text]:
    index = stats.index
    yield titled(
        "index",
        f"{index.blocks:,} blocks of {index.max_blocks:,}",
        f"{index.bytes / 1e6:,.1f} MB",
        listed({"orphans": index.orphans, "refused": index.refused_blocks}),
    )
    if stats.queue is not None:
        waiting = f"{stats.queue.waiting:,} of {stats.queue.capacity:,} waiting"
        yield titled("queue", waiting, listed(_prefixed("refused", stats.queue.refused)))
    if stats.proxy is not None:
        yield titled(
            "requests",
            f"{stats.proxy.open_requests:,} open",
            listed(stats.proxy.ended),
            listed({"retries": stats.proxy.retries}),
            listed(_prefixed("rejected", stats.proxy.rejected)),
        )
    if stats.tokens is not None:
        yield titled("tokens", listed(stats.tokens.requests) or "no requests yet")
    for name, peer in stats.peers.items():
        yield titled(f"router {name}", "up" if peer.is_up else "away", f"{peer.requests:,} running")


def _prefixed(word: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{word} {name}": count for name, count in counts.items()}


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _mean(histogram: Histogram) -> float:
    return histogram.sum / sum(histogram.counts)
