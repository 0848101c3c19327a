"""Scheduler side of TensorRT-LLM's connector: turns its queries into FlexCache tasks.

A request's get is matched when TensorRT-LLM asks, launched when it has allocated blocks, and
announced to the ranks in the metadata of the same step. Its put begins when it ends: TensorRT-LLM
keeps the blocks until they are copied.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flexcache.errors import FlexCacheError, InternalError
from flexcache.ids import RequestInfo, TierName
from flexcache.integration.adapter import LayerwiseRule, TaskCalls, safely
from flexcache.integration.checkpoint import LoadedAdapter, identify_now
from flexcache.integration.file_digests import FileDigests
from flexcache.integration.tensorrt_llm.engine import (
    Saves,
    StepLoad,
    StepMetadata,
    When,
    check_supported,
    read_cache_config,
    read_model_config,
    read_model_id,
)
from flexcache.logs import log_event
from flexcache.manager import KVManager

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
    )
except ModuleNotFoundError:  # before its connectors had a package
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler

logger = logging.getLogger(__name__)

_MEDIA = ("multimodal_positions", "multimodal_lengths", "multimodal_embedding")
_UNNAMED = ("prompt_embedding_table", "mrope_rotary_cos_sin", "encoder_tokens", "input_embeds")
"""Inputs that change a request's KV and that nothing identifies."""


@dataclass(slots=True)
class RequestMatch:
    """A match for a request's blocks ``[first, stop)``, all of them in DRAM.

    Attributes:
        stop: TensorRT-LLM counts on the blocks before it.
        num_found: How many there are: fewer only if a second match had to be made.
        is_parked: Whether the request waits for the load outside of the batch.
        has_computed: Whether a step computed with it.
    """

    task_id: int
    first: int
    stop: int
    num_found: int
    is_parked: bool
    launched: bool = False
    has_computed: bool = False


class Scopes:
    """Names what keeps the KV of an engine's requests apart."""

    def __init__(self) -> None:
        self._digests = FileDigests(waits=False)
        self._adapters: dict[int, LoadedAdapter] = {}
        """By TensorRT-LLM's number, as they were first seen."""

    def read(self, request: Any) -> tuple[str, ...] | None:
        """Return the namespace of a request's tokens: salt, LoRA and media keep prompts apart.

        None if the request has an input besides its tokens that nothing identifies: its KV is
        neither stored nor looked up.
        """
        if any(_has(request, name) for name in _UNNAMED):
            return None
        salt = getattr(request, "cache_salt", None)
        if salt is None:
            salt = getattr(request, "cache_salt_id", None)
        scope = ["tensorrt_llm"]
        if salt is not None:
            scope.append(f"salt={salt}")
        lora = getattr(request, "lora_task_id", None)
        if lora is not None:
            adapter = self._name_adapter(lora, getattr(request, "py_lora_path", None))
            if adapter is None:
                return None
            scope.append(f"lora={adapter}")
        hashes = getattr(request, "multimodal_hashes", None)
        if hashes:
            places = [list(getattr(request, name, None) or ()) for name in _MEDIA[:2]]
            text = repr([[list(item) for item in hashes], *places]).encode()
            scope.append(f"media={hashlib.blake2b(text, digest_size=16).hexdigest()}")
        elif any(_has(request, name) for name in _MEDIA):
            return None
        return tuple(scope)

    def _name_adapter(self, number: int, path: str | None) -> str | None:
        """Name an adapter by its files if they are older than the engine, so that it has loaded
        these; else at random. None if they have changed since: which it has loaded is unknown."""
        now, known = LoadedAdapter(path or ""), self._adapters.get(number)
        if known is None:
            known = self._adapters[number] = now
            known.identify(self._digests)
        return known.name if known.files == now.files else None


def describe(request: Any) -> RequestInfo:
    """Describe a request for KV events and traces."""
    return RequestInfo(
        request_id=str(request.request_id), lora_id=getattr(request, "lora_task_id", None)
    )


def num_computed_tokens(request: Any) -> int:
    """Return how many of a finished request's tokens are certainly computed.

    None of a prompt that was not finished: its last chunk may still be running.
    """
    if getattr(request, "context_remaining_length", 0) > 0:
        return 0
    return max(0, len(request.get_tokens(0)) - 1)  # the last one was sampled, and not computed


def _has(request: Any, name: str) -> bool:
    value = getattr(request, name, None)
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


_MAX_PREFETCHES = 4  # at once: they use the disk that puts write to


class RequestCalls(TaskCalls):
    """Calls to one engine's `KVManager`, in blocks of its requests.

    TensorRT-LLM cannot recompute what a load was to bring. So only blocks in DRAM are matched, and
    what is found on SSD or in the remote store is brought to DRAM for requests to come.
    """

    effect_of_lost_load = "the request is not stored"

    def __init__(self, manager: KVManager, block_size: int) -> None:
        super().__init__(manager, block_size)
        self._prefetches: set[int] = set()

    def match_in_dram(
        self, request: Any, scope: Sequence[str], first: int, stop: int
    ) -> tuple[int, int] | None:
        """Match the blocks ``[first, stop)`` of a request that are in DRAM.

        Returns:
            The task and how many blocks it will load; None if there are none.
        """
        found = self._match(request, scope, first, stop)
        if found is None:
            return None
        task_id, num_found, num_in_dram = found
        if num_in_dram < num_found:  # the rest is below
            again = self._match(request, scope, first, first + num_in_dram)
            self.cancel(task_id)
            self._prefetch(request, scope)
            if again is None:
                return None
            task_id, num_found, num_in_dram = again
        if num_in_dram < num_found:
            self.cancel(task_id)
            return None
        return (task_id, num_found) if num_found else None

    def match_put(
        self, request: Any, scope: Sequence[str], num_blocks: int, weights: int
    ) -> tuple[int, range] | None:
        """Match a put of a request's first blocks, computed with weights of this generation.

        Returns:
            The task, and which blocks will be copied; None if there is nothing to store.
        """
        tokens = request.get_tokens(0)[: num_blocks * self._block_size]
        try:
            task_id, wanted = self.manager.put_match(
                tokens, namespace=scope, request_info=self._info(request), weights=weights
            )
        except (FlexCacheError, ValueError) as error:
            self._log("put_failed", request, error)
            return None
        if not wanted.any():
            return None
        begin = int(wanted.argmax()) // self._block_size
        return task_id, range(begin, begin + int(wanted.sum()) // self._block_size)

    def _match(
        self, request: Any, scope: Sequence[str], first: int, stop: int
    ) -> tuple[int, int, int] | None:
        """Return a task, and how many blocks it finds in all and in DRAM."""
        tokens = request.get_tokens(0)[: stop * self._block_size]
        mask = np.ones(len(tokens), dtype=np.bool_)
        mask[: first * self._block_size] = False
        try:
            matched = self.manager.get_match_by_tier(
                tokens, mask, namespace=scope, request_info=self._info(request), look_up=False
            )
        except (FlexCacheError, ValueError) as error:
            self._log("match_failed", request, error)
            return None
        assert matched is not None  # the remote store was not asked
        task_id, found, sources = matched
        in_dram = sources.get(TierName.CPU, 0) // self._block_size
        return task_id, int(found.sum()) // self._block_size, in_dram

    def _prefetch(self, request: Any, scope: Sequence[str]) -> None:
        self._prefetches.difference_update(self.ended(self._prefetches))
        if len(self._prefetches) >= _MAX_PREFETCHES:
            return
        try:
            self._prefetches.add(
                self.manager.prefetch_async(request.get_tokens(0), namespace=scope)
            )
        except (FlexCacheError, ValueError) as error:
            self._log("prefetch_failed", request, error)

    def _info(self, request: Any) -> RequestInfo | None:
        return describe(request) if self.manager.wants_request_info else None

    def _log(self, event: str, request: Any, error: Exception) -> None:
        log_event(logger, logging.WARNING, event, request=request.request_id, error=error)


_READY_TIMEOUT_S = 60.0
_OF_NO_WEIGHTS = -1


class FlexCacheConnectorScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """Owns the `KVManager` of one engine, on rank 0. Called on the executor's one thread.

    Attributes:
        manager: The cache. Until all ranks have registered, nothing is found.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        check_supported(llm_args)
        config = read_cache_config(llm_args)
        self._block_size = config.tokens_per_block
        self._is_one_rank = llm_args.tensor_parallel_size == 1
        self._layerwise = LayerwiseRule(config.layerwise_load, None)
        model_id, config = identify_now(partial(read_model_id, llm_args), config)
        model = read_model_config(llm_args, model_id)
        self.manager = KVManager(model, config, endpoint=config.endpoint)
        self.manager.start()
        self._cache = RequestCalls(self.manager, self._block_size)
        self._saves = Saves(self._cache, llm_args)
        self._scopes = Scopes()
        self._begun: dict[int, int] = {}
        """Generation of the weights that each request began with."""
        self._first_weights = self.manager.weights_generation
        self._asked = (0, 0)
        """The request that was asked about last, and how many tokens the engine had of it."""
        self._gets: dict[int, RequestMatch] = {}
        self._loads: list[StepLoad] = []

    # -- loads -----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens after the first ``num_computed_tokens`` will be loaded, and
        whether the request is parked meanwhile.

        At least one token is left to compute. Asked again, the request has lost its blocks.
        """
        self._drop(request.request_id)
        self._asked = request.request_id, num_computed_tokens
        scope = self._scopes.read(request)
        first, rest = divmod(num_computed_tokens, self._block_size)
        stop = (len(request.get_tokens(0)) - 1) // self._block_size
        if scope is None or rest or stop <= first:
            return 0, False
        found = self._cache.match_in_dram(request, scope, first, stop)
        if found is None:
            return 0, False
        task_id, num_found = found
        is_parked = not self._layerwise.allows(request.request_id)
        self._gets[request.request_id] = RequestMatch(
            task_id, first, first + num_found, num_found, is_parked
        )
        return num_found * self._block_size, is_parked

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        """Launch the request's load into the blocks that it was given."""
        self._note_weights(request.request_id)
        get = self._gets.get(request.request_id)
        if get is None or get.launched:
            return
        if len(block_ids) < get.stop:  # the prompt is computed in pieces
            self._narrow(request, get, get.first, len(block_ids))
        blocks = list(block_ids[get.first : get.stop])
        is_there = bool(blocks) and get.num_found == len(blocks) and min(blocks) >= 0
        is_started = is_there and self._cache.launch(get.task_id, [blocks])
        if not is_there:
            self._cache.cancel(get.task_id)
        get.launched = True
        if blocks or get.is_parked:
            task_id = get.task_id if is_started else None
            self._loads.append(StepLoad(request.request_id, task_id, len(blocks), self._when(get)))

    def _note_weights(self, request_id: int) -> None:
        """Note which weights a request begins with. Once they have changed, blocks that the engine
        had itself may be of other ones: no one says whether it has let go of those."""
        weights = self.manager.weights_generation
        is_mixed = weights != self._first_weights and self._asked != (request_id, 0)
        self._begun[request_id] = _OF_NO_WEIGHTS if is_mixed else weights

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Leave out the tokens ``[start, end)``, at either end of what was matched."""
        get = self._gets.get(request.request_id)
        if get is None or get.launched or end <= start:
            return
        if start <= get.first * self._block_size:
            self._narrow(request, get, -(-end // self._block_size), get.stop)
        else:
            self._narrow(request, get, get.first, start // self._block_size)

    def _narrow(self, request: Any, get: RequestMatch, first: int, stop: int) -> None:
        """Match fewer of the blocks, before the others are let go."""
        former, scope, found = get.task_id, self._scopes.read(request), None
        get.first, get.stop = first, max(first, min(stop, get.stop))
        if get.first < get.stop and scope is not None:
            found = self._cache.match_in_dram(request, scope, get.first, get.stop)
        get.task_id, get.num_found = found or (former, 0)
        self._cache.cancel(former)

    def _when(self, get: RequestMatch) -> When:
        if get.is_parked:
            return When.BETWEEN
        return When.BY_LAYER if self._is_one_rank else When.FIRST

    def _drop(self, request_id: int) -> None:
        get = self._gets.pop(request_id, None)
        if get is not None and not get.launched:
            self._cache.cancel(get.task_id)

    # -- steps -----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        in_step = (*scheduler_output.new_requests, *scheduler_output.cached_requests)
        ids = [data.request_id for data in in_step]
        self._layerwise.step(ids)
        loads, self._loads = self._loads, []
        return StepMetadata(self.manager.endpoint, loads, self._first_computed(ids))

    def _first_computed(self, request_ids: Sequence[int]) -> list[int]:
        """Return those of the requests that now compute with what was loaded for them."""
        first = []
        for request_id in request_ids:
            get = self._gets.get(request_id)
            if get is not None and get.launched and not get.has_computed:
                get.has_computed = True
                first.append(request_id)
        return first

    # -- ends ------------------------------------------------------------------------------------

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        """Begin to store a request; return whether its blocks are still in use.

        They are if they are being copied, or still loaded: an aborted request's load ends first.
        """
        request_id = request.request_id
        self._layerwise.finished(request_id)
        get = self._gets.pop(request_id, None)
        weights = self._begun.pop(request_id, _OF_NO_WEIGHTS)
        tasks: list[int] = []
        is_whole = True
        if get is not None and not get.launched:
            self._cache.cancel(get.task_id)
        elif get is not None and get.first < get.stop:
            if get.task_id not in self._cache.ended([get.task_id]):
                self._cache.cancel(get.task_id)
                tasks.append(get.task_id)
                is_whole = False
            else:
                num_tokens = (get.stop - get.first) * self._block_size
                is_whole = self._cache.has_arrived(get.task_id, num_tokens)
        if is_whole and (task_id := self._put(request, cache_block_ids, weights)) is not None:
            tasks.append(task_id)
        if tasks:
            self._saves.add(request_id, tasks)
        return bool(tasks)

    def _put(self, request: Any, block_ids: Sequence[int], weights: int) -> int | None:
        """Store what the request has computed with these weights; None if there is nothing."""
        scope = self._scopes.read(request)
        num_blocks = min(num_computed_tokens(request) // self._block_size, len(block_ids))
        if scope is None or not num_blocks or min(block_ids[:num_blocks]) < 0:
            return None
        found = self._cache.match_put(request, scope, num_blocks, weights)
        if found is None:
            return None
        task_id, wanted = found
        blocks = list(block_ids[wanted.start : wanted.stop])
        # The blocks were computed before their last token was sampled: nothing has to be awaited.
        return task_id if self._cache.launch(task_id, [blocks], gated=False) else None

    def request_reset(self, request: Any) -> None:
        """Forget a request that has lost its blocks and will be computed again."""
        self._drop(request.request_id)

    def wait_for_initialization(self) -> None:
        """Wait until the rank of this process has registered, so that the first request can hit.

        Ranks of other processes register when the first step tells them where.
        """
        if self._is_one_rank:
            safely(self.manager.wait_ready, _READY_TIMEOUT_S)

    def check_idle(self) -> None:
        """Raise `InternalError` if a request is still remembered; all must have ended."""
        if self._gets or self._begun or self._loads or not self._saves.is_empty():
            raise InternalError(f"ended requests are still remembered: {list(self._begun)}")

    def shutdown(self) -> None:
        self._saves.close()
        self.manager.shutdown()
