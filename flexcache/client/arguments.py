"""Arguments of callers: checks of what they pass, and the GPU blocks of tasks.

Each check raises a `ValueError` that names the argument, its value and what is allowed. In a model
with several groups each GPU block is named with its group (`transfer.messages`), since its id
alone does not tell whose bytes it holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from operator import index
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.cache.prompt import Mask, Prompt, Span
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.model import UnitShape
from flexcache.config.values import split_address
from flexcache.errors import ConfigError
from flexcache.ids import TaskKind, TierName
from flexcache.protocol.messages import MAX_NAME_LENGTH, engine_name
from flexcache.tasks.instructions import Offer
from flexcache.transfer.messages import name_blocks

_FOREVER_S = 1e9  # locks and sockets of the system overflow a little above
_MAX_RANKS = 65_536
_MAX_SHOWN = 100
_TIERS = tuple(tier.value for tier in TierName if tier is not TierName.GPU)


def refusal(name: str, value: object, allowed: str) -> ValueError:
    """Make the error that refuses an argument."""
    try:
        shown = repr(value)
    except Exception:  # an integer of too many digits, or a caller's own class
        shown = f"a value of type {type(value).__name__}"
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    return ValueError(f"{name} = {shown}: {allowed}")


# -- of both -------------------------------------------------------------------------------------


def wait_s(timeout: float | None) -> float | None:
    """Return a ``timeout`` in seconds, 0 if its deadline has passed; None for no limit."""
    if timeout is None:
        return None
    is_number = isinstance(timeout, (float, int, Real)) and not isinstance(timeout, bool)
    if not is_number or timeout != timeout:
        raise refusal("timeout", timeout, "must be None or a number of seconds")
    return max(timeout, 0.0) if timeout < _FOREVER_S else None


def positive(name: str, value: float) -> float:
    """Return a finite number above 0."""
    is_number = isinstance(value, (float, int, Real)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise refusal(name, value, "must be a finite number greater than 0")
    return float(value)


def check_flag(name: str, value: object) -> None:
    """Check that a switch is on or off."""
    if not isinstance(value, bool):
        raise refusal(name, value, "must be True or False")


def count_from(lowest: int, below: int, name: str, value: int, why: str = "") -> int:
    """Return an integer that is within bounds."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not lowest <= value < below:
        raise refusal(name, value, f"must be an integer, at least {lowest} and below {below}{why}")
    return int(value)


def _check_engine_id(engine_id: object, dp_rank: int) -> None:
    """Check that an engine of this id fits the messages in which it is named."""
    longest = MAX_NAME_LENGTH - len(engine_name("-", dp_rank)) + 1
    if not isinstance(engine_id, str) or len(engine_id) > longest:
        raise refusal("engine_id", engine_id, f"must be a string of at most {longest} characters")
    try:
        engine_id.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise refusal("engine_id", engine_id, error.reason) from None


def _check_endpoint_type(endpoint: object) -> None:
    if not isinstance(endpoint, str):
        raise refusal("endpoint", endpoint, "must be ipc://PATH or tcp://127.0.0.1:PORT")


# -- of a KVManager ------------------------------------------------------------------------------


def check_manager(
    model: object, config: object, endpoint: object, dp_rank: int, engine_id: object
) -> None:
    """Check what makes a `KVManager`.

    A group that shares an endpoint may have more ranks than its engines know of: vLLM tells each
    rank of a dense model that it is the only one.
    """
    for name, value, kind in (
        ("model_config", model, ModelConfig), ("cache_config", config, CacheConfig),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise ConfigError(f"{name}: must be a {kind.__name__}, not {type(value).__name__}")
    assert isinstance(model, ModelConfig) and isinstance(config, CacheConfig)
    if endpoint is not None:
        _check_endpoint_type(endpoint)
    is_shared = bool(endpoint or config.endpoint)
    size, why = model.dp_size, ", the model's dp_size"
    if is_shared and size == 1:
        size, why = _MAX_RANKS, ""
    _check_engine_id(engine_id, count_from(0, size, "dp_rank", dp_rank, why))


def ids_of(task_ids: Iterable[int]) -> list[int]:
    """Return task ids as plain integers, which messages can hold."""
    try:
        return list(map(index, task_ids))
    except TypeError:
        pass
    raise refusal("task_ids", task_ids, "must be a list of the integers that name tasks")


def check_tier(name: object) -> None:
    """Check that this is the name of a tier, if not one that the cache has."""
    if not isinstance(name, str) or name not in _TIERS:
        raise refusal("tier", name, f"must be one of {', '.join(_TIERS)}")


def check_look_up(look_up: object, awaits_loads: object) -> None:
    """Check how `KVManager.get_match_by_tier` is to look a prompt up."""
    if not isinstance(look_up, bool) and look_up != "only":
        raise refusal("look_up", look_up, "must be True, False or 'only'")
    check_flag("awaits_loads", awaits_loads)


# -- of a KVTPClient -----------------------------------------------------------------------------


def server_and_engine(endpoint: str, engine_id: str, dp_rank: int) -> tuple[str, str]:
    """Return the server's endpoint and the name of the engine there."""
    _check_endpoint_type(endpoint)
    dp_rank = count_from(0, _MAX_RANKS, "dp_rank", dp_rank)
    _check_engine_id(engine_id, dp_rank)
    endpoint, engine_id = split_address(endpoint, engine_id)
    _check_engine_id(engine_id, dp_rank)  # the one in the address
    return endpoint, engine_name(engine_id, dp_rank)


def place_of(rank: int | None, tp_rank: int) -> int:
    """Return a rank's place in its engine."""
    place = count_from(0, _MAX_RANKS, "tp_rank", tp_rank)
    return place if rank is None else count_from(0, _MAX_RANKS, "rank", rank)


def check_kv_caches(
    kv_caches: object, dims: tuple[object, object], description: object, num_blocks: Any,
    kv_replicas: int | None,
) -> None:  # fmt: skip
    """Check what describes KV tensors; `LentTensors` reads the tensors themselves."""
    if not isinstance(kv_caches, Mapping) or not all(isinstance(name, str) for name in kv_caches):
        shown = list(kv_caches) if isinstance(kv_caches, Mapping) else kv_caches
        raise refusal("kv_caches", shown, "must be a dict from names of layers to tensors")
    _check_dims(dims)
    if not isinstance(description, str):
        raise refusal("layout_description", description, "must be a string")
    counts = num_blocks if isinstance(num_blocks, (list, tuple)) else [num_blocks]
    for count in () if num_blocks is None else counts:
        count_from(1, 2**63, "num_blocks", count)
    if kv_replicas is not None:
        count_from(1, _MAX_RANKS, "kv_replicas", kv_replicas)


def _check_dims(dims: tuple[object, object]) -> None:
    for name, dim in zip(("block_dim", "head_dim"), dims, strict=True):
        is_number = isinstance(dim, Integral) and not isinstance(dim, bool)
        if not is_number and (dim is not None or name == "block_dim"):
            raise refusal(name, dim, "must be the number of a dimension")
    if dims[0] == dims[1]:
        raise refusal("head_dim", dims[1], "must differ from block_dim")


Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
BlockIds = npt.NDArray[np.int64]
NO_BLOCKS: BlockIds = np.empty(0, np.int64)


def as_slots(slot_mapping: Slots, name: str) -> npt.NDArray[np.int64]:
    """Raises `ValueError`, under the argument's ``name``, for anything but a list of integers."""
    try:
        slots = np.asarray(slot_mapping)
    except ValueError as error:  # lists of unequal length
        raise ValueError(f"{name}: {error}") from None
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and len(slots)):
        raise ValueError(
            f"{name} must be a 1-D array of integers, not {slots.ndim}-D of {slots.dtype}"
        )
    return slots.astype(np.int64, copy=False)


def matched_slots(
    slots: npt.NDArray[np.int64], mask: Mask, token_mask: Span | None
) -> npt.NDArray[np.int64]:
    """The slots of the tokens in ``mask``.

    ``slots`` has one for each token wanted (in ``token_mask``, or all), or just these already.
    """
    if token_mask is None:
        token_mask = range(len(mask))
    if isinstance(token_mask, range):
        wanted = mask[token_mask.start : max(0, token_mask.stop)]
        return slots[wanted] if len(slots) == len(wanted) else slots
    num_wanted = int(np.count_nonzero(token_mask))
    if len(slots) != num_wanted:
        return slots
    return slots[mask[token_mask]]


def gpu_blocks(slots: npt.NDArray[np.int64], tokens_per_block: int, name: str) -> BlockIds:
    """The GPU blocks that slots, given as the argument ``name``, make up.

    Raises:
        ValueError: They are not whole blocks of consecutive slots.
    """
    size = tokens_per_block
    if len(slots) % size:
        raise ValueError(f"{name}: {len(slots)} slots are not whole blocks of {size} tokens")
    grid = slots.reshape(-1, size)
    blocks = grid[:, 0] // size
    if not np.array_equal(grid, (blocks * size)[:, None] + np.arange(size)):
        raise ValueError(f"{name} must be whole GPU blocks of {size} consecutive slots each")
    if len(blocks) and int(blocks.min()) < 0:
        raise ValueError(f"{name} must not be negative")
    return blocks


GroupBlocks = Sequence[Sequence[int] | npt.NDArray[np.integer[Any]]]
"""For each group of the model, in order, ids of GPU blocks; -1 for one that is not wanted."""


class GroupTable:
    """What the groups of a model mean for the calls of its engine.

    Args:
        model: May have no groups: then GPU blocks come as slots.
        tokens_per_position: The cache's block size.

    Raises:
        ConfigError: A position is not whole blocks of every group.
    """

    def __init__(self, model: ModelConfig, tokens_per_position: int) -> None:
        self._has_states, self._has_tails = model.has_states, model.has_tails
        self._groups = model.groups
        self._tokens = tokens_per_position
        self._shape = UnitShape(model.groups, tokens_per_position)

    def loadable(self, prompt: Prompt) -> Prompt:
        """Return the part of a prompt that a hit may cover."""
        return prompt.before_last_token(self._tokens) if self._has_states else prompt

    def with_tail(self, prompt: Prompt, tail_at: int | None) -> Prompt:
        """Have a put also store the tail behind ``tail_at`` tokens. Raises `ValueError`."""
        if tail_at is None:
            return prompt
        is_integer = isinstance(tail_at, Integral)
        position, rest = divmod(int(tail_at), self._tokens) if is_integer else (0, 0)
        if rest or not 0 < position <= prompt.stop or not self._has_tails:
            allowed = "must be the end of a block offered, in a model with tails"
            raise refusal("tail_at", tail_at, allowed)
        return msgspec.structs.replace(prompt, tail_at=position)

    def kept(self, prompt: Prompt, store: bool, max_store_tokens: int | None) -> Prompt:
        """Return the part of a put that its sender wants to be kept: nothing unless ``store``, at
        most the first ``max_store_tokens``. Raises `ValueError`."""
        check_flag("store", store)
        if store and max_store_tokens is None:
            return prompt
        limit = 0
        if max_store_tokens is not None:
            limit = count_from(0, 2**63, "max_store_tokens", max_store_tokens) // self._tokens
        kept = prompt.up_to(limit if store else 0)
        if kept.tail_at <= kept.stop:
            return kept
        return msgspec.structs.replace(kept, tail_at=0)

    def require_slots(self, instead: str) -> None:
        """Raise `ValueError` if the model has groups."""
        if self._groups:
            raise ValueError(f"the model has groups: use {instead}, and launch with group_blocks")

    def gpu_blocks(
        self,
        slot_mappings: Sequence[Slots],
        group_blocks: Sequence[GroupBlocks] | None,
        offers: Iterable[Offer],
    ) -> list[BlockIds]:
        """Return the GPU blocks of each task, from slots or from ids; for a model with groups, from
        ids only.

        Args:
            offers: What each task moves.

        Raises:
            ValueError: They are of the wrong kind or not as many as the task needs.
        """
        try:
            return self._read(slot_mappings, group_blocks, offers)
        except TypeError:  # something has neither length nor items
            pass
        if group_blocks is None:
            raise refusal("slot_mappings", slot_mappings, "must have a list of slots for each task")
        allowed = "must have, for each task, a list of blocks for each group"
        raise refusal("group_blocks", group_blocks, allowed)

    def _read(
        self,
        slot_mappings: Sequence[Slots],
        group_blocks: Sequence[GroupBlocks] | None,
        offers: Iterable[Offer],
    ) -> list[BlockIds]:
        if group_blocks is not None and len(slot_mappings):
            raise ValueError("give slot_mappings or group_blocks, not both")
        if self._groups and group_blocks is None:
            raise ValueError("a model with groups needs group_blocks, not slot_mappings")
        if group_blocks is None:
            return [
                gpu_blocks(as_slots(slots, "slot_mappings"), self._tokens, "slot_mappings")
                for slots in slot_mappings
            ]
        if not self._groups:
            return [_only_group(given) for given in group_blocks]
        tasks = list(offers)
        if len(tasks) != len(group_blocks):
            raise ValueError(
                f"group_blocks has lists for {len(group_blocks)} of {len(tasks)} tasks"
            )
        return [
            self._arranged(given, offer) for given, offer in zip(group_blocks, tasks, strict=True)
        ]

    def _arranged(self, group_blocks: GroupBlocks, offer: Offer) -> BlockIds:
        """Return the GPU blocks of a task.

        First those of the dense groups, position by position; then, if the task has a tail, those
        of the others, group by group, and -1 up to a whole unit.

        Raises:
            ValueError: A group has another number of blocks than the task needs of it, or -1 among
                those of a put, which would store what is no KV.
        """
        num_blocks, tail_at = offer.num_blocks, offer.tail_at
        lowest = 0 if offer.kind is TaskKind.PUT else -1
        if len(group_blocks) != len(self._groups):
            counts = f"{len(group_blocks)} of {len(self._groups)}"
            raise ValueError(f"group_blocks has blocks for {counts} groups")
        dense: list[BlockIds] = []
        tail = [NO_BLOCKS]
        for number, (group, given) in enumerate(zip(self._groups, group_blocks, strict=True)):
            given_blocks = as_slots(given, "group_blocks")
            per_position = self._tokens // group.tokens_per_block
            if group.is_dense:
                num_needed = num_blocks * per_position
            else:
                num_needed = group.num_needed(tail_at * self._tokens)
                if not tail_at:  # the tail is cached already
                    continue
            if len(given_blocks) != num_needed:
                raise ValueError(
                    f"group_blocks: the task needs {num_needed} blocks of group {number}, "
                    f"{len(given_blocks)} were given"
                )
            if len(given_blocks) and int(given_blocks.min()) < lowest:
                raise ValueError(f"group_blocks: a block of group {number} is below {lowest}")
            blocks = name_blocks(number, given_blocks)
            if group.is_dense:
                dense.append(blocks.reshape(num_blocks, per_position))
            else:
                tail.append(blocks)
        arranged = np.concatenate(dense, axis=1).ravel() if dense else NO_BLOCKS
        if not tail_at:
            return arranged
        units = np.full(self._shape.tail_units(tail_at) * self._shape.blocks_per_unit, -1, np.int64)
        flat = np.concatenate(tail)
        units[: len(flat)] = flat
        return np.concatenate((arranged, units))


def _only_group(group_blocks: GroupBlocks) -> BlockIds:
    """Return the GPU blocks of a task of a model without groups. Raises `ValueError`."""
    if len(group_blocks) != 1:
        raise ValueError(
            f"group_blocks has blocks for {len(group_blocks)} groups of a model without groups"
        )
    blocks: BlockIds = np.array(as_slots(group_blocks[0], "group_blocks"))  # not the caller's own
    if len(blocks) and int(blocks.min()) < 0:
        raise ValueError("group_blocks must not be negative")
    return blocks
