"""FlexCache for SGLang: behind its radix tree, or as the storage below its HiCache."""

try:
    import sglang.srt.mem_cache.hicache_storage  # noqa: F401
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "sglang":
        raise
    from flexcache.errors import MissingDependencyError

    raise MissingDependencyError("flexcache.integration.sglang needs SGLang 0.5.23") from error

from flexcache.integration.sglang.parking import check_version

try:
    from flexcache.integration.sglang.linker import FlexCacheLinker
    from flexcache.integration.sglang.storage import FlexCacheHiCacheStorage
except ImportError:  # of a module that this version does not have
    check_version()
    raise

__all__ = ["FlexCacheHiCacheStorage", "FlexCacheLinker"]
