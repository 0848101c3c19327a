"""Tokenization of requests: their token ids, as the engine will see them."""

from flexcache.router.tokens.local import TokenLimits
from flexcache.router.tokens.tokenizers import Tokenizers

__all__ = ["TokenLimits", "Tokenizers"]
