"""KVManager: what an engine's scheduler calls. Token-level on the outside, blocks inside."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import (
    ENGINE_KEYS,
    TOKEN_KEYS,
    EngineBlockKeys,
    PromptKeys,
    TokenBlockKeys,
    make_root,
)
from flexcache.cache.journal import Change
from flexcache.cache.prompt_content import PromptContent
from flexcache.client.backend import Backend, MatchedTask
from flexcache.client.local import LocalCache
from flexcache.client.remote import KVDPClient
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.address import server_of, with_engine
from flexcache.ids import MAX_KEY_BYTES, KVStatus, RootId, TaskKind, TierName
from flexcache.protocol.names import engine_name, new_engine_id
from flexcache.protocol.runtime import check_endpoint, private_endpoint
from flexcache.request_info import NO_INFO, PromptDetail, RequestInfo
from flexcache.tasks.instructions import TaskResult

Mask = npt.NDArray[np.bool_]
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
Namespace = str | Sequence[str] | None

_MAX_ROOTS = 65_536
MAX_PRIORITY = 1000
_OTHERS_START_AFTER_S = 5.0


@dataclass(frozen=True, eq=False)
class KVResponse:
    """How a task ended.

    Attributes:
        status: SUCCESS if anything arrived, for a get possibly less than was matched.
        mask: Over the prompt's tokens: True where KV really arrived (get) or was stored (put).
        error: What went wrong, also where part of it succeeded.
    """

    status: KVStatus
    mask: Mask
    error: str | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVResponse):
            return NotImplemented
        same = (self.status, self.error) == (other.status, other.error)
        return same and np.array_equal(self.mask, other.mask)


class _Prompt(NamedTuple):
    """Blocks ``[start, stop)`` of a prompt of ``num_tokens``."""

    keys: PromptKeys
    start: int
    stop: int
    num_tokens: int


def local_endpoint(engine_id: str) -> str:
    """Where the ranks of an engine that keeps its own cache find it."""
    return private_endpoint(f"engine-{engine_id}" if engine_id else None)


class KVManager:
    """The KV cache of one engine: held in this process, or by a server that engines share.

    It is shared if an ``endpoint`` is given (here or in the config) or ``dp_size > 1``. Then the
    server may be started by hand; if nobody serves the endpoint, the engine of rank 0 starts one of
    the config's sizes.

    Args:
        model_config: What the model's KV looks like.
        cache_config: How much is kept where. Needs no size where an ``endpoint`` is given.
        endpoint: Address of the shared server, or the `endpoint` of another engine there; by
            default, all ranks of one ``engine_id`` and ``dp_size > 1`` find the same private one.
        dp_rank: The engine's data-parallel rank.
        engine_id: Tells engines at one server apart, by default a new one. `endpoint` hands it to
            the engine's `KVTPClient`s; those that connect otherwise must be given the same.

    Thread-safe. A match reserves what it promises: launch it or cancel it. Without its server a
    shared cache answers every match with a miss, at once.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        *,
        endpoint: str | None = None,
        dp_rank: int = 0,
        engine_id: str = "",
    ) -> None:
        logging.getLogger("flexcache").setLevel(cache_config.log_level)
        self.model_config = model_config
        self.cache_config = cache_config
        self.dp_rank = dp_rank
        self._tokens_per_block = cache_config.tokens_per_block
        self._engine_id = engine_id
        if endpoint is None:
            cache_config.check_has_tier()
        self._backend = self._make_backend(endpoint or cache_config.endpoint)
        self._roots: dict[tuple[Namespace, str], RootId] = {}

    def _make_backend(self, address: str | None) -> Backend:
        model, config, engine_id = self.model_config, self.cache_config, self._engine_id
        if address is None and model.dp_size == 1:
            name = engine_name(engine_id, self.dp_rank)
            return LocalCache(local_endpoint(engine_id), model, config, name)
        if address is None:
            group = engine_id or model.fingerprint(config.tokens_per_block)
            endpoint = private_endpoint(f"group-{group}")
        else:
            endpoint = server_of(address)
        check_endpoint(endpoint, has_keys=config.curve_keys is not None)
        self._engine_id = engine_id or new_engine_id()
        name = engine_name(self._engine_id, self.dp_rank)
        patience_s = 0.0 if self.dp_rank == 0 else _OTHERS_START_AFTER_S
        return KVDPClient(endpoint, model, config, name, patience_s)

    @property
    def endpoint(self) -> str:
        """What a `KVTPClient` connects to: the server, and which engine the client is of."""
        return with_engine(self._backend.endpoint, self._engine_id)

    @property
    def wants_request_info(self) -> bool:
        """Whether KV events or traces are on, which a ``request_info`` is for."""
        return self._backend.wanted is not PromptDetail.NOTHING

    def start(self) -> None:
        """Begin to serve; returns at once. `wait_ready` says when every rank is there."""
        self._backend.start()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait for all ranks and workers.

        Raises:
            TimeoutError: Names who has not registered yet.
            RegistrationError: A rank was refused; says why.
        """
        self._backend.wait_ready(timeout)

    def is_ready(self) -> bool:
        return self._backend.is_ready()

    # -- match and launch ------------------------------------------------------------------------

    def get_match(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
        request_info: RequestInfo | None = None,
    ) -> tuple[int, Mask]:
        """Find the longest cached prefix and reserve it for a load.

        Args:
            token_ids: The prompt, 1-D.
            token_mask: True where the caller wants KV; a False prefix is what it has already. Only
                whole blocks count.
            namespace: Isolates keys: tenant, LoRA, cache salt.
            block_keys: The engine's own chained block hashes; then no token is looked at.
            request_info: What KV events and traces shall say of the request.

        Returns:
            A task id, and a mask over the tokens: True where FlexCache will supply KV.
        """
        prompt = self._prompt(token_ids, token_mask, namespace, block_keys, request_info)
        task, mask = self._match(TaskKind.GET, prompt)
        return task.task_id, mask

    def get_match_by_tier(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
        request_info: RequestInfo | None = None,
        look_up: bool = True,
    ) -> tuple[int, Mask, dict[TierName, int]] | None:
        """`get_match` that does not wait, and how many of the tokens each tier will supply.

        None if the remote store was asked and has yet to answer: ask again a little later, and
        after ``remote_lookup_timeout_s`` without ``look_up``: then what is known is taken.
        """
        prompt = self._prompt(token_ids, token_mask, namespace, block_keys, request_info)
        task = self._backend.match(TaskKind.GET, *prompt, look_up=look_up, may_wait=False)
        if task is None:
            return None
        mask = self._token_mask(prompt.num_tokens, task.start, task.num_blocks)
        sources = {tier: n * self._tokens_per_block for tier, n in task.sources.items()}
        return task.task_id, mask, sources

    def put_match(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
        priority: int = 0,
        ttl_s: float = 0.0,
        request_info: RequestInfo | None = None,
    ) -> tuple[int, Mask]:
        """Find what of a prompt is not cached yet and reserve room for it.

        The mask returned is True where KV will be copied; what is cached, on its way, or does not
        fit is False. Arguments as for `get_match`; ``token_mask`` is True where KV is offered.

        Args:
            priority: Of the prompt when room is needed: each step counts as having been used
                ``priority_step_s`` later. Negative: the first to go.
            ttl_s: For so long it goes after all that is used meanwhile. A hint, not a pin.
        """
        retain_s = self._retain_s(priority, ttl_s)
        prompt = self._prompt(token_ids, token_mask, namespace, block_keys, request_info)
        task, mask = self._match(TaskKind.PUT, prompt, retain_s)
        return task.task_id, mask

    def get_async(
        self,
        token_ids: Tokens,
        slot_mapping: Slots,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
        request_info: RequestInfo | None = None,
    ) -> tuple[int, Mask]:
        """`get_match` and `launch` in one.

        ``slot_mapping`` has a slot for each token wanted (True in ``token_mask``, or all), or just
        for each one that matches.
        """
        prompt = self._prompt(token_ids, token_mask, namespace, block_keys, request_info)
        return self._match_and_launch(TaskKind.GET, prompt, slot_mapping, token_mask)

    def put_async(
        self,
        token_ids: Tokens,
        slot_mapping: Slots,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
        priority: int = 0,
        ttl_s: float = 0.0,
        request_info: RequestInfo | None = None,
    ) -> tuple[int, Mask]:
        """`put_match` and `launch` in one; ``slot_mapping`` as for `get_async`."""
        retain_s = self._retain_s(priority, ttl_s)
        prompt = self._prompt(token_ids, token_mask, namespace, block_keys, request_info)
        return self._match_and_launch(TaskKind.PUT, prompt, slot_mapping, token_mask, retain_s)

    def prefetch_async(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
        request_info: RequestInfo | None = None,
    ) -> int:
        """Bring what lower tiers have of a prompt to DRAM. Needs no GPU slots."""
        prompt = self._prompt(token_ids, token_mask, namespace, block_keys, request_info)
        task, _ = self._match(TaskKind.PREFETCH, prompt)
        self._backend.launch([task.task_id], [np.empty(0, np.int64)], gated=False)
        return task.task_id

    def launch(
        self, task_ids: Sequence[int], slot_mappings: Sequence[Slots], *, gated: bool = False
    ) -> None:
        """Start matched tasks.

        Args:
            slot_mappings: Per task one GPU slot per True token of its mask, in order.
            gated: The GPU is touched only once every rank's worker opened the task's gate
                (`KVTPClient.open_gates`).

        Raises:
            ValueError: A length is wrong, slots are not whole blocks, or a task was launched
                before. Nothing is started then.
            KeyError: An id was never given out.
        """
        blocks = [self._gpu_blocks(slots) for slots in slot_mappings]
        self._backend.launch(task_ids, blocks, gated)

    def report_prefill(self, tokens_per_s: float) -> None:
        """Say how fast the engine computes prompts.

        With ``skip_slow_loads``, what would take longer to load than to compute is not matched.
        """
        if not tokens_per_s > 0:
            raise ValueError(f"tokens_per_s = {tokens_per_s}: must be greater than zero")
        self._backend.report_prefill(tokens_per_s / self._tokens_per_block)

    def cancel(self, task_ids: Iterable[int]) -> None:
        """Stop what has not started. Idempotent; a finished task stays as it is."""
        self._backend.cancel(task_ids)

    # -- responses -------------------------------------------------------------------------------

    def wait(
        self, task_ids: Iterable[int], timeout: float | None = None, completely: bool = False
    ) -> dict[int, KVResponse]:
        """Wait until the GPU side of the tasks is done, so that their slots can be reused.

        Args:
            timeout: Seconds; a task that is not done by then is answered TIMEOUT and goes on.
            completely: Wait for everything, write-through to lower tiers included.
        """
        wanted = list(task_ids)
        results = self._backend.results(wanted, timeout, completely)
        nothing = np.zeros(0, dtype=np.bool_)
        late = KVResponse(KVStatus.TIMEOUT, nothing, f"not done within {timeout} s")
        return {
            task_id: self._response(results[task_id]) if task_id in results else late
            for task_id in wanted
        }

    def try_wait(self, task_ids: Iterable[int]) -> dict[int, KVResponse]:
        """The responses of those tasks whose GPU side is done."""
        results = self._backend.results(list(task_ids), 0.0, completely=False)
        return {task_id: self._response(result) for task_id, result in results.items()}

    # -- the cache as a whole --------------------------------------------------------------------

    def clear(self, tier: str) -> int:
        """Drop the blocks of one tier (`CPU`, `SSD`, `REMOTE`) that nobody holds; how many.

        What a remote store holds stays there. Until the server restarts it is not found any more by
        those who share this cache, and others do not find what they store from then on.
        """
        return self._backend.clear(tier)

    def reset(self) -> None:
        """Drop the blocks of every tier that nobody holds.

        What is stored from then on is not recorded on SSD for the next start: the model's weights
        may have changed under their name.
        """
        self._backend.clear(None)

    def take_changes(self) -> list[Change]:
        """What the tiers have stored and lost since the last call, in order: with ``kv_events``.

        Nothing where the cache is shared: its server publishes it (``kv_events_endpoint``).
        """
        return self._backend.take_changes()

    def stats(self) -> dict[str, Any]:
        """Counters and occupancy, as plain dicts of numbers and strings.

        ``engine`` has what this engine has had, the rest is of all that share the cache.

        Raises:
            ServerLostError: The cache is shared and its server is away.
        """
        return self._backend.stats()

    def check(self) -> None:
        """Raise `InternalError` if an invariant of the control plane does not hold.

        Where the cache is shared, only the tiers' counts of blocks are checked: to walk the blocks
        would hold up the other engines.
        """
        self._backend.check()

    def shutdown(self) -> None:
        """Cancel, let moving bytes land, stop the workers, give the memory back. Idempotent."""
        self._backend.shutdown()

    def __enter__(self) -> KVManager:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.shutdown()

    # -- from tokens to blocks and back ----------------------------------------------------------

    def _match(
        self, kind: TaskKind, prompt: _Prompt, retain_s: float = 0.0
    ) -> tuple[MatchedTask, Mask]:
        task = self._backend.match(kind, *prompt, retain_s)
        assert task is not None  # it may wait
        return task, self._token_mask(prompt.num_tokens, task.start, task.num_blocks)

    def _prompt(
        self,
        token_ids: Tokens,
        token_mask: Mask | None,
        namespace: Namespace,
        block_keys: Sequence[bytes] | None,
        info: RequestInfo | None,
    ) -> _Prompt:
        num_tokens = len(token_ids)
        start, stop = self._block_range(num_tokens, token_mask)
        content = None
        wanted = self._backend.wanted
        if wanted:
            tokens = _own_copy(token_ids) if wanted is PromptDetail.TOKENS else ()
            content = PromptContent(tokens, info or NO_INFO)
        keys = self._keys(token_ids, namespace, block_keys, content)
        stop = min(stop, keys.num_blocks)
        return _Prompt(keys, min(start, stop), stop, num_tokens)

    def _retain_s(self, priority: int, ttl_s: float) -> float:
        if not math.isfinite(ttl_s) or ttl_s < 0:
            raise ValueError(f"ttl_s = {ttl_s}: must be a number of seconds, at least 0")
        if abs(priority) > MAX_PRIORITY:
            raise ValueError(
                f"priority = {priority}: must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        return priority * self.cache_config.priority_step_s + ttl_s

    def _match_and_launch(
        self,
        kind: TaskKind,
        prompt: _Prompt,
        slot_mapping: Slots,
        token_mask: Mask | None,
        retain_s: float = 0.0,
    ) -> tuple[int, Mask]:
        slots = _as_slots(slot_mapping)
        wanted = prompt.num_tokens if token_mask is None else int(np.count_nonzero(token_mask))
        task, mask = self._match(kind, prompt, retain_s)
        task_id = task.task_id
        try:
            if len(slots) == wanted:
                slots = slots[mask] if token_mask is None else slots[mask[token_mask]]
            self.launch([task_id], [slots])
        except ValueError:
            self.cancel([task_id])
            raise
        return task_id, mask

    def _keys(
        self,
        token_ids: Tokens,
        namespace: Namespace,
        block_keys: Sequence[bytes] | None,
        content: PromptContent | None,
    ) -> PromptKeys:
        if block_keys is not None:
            if len(block_keys) and not 0 < len(block_keys[0]) <= MAX_KEY_BYTES:
                raise ValueError(f"block_keys must have at most {MAX_KEY_BYTES} bytes each")
            root = self._root(namespace, ENGINE_KEYS)
            num_blocks = len(token_ids) // self._tokens_per_block
            return EngineBlockKeys(root, block_keys, num_blocks, content)
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
            raise ValueError(
                f"token_ids must be a 1-D array of integers, not {tokens.ndim}-D of {tokens.dtype}"
            )
        return TokenBlockKeys(
            self._root(namespace, TOKEN_KEYS),
            tokens.astype(np.int64, copy=False),
            self._tokens_per_block,
            content,
        )

    def _root(self, namespace: Namespace, kind: str) -> RootId:
        if namespace is not None and not isinstance(namespace, str):
            if not isinstance(namespace, Sequence):
                raise ValueError(f"namespace must be a string or strings, not {namespace!r}")
            namespace = tuple(namespace)
        root = self._roots.get((namespace, kind))
        if root is None:
            parts = () if namespace is None else namespace
            parts = (parts,) if isinstance(parts, str) else parts
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"namespace must be a string or strings, not {namespace!r}")
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            root = self._roots[namespace, kind] = make_root(self._backend.fingerprint, parts, kind)
        return root

    def _block_range(self, num_tokens: int, token_mask: Mask | None) -> tuple[int, int]:
        """The whole blocks within the first run of True."""
        size = self._tokens_per_block
        if token_mask is None:
            return 0, num_tokens // size
        mask = np.asarray(token_mask)
        if mask.shape != (num_tokens,) or mask.dtype != np.bool_:
            raise ValueError(
                f"token_mask must be {num_tokens} booleans, not {mask.shape} of {mask.dtype}"
            )
        if not num_tokens or not mask.any():
            return 0, 0
        first = int(mask.argmax())
        run = mask[first:]
        last = num_tokens if run.all() else first + int(run.argmin())
        start = -(-first // size)
        return start, max(start, last // size)

    def _token_mask(self, num_tokens: int, start: int, num_blocks: int) -> Mask:
        first = start * self._tokens_per_block
        last = first + num_blocks * self._tokens_per_block
        mask = np.empty(num_tokens, dtype=np.bool_)  # each byte is written once
        mask[:first] = False
        mask[first:last] = True
        mask[last:] = False
        return mask

    def _gpu_blocks(self, slot_mapping: Slots) -> npt.NDArray[np.int64]:
        slots = _as_slots(slot_mapping)
        size = self._tokens_per_block
        if len(slots) % size:
            raise ValueError(f"{len(slots)} slots are not whole blocks of {size} tokens")
        grid = slots.reshape(-1, size)
        blocks = grid[:, 0] // size
        if not np.array_equal(grid, (blocks * size)[:, None] + np.arange(size)):
            raise ValueError(f"slots must be whole GPU blocks of {size} consecutive slots each")
        if len(blocks) and int(blocks.min()) < 0:
            raise ValueError("slots must not be negative")
        return blocks

    def _response(self, result: TaskResult) -> KVResponse:
        mask = self._token_mask(result.num_tokens, result.start, result.num_ok)
        return KVResponse(result.status, mask, result.error)


def _own_copy(token_ids: Tokens) -> Sequence[int] | npt.NDArray[np.int64]:
    """What is told of a prompt is told later: the caller may have changed its own by then. A view
    that an engine gives out only grows."""
    if isinstance(token_ids, np.ndarray):
        return np.array(token_ids, dtype=np.int64)
    return list(token_ids) if isinstance(token_ids, list) else token_ids


def _as_slots(slot_mapping: Slots) -> npt.NDArray[np.int64]:
    slots = np.asarray(slot_mapping)
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and len(slots)):
        raise ValueError(f"slots must be a 1-D array of integers, not {slots.ndim}-D {slots.dtype}")
    return slots.astype(np.int64, copy=False)
