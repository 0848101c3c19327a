"""The loads that a rank can finish by itself, beside a plain model of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.client.rank_ops import HeldLoads
from flexcache.ids import OpKind
from flexcache.transfer.messages import Done, Execute, pack_ids

PER_UNIT = 2  # GPU blocks for each block of the pool


@dataclass
class Load:
    ops: dict[int, int] = field(default_factory=dict)  # blocks of the pool
    arrived: dict[int, int] = field(default_factory=dict)


def op(op_id: int, task_id: int, num_blocks: int) -> Execute:
    src, dst = np.arange(num_blocks), np.arange(PER_UNIT * num_blocks)
    return Execute(op_id, OpKind.H2D, pack_ids(src), pack_ids(dst), task_id, gated=True)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held = HeldLoads()
        self.loads: dict[int, Load] = {}
        self.num_ops = 0

    @rule(task_id=st.integers(1, 4), num_blocks=st.integers(1, 3))
    def give(self, task_id: int, num_blocks: int) -> None:
        self.num_ops += 1
        self.held.given(op(self.num_ops, task_id, num_blocks))
        self.loads.setdefault(task_id, Load()).ops[self.num_ops] = num_blocks

    @rule(data=st.data(), num_ok=st.integers(0, 3))
    def move(self, data: st.DataObject, num_ok: int) -> None:
        op_id = data.draw(st.integers(0, self.num_ops + 1))  # also unknown ones
        self.held.moved(Done(op_id, num_ok))
        for load in self.loads.values():
            if op_id in load.ops:
                load.arrived.setdefault(op_id, num_ok)

    @rule(task_ids=st.sets(st.integers(1, 5)))
    def forget(self, task_ids: set[int]) -> None:
        self.held.forget(task_ids)
        for task_id in task_ids:
            self.loads.pop(task_id, None)

    @invariant()
    def agrees(self) -> None:
        self.held.check()
        assert set(self.held.task_ids) == self.loads.keys()
        unfinished = {task for task, load in self.loads.items() if load.ops.keys() - load.arrived}
        assert set(self.held.unfinished) == unfinished
        for task_id, load in self.loads.items():
            size = PER_UNIT * sum(load.ops.values())
            is_lost = any(load.ops[op_id] > num_ok for op_id, num_ok in load.arrived.items())
            assert self.held.holds(task_id, size) is not is_lost
            assert not self.held.holds(task_id, size + 1)
            is_whole = task_id not in unfinished and not is_lost
            assert self.held.num_arrived(task_id) == (size if is_whole else 0)


TestHeldLoads = World.TestCase
