"""Run vLLM's own OffloadingConnector on the CPU backend, for measurements beside FlexCache.

vLLM's specs refuse a CPU only because their worker copies with CUDA streams. Scheduler, policies
and the file-system tier are used as they are; here the worker copies with torch instead.
For vLLM 0.32.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages between vLLM's KV tensors and its shared offload region, at once."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._references = kv_caches.group_data_refs
        self._engine = [tensor.tensor for tensor in kv_caches.tensors]
        self._pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self._host = [region.create_next_worker_view(p * blocks_per_chunk) for p in self._pages]
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec, to_host=False)

    def _move(self, job_id: int, engine_spec: Any, host_spec: Any, *, to_host: bool) -> bool:
        started, moved = time.perf_counter(), 0
        block_at = chunk_at = 0
        per_chunk = self._blocks_per_chunk
        groups = zip(
            self._references, engine_spec.group_sizes, engine_spec.block_indices, strict=True
        )
        for references, count, first in groups:
            inside = first % per_chunk
            for i in range(count):
                block = int(engine_spec.block_ids[block_at + i])
                chunk = int(host_spec.block_ids[chunk_at + (inside + i) // per_chunk])
                piece = (inside + i) % per_chunk
                for reference in references:
                    index, size = reference.tensor_idx, reference.page_size_bytes
                    here = self._engine[index][block, :size]
                    offset = piece * self._pages[index]
                    there = self._host[index][chunk, offset : offset + size]
                    (there.copy_(here) if to_host else here.copy_(there))
                    moved += size
            block_at += count
            chunk_at += -(-(inside + count) // per_chunk) if count else 0
        seconds = time.perf_counter() - started
        self._results.append(TransferResult(job_id, True, moved, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Any) -> None:
        """Nothing to wait for: copies are done when they are submitted."""

    def shutdown(self) -> None:
        self._host.clear()
        self._engine.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec with the worker above."""

    def get_worker(self, kv_caches: Any) -> HostCopyWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
