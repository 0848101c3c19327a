"""Takeover: a router that starts has the index of another one, and goes on from there.

Publishers tell what changes. What was stored before, a FlexCache lists on request; an engine
repeats its last batches at most, so that a router which restarts never hears of the beginnings of
prompts that stay cached. Another router before the same engines knows them.

The one that starts connects to all sources, and holds them. It asks another router, at the replay
endpoint where its requests can be followed, for a *heading*: up to which batch of each source it
knows what is held. Then come all blocks, in pages, while both go on. The source is followed from
that batch on. So a block that went meanwhile goes here too, and a source that restarted, or of
which batches are missing, is forgotten, as it would be at the other router.

Pages are of random blocks, not the most recent first: a prompt is found by its beginning, which is
old, and until that is known what is recent is worth nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from flexcache.events.subscriber import Position
from flexcache.events.wire import Page, pack_request
from flexcache.logs import log_event
from flexcache.router.events import EventApplier, KnownSource
from flexcache.router.feed import Feed
from flexcache.router.holdings import Holdings
from flexcache.router.index import BlockForm, IndexPart
from flexcache.router.messages import TOPIC

logger = logging.getLogger(__name__)

VERSION = 1
"""Rises with every change to pages or to the keys in them."""
_SUBSCRIBED_S = 0.2  # until publishers know of subscriptions
_ANSWER_S = 2.0
_LIMIT_S = 120.0  # sources publish meanwhile, and their sockets keep 100,000 batches each
_SLICE_S = 0.001
_MAX_PAGE_BYTES = 64 << 20

_encode = msgspec.msgpack.encode


class Heading(msgspec.Struct, frozen=True):
    """The first page.

    Attributes:
        num_blocks: Of the whole index.
        runs: Forms of runs.
        sources: Those whose blocks follow, and up to where each was followed.
    """

    version: int
    num_blocks: int
    runs: list[BlockForm]
    sources: list[tuple[KnownSource, Position]]


class IndexPages:
    """Gives the index to routers that start."""

    def __init__(self, feed: Feed, holdings: Holdings) -> None:
        self._feed = feed
        self._holdings = holdings
        self._sources: set[str] = set()
        """Those of all headings: to look at thousands for each page takes longer than it."""

    async def page(self, cursor: int) -> tuple[bytes, int | None]:
        """Return a page, and the cursor of the next one; None: it was the last.

        Args:
            cursor: 0, or of the page before.
        """
        began_s = time.monotonic()
        page = self._page(cursor)
        # Half of the loop's time is left to requests, however many ask.
        await asyncio.sleep(time.monotonic() - began_s)
        return page

    def _page(self, cursor: int) -> tuple[bytes, int | None]:
        applier = self._holdings.applier
        if cursor:
            part, following = applier.part(cursor - 1, self._sources)
            return _encode(part), None if following is None else following + 1
        positions = {
            source: position
            for source, position in self._feed.positions().items()
            if self._holdings.uses(source)
        }
        self._sources |= positions.keys()
        known = zip(applier.known(positions), positions.values(), strict=True)
        heading = Heading(VERSION, applier.index.num_blocks, applier.runs, list(known))
        return _encode(heading), 1


class _Neighbour:
    """Another router, which is asked for a page at a time.

    Raises:
        zmq.ZMQError: The address cannot be used.
    """

    def __init__(self, replay: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.ipv6, self._socket.maxmsgsize = "[" in replay, _MAX_PAGE_BYTES
        self._request = b""
        self._process: bytes | None = None
        try:
            self._socket.connect(replay)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    async def ask(self, cursor: int) -> None:
        self._request = pack_request(cursor)
        await self._socket.send_multipart([b"", self._request])

    async def answer(self) -> Page:
        """
        Raises:
            ValueError: There is none, or it makes no sense.
        """
        if not await self._socket.poll(int(_ANSWER_S * 1000)):
            raise ValueError("it does not answer")
        frames = await self._socket.recv_multipart()
        if len(frames) != 4 or frames[1:3] != [TOPIC.encode(), self._request]:
            raise ValueError("it does not give its index away")
        page = msgspec.msgpack.decode(frames[3], type=Page)
        if self._process not in (None, page.publisher):
            raise ValueError("it restarted")
        self._process = page.publisher
        return page


async def take_over(pairs: Sequence[str], feed: Feed, holdings: Holdings) -> None:
    """Take the index over from the first of other routers that has one, and release the feed.

    Whatever they answer, sources are followed then, as without them.

    Args:
        pairs: ``ENDPOINT,REPLAY`` of each.
        feed: Held until now.
        holdings: What the feed's events are applied to.
    """
    is_whole = False
    try:
        # Without it a batch that is published now may neither come here nor be known there.
        await asyncio.sleep(_SUBSCRIBED_S)
        for pair in pairs:
            endpoint, _, replay = pair.partition(",")
            try:
                neighbour = _Neighbour(replay)
                try:
                    is_whole = await asyncio.wait_for(
                        _take(neighbour, endpoint, feed, holdings), _LIMIT_S
                    )
                finally:
                    neighbour.close()
            except Exception as error:  # it may be of another version, or no router
                log_event(
                    logger, logging.WARNING, "index_not_taken_over", peer=endpoint,
                    reason=str(error) or repr(error),
                    effect="what publishers do not tell again is unknown",
                )  # fmt: skip
            if feed.taken_over:
                break
    finally:
        feed.release(is_whole=is_whole)


async def _take(neighbour: _Neighbour, peer: str, feed: Feed, holdings: Holdings) -> bool:
    """Return whether all was taken over that one has; False: it has nothing.

    Raises:
        ValueError: It cannot be.
    """
    began_s, applier = time.monotonic(), holdings.applier
    await neighbour.ask(0)
    page = await neighbour.answer()
    heading = msgspec.msgpack.decode(page.batch, type=Heading)
    if heading.version != VERSION:
        raise ValueError(f"its index has version {heading.version}, not {VERSION}")
    if heading.num_blocks > applier.index.max_blocks:
        raise ValueError(f"its {heading.num_blocks:,} blocks are more than max_blocks")
    positions = {each.source: position for each, position in heading.sources}
    feed.begin_at({source: positions[source] for source in filter(holdings.uses, positions)})
    if not feed.taken_over:
        return False
    for each, _ in heading.sources:
        if each.source in feed.taken_over:
            applier.begin(each, heading.runs)
    if page.cursor is not None:
        await neighbour.ask(page.cursor)
    while page.cursor is not None:
        asked, page = page.cursor, await neighbour.answer()
        if page.cursor is not None:
            if page.cursor <= asked:
                raise ValueError("its pages do not end")
            await neighbour.ask(page.cursor)  # it makes the next one while this one is noted
        part = msgspec.msgpack.decode(page.batch, type=IndexPart | None)
        if part is not None:
            await _note(part, feed, applier)
    log_event(
        logger, logging.INFO, "index_taken_over", peer=peer, sources=len(feed.taken_over),
        blocks=applier.index.num_blocks, seconds=round(time.monotonic() - began_s, 3),
    )  # fmt: skip
    return True


async def _note(part: IndexPart, feed: Feed, applier: EventApplier) -> None:
    due_s = time.monotonic() + _SLICE_S
    for _ in applier.take(part, feed.taken_over):
        if time.monotonic() > due_s:
            await asyncio.sleep(0)
            due_s = time.monotonic() + _SLICE_S
