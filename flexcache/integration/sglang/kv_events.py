"""What the tiers store and lose, in SGLang's own stream of KV events, and the tokens in them.

SGLang names the pages that a linker shall store, but not their tokens, which routers need: hooks
remember the prompt that is being inserted into the radix tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.disaggregation.kv_events import KVEventsConfig, is_kv_publisher_rank

from flexcache.cache.journal import Change, Cleared
from flexcache.cache.prompt_content import PromptContent
from flexcache.events.wire import Event, describe
from flexcache.integration.safe_calls import safely
from flexcache.manager import KVManager
from flexcache.request_info import RequestInfo


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
        self._num_before = 0

    @contextmanager
    def inserting(self, key: Any) -> Iterator[None]:
        """Remember the prompt that SGLang inserts meanwhile, a ``RadixKey``."""
        self._inserted = key
        try:
            yield
        finally:
            self._inserted = None

    def offloading(self, num_before: int) -> None:
        """Note how many pages of it are before those that are stored next."""
        self._num_before = num_before

    def of_offload(self) -> PromptContent | None:
        """Describe the pages that are stored."""
        if self._inserted is None:
            return None
        rest = self._inserted[self._num_before * self._page_size :]
        return self.describe(rest, self._num_before == 0)

    def describe(self, key: Any, is_start: bool, request_id: str = "") -> PromptContent | None:
        """Describe pages for KV events and traces; None without these, or if the tokens do not tell
        the KV: those of EAGLE's pairs, or of a caller's own ``extra_key``.

        Args:
            key: Their ``RadixKey``.
            is_start: Whether a prompt begins with them.
        """
        if not self._manager.wants_request_info:
            return None
        adapter = self._adapter_of(key.extra_key)
        if key.is_bigram or (key.extra_key and adapter is None):
            return None
        tokens = key.raw_token_ids()
        extra_keys: list[Any] | None = None
        if key.cache_salt and is_start:
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
