"""Graph of ops that a planner passes to the scheduler, with the dependencies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.errors import InternalError
from flexcache.ids import OpId, OpKind
from flexcache.transfer.messages import BlockNames

BlockIds = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class TransferOp:
    """One transfer of a list of blocks of one task, from one tier to another.

    ``first`` is the position of the op's first block among the task's blocks. An op that depends
    on another over the same positions moves at most the prefix that the other delivered.

    Attributes:
        src: Block ids to read, in the tier that ``kind`` names first; GPU ids are set at launch,
            one or more for each block. Of a COMMIT both are the slots.
        dst: Block ids to write, likewise.
        names: Names of the blocks, if the op reads or writes storage that outlives the process.
    """

    op_id: OpId
    kind: OpKind
    first: int
    src: BlockIds | None
    dst: BlockIds | None
    depends_on: tuple[OpId, ...] = ()
    names: BlockNames | None = None

    def __len__(self) -> int:
        blocks = self.src if self.kind.fills_gpu else self.dst
        assert blocks is not None
        return len(blocks)

    def truncate(self, count: int) -> None:
        num_blocks = len(self)
        if count == num_blocks:
            return
        if self.src is not None:
            self.src = self.src[: count * (len(self.src) // num_blocks)]
        if self.dst is not None:
            self.dst = self.dst[: count * (len(self.dst) // num_blocks)]
        if self.names is not None:
            self.names = msgspec.structs.replace(self.names, keys=self.names.keys[:count])


@dataclass(slots=True, eq=False)
class TransferOpGraph:
    """The ops of one get, put or prefetch, in a valid order of execution."""

    ops: list[TransferOp] = field(default_factory=list)

    def add(
        self,
        op_id: OpId,
        kind: OpKind,
        first: int,
        src: BlockIds | None,
        dst: BlockIds | None,
        depends_on: Sequence[OpId] = (),
        names: BlockNames | None = None,
    ) -> OpId:
        self.ops.append(TransferOp(op_id, kind, first, src, dst, tuple(depends_on), names))
        return op_id

    def bind_gpu_blocks(self, gpu_blocks: BlockIds, base: int, per_block: int = 1) -> None:
        """Assign ``per_block`` GPU blocks to each of the task's blocks ``base, base + 1, ...``."""
        stop = base + len(gpu_blocks) // per_block
        for op in self.ops:
            if op.kind.touches_gpu and base <= op.first < stop:
                first, size = (op.first - base) * per_block, len(op) * per_block
                chunk = gpu_blocks[first : first + size]
                if len(chunk) != size:
                    raise InternalError(f"op {op.op_id} has no GPU block for each of its blocks")
                if op.kind.fills_gpu:
                    op.dst = chunk
                else:
                    op.src = chunk
