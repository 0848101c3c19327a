"""What the tiers store and lose, in SGLang's own stream of KV events, and the tokens in them.

SGLang names the pages that a linker shall store, but not their tokens, which routers need: hooks
remember the prompt that is being inserted into the radix tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.disaggregation.kv_events import KVEventsConfig, is_kv_publisher_rank

from flexcache.cache.block_keys import PromptContent
from flexcache.cache.journal import Change, Cleared
from flexcache.events.wire import Event, describe
from flexcache.ids import RequestInfo
from flexcache.integration.adapter import safely
from flexcache.manager import KVManager


def publishes_events(server_args: Any) -> bool:
    """Return whether SGLang publishes the KV events of this rank's cache."""
    config = server_args.kv_events_config
    if not is_kv_publisher_rank(config):
        return False
    return bool(KVEventsConfig.from_cli(config).publisher != "null")


class TreeEvents:
    """The KV events of one rank's cache, for the stream of its radix tree.

    Args:
        params: SGLang's ``CacheInitParams``.
        publishes: Whether SGLang's publisher takes them.
    """

    def __init__(self, manager: KVManager, params: Any, publishes: bool) -> None:
        self._manager = manager
        self._page_size = params.page_size
        self._adapter_of = params.kv_event_lora_names.resolve
        self._publishes = publishes
        self._inserted: Any = None
        self._key: Any = None
        self._first = 0

    @contextmanager
    def inserting(self, key: Any) -> Iterator[None]:
        """Remember the prompt that SGLang inserts meanwhile, a ``RadixKey``."""
        self._inserted = key
        try:
            yield
        finally:
            self._inserted = None

    def stores(self, first: int) -> None:
        """Note that pages of the inserted prompt are stored next, from page ``first`` on."""
        self._key, self._first = self._inserted, first

    def looks_up(self, key: Any, first: int) -> None:
        """Note that pages of a prompt are looked up next, from page ``first`` on."""
        self._key, self._first = key, first

    def describe(self, request_id: str = "", is_whole: bool = False) -> PromptContent | None:
        """Describe these pages for KV events and traces; None without such, or if their tokens do
        not tell their KV: those of EAGLE's pairs, or of a caller's own ``extra_key``.

        Args:
            is_whole: Describe the prompt from its first page on.
        """
        key, first = self._key, 0 if is_whole else self._first
        if key is None or not self._manager.wants_request_info:
            return None
        adapter = self._adapter_of(key.extra_key)
        if key.is_bigram or (key.extra_key and adapter is None):
            return None
        tokens = key.raw_token_ids()[first * self._page_size :]
        extra_keys: list[Any] | None = None
        if key.cache_salt and not first:
            extra_keys = [[key.cache_salt], *[None] * (len(tokens) // self._page_size - 1)]
        info = RequestInfo(request_id, lora_name=adapter, extra_keys=extra_keys)
        return PromptContent(tokens, info)

    def take(self) -> list[Event]:
        """Take what the tiers stored and lost since the last call."""
        if not self._publishes:
            return []
        changes = safely(self._manager.take_changes, if_failed=())
        return list(_events(changes, self._manager.cache_config.kv_events_hashes))


def _events(changes: Iterable[Change], hashes: str) -> Iterator[Event]:
    for change in changes:
        if isinstance(change, Cleared):  # readers would apply "all cleared" to the GPU's blocks too
            yield from _events(change.removed, hashes)
        else:
            yield describe(change, hashes)
