"""FlexCache's KV connector for vLLM: ``kv_connector_module_path="flexcache.integration.vllm"``."""

try:
    from flexcache.integration.vllm.connector import FlexCacheConnectorV1
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "vllm":
        raise
    from flexcache.errors import MissingDependencyError

    raise MissingDependencyError(
        "flexcache.integration.vllm needs vLLM 0.28 to 0.33 (extra flexcache[vllm])"
    ) from error

__all__ = ["FlexCacheConnectorV1"]
