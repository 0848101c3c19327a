"""Table of all checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flexcache.doctor.agreement import check_block_size, check_hash_seed
from flexcache.doctor.directories import (
    check_file_systems,
    check_missing_directories,
    check_space,
)
from flexcache.doctor.endpoints import check_event_endpoints, check_http, check_server_endpoint
from flexcache.doctor.findings import Finding, warning
from flexcache.doctor.gpu import check_gpu
from flexcache.doctor.machine import check_io_uring, check_kernel, check_open_files
from flexcache.doctor.memory import (
    check_container_limit,
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_numa,
    check_shared_memory,
)
from flexcache.doctor.packages import (
    check_python,
    check_sglang,
    check_tensorrt_llm,
    check_transfer_config,
    check_vllm,
)
from flexcache.doctor.settings import check_settings
from flexcache.doctor.stores import check_remote_store, check_ssd_compression
from flexcache.doctor.subject import Subject

Check = Callable[[Subject], Iterable[Finding]]

CHECKS: dict[str, Check] = {
    "settings": check_settings,
    "kernel": check_kernel,
    "io_uring": check_io_uring,
    "open_files": check_open_files,
    "memory": check_memory,
    "container_limit": check_container_limit,
    "shared_memory": check_shared_memory,
    "locked_memory": check_locked_memory,
    "huge_pages": check_huge_pages,
    "numa": check_numa,
    "gpu": check_gpu,
    "python": check_python,
    "vllm": check_vllm,
    "sglang": check_sglang,
    "tensorrt_llm": check_tensorrt_llm,
    "transfer_config": check_transfer_config,
    "block_size": check_block_size,
    "hash_seed": check_hash_seed,
    "server": check_server_endpoint,
    "http": check_http,
    "kv_events": check_event_endpoints,
    "remote_store": check_remote_store,
    "ssd_compression": check_ssd_compression,
    "file_system": check_file_systems,
    "space": check_space,
    "directory": check_missing_directories,
}


def examine(subject: Subject) -> Iterator[tuple[str, Finding]]:
    """Yield findings as checks produce them. A check that raises is itself reported."""
    for name, check in CHECKS.items():
        try:
            for finding in check(subject):
                yield name, finding
        except Exception as failure:
            yield (
                name,
                warning(
                    f"{name} could not be checked: {type(failure).__name__}: {failure}",
                    "this is a bug: please report it",
                ),
            )
