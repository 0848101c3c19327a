"""GPU blocks of tasks, from the slots or the groups' block tables that an engine gives.

In a model with several groups each block is named with its group (`transfer.group_ids`), since its
id alone does not tell whose bytes it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcache.cache.prompt import Mask, Prompt, Span
from flexcache.client.arguments import refusal
from flexcache.config import ModelConfig
from flexcache.config.model import UnitShape
from flexcache.ids import TaskKind
from flexcache.tasks.instructions import Offer
from flexcache.transfer.messages import name_blocks

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
        """Return the part of a prompt that a hit may cover: not the last token if a state sums up
        the tokens."""
        if not self._has_states:
            return prompt
        stop = min(prompt.stop, max(0, prompt.num_tokens - 1) // self._tokens)
        return prompt._replace(start=min(prompt.start, stop), stop=stop)

    def with_tail(self, prompt: Prompt, tail_at: int | None) -> Prompt:
        """Have a put also store the tail behind ``tail_at`` tokens. Raises `ValueError`."""
        if tail_at is None:
            return prompt
        is_integer = isinstance(tail_at, Integral)
        position, rest = divmod(int(tail_at), self._tokens) if is_integer else (0, 0)
        if rest or not 0 < position <= prompt.stop or not self._has_tails:
            allowed = "must be the end of a block offered, in a model with tails"
            raise refusal("tail_at", tail_at, allowed)
        return prompt._replace(tail_at=position)

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
