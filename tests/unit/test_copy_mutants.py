"""Faults put into the path of copies to a GPU: each must fail the test that is named with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import test_copy_choice as on_choice
import test_copy_cuda as on_cuda
import test_copy_driver as on_driver
import test_device_worker as on_worker
import test_layout as on_layout
import test_memory_limit as on_memory
import torch
from engine_memory import device_memory
from fake_gpu import fake_gpu
from mutants import Fixtures, Mutant, Opened, check_seen

from flexcache.ids import OpKind
from flexcache.storage import layout, machine
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.layout import bytes_per_index
from flexcache.transfer import copy_ways, device_worker
from flexcache.transfer.copy_ways import CopyChoice, CopyCost, CopyWay
from flexcache.transfer.cuda_copier import CudaCopier, CudaStreams, KernelTables
from flexcache.transfer.cuda_driver import CudaDriver, PinnedSegment
from flexcache.transfer.device_worker import DeviceWorker, InFlight
from flexcache.transfer.gates import DeviceGates, LayerLoad

pytestmark = pytest.mark.whole


@contextmanager
def opened_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    with (
        HostSegment.create(on_cuda.BLOCK, on_cuda.NUM_BLOCKS) as segment,
        fake_gpu(monkeypatch) as gpu,
    ):
        segment.map()
        rig = on_cuda.Rig(monkeypatch, gpu, segment)
        yield {"rig": rig, "gpu": gpu, "segment": segment}
        rig.copier.close()
        assert gpu.is_lost or not gpu.registered


@contextmanager
def opened_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    with (
        HostSegment.create(on_cuda.BLOCK, on_cuda.NUM_BLOCKS) as segment,
        fake_gpu(monkeypatch) as gpu,
    ):
        segment.map()
        yield {"gpu": gpu, "segment": segment}


@contextmanager
def opened_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    size = bytes_per_index(on_worker.make_tensors())
    with (
        HostSegment.create(size, on_worker.NUM_HOST_BLOCKS) as segment,
        device_memory(monkeypatch) as memory,
    ):
        segment.map()
        monkeypatch.setattr(device_worker, "_MIN_PART_BYTES", 0)
        memory.gpu.set_speed(late_us=20_000)
        tensors = memory.place(on_worker.make_tensors())
        layouts = [on_worker.layout_of(memory.lend(tensors))]
        with on_worker.open_worker(memory, layouts, segment) as worker:
            yield {
                "memory": memory, "tensors": tensors, "segment": segment, "worker": worker
            }  # fmt: skip


@contextmanager
def opened_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    size = bytes_per_index(on_worker.make_tensors())
    for name in ("_PIECE_BYTES", "_LARGE_PIECE_BYTES"):
        monkeypatch.setattr(device_worker, name, size)
    for name in ("MOST_BYTES", "BESIDE_LAYERS"):
        monkeypatch.setattr(device_worker, name, size + 1)
    with HostSegment.create(size, on_worker.NUM_HOST_BLOCKS) as segment:
        segment.map()
        yield {"segment": segment}


ON_RIG = [
    Mutant("a copy does not wait for its fence", CudaCopier, "start",
           "stream.wait_event(after)", "pass",
           on_cuda.test_a_store_takes_what_the_model_had_written_when_its_fence_was_recorded,
           (None,)),
    Mutant("a load does not wait for its fence", CudaCopier, "start",
           "if after is not None:", "if after is not None and kind is not OpKind.H2D:",
           on_cuda.test_a_load_overwrites_only_what_the_model_has_read),
    Mutant("the fence is recorded on a stream that does nothing", CudaCopier, "fence",
           "event.record(torch.cuda.current_stream(self.device))",
           "event.record(self._streams[CopyLane.LOADS])",
           on_cuda.test_a_store_takes_what_the_model_had_written_when_its_fence_was_recorded,
           (None,)),
    Mutant("the landing is not recorded", CudaCopier, "start",
           "landed.record(stream)", "pass",
           on_cuda.test_landed_is_what_has_landed),
    Mutant("the landing is recorded on the other stream", CudaCopier, "start",
           "landed.record(stream)",
           "landed.record(self._streams[CopyLane.LOADS])",
           on_cuda.test_landed_is_what_has_landed),
    Mutant("a store may read early", CudaCopier, "_queue",
           "_SOURCE_ORDER[kind]", "SourceOrder.ANY",
           on_cuda.test_a_store_takes_what_the_model_had_written_when_its_fence_was_recorded,
           (None,)),
    Mutant("close does not wait for copies", CudaCopier, "close",
           ", *streams.synchronizing_steps()", "",
           on_cuda.test_closing_waits_for_copies_before_it_unpins),
    Mutant("a run is joined over two pinned pieces", CudaCopier, "start",
           "runs.joined(self._pinned.starts)", "runs.joined()",
           on_cuda.test_neighbours_are_one_copy_but_not_over_two_pinned_pieces),
    Mutant("the kernel runs on the current stream", CudaCopier, "_queue",
           "with torch.cuda.stream(stream):", "if True:",
           on_cuda.test_a_store_takes_what_the_model_had_written_when_its_fence_was_recorded,
           (CopyWay.KERNEL,)),
    Mutant("a refused op is reported while its copies run", CudaCopier, "start",
           "self._settle(lane)", "pass",
           on_cuda.test_a_refused_op_has_ended_before_its_failure_is_reported),
    Mutant("a thread does not declare itself independent of captures", CudaDriver, "bind",
           "_CAPTURE_MODE_RELAXED", "0",
           on_cuda.test_copies_do_not_void_a_graph_that_another_thread_captures),
    Mutant("the self-test looks before copies have landed", CudaCopier, "_copy_now",
           "self._settle(lane)", "pass",
           on_cuda.test_the_self_test_looks_at_bytes_only_when_they_have_landed),
    Mutant("H2: wrong bytes pass the self-test", copy_ways, "_find_fault",
           'if num_wrong else ""', 'if False else ""',
           on_cuda.test_a_batch_that_copies_wrong_bytes_is_never_used, (OpKind.H2D, 1, True)),
    Mutant("M1: a lost device is an op's error only", CudaStreams, "settle",
           "raise DeviceLostError", "raise RuntimeError",
           on_cuda.test_a_lost_device_is_reported_as_lost_and_closing_the_copier_does_not_raise),
    Mutant("M3: an attach that fails leaves pieces pinned", PinnedSegment, "__init__",
           "self.close()", "pass",
           on_cuda.test_an_attach_that_fails_half_way_leaves_nothing_pinned),
    Mutant("M6: the kernel has the fewest programs, though more are quicker", CopyChoice, "of",
           "kernels.items() if seconds(cost) <= enough", "kernels.items()",
           on_cuda.test_ops_use_the_number_of_programs_that_was_quick_enough),
    Mutant("a run is joined over the end of what is pinned", PinnedSegment, "__init__",
           "[*self._registered, self.end] if self.is_partial else self._registered",
           "self._registered",
           on_cuda.test_of_a_pool_that_is_partly_pinned_all_blocks_are_copied, (False, 13_000)),
    Mutant("the kernel copies what is not pinned", PinnedSegment, "split",
           "if not self.is_partial:", "if True:",
           on_cuda.test_of_a_pool_that_is_partly_pinned_all_blocks_are_copied, (True, 13_000)),
    Mutant("copies are on streams that torch hands out", CudaStreams, "__init__",
           "torch.cuda.ExternalStream(handle, device)", "torch.cuda.Stream(device)",
           on_cuda.test_no_stream_of_torch_is_ours),
    Mutant("an op fails for which the kernel finds no memory", CudaCopier, "_queue_as_chosen",
           "if self._engine is None or way is not CopyWay.KERNEL:", "if True:",
           on_cuda.test_a_kernel_that_finds_no_memory_for_an_op_leaves_it_and_all_others_to_the_engine),
    Mutant("a table is written over while a kernel has yet to read it", KernelTables, "_find",
           "while used and used[0].landed is not None and used[0].landed.query():", "while used:",
           on_cuda.test_a_table_is_left_alone_until_its_copies_have_landed),
    Mutant("tables are never free again", KernelTables, "landed",
           "table.landed = table.landed or event", "pass",
           on_cuda.test_a_table_is_left_alone_until_its_copies_have_landed),
    Mutant("the model waits for a table", CudaCopier, "_queue_as_chosen",
           "if not self._tables.has_room(lane, len(runs.sizes)):", "if False:",
           on_cuda.test_a_table_is_left_alone_until_its_copies_have_landed),
]  # fmt: skip


ON_WORKER = [
    Mutant("an op is done when it was started", InFlight, "_has_landed",
           "return piece.landed.query()", "return True",
           on_worker.test_blocks_come_back_byte_for_byte_in_other_slots_and_nothing_else_changes),
    Mutant("a layer is used before it has landed", LayerLoad, "_wait",
           "landed.wait()", "pass",
           on_worker.test_a_layer_is_there_when_the_engine_has_waited_for_it),
    Mutant("a load that is given up may still write", LayerLoad, "give_up",
           "last.wait()", "pass",
           on_worker.test_a_load_that_was_given_up_writes_nothing_later),
    Mutant("M4: blocks in one piece are not loaded by layer", DeviceWorker, "_start_by_layer",
           ", by_layer=True", "",
           on_worker.test_layers_of_blocks_in_one_piece_come_one_after_the_other),
]  # fmt: skip


ON_DRIVER = [
    Mutant("H3: a single copy gives the interpreter lock away", CudaDriver, "copy_singly",
           "self._copy if is_pinned else self._copy_unlocked", "self._copy_unlocked",
           on_driver.test_single_copies_of_pinned_memory_keep_the_interpreter_lock, (True,)),
]  # fmt: skip

ON_PIECES = [
    Mutant("M2: all that is waiting is queued at once", InFlight, "has_room",
           "if kind is OpKind.D2H:", "if True: return True\n    if kind is OpKind.D2H:",
           on_worker.test_a_large_op_is_queued_in_pieces_and_few_are_in_flight),
    Mutant("M2: a load by layer comes behind other loads", InFlight, "has_room",
           "0 if urgent else self._bytes[CopyLane.LOADS]", "self._bytes[CopyLane.LOADS]",
           on_worker.test_a_load_by_layer_does_not_wait_for_a_large_load),
    Mutant("a load is queued a quarter at a time though nothing waits by layer", InFlight,
           "has_room", "BESIDE_LAYERS if urgent or beside_layers else MOST_BYTES", "BESIDE_LAYERS",
           on_worker.test_more_is_queued_until_the_engine_waits_for_loads_by_layer),
    Mutant("loads by layer come behind four times as much", DeviceGates, "load_by_layer",
           "self.has_layer_loads = True", "pass",
           on_worker.test_more_is_queued_until_the_engine_waits_for_loads_by_layer),
    Mutant("an op that was dropped goes on", DeviceWorker, "_end_dropped",
           "del self._in_pieces[kind]", "continue",
           on_worker.test_an_op_that_must_not_go_on_ends_when_what_was_queued_has_landed,
           ("drop",)),
    Mutant("an op has ended before its pieces have landed", InFlight, "end",
           "[] if op.num_in_flight else [_done(op)]", "[_done(op)]",
           on_worker.test_an_op_that_must_not_go_on_ends_when_what_was_queued_has_landed,
           ("refuse",)),
]  # fmt: skip

ON_LAYOUT = [
    Mutant("M4: a block in one piece is a copy for each head of a layer", layout, "_join",
           "if len(as_in_memory) < len(joined):", "if False:",
           on_layout.test_a_block_in_one_piece_is_one_segment_though_its_layers_are_not,
           (torch.bfloat16,)),
]  # fmt: skip

ON_CHOICE = [
    Mutant("all copies cost what the smallest do", CopyCost, "estimate",
           "float(np.interp(size, SIZES, self.run_s))", "self.run_s[0]",
           on_choice.test_on_an_h200_the_kernel_gets_copies_up_to_64_kib, (128 << 10, False)),
    Mutant("a link that sleeps is timed", copy_ways, "measure_costs",
           "while clock() - began < _WARM_UP_S:", "while False:",
           on_choice.test_the_cost_of_a_device_is_measured_once_it_is_awake,
           (on_choice.ENGINE, 0.05)),
]  # fmt: skip

ON_MEMORY = [
    Mutant("a pool is refused that will fit", machine, "largest_memory",
           "return max(_NO_LIMIT if plugs else 0, present, installed_memory())",
           "return installed_memory()",
           on_memory.test_a_pool_that_fits_once_the_machine_has_been_given_more_memory_warns),
]  # fmt: skip

ON_SECOND_GPU = Mutant(
    "H1: a thread works with the first GPU as its current device", CudaStreams, "bind",
    "torch.cuda.set_device(self.device)", "pass",
    on_cuda.test_a_rank_of_the_second_gpu_makes_no_context_on_the_first,
)  # fmt: skip


def name_of(value: Mutant | Opened) -> str:
    return value.name if isinstance(value, Mutant) else ""


@pytest.mark.parametrize(
    ("mutant", "opened"),
    [
        *((mutant, opened_rig) for mutant in ON_RIG),
        *((mutant, opened_worker) for mutant in ON_WORKER),
        *((mutant, opened_pieces) for mutant in ON_PIECES),
        *((mutant, opened_gpu) for mutant in (ON_SECOND_GPU, *ON_DRIVER)),
        *((mutant, lambda _: nullcontext({})) for mutant in (*ON_LAYOUT, *ON_CHOICE, *ON_MEMORY)),
    ],
    ids=name_of,
)
def test_the_mutant_is_seen(
    mutant: Mutant,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    check_seen(mutant, opened, monkeypatch, caplog=caplog, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("mutant", "opened"),
    [
        (ON_RIG[0], opened_rig),
        (ON_WORKER[2], opened_worker),
        (ON_PIECES[0], opened_pieces),
        (ON_SECOND_GPU, opened_gpu),
    ],
    ids=name_of,
)
def test_a_mutant_that_changes_nothing_is_not_seen(
    mutant: Mutant,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unchanged = replace(mutant, instead=mutant.line)
    with pytest.raises(pytest.fail.Exception, match="not seen"):
        check_seen(unchanged, opened, monkeypatch, caplog=caplog)
