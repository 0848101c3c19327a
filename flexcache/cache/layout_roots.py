"""Roots under which the blocks of one KV layout are kept.

A prompt's root depends on what an engine's scheduler knows: model, block size, namespace and kind
of key. Only the ranks that move a block know how its bytes are laid out, so the layout is mixed in
here, once the first rank has registered. Blocks of another layout are under other roots, in every
tier, and are not found.
"""

from __future__ import annotations

import xxhash

from flexcache.cache.block_keys import PromptKeys, tenant_of, with_tenant
from flexcache.ids import RootId

_MAX_ROOTS = 4096


class LayoutRoots:
    """Places prompts under one layout.

    Args:
        layout: Digest of the layout; empty while no rank has registered, which leaves roots alone:
            nothing can have been stored under them.
    """

    def __init__(self, layout: bytes = b"") -> None:
        self.layout = layout
        self._roots: dict[RootId, RootId] = {}

    def place(self, keys: PromptKeys) -> None:
        """Set the root of ``keys`` to that of the layout. Idempotent. O(1)."""
        if not self.layout:
            keys.root = keys.prompt_root
            return
        root = self._roots.get(keys.prompt_root)
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            digest = xxhash.xxh3_128_digest(keys.prompt_root + self.layout)
            root = with_tenant(digest, tenant_of(keys.prompt_root))
            self._roots[keys.prompt_root] = root
        keys.root = root
