"""KVManager: what an engine's scheduler calls. Token-level on the outside, blocks inside."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import (
    ENGINE_KEYS,
    TOKEN_KEYS,
    BlockKeys,
    EngineBlockKeys,
    TokenBlockKeys,
    make_root,
)
from flexcache.cache.planner import Plan
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ClosedError, ConfigError
from flexcache.ids import KVStatus, RootId, TaskId, TaskKind, TierName
from flexcache.server.server import KVServer
from flexcache.task import TaskResult

Mask = npt.NDArray[np.bool_]
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
Namespace = str | Sequence[str] | None

_MAX_ROOTS = 65_536


@dataclass(frozen=True)
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


class KVManager:
    """The KV cache of one engine, held in this process.

    Args:
        model_config: What the model's KV looks like.
        cache_config: How much is kept where.
        endpoint: Address that the ranks' `KVTPClient`s connect to; a private one by default.
        dp_rank: The engine's data-parallel rank.

    Thread-safe. A match reserves what it promises: launch it or cancel it.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        *,
        endpoint: str | None = None,
        dp_rank: int = 0,
    ) -> None:
        if model_config.dp_size != 1:
            raise ConfigError(
                f"dp_size = {model_config.dp_size}: this version caches for one data-parallel "
                "rank per manager; give each rank its own with dp_size = 1"
            )
        logging.getLogger("flexcache").setLevel(cache_config.log_level)
        self.model_config = model_config
        self.cache_config = cache_config
        self.dp_rank = dp_rank
        self._server = KVServer(model_config, cache_config, endpoint)
        self._tokens_per_block = cache_config.tokens_per_block
        self._roots: dict[tuple[Namespace, str], RootId] = {}

    @property
    def endpoint(self) -> str:
        """What a `KVTPClient` connects to."""
        return self._server.endpoint

    def start(self) -> None:
        """Begin to serve; returns at once. `wait_ready` says when every rank is there."""
        self._server.start()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait for all ranks and workers.

        Raises:
            TimeoutError: Names who has not registered yet.
            RegistrationError: A rank was refused; says why.
        """
        self._server.wait_ready(timeout)

    def is_ready(self) -> bool:
        return not self._server.stopping and not self._server.missing()

    # -- match and launch ------------------------------------------------------------------------

    def get_match(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
    ) -> tuple[int, Mask]:
        """Find the longest cached prefix and reserve it for a load.

        Args:
            token_ids: The prompt, 1-D.
            token_mask: True where the caller wants KV; a False prefix is what it has already. Only
                whole blocks count.
            namespace: Isolates keys: tenant, LoRA, cache salt.
            block_keys: The engine's own chained block hashes; then no token is looked at.

        Returns:
            A task id, and a mask over the tokens: True where FlexCache will supply KV.
        """
        return self._match(TaskKind.GET, token_ids, token_mask, namespace, block_keys)[:2]

    def get_match_by_tier(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
    ) -> tuple[int, Mask, dict[TierName, int]]:
        """`get_match`, and how many of the tokens each tier will supply."""
        task_id, mask, plan = self._match(
            TaskKind.GET, token_ids, token_mask, namespace, block_keys
        )
        sources = {tier: n * self._tokens_per_block for tier, n in plan.sources.items()}
        return task_id, mask, sources

    def put_match(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
    ) -> tuple[int, Mask]:
        """Find what of a prompt is not cached yet and reserve room for it.

        The mask returned is True where KV will be copied; what is cached, on its way, or does not
        fit is False. Arguments as for `get_match`; ``token_mask`` is True where KV is offered.
        """
        return self._match(TaskKind.PUT, token_ids, token_mask, namespace, block_keys)[:2]

    def get_async(
        self,
        token_ids: Tokens,
        slot_mapping: Slots,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
    ) -> tuple[int, Mask]:
        """`get_match` and `launch` in one.

        ``slot_mapping`` has a slot for each token wanted (True in ``token_mask``, or all), or just
        for each one that matches.
        """
        return self._match_and_launch(
            TaskKind.GET, token_ids, slot_mapping, token_mask, namespace, block_keys
        )

    def put_async(
        self,
        token_ids: Tokens,
        slot_mapping: Slots,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
    ) -> tuple[int, Mask]:
        """`put_match` and `launch` in one; ``slot_mapping`` as for `get_async`."""
        return self._match_and_launch(
            TaskKind.PUT, token_ids, slot_mapping, token_mask, namespace, block_keys
        )

    def prefetch_async(
        self,
        token_ids: Tokens,
        token_mask: Mask | None = None,
        *,
        namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None,
    ) -> int:
        """Bring what lower tiers have of a prompt to DRAM. Needs no GPU slots."""
        task_id, _, _ = self._match(TaskKind.PREFETCH, token_ids, token_mask, namespace, block_keys)
        with self._server.session() as engine:
            engine.launch([TaskId(task_id)], [np.empty(0, np.int64)], time.monotonic())
        return task_id

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
        with self._server.session() as engine:
            engine.launch([TaskId(t) for t in task_ids], blocks, time.monotonic(), gated)

    def cancel(self, task_ids: Iterable[int]) -> None:
        """Stop what has not started. Idempotent; a finished task stays as it is."""
        with self._server.session() as engine:
            engine.cancel([TaskId(t) for t in task_ids], time.monotonic())

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
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._server.session():
            while True:
                responses = self._responses(wanted, completely)
                if len(responses) == len(set(wanted)):
                    return responses
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._server.wait_for_change(left)
                if self._server.stopping:
                    raise ClosedError("the cache was shut down")
            nothing = np.zeros(0, dtype=np.bool_)
            late = KVResponse(KVStatus.TIMEOUT, nothing, f"not done within {timeout} s")
            return {task_id: responses.get(task_id, late) for task_id in wanted}

    def try_wait(self, task_ids: Iterable[int]) -> dict[int, KVResponse]:
        """The responses of those tasks whose GPU side is done."""
        with self._server.session():
            return self._responses(list(task_ids), completely=False)

    # -- the cache as a whole --------------------------------------------------------------------

    def clear(self, tier: str) -> int:
        """Drop the blocks of one tier (`CPU`, `SSD`) that nobody holds; how many."""
        with self._server.session() as engine:
            known = engine.cache.by_name
            if tier not in known:
                names = ", ".join(name.value for name in known)
                raise ValueError(f"no tier {tier!r} here; there is {names}")
            return known[TierName(tier)].clear()

    def reset(self) -> None:
        """Drop the blocks of every tier that nobody holds."""
        for name in list(self._server.engine.cache.by_name):
            self.clear(name)

    def stats(self) -> dict[str, Any]:
        """Counters and occupancy, as plain dicts of numbers and strings."""
        with self._server.session() as engine:
            return {
                "fingerprint": self._server.fingerprint,
                "block_bytes": self._server.block_bytes,
                "tiers": {tier.name.value: tier.stats() for tier in engine.cache.tiers},
                "tasks": engine.tasks_by_state(),
                "ended_tasks": dict(engine.ended_tasks),
                "ops": {kind.value: total.report() for kind, total in engine.op_totals.items()},
                "dropped_blocks": dict(engine.dropped_blocks),
                "workers": self._server.workers(),
                "disk_worker_restarts": self._server.num_disk_restarts,
            }

    def check(self) -> None:
        """Raise `InternalError` if an invariant of the control plane does not hold."""
        with self._server.session() as engine:
            engine.check()

    def shutdown(self) -> None:
        """Cancel, let moving bytes land, stop the workers, give the memory back. Idempotent."""
        self._server.shutdown()

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
        self,
        kind: TaskKind,
        token_ids: Tokens,
        token_mask: Mask | None,
        namespace: Namespace,
        block_keys: Sequence[bytes] | None,
    ) -> tuple[int, Mask, Plan]:
        num_tokens = len(token_ids)
        start, stop = self._block_range(num_tokens, token_mask)
        keys = self._keys(token_ids, namespace, block_keys)
        stop = min(stop, keys.num_blocks)
        with self._server.session() as engine:
            now = time.monotonic()
            task_id, plan = engine.match(kind, keys, min(start, stop), stop, num_tokens, now)
        return task_id, self._token_mask(num_tokens, plan.start, plan.num_blocks), plan

    def _match_and_launch(
        self,
        kind: TaskKind,
        token_ids: Tokens,
        slot_mapping: Slots,
        token_mask: Mask | None,
        namespace: Namespace,
        block_keys: Sequence[bytes] | None,
    ) -> tuple[int, Mask]:
        slots = _as_slots(slot_mapping)
        num_wanted = len(token_ids) if token_mask is None else int(np.count_nonzero(token_mask))
        task_id, mask, _ = self._match(kind, token_ids, token_mask, namespace, block_keys)
        try:
            if len(slots) == num_wanted:
                slots = slots[mask] if token_mask is None else slots[mask[token_mask]]
            self.launch([task_id], [slots])
        except ValueError:
            self.cancel([task_id])
            raise
        return task_id, mask

    def _keys(
        self, token_ids: Tokens, namespace: Namespace, block_keys: Sequence[bytes] | None
    ) -> BlockKeys:
        if block_keys is not None:
            root = self._root(namespace, ENGINE_KEYS)
            return EngineBlockKeys(root, block_keys, len(token_ids) // self._tokens_per_block)
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
            raise ValueError(
                f"token_ids must be a 1-D array of integers, not {tokens.ndim}-D of {tokens.dtype}"
            )
        return TokenBlockKeys(
            self._root(namespace, TOKEN_KEYS),
            tokens.astype(np.int64, copy=False),
            self._tokens_per_block,
        )

    def _root(self, namespace: Namespace, kind: str) -> RootId:
        if not isinstance(namespace, (str, Sequence, type(None))):
            raise ValueError(f"namespace must be a string or strings, not {namespace!r}")
        if namespace is not None and not isinstance(namespace, str):
            namespace = tuple(namespace)
        root = self._roots.get((namespace, kind))
        if root is None:
            parts = () if namespace is None else namespace
            parts = (parts,) if isinstance(parts, str) else parts
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"namespace must be a string or strings, not {namespace!r}")
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            root = self._roots[namespace, kind] = make_root(self._server.fingerprint, parts, kind)
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
        mask = np.zeros(num_tokens, dtype=np.bool_)
        mask[start * self._tokens_per_block : (start + num_blocks) * self._tokens_per_block] = True
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

    def _responses(self, task_ids: Sequence[int], completely: bool) -> dict[int, KVResponse]:
        engine = self._server.engine
        responses = {}
        for task_id in task_ids:
            result = engine.result(TaskId(task_id), completely)
            if result is not None:
                responses[task_id] = self._response(result)
                if result.is_final:
                    engine.collected(TaskId(task_id))
        return responses

    def _response(self, result: TaskResult) -> KVResponse:
        mask = self._token_mask(result.num_tokens, result.start, result.num_ok)
        return KVResponse(result.status, mask, result.error)


def _as_slots(slot_mapping: Slots) -> npt.NDArray[np.int64]:
    slots = np.asarray(slot_mapping)
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and len(slots)):
        raise ValueError(f"slots must be a 1-D array of integers, not {slots.ndim}-D {slots.dtype}")
    return slots.astype(np.int64, copy=False)
