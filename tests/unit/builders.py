"""Prompts spelled as words: a letter is a block, and a block's key is the word up to its letter.

So a key says what its block must hold, and two words share blocks as far as they share letters.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from flexcache.cache.block_keys import EngineBlockKeys
from flexcache.cache.block_pool import BlockIds
from flexcache.ids import BlockKey, RootId

ROOT = RootId(b"a-model")
OTHER_ROOT = RootId(b"another-model")
ROOTS = (ROOT, OTHER_ROOT)


def key_of(word: str) -> BlockKey:
    """Key of the last block of ``word``."""
    return BlockKey(word.encode())


def keys_of(word: str, start: int = 0) -> list[BlockKey]:
    """Keys of the blocks of ``word`` from ``start`` on."""
    return [key_of(word[:end]) for end in range(start + 1, len(word) + 1)]


def prompt(word: str, root: RootId = ROOT) -> EngineBlockKeys:
    return EngineBlockKeys(root, keys_of(word), len(word))


def prefixes(word: str) -> list[str]:
    """All prefixes but the empty one, shortest first."""
    return [word[:end] for end in range(1, len(word) + 1)]


def words(alphabet: str, length: int) -> list[str]:
    """Every word of exactly this length."""
    return ["".join(letters) for letters in product(alphabet, repeat=length)]


def ids(*blocks: int) -> BlockIds:
    return np.array(blocks, dtype=np.int64)
