"""Requests of SGLang as one rank knows them: their sessions, pinned pages and pages to wait for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flexcache.cache.block_keys import PromptContent
from flexcache.cache.prompt import check_session_id
from flexcache.integration.adapter import as_bool, as_count, as_pin_ttl_s, read_hint, safely
from flexcache.integration.sglang.loads import PageCalls
from flexcache.integration.sglang.rank import Pages
from flexcache.tasks.model import load_patience_s

_MAX_PLACES = 16
"""Tails offered to the other ranks for one prompt, the last ones."""


@dataclass(slots=True)
class RankRequest:
    """One request, from its arrival or first look-up until it is computed, or gone.

    Attributes:
        session_id: Whose prompt it is.
        asked: The pages that SGLang looked up last: those that its tree lacks.
        pinned: Tasks by how many of these pages they load, the longest first. With one group every
            length up to the longest can be loaded: one task. With tails only lengths up to a tail
            can: a task for each, if other ranks may have less; the ranks then agree on the longest
            that all have.
        pinned_s: When they were matched.
        waits_for: The pages that it is parked for.
        prefetch: The task that brings these to DRAM, and keeps them there.
        give_up_s: When it waits no longer.
    """

    session_id: str | None = None
    asked: Pages | None = None
    pinned: dict[int, int] = field(default_factory=dict)
    pinned_s: float = 0.0
    waits_for: Pages | None = None
    prefetch: int | None = None
    give_up_s: float = 0.0


class RankRequests:
    """The requests of one rank.

        arrived --nothing below DRAM--> ready
           |
           +--the store is asked--> asked --answered, or too late--> ready, or:
           +--found below DRAM, faster than computing--> fetching --ended, or too late--> ready

    What has come is kept until the request is computed, or gone. A request waits for its pages no
    longer than computing them would take, and not at all if their tier has been slower than that
    lately (`LoadCost`).

    Args:
        has_tails: Whether only some lengths of a prompt can be loaded.
        has_peers: Whether other ranks may have less.

    Attributes:
        parked: Those that wait.
    """

    def __init__(self, calls: PageCalls, has_tails: bool, has_peers: bool) -> None:
        self._calls = calls
        self._config = calls.manager.cache_config
        self._has_tails = has_tails
        self._max_places = _MAX_PLACES if has_tails and has_peers else 1
        self._known: dict[str, RankRequest] = {}
        self.parked: set[str] = set()
        self.prefill_pages_per_s = 0.0
        self._looked_up: str | None = None
        """Whose pages were looked up last, since the last arrival."""

    def report_prefill(self, tokens_per_s: float) -> None:
        """Report how fast the engine computes prompts."""
        self.prefill_pages_per_s = tokens_per_s / self._config.tokens_per_block
        self._calls.report_prefill(tokens_per_s)

    def arrived(self, request: Any) -> None:
        """Note the session of SGLang's request: its ``session_id``, or the one it is part of. Keep
        it out of SGLang's tree, whose nodes are what is stored, if it is not to be stored."""
        request.skip_radix_cache_insert |= not store_limit(request)
        session = getattr(request, "session", None)
        if session is not None:
            request.session_id = session.session_id  # SGLang passes it on with what it offloads
        self._looked_up = None
        own = self._known.setdefault(request.rid, RankRequest())
        own.session_id = valid_session_id(request.session_id)

    def session_of(self, rid: str) -> str | None:
        return self._known[rid].session_id if rid in self._known else None

    def closed(self, session_id: object) -> None:
        """Let a session's blocks go first: SGLang has closed it."""
        if (name := valid_session_id(session_id)) is not None:
            safely(self._calls.manager.session_hint, name, over=True)

    def ended(self, rid: str) -> None:
        """Forget a request that was computed or aborted; bring nothing more for it."""
        self._end_prefetch(rid)
        self.release(rid)
        self._known.pop(rid, None)

    def is_busy(self) -> bool:
        """Return whether any request waits."""
        return bool(self.parked)

    def reset(self) -> None:
        for rid in list(self._known):
            self._end_prefetch(rid)
            self.release(rid)

    # -- pinned pages ----------------------------------------------------------------------------

    def find(self, rid: str, pages: Pages) -> list[int]:
        """Pin what DRAM has of a request's pages; return how many can be loaded: all that apply."""
        now, request = time.monotonic(), self._known.setdefault(rid, RankRequest())
        # A pin is good for half of the time after which the cache gives a match up.
        is_old = now - request.pinned_s > self._config.match_ttl_s / 2
        if request.asked != pages or is_old:
            self._unpin(request)
        request.asked, self._looked_up = pages, rid
        if not request.pinned:
            request.pinned, request.pinned_s = self._pin(pages), now
        if self._has_tails:
            return sorted(request.pinned)
        return list(range(1, max(request.pinned, default=0) + 1))

    def _pin(self, pages: Pages) -> dict[int, int]:
        tasks: dict[int, int] = {}
        while len(tasks) < self._max_places and (found := self._calls.pin(pages)) is not None:
            tasks[found.num_pages] = found.task_id
            pages = pages.first(found.num_pages - 1)
        return tasks

    def take(self, rid: str, num_pages: int) -> tuple[int, Pages] | None:
        """Return the task that loads so many pages, which is now the caller's, and the pages."""
        request = self._known.get(rid)
        if request is None or request.asked is None or not request.pinned:
            return None
        pages, task_id = request.asked, request.pinned.pop(num_pages, None)
        if task_id is None:  # another rank has fewer
            found = self._calls.pin(pages.first(num_pages))
            if found is not None and found.num_pages == num_pages:
                task_id = found.task_id
            elif found is not None:
                self._calls.cancel(found.task_id)
        self.release(rid)
        return None if task_id is None else (task_id, pages)

    def release(self, rid: str) -> None:
        """Unpin what was found for a request."""
        request = self._known.get(rid)
        if request is None:
            return
        self._unpin(request)
        if request.session_id is None and request.prefetch is None and rid not in self.parked:
            del self._known[rid]

    def _unpin(self, request: RankRequest) -> None:
        for task_id in request.pinned.values():
            self._calls.cancel(task_id)
        request.pinned = {}

    # -- pages to wait for -----------------------------------------------------------------------

    def park(self, describe: Callable[[str], PromptContent | None]) -> None:
        """Bring to DRAM what the look-up of the request that has just arrived missed there; it
        waits until `is_ready`.

        Args:
            describe: Returns what is known of a request's prompt, for KV events and traces.
        """
        if (rid := self._looked_up) is None:
            return
        request = self._known[rid]
        assert request.asked is not None
        if max(request.pinned, default=0) == len(request.asked.keys):
            return
        former, request.prefetch = request.prefetch, None
        request.waits_for = request.asked._replace(content=describe(rid))
        request.give_up_s = time.monotonic() + self._config.remote_lookup_timeout_s
        self.parked.discard(rid)
        if self._waits(request, request.waits_for):
            self.parked.add(rid)
        if former is not None:  # it kept pages in DRAM until now
            self._calls.cancel(former)

    def is_ready(self, rid: str) -> bool:
        """Return whether a request has nothing to wait for."""
        if rid not in self.parked:
            return True
        request = self._known[rid]
        assert request.waits_for is not None
        if self._waits(request, request.waits_for):
            return False
        # What comes too late tells how slow the tier is: its prefetch goes on.
        self.parked.discard(rid)
        self.release(rid)  # since then more has come
        return True

    def _waits(self, request: RankRequest, pages: Pages) -> bool:
        """Take the next step of a parked request, if it is due; return whether it still waits."""
        now = time.monotonic()
        if request.prefetch is not None:
            ended = safely(self._calls.manager.try_wait, [request.prefetch])
            return ended == {} and now < request.give_up_s
        look_up = now < request.give_up_s
        found = self._calls.match(pages._replace(content=None), look_up)
        if found is None:
            return look_up  # not answered yet, or failed
        self._calls.cancel(found.task_id)
        if found.is_in_dram:
            return False
        request.prefetch = self._calls.prefetch(pages.first(found.num_pages))
        request.give_up_s = now + load_patience_s(
            max(1, found.num_pages - found.num_in_dram), self.prefill_pages_per_s,
            self._config.op_timeout_s,
        )  # fmt: skip
        return request.prefetch is not None

    def _end_prefetch(self, rid: str) -> None:
        self.parked.discard(rid)
        request = self._known.get(rid)
        if request is not None and request.prefetch is not None:
            self._calls.cancel(request.prefetch)
            request.prefetch = None


def store_limit(request: Any) -> int:
    """Return how many of a request's tokens may be stored, by its ``custom_params``."""
    if _hint(request, "store", as_bool) is False:
        return 0
    limit = _hint(request, "max_store_tokens", as_count)
    return sys.maxsize if limit is None else int(limit)


def pin_ttl_s(request: Any) -> float | None:
    """Return how long a request's prompt is pinned, by its ``custom_params``; None: not at all."""
    ttl_s: float | None = _hint(request, "pin_ttl_s", as_pin_ttl_s)
    return ttl_s


def _hint(request: Any, name: str, convert: Callable[[Any], Any]) -> Any:
    params = getattr(request.sampling_params, "custom_params", None)
    return read_hint(params, request.rid, name, convert) if isinstance(params, dict) else None


def valid_session_id(session_id: object) -> str | None:
    """Return a session's name if it can be one: it comes from the sender of the request."""
    try:
        check_session_id(session_id)
    except ValueError:
        return None
    return str(session_id)
