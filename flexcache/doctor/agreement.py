"""Checks that every reader and writer of a block agrees on its size and its hashes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flexcache.config.sources import read_environment
from flexcache.doctor.findings import Finding, error, ok, warning
from flexcache.doctor.packages import as_pair, vllm_version
from flexcache.doctor.subject import Subject
from flexcache.storage.pool_directory import (
    DirectoryInUseError,
    PoolDirectory,
    PoolMismatchError,
    files_in,
)

_FIXED_ROOT = (0, 32)
"""First vLLM version whose hashes have the same root in every process, except xxhash's."""


def check_block_size(subject: Subject) -> Iterator[Finding]:
    given, server = subject.vllm.block_size, subject.server
    ours = _set_block_size(subject)
    if ours is None and given is None:
        yield ok("tokens per block: taken from the engine")
    elif ours is None or ours == given:
        yield ok(f"tokens per block: {given}")
    elif given is None and not _is_named(subject):
        yield ok(f"tokens per block: {ours}, for the model in the server's settings")
    elif given is None:
        yield warning(
            f"tokens_per_block is set to {ours}: vLLM does not start if its own differs",
            f"leave it unset in vLLM's environment, or start vLLM with --block-size {ours}",
        )
    else:
        yield error(
            f"tokens_per_block is {ours}, --block-size is {given}", "leave tokens_per_block unset"
        )
    wanted, held = given or ours, None
    if server is not None and server.cache is not None:
        held = server.cache.identity.tokens_per_block
    if wanted is not None and held is not None and wanted != held:
        yield error(
            f"blocks have {wanted} tokens here, {held} on the server at {subject.endpoint}",
            f"start vLLM with --block-size {held}, or restart the server",
        )
    yield from _check_slots(subject)


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
        config.has_ssd_tier or config.remote_url or config.endpoint
    )
    is_random = as_pair(version) < _FIXED_ROOT or subject.vllm.hash_algo.startswith("xxhash")
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
