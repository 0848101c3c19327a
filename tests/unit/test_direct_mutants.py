"""Faults put into direct I/O on a GPU: each must fail the test that is named with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import test_direct_cuda as on_io
from fake_gpu import fake_gpu
from mutants import Fixtures, Mutant, check_seen

from flexcache.transfer.direct.cuda import CudaDirectIO
from flexcache.transfer.direct.cufile import CuFile, DeviceFiles

pytestmark = pytest.mark.whole


MUTANTS = [
    Mutant("a block is let in whatever its checksum", CudaDirectIO, "_take_checksums",
           "elif each == transfer.expected:", "elif True:",
           on_io.test_a_block_with_another_checksum_never_reaches_the_tensors),
    Mutant("work on the device is taken for done when it was queued", CudaDirectIO, "reap",
           "if batch.done.query()]", "]",
           on_io.test_a_write_begins_when_its_block_and_checksum_are_there),
    Mutant("a checksum is computed on another stream than its block is copied", CudaDirectIO,
           "_queue", "torch.cuda.stream(self._streams[lane])",
           "torch.cuda.stream(self._streams[Lane.LAYERS])",
           on_io.test_a_write_begins_when_its_block_and_checksum_are_there),
    Mutant("a place in the buffer is free while its block is copied", CudaDirectIO, "_scatter",
           "return self._end_all", "self._end_all(transfers)\n    return lambda _: None",
           on_io.test_a_read_has_ended_when_its_bytes_are_in_the_tensors),
    Mutant("what follows a block in the buffer is written too", CudaDirectIO, "_runs",
           "if padded and padding:", "if False:",
           on_io.test_blocks_are_written_with_their_checksums_and_read_back),
    Mutant("a revoked task is read into the tensors", CudaDirectIO, "_take_checksums",
           "self._permitted(right)", "right",
           on_io.test_what_is_revoked_while_it_is_read_stays_out_of_the_tensors),
    Mutant("a revoked task is written", CudaDirectIO, "submit",
           "self._permitted(writes)", "writes",
           on_io.test_a_revoked_task_does_not_write),
    Mutant("a step that fails leaves copies behind", CudaDirectIO, "_queue",
           "self._streams.settle(lane)", "pass",
           on_io.test_a_launch_that_fails_leaves_no_copies_behind),
    Mutant("closing does not wait for copies", CudaDirectIO, "close",
           "self._streams.settle(lane)", "pass",
           on_io.test_closing_waits_for_copies),
    Mutant("reads are not tested", CudaDirectIO, "_test",
           "[self._test_read(fd) for fd in fds]", "[bytes(4096)]",
           on_io.test_what_does_not_do_what_it_should_is_not_used, ("reads",)),
    Mutant("closing does not wait for file I/O", DeviceFiles, "__init__",
           "wait=True", "wait=False",
           on_io.test_closing_waits_for_what_is_in_flight),
    Mutant("a thread has no context", DeviceFiles, "_run",
           "self._bind()", "pass",
           on_io.test_blocks_are_written_with_their_checksums_and_read_back),
    Mutant("the compatibility mode counts as direct", CuFile, "why_through_host",
           "if not found.file_systems:", "if False:",
           on_io.test_a_path_through_host_memory_says_so),
    Mutant("a short read counts", DeviceFiles, "move",
           "if moved != length:", "if False:",
           on_io.test_a_file_that_ends_early_is_an_error_of_the_read),
]  # fmt: skip


@contextmanager
def opened_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    with tempfile.TemporaryDirectory() as folder, fake_gpu(monkeypatch) as gpu:
        gpu.set_speed(late_us=200)
        rig = on_io.Rig(monkeypatch, gpu, Path(folder) / "slots")
        try:
            yield {"rig": rig}
        finally:
            gpu.thaw()
            rig.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    check_seen(mutant, opened_rig, monkeypatch)
