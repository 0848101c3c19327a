"""Faults put into the path between a rank on a fake GPU and its server: each must fail a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cluster
import pytest
import test_gpu_clusters as on_clusters
import test_past_dram_on_gpu as past_dram
from engine_memory import device_memory
from mutants import Fixtures, Mutant, check_seen

from flexcache.client import lent_tensors as attachment
from flexcache.client.rank import KVTPClient
from flexcache.transfer.cuda_copier import CudaCopier
from flexcache.transfer.gates import DeviceGates

pytestmark = pytest.mark.whole


MUTANTS = [
    Mutant("M1: a rank whose device is lost does not say so to its engine", KVTPClient, "_fail",
           "self._set_state(ClientState.REFUSED, reason)", "pass",
           on_clusters.test_a_device_that_is_lost_ends_its_tasks_and_leaves_the_cache_to_others),
    Mutant("a gate opens before the step that it is in", DeviceGates, "open",
           "self._opened[task_id] = fence", "self._opened[task_id] = None",
           on_clusters.test_a_gated_store_takes_what_the_queued_step_will_have_written),
    Mutant("a copy without a gate is behind the default stream only", CudaCopier, "attach",
           "torch.cuda.set_stream(self._engine_stream)", "pass",
           on_clusters.test_a_store_without_a_gate_takes_what_is_queued_on_the_stream_of_the_engine),
]  # fmt: skip


@contextmanager
def opened_memory(patch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
    patch.setattr(cluster, "PATIENCE_S", 3.0)
    with device_memory(patch) as memory:
        yield {"memory": memory}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    check_seen(mutant, opened_memory, monkeypatch)


def test_the_compatibility_mode_of_cufile_beside_dram_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def opened(patch: pytest.MonkeyPatch) -> Iterator[Fixtures]:
        with past_dram.opened_memory(patch, tmp_path) as memory:
            yield {"memory": memory}

    mutant = Mutant(
        "cuFile's compatibility mode counts as past DRAM", attachment, "_open_direct",
        "if io.through_host and ref.is_choice:", "if False:",
        past_dram.test_cufile_in_its_compatibility_mode_is_not_chosen_beside_dram,
    )  # fmt: skip
    check_seen(mutant, opened, monkeypatch, tmp_path=tmp_path, caplog=caplog)
