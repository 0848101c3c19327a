"""Direct I/O on a fake GPU with the checksum kernels themselves, run by Triton's interpreter.

In a process of its own: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import test_direct_cuda as on_cuda
from compiled_kernel import find_tritons
from fake_gpu import fake_gpu
from paths import ROOT, SUPPORT

pytestmark = pytest.mark.whole


TRITONS = find_tritons()


def run_checks() -> None:
    from interpreted import interpret_digests

    from flexcache.transfer.direct import digest_kernel

    with (
        pytest.MonkeyPatch.context() as patch,
        fake_gpu(patch) as gpu,
        tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
    ):
        gpu.set_speed(late_us=200)
        rig = on_cuda.Rig(patch, gpu, Path(folder) / "slots")
        patch.setitem(sys.modules, digest_kernel.__name__, digest_kernel)
        interpret_digests(rig.torch, patch)
        on_cuda.test_blocks_are_written_with_their_checksums_and_read_back(rig)
        assert rig.io is not None
        rig.io.close()
        on_cuda.test_a_block_with_another_checksum_never_reaches_the_tensors(rig)
        rig.close()


@pytest.mark.skipif(not TRITONS, reason="there is no Triton; see TRITON_PATHS")
def test_blocks_are_verified_by_the_kernels_in_the_order_of_their_streams(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, [TRITONS[-1], ROOT, SUPPORT, Path(__file__).parent]))
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__}; {__name__}.run_checks()"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
