"""RankCache: the cache of one rank of SGLang, in the process that also holds the rank's KV."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flexcache.cache.block_keys import PromptContent
from flexcache.client.rank import KVTPClient
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import FlexCacheError
from flexcache.integration.sglang.engine_metrics import EngineMetrics
from flexcache.logs import log_event
from flexcache.manager import KVManager

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
_UNKNOWN_TOKEN = -1
_NAMESPACE = ("sglang", "sha256")
"""SGLang's keys: digests chained over the pages' tokens, seeded with salt and adapter."""
_OF_NO_WEIGHTS = -1
_APART = (*_NAMESPACE, "apart")
"""Chains of pages whose prefix was not cached when they were stored."""


class RankCache:
    """A `KVManager`, and the client that lends it the rank's KV.

    SGLang names only the pages that it asks about. ``parent_key`` is the key of the page before
    them; None at the start of a prompt.

    Args:
        kv_caches: Tensors that count pages in their first dimension.
        layout: What else determines the order of a page's bytes.
        num_blocks: Blocks of each of the model's groups, if it has any.
        groups: Names of the tensors in each of them.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: CacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        layout: str,
        num_blocks: Sequence[int] | None = None,
        groups: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.page_size = config.tokens_per_block
        self._of_tree: int | None = None
        """Generation of the weights that SGLang's own cache is of; None while that is empty."""
        self.manager = KVManager(model, config)
        try:
            self.manager.start()
            self.client = KVTPClient(
                self.manager.endpoint,
                curve_keys=config.curve_keys,
                server_timeout_s=config.server_timeout_s,
                keeps_loads=True,
            )
            if num_blocks is None:
                num_blocks = [min(tensor.shape[0] for tensor in kv_caches.values())]
            self.client.register_kv_caches(
                kv_caches, layout_description=layout, num_blocks=num_blocks, groups=groups
            )
            self.metrics = EngineMetrics(self.manager, self.page_size)
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        """Wait until the cache serves. An engine without its cache still serves."""
        try:
            self.manager.wait_ready(_READY_TIMEOUT_S)
        except (FlexCacheError, TimeoutError) as error:
            log_event(
                logger, logging.ERROR, "cache_refused", reason=error,
                server=self.manager.endpoint, effect="SGLang runs without FlexCache",
            )  # fmt: skip

    @property
    def weights(self) -> int:
        """The generation of the weights that pages are of which SGLang asks for or hands over.

        If the weights have changed since SGLang's own cache was emptied, it is an earlier one:
        nothing is found or stored, since what is computed continues from what is in that cache.
        """
        return self.manager.weights_generation if self._of_tree is None else self._of_tree

    def computes(self, are_present: bool = True) -> None:
        """Note that from now on SGLang's own cache has pages.

        Args:
            are_present: Whether they are of the present weights, unless it had older ones.
        """
        self._of_tree = self.weights if are_present else _OF_NO_WEIGHTS

    def emptied(self) -> None:
        """Note that SGLang's own cache is empty, and nothing is being computed."""
        self._of_tree = None

    def reset(self) -> None:
        """Drop everything cached and unused. The weights are as before."""
        is_present = self.weights == self.manager.weights_generation
        self.manager.reset()
        if is_present and self._of_tree is not None:
            self._of_tree = self.manager.weights_generation

    def prompt(
        self,
        keys: Sequence[bytes],
        parent_key: bytes | None,
        apart: bool = False,
        content: PromptContent | None = None,
    ) -> dict[str, Any]:
        """Return the arguments that name pages in calls of the manager.

        Args:
            apart: Whether the pages are among those stored without their prefix.
            content: What is known of the prompt from the first of the pages on.
        """
        num_tokens = len(keys) * self.page_size
        # SGLang has left a prompt's last token out, which a hit in a model with states must leave.
        tokens = np.full(num_tokens + self.manager.model_config.has_states, _UNKNOWN_TOKEN)
        if content is not None and len(content.token_ids) >= num_tokens:
            tokens[:num_tokens] = content.token_ids[:num_tokens]
        return {
            "token_ids": tokens,
            "namespace": _APART if apart else _NAMESPACE,
            "block_keys": keys,
            "parent_key": parent_key,
            "request_info": None if content is None else content.info,
            "weights": self.weights,
        }

    def places(self, keys: Sequence[bytes], parent_key: bytes | None) -> Iterator[dict[str, Any]]:
        """Yield the arguments for each place where the pages may be: behind their prefix, behind
        pages that were stored without it, or without any before them."""
        yield self.prompt(keys, parent_key)
        if parent_key is not None:
            yield self.prompt(keys, parent_key, apart=True)
            yield self.prompt(keys, None, apart=True)

    def num_pages(self, mask: np.ndarray) -> int:
        """Return how many pages a mask of a prefix covers."""
        return int(mask.sum()) // self.page_size

    def close(self) -> None:
        """End copies and free the memory. Idempotent."""
        if (client := getattr(self, "client", None)) is not None:
            client.close()
        self.manager.shutdown()
