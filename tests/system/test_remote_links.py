"""A remote store behind a link that delays, loses and breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import NO_HANG_S, until
from load import Loaded, under_load
from slow_link import SlowLink, behind_link
from stores import missing, store_server

pytestmark = pytest.mark.whole


STORES = [
    pytest.param("s3", marks=pytest.mark.skipif(bool(missing("obstore", "weed")), reason="s3")),
    pytest.param(
        "mooncake",
        marks=pytest.mark.skipif(
            bool(missing("mooncake", "mooncake_master")), reason="Mooncake is not installed"
        ),
    ),
]


@contextmanager
def distant(kind: str) -> Iterator[tuple[SlowLink, Loaded]]:
    """Run a cache whose store is behind a link; in the end, no byte was wrong and no call hung."""
    with (
        store_server(kind) as server,
        behind_link(server.url) as (link, url),
        under_load(url) as load,
    ):
        load.work_until_it_grows("stored_blocks", "read_bytes")
        yield link, load
        assert load.engine.seen.wrong == []
        assert load.engine.seen.hits > 0
        assert load.engine.seen.longest_call_s < NO_HANG_S


@pytest.mark.parametrize("kind", STORES)
def test_a_store_behind_delay_and_loss_is_used(kind: str) -> None:
    with distant(kind) as (link, load):
        link.delay_s, link.loss = 0.02, 0.05
        lost = link.num_lost
        for _ in range(3):
            load.work_until_it_grows("stored_blocks", "read_bytes")

        def has_lost() -> bool:
            load.engine.step()
            return link.num_lost > lost

        until(has_lost)


@pytest.mark.parametrize("kind", STORES)
def test_a_store_farther_away_than_the_deadline_is_a_miss_until_it_is_nearer(kind: str) -> None:
    with distant(kind) as (link, load):
        link.delay_s = 3600.0
        load.work_until("open")
        hits = load.engine.seen.hits
        while load.engine.seen.hits == hits:  # DRAM serves on
            load.engine.step()
        link.delay_s = 0.0
        link.cut()
        load.work_until("closed")
        load.work_until_it_grows("stored_blocks", "read_bytes")


@pytest.mark.parametrize("kind", STORES)
def test_connections_that_break_off_cost_no_byte(kind: str) -> None:
    with distant(kind) as (link, load):
        link.breaks_after = 30_000  # less than a batch, more than a block
        broken = link.num_broken
        for _ in range(100):
            load.engine.step()
        assert link.num_broken > broken
        link.breaks_after = None
        load.work_until_it_grows("stored_blocks", "read_bytes")
