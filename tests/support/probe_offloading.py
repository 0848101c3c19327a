"""vLLM's OffloadingConnector that also records a digest of every block of a request that ends.

Scheduler and worker must be in one process. Lines: ``{"key": <block hash>, "digest": ...}``.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from probe_connector import digest_block
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

_layers: dict[str, torch.Tensor] = {}


class ProbeOffloading(OffloadingConnector):  # type: ignore[misc]
    """The connector whose request ends are recorded."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        _layers.update(kv_caches)
        super().register_kv_caches(kv_caches)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        size = self._vllm_config.cache_config.block_size
        computed = min(request.num_computed_tokens, request.num_tokens - 1) // size
        with (Path(os.environ["KV_PROBE_DIR"]) / "ended.jsonl").open("a") as file:
            for key, block in zip(request.block_hashes[:computed], block_ids[0], strict=False):
                line = {"key": key.hex(), "digest": digest_block(_layers, block)}
                file.write(json.dumps(line) + "\n")
        return super().request_finished_all_groups(request, block_ids)


def read_digests(directory: Path) -> dict[str, list[str]]:
    """Return the digests of each block, in the order of the requests that ended."""
    digests = defaultdict(list)
    for line in (directory / "ended.jsonl").read_text().splitlines():
        row = json.loads(line)
        digests[row["key"]].append(row["digest"])
    return dict(digests)
