"""A tier for vLLM's OffloadingConnector: ``module_path`` of an entry of ``secondary_tiers``."""

from flexcache.integration.vllm.secondary_tier.tier import FlexCacheSecondaryTier

__all__ = ["FlexCacheSecondaryTier"]
