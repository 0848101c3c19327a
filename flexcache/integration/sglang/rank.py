"""Rank of an SGLang engine: its cache, its part of the KV, and what identifies that.

SGLang's ranks look up, load and store by themselves, and agree afterwards: a prefix counts as found
if every rank has it. So each rank has a cache of its own, with its share of the configured sizes. A
cache for all ranks of an engine, as for vLLM, moves the same block ids on every rank in one task:
ranks would have to wait for each other on threads whose order is not the same.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexcache.cache.block_keys import PromptContent
from flexcache.client.rank import KVTPClient
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.model import EngineKeys
from flexcache.config.values import reject
from flexcache.errors import FlexCacheError
from flexcache.integration.adapter import COUNTERS, increases, read_counters, safely
from flexcache.integration.checkpoint import identify_checkpoint
from flexcache.integration.file_digests import FileDigests, digest
from flexcache.logs import log_event
from flexcache.manager import KVManager

logger = logging.getLogger(__name__)

_SETTINGS = (
    "dtype", "quantization", "modelopt_quant", "kv_cache_dtype",
    "json_model_override_args", "context_length", "mamba_ssm_dtype", "qsa_indexer_dtype",
    "speculative_algorithm", "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
)  # fmt: skip
"""Those of SGLang's settings that change the numbers in KV, or which layers have KV."""
_FILES = (
    "quantization_param_path", "kt_weight_path", "modelopt_checkpoint_restore_path",
    "decrypted_config_file",
)  # fmt: skip
"""Settings that name more of what is loaded."""
_FROM_FILES = {
    "auto", "pt", "safetensors", "npcache", "dummy", "sharded_state", "gguf", "bitsandbytes",
    "mistral", "layered", "fastsafetensors", "instanttensor",
}  # fmt: skip
"""Those of SGLang's ways to load that read the files of the checkpoint."""


def read_model_id(server_args: Any, part: str, digests: FileDigests) -> str:
    """Name everything that decides the numbers in a rank's KV, the model's name first.

    Args:
        part: Which part of the model's KV the rank holds; empty for all of it.
    """
    name, *parts = _parts(server_args, digests)
    if part:
        parts.append(("part", part))
    return "|".join([name[1], *(f"{key}={value}" for key, value in parts)])


def _parts(args: Any, digests: FileDigests) -> Iterator[tuple[str, str]]:
    yield from identify_checkpoint(
        args.model_path, args.revision, digests,
        trusts_code=bool(getattr(args, "trust_remote_code", False)),
        download_dir=getattr(args, "download_dir", None),
    )  # fmt: skip
    settings = {name: getattr(args, name, None) for name in _SETTINGS}
    yield "sglang", digest({k: v for k, v in settings.items() if v not in ("", "auto", "{}")})
    for name in _FILES:
        if path := getattr(args, name, None):
            content = dict(identify_checkpoint(path, None, digests))
            del content["model"]  # the path
            yield name, digest(content)
    load_format = str(getattr(args.load_format, "value", args.load_format))
    if load_format not in _FROM_FILES:
        digests.note_unknown(f"load_format = {load_format!r}: weights may be anywhere")
    if load_format == "dummy":
        yield "random_weights", str(args.random_seed)
    draft = getattr(args, "speculative_draft_model_path", None)
    if draft is not None:
        revision = getattr(args, "speculative_draft_model_revision", None)
        yield "draft", digest(dict(identify_checkpoint(draft, revision, digests)))


_READY_TIMEOUT_S = 60.0
_METRICS_INTERVAL_S = 1.0
_UNKNOWN_TOKEN = -1
_NAMESPACE = ("sglang", "sha256")
"""SGLang's keys: digests chained over the pages' tokens, seeded with salt and adapter."""
_OF_NO_WEIGHTS = -1
_APART = (*_NAMESPACE, "apart")
"""Chains of pages whose prefix was not cached when they were stored.

HiCache with ``write_back`` evicts, and so stores, the end of a prompt before its beginning. In the
prompts' own namespace such pages would stand at two places of the index. Dropping them would leave
``write_back`` with one page per prompt.
"""


class Pages(NamedTuple):
    """Pages of a prompt. SGLang names only those that it asks about.

    Attributes:
        parent_key: Key of the page before them; None at the start of the prompt.
        num_before: How many pages are before them.
        content: What is known of the prompt from the first of them on, for KV events.
        session_id: Whose prompt it is.
    """

    keys: Sequence[bytes]
    parent_key: bytes | None = None
    num_before: int = 0
    content: PromptContent | None = None
    session_id: str | None = None

    def first(self, count: int) -> Pages:
        return self._replace(keys=self.keys[:count])


class RankCache:
    """A `KVManager`, and the client that lends it the rank's KV.

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
        self._reported: Mapping[str, float] = {}
        self._report_due_s = 0.0
        keys = EngineKeys("sglang", self.page_size, _NAMESPACE)
        self.manager = KVManager(replace(model, engine_keys=keys), config)
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

    def prompt(self, pages: Pages, apart: bool = False) -> dict[str, Any]:
        """Return the arguments that name pages in calls of the manager.

        Args:
            apart: Whether the pages are among those stored without their prefix.
        """
        content, num_tokens = pages.content, len(pages.keys) * self.page_size
        # SGLang has left a prompt's last token out, which a hit in a model with states must leave.
        tokens = np.full(num_tokens + self.manager.model_config.has_states, _UNKNOWN_TOKEN)
        if content is not None and len(content.token_ids) >= num_tokens:
            tokens[:num_tokens] = content.token_ids[:num_tokens]
        return {
            "token_ids": tokens,
            "namespace": _APART if apart else _NAMESPACE,
            "block_keys": pages.keys,
            "parent_key": pages.parent_key,
            "request_info": None if content is None else content.info,
            "session_id": pages.session_id,
            "weights": self.weights,
        }

    def pin(self, keys: Sequence[bytes], ttl_s: float, session_id: str | None) -> None:
        """Pin a prompt's pages, those that are cached. What SGLang stored, it would find again."""
        if self.weights == self.manager.weights_generation:
            safely(
                self.manager.pin, ttl_s=ttl_s, session_id=session_id, namespace=_NAMESPACE,
                block_keys=keys,
            )  # fmt: skip

    def places(self, pages: Pages) -> Iterator[dict[str, Any]]:
        """Yield the arguments for each place where the pages may be: behind their prefix, behind
        pages that were stored without it, or without any before them."""
        yield self.prompt(pages)
        if pages.parent_key is not None:
            yield self.prompt(pages, apart=True)
            yield self.prompt(Pages(pages.keys), apart=True)

    def report_metrics(self, labels: Mapping[str, str]) -> None:
        """Add to ``sglang:flexcache_..._total`` what has happened since the last report, once a
        second at most.

        Args:
            labels: Those of SGLang's scheduler.
        """
        now = time.monotonic()
        if now < self._report_due_s:
            return
        self._report_due_s = now + _METRICS_INTERVAL_S
        stats = safely(self.manager.stats)
        if stats is None:
            return
        counters = read_counters(stats, self.page_size)
        for name, gain in increases(self._reported, counters).items():
            _counter(name, tuple(labels)).labels(**labels).inc(gain)
        self._reported = counters

    def num_pages(self, mask: np.ndarray) -> int:
        """Return how many pages a mask of a prefix covers."""
        return int(mask.sum()) // self.page_size

    def close(self) -> None:
        """End copies and free the memory. Idempotent."""
        if (client := getattr(self, "client", None)) is not None:
            client.close()
        self.manager.shutdown()


@cache
def _counter(name: str, labels: tuple[str, ...]) -> Any:
    import prometheus_client  # SGLang sets its directory before the first import

    return prometheus_client.Counter(f"sglang:flexcache_{name}", COUNTERS[name], labels)


@dataclass(frozen=True)
class RankPlace:
    """One of an engine's ranks.

    Attributes:
        part: The part of the model's KV that it holds; empty for all of it.
        name: Distinguishes it from ranks with other KV; empty if there are none.
        index: Its place among them.
        count: How many ranks share the configured sizes.
        num_replicas: How many ranks hold the same KV, and share a cache.
        stores: Whether it stores what they hold; all of them load it.
    """

    part: str = ""
    name: str = ""
    index: int = 0
    count: int = 1
    num_replicas: int = 1
    stores: bool = True

    @property
    def has_peers(self) -> bool:
        """Whether other ranks must decide alike."""
        return self.count > 1 or self.num_replicas > 1


def read_rank(parallel: Any, num_replicas: int, is_replicated: bool) -> RankPlace:
    """Return the rank that this process is.

    Args:
        parallel: SGLang's ``get_parallel()``.
        num_replicas: Data-parallel schedulers of the engine.
        is_replicated: Whether the tensor-parallel ranks hold the same KV (MLA).
    """
    part = {
        "pp": (parallel.pp_rank, parallel.pp_size),
        "cp": (parallel.attn_cp_rank, parallel.attn_cp_size),
        "tp": (0, 1) if is_replicated else (parallel.attn_tp_rank, parallel.attn_tp_size),
    }
    whole = {
        "dp": (parallel.dp_rank or 0, num_replicas),
        "pp": part["pp"],
        "tp": (0, 1) if is_replicated else (parallel.tp_rank, parallel.tp_size),
    }
    index, count = 0, 1
    for rank, size in whole.values():
        index, count = index * size + rank, count * size
    return RankPlace(
        " ".join(f"{kind} {rank} of {size}" for kind, (rank, size) in part.items() if size > 1),
        "-".join(f"{kind}{rank}" for kind, (rank, size) in whole.items() if size > 1),
        index,
        count,
        parallel.attn_tp_size if is_replicated else 1,
        not is_replicated or parallel.attn_tp_rank == 0,
    )


def all_agree(params: Any, answer: bool) -> bool:
    """Return whether every rank that looks prompts up alike says yes. Each of them must ask.

    Args:
        params: SGLang's ``CacheInitParams``.
    """
    return bool(_least(int(answer), lookup_groups(params)))


def common_seed(groups: Sequence[Any]) -> str:
    """Return something random that all ranks of these groups have alike. Each of them must ask."""
    return f"{_least(secrets.randbits(62), groups):x}"


def lookup_groups(params: Any) -> list[Any]:
    """Return SGLang's groups of ranks that look prompts up alike."""
    groups = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and torch.distributed.get_world_size(group) > 1
    ]
    return groups or [params.tp_cache_group]


def _least(value: int, groups: Sequence[Any]) -> int:
    vote = torch.tensor([value], dtype=torch.int64)
    for group in groups:
        torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group)
    return int(vote.item())


def read_cache_config(
    extra: dict[str, Any], page_size: int, rank: RankPlace, kv_events: bool = False
) -> CacheConfig:
    """Read the rank's share of what ``FLEXCACHE_*`` and SGLang's extra config say; the latter wins.

    Args:
        kv_events: Whether KV events are on by default.

    Raises:
        ConfigError: A setting is unknown or wrong.
    """
    if extra.get("tokens_per_block", page_size) != page_size:
        raise reject(
            "tokens_per_block",
            extra["tokens_per_block"],
            f"must be SGLang's page size, {page_size}; leave it unset",
        )
    defaults = {"kv_events": kv_events, "kv_events_hashes": "int_first"}
    config = CacheConfig.from_env(
        None, defaults, "SGLang's extra config", **{**extra, "tokens_per_block": page_size}
    )
    if config.store_shards is not None:
        raise reject(
            "store_shards", config.store_shards,
            "must be unset with SGLang, where each rank has a cache of its own",
        )  # fmt: skip
    if rank.num_replicas > 1 and config.endpoint is None:
        raise reject(
            "endpoint",
            None,
            "the ranks of an MLA model hold the same KV, of which one rank stores; give them an "
            "endpoint, where they share a cache",
        )
    return config if rank.count == 1 else _share(config, rank)


def _share(config: CacheConfig, rank: RankPlace) -> CacheConfig:
    """Divide what the ranks of a host would otherwise all claim."""
    addresses: dict[str, Any] = {
        name: None if (address := getattr(config, name)) is None else _own(name, address, rank)
        for name in ("http_endpoint", "kv_events_endpoint", "kv_events_replay_endpoint")
    }
    endpoint = config.endpoint
    if endpoint is not None and not endpoint.startswith("ipc://"):
        raise reject("endpoint", endpoint, "must be ipc:// with several ranks: each has its own")
    sizes: dict[str, Any] = {
        name: None if (size := getattr(config, name)) is None else size / rank.count
        for name in ("cpu_cache_gb", "ssd_cache_gb")
    }
    return replace(
        config,
        **sizes,
        **addresses,
        peer_endpoint=None if config.peer_endpoint is None else _peer(config.peer_endpoint, rank),
        peers=tuple(_peer(address, rank) for address in config.peers),
        ssd_cache_dirs=tuple(str(Path(place) / rank.name) for place in config.ssd_cache_dirs),
        endpoint=None if endpoint is None else f"{endpoint}.{rank.name}",
    )


def _peer(address: str, rank: RankPlace) -> str:
    """Return where the caches of a rank read each other: two ports for each rank of a host."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 2 * rank.index}"


def _own(name: str, address: str, rank: RankPlace) -> str:
    """Return a rank's own address: the port plus its index, or a socket file of its name."""
    if address.startswith("ipc://"):
        return f"{address}.{rank.name}"
    host, colon, port = address.rpartition(":")
    if not port.isdecimal():
        raise reject(name, address, "must end with a port, to which each rank adds its number")
    return f"{host}{colon}{int(port) + rank.index}"
