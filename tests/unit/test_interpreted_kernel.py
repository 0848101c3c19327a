"""The copy kernel with its tables and launches on a fake GPU, run by Triton's interpreter.

In a process of its own: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import test_copy_cuda as on_cuda
from compiled_kernel import find_tritons
from fake_gpu import fake_gpu
from paths import ROOT, SUPPORT

from flexcache.ids import OpKind
from flexcache.storage.host_pool import HostSegment
from flexcache.transfer import cuda_copier
from flexcache.transfer.copy_ways import SIZES, CopyCost, CopyWay

pytestmark = pytest.mark.whole


TRITONS = find_tritons()
KERNEL = CopyWay.KERNEL


@contextmanager
def opened_rig(patch: pytest.MonkeyPatch) -> Iterator[on_cuda.Rig]:
    from interpreted import InterpretedKernel

    from flexcache.transfer import copy_kernel

    no_costs = {number: CopyCost(0, (1,) * len(SIZES)) for number in (0, 4, 8, 12)}
    patch.setattr(cuda_copier, "measure_costs", lambda _: no_costs.copy())  # takes long here
    with (
        HostSegment.create(on_cuda.BLOCK, on_cuda.NUM_BLOCKS) as segment,
        fake_gpu(patch) as gpu,
    ):
        segment.map()
        rig = on_cuda.Rig(patch, gpu, segment)
        rig.kernel = InterpretedKernel(copy_kernel, rig.torch, patch)
        yield rig
        rig.copier.close()


def passes_the_self_test_and_copies(rig: on_cuda.Rig, patch: pytest.MonkeyPatch) -> None:
    rig.add_kernel()
    rig.attach()
    assert rig.copier.ways == (CopyWay.BATCH, KERNEL)
    before = rig.blocks.copy()
    blocks, places = list(range(0, 40, 2)), list(range(20))[::-1]
    rig.copy(OpKind.D2H, blocks, places, way=KERNEL)
    rig.blocks[:] = 0
    rig.copy(OpKind.H2D, blocks, places, way=KERNEL)
    assert np.array_equal(rig.blocks[blocks], before[blocks])
    assert not np.delete(rig.blocks, blocks, axis=0).any()


def copies_a_large_op_by_several_tables(rig: on_cuda.Rig, patch: pytest.MonkeyPatch) -> None:
    rig.add_kernel()
    rig.attach()
    patch.setattr(cuda_copier, "_RUNS_PER_TABLE", 9)
    before = rig.blocks.copy()
    blocks = list(range(0, 50, 2))
    rig.copy(OpKind.D2H, blocks, blocks, way=KERNEL)
    assert rig.kernel.num_ops == 3
    assert rig.gpu.copy_calls == []  # the tables are not sent
    assert all(rig.on_host(block) == before[block].tobytes() for block in blocks)


def stores_what_the_model_had_written(rig: on_cuda.Rig, patch: pytest.MonkeyPatch) -> None:
    on_cuda.test_a_store_takes_what_the_model_had_written_when_its_fence_was_recorded(rig, KERNEL)


def stores_beside_a_load_of_the_engine(rig: on_cuda.Rig, patch: pytest.MonkeyPatch) -> None:
    """The load keeps the link to the device for two seconds: no store needs that."""
    rig.add_kernel()
    rig.attach()
    rig.gpu.set_speed(bytes_per_us=0.002)
    load = rig.start(OpKind.H2D, [1], [1], way=CopyWay.BATCH)
    before, blocks = rig.blocks.copy(), list(range(0, 50, 2))
    rig.copy(OpKind.D2H, blocks, blocks, way=KERNEL)
    assert not load.query()
    assert all(rig.on_host(block) == before[block].tobytes() for block in blocks)


def run_checks() -> None:
    checks = (
        stores_beside_a_load_of_the_engine,
        passes_the_self_test_and_copies,
        copies_a_large_op_by_several_tables,
        stores_what_the_model_had_written,
    )
    for check in checks:
        with pytest.MonkeyPatch.context() as patch, opened_rig(patch) as rig:
            check(rig, patch)


@pytest.mark.skipif(not TRITONS, reason="there is no Triton; see TRITON_PATHS")
def test_the_kernel_copies_in_the_order_of_its_stream_whatever_the_number_of_tables() -> None:
    path = os.pathsep.join(map(str, [TRITONS[-1], ROOT, SUPPORT, Path(__file__).parent]))
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__}; {__name__}.run_checks()"],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
