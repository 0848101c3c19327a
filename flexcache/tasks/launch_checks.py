"""What a launch must satisfy: checked by the client that makes it, and again by the task engine,
which does not trust clients."""

from __future__ import annotations

from collections.abc import Sequence

from flexcache.ids import TaskKind
from flexcache.transfer.scheduler import BlockIds


def check_slot_mappings(task_ids: Sequence[int], gpu_blocks: Sequence[object]) -> None:
    """Raise `ValueError` unless each task is named once and has its blocks."""
    if len(task_ids) != len(gpu_blocks):
        raise ValueError(f"{len(task_ids)} tasks need as many slot mappings, not {len(gpu_blocks)}")
    if len(set(task_ids)) != len(task_ids):
        raise ValueError("task_ids name a task twice")


def check_launchable(
    task_id: int, kind: TaskKind, is_launched: bool, num_blocks: int, blocks: BlockIds
) -> None:
    """Raise `ValueError` if a task was launched before, or needs another number of GPU blocks."""
    if is_launched:
        raise ValueError(f"task {task_id} was launched before")
    if kind is not TaskKind.PREFETCH and len(blocks) != num_blocks:
        raise ValueError(
            f"task {task_id} needs slots for {num_blocks} blocks, {len(blocks)} were given"
        )
