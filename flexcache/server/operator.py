"""What whoever operates a server may ask of it, by HTTP: to tell, to forget, to warm up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flexcache.cache.block_keys import (
    ENGINE_KEYS,
    TOKEN_KEYS,
    EngineBlockKeys,
    PromptKeys,
    TokenBlockKeys,
    make_root,
)
from flexcache.cache.prompt_content import PromptContent
from flexcache.errors import RegistrationError
from flexcache.ids import MAX_KEY_BYTES, TaskKind
from flexcache.server.server import KVServer
from flexcache.server.session_calls import SessionCalls
from flexcache.server.store import CacheStore
from flexcache.tasks.ids import TaskIds

if TYPE_CHECKING:
    from flexcache.server.http import HttpService

_NAME = "operator"
_NUM_REMEMBERED = 1024


class Operator:
    """Thread-safe. `clear` and `prefetch` raise `ClosedError` once the server has stopped."""

    def __init__(self, server: KVServer) -> None:
        self._server = server
        self._calls = SessionCalls(server)
        self._opening = threading.Lock()

    def stats(self) -> dict[str, Any]:
        return self._server.stats()

    def health(self) -> dict[str, Any]:
        """``serving``, and ``missing``: who should be there and is not."""
        return self._server.health()

    def clear(self, tier: str | None) -> int:
        """Drop what nobody holds, of one tier or of all; how many blocks.

        Raises:
            ValueError: There is no such tier.
            RegistrationError: No engine has said yet what is cached.
        """
        self._require_store()
        return self._server.clear(tier)

    def prefetch(
        self,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: str | Sequence[str] | None = None,
    ) -> int:
        """Bring what lower tiers have of a prompt to DRAM. Does not wait for it.

        Args:
            token_ids: The prompt; or instead ``block_keys``, as its engine hashes it.

        Returns:
            How many of its blocks will be in DRAM.

        Raises:
            ValueError: Not exactly one of the two is given, or it makes no sense.
            RegistrationError: No engine has said yet what is cached.
        """
        store = self._require_store()
        parts = (namespace,) if isinstance(namespace, str) else namespace or ()
        keys = self._keys(
            store.fingerprint, store.config.tokens_per_block, token_ids, block_keys, parts
        )
        with self._opening:
            if self._calls.ids is None:
                self._calls.ids = TaskIds(self._server.open_session(_NAME, _NUM_REMEMBERED))
        num_tokens = keys.num_blocks * store.config.tokens_per_block
        task = self._calls.match(TaskKind.PREFETCH, keys, 0, keys.num_blocks, num_tokens)
        assert task is not None  # it may wait
        self._calls.launch([task.task_id], [np.empty(0, np.int64)], gated=False)
        return task.num_blocks

    def _require_store(self) -> CacheStore:
        store = self._server.store
        if store is None:
            raise RegistrationError("no engine has said yet what is cached here")
        return store

    @staticmethod
    def _keys(
        fingerprint: str,
        tokens_per_block: int,
        token_ids: Sequence[int] | None,
        block_keys: Sequence[bytes] | None,
        namespace: Sequence[str],
    ) -> PromptKeys:
        if (token_ids is None) == (block_keys is None):
            raise ValueError("give either token_ids or block_keys")
        if block_keys is not None:
            if any(not 0 < len(key) <= MAX_KEY_BYTES for key in block_keys):
                raise ValueError(f"block_keys must have 1 to {MAX_KEY_BYTES} bytes each")
            root = make_root(fingerprint, namespace, ENGINE_KEYS)
            return EngineBlockKeys(root, block_keys, len(block_keys))
        try:
            tokens = np.array(token_ids, dtype=np.int64)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token_ids: {error}") from None
        if tokens.ndim != 1:
            raise ValueError("token_ids must be a list of integers")
        root = make_root(fingerprint, namespace, TOKEN_KEYS)
        return TokenBlockKeys(root, tokens, tokens_per_block, PromptContent(tokens))


def open_http(server: KVServer) -> HttpService:
    """Serve it at its ``http_endpoint``. See `server.http`, whose packages are an extra.

    Raises:
        ConfigError: The address cannot be used.
        MissingDependencyError: A package is not installed.
    """
    from flexcache.server.http import HttpService

    assert server.config.http_endpoint is not None
    service = HttpService(Operator(server), server.config.http_endpoint, server.config.http_token)
    service.start()
    return service
